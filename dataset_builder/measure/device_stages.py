"""The stages of a GPU probe.  Each runs in a process of its own, so that it shows the memory of its
libraries alone.

The first stages make the driver load kernels, whose memory is outside the allocator.  The last two
read from the allocator how much workspace cuBLAS and cuDNN allocated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpumemnet.errors import first_line

_CURRENT: Final = "requested_bytes.all.current"
_PEAK: Final = "requested_bytes.all.peak"
_TYPES: Final = (torch.float32, torch.float16)
_ATEN: Any = torch.ops.aten

Stage = Callable[[torch.device], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A convolution of square images."""

    batch: int
    channels: int
    outputs: int
    image: int
    filter: int
    stride: int = 1
    padding: int = 0
    groups: int = 1


SHAPES: Final = (
    Shape(32, 64, 64, 56, 3, padding=1),
    Shape(32, 128, 128, 56, 3, stride=2, padding=1),
    Shape(32, 256, 1024, 14, 1),
    Shape(32, 3, 64, 224, 7, stride=2, padding=3),
    Shape(32, 64, 192, 27, 5, padding=2),
    Shape(32, 96, 96, 56, 7, padding=3, groups=96),
)
"""Of ResNets, AlexNet and ConvNeXt: narrow, strided, pointwise, first, wide and depthwise
filters."""


def run_stage(name: str, device: torch.device) -> dict[str, Any]:
    """Run a stage on ``device``; return its findings, JSON-ready.  Its tensors are freed when it
    returns.

    Raises:
        KeyError: when there is no such stage.
        RuntimeError: when the GPU cannot run it.
    """
    return STAGES[name](device)


def _allocation(device: torch.device) -> dict[str, Any]:
    torch.empty(2**20, dtype=torch.uint8, device=device).zero_()
    properties = torch.cuda.get_device_properties(device)
    return {
        "compute_capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "module_loading": os.environ.get("CUDA_MODULE_LOADING", ""),
    }


def _matmul(device: torch.device) -> dict[str, Any]:
    for dtype in _TYPES:
        matrix = torch.randn(512, 512, device=device, dtype=dtype, requires_grad=True)
        functional.linear(matrix, matrix, matrix[0]).sum().backward()  # type: ignore[no-untyped-call]
    return {}


def _convolution(device: torch.device) -> dict[str, Any]:
    for dtype in _TYPES:
        images = torch.randn(8, 32, 32, 32, device=device, dtype=dtype, requires_grad=True)
        weight = torch.randn(64, 32, 3, 3, device=device, dtype=dtype, requires_grad=True)
        functional.conv2d(images, weight, padding=1).sum().backward()  # type: ignore[no-untyped-call]
    return {}


def _attention(device: torch.device) -> dict[str, Any]:
    for dtype in _TYPES:
        query = torch.randn(2, 4, 128, 64, device=device, dtype=dtype, requires_grad=True)
        functional.scaled_dot_product_attention(
            query, query, query, is_causal=True
        ).sum().backward()  # type: ignore[no-untyped-call]
    return {}


def _training(device: torch.device) -> dict[str, Any]:
    """A few steps of a network with convolutions, attention and matrix products, in fp32 and with
    autocast."""
    stem = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(2),
    )
    network = nn.ModuleList(
        [stem, nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), nn.Linear(64, 10)]
    ).to(device)
    optimizer = torch.optim.AdamW(network.parameters())
    images, targets = (
        torch.randn(8, 3, 16, 16, device=device),
        torch.zeros(8, dtype=torch.int64, device=device),
    )
    for mixed in (False, True, True):
        with torch.autocast(device.type, torch.float16, enabled=mixed):
            hidden = network[1](network[0](images).transpose(1, 2))
            loss = functional.cross_entropy(network[2](hidden.mean(1)), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {}


def _blas_workspaces(device: torch.device) -> dict[str, Any]:
    """Growth of the allocator at the first matrix product of the forward and of the backward
    thread, and at a bias epilogue."""
    square, product = torch.randn(256, 256, device=device), torch.empty(256, 256, device=device)
    bias = torch.randn(256, device=device)
    leaf = torch.randn(256, 256, device=device, requires_grad=True)
    leaf.grad = torch.zeros_like(
        leaf
    )  # so that the backward pass allocates nothing else that stays
    found = {
        "forward_bytes": _growth(device, lambda: torch.mm(square, square, out=product)),
        "bias_epilogue_bytes": _growth(
            device, lambda: torch.addmm(bias, square, square, out=product)
        ),
    }
    graph = leaf @ square
    found["backward_bytes"] = _growth(device, lambda: graph.backward(product))  # type: ignore[no-untyped-call]
    return found


def _growth(device: torch.device, call: Callable[[], object]) -> int:
    """Bytes that ``call`` leaves allocated."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)[_CURRENT]
    call()
    torch.cuda.synchronize(device)
    return int(torch.cuda.memory_stats(device)[_CURRENT] - before)


def _convolution_workspaces(device: torch.device) -> dict[str, Any]:
    """The workspace of every operation of every shape, as the heuristics choose and as benchmarking
    tries.

    cuDNN reuses the algorithms that benchmarking found, so benchmarking comes last.
    """
    return {
        "convolutions": [
            row
            for benchmark in (False, True)
            for shape in SHAPES
            for math in ("fp32", "tf32", "fp16")
            for channels_last in (False, True)
            for row in _workspaces(device, shape, math, channels_last, benchmark)
        ]
    }


def _workspaces(
    device: torch.device, shape: Shape, math: str, channels_last: bool, benchmark: bool
) -> Iterator[dict[str, Any]]:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    dtype = torch.float16 if math == "fp16" else torch.float32
    torch.backends.cudnn.allow_tf32 = math == "tf32"
    torch.backends.cudnn.benchmark = benchmark

    def random_tensor(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype).to(memory_format=layout)

    result_side = (shape.image + 2 * shape.padding - shape.filter) // shape.stride + 1
    images = random_tensor(shape.batch, shape.channels, shape.image, shape.image)
    weight = random_tensor(
        shape.outputs, shape.channels // shape.groups, shape.filter, shape.filter
    )
    gradient = random_tensor(shape.batch, shape.outputs, result_side, result_side)
    arguments = ([shape.stride] * 2, [shape.padding] * 2, [1, 1], False, [0, 0], shape.groups)
    operations = {
        "forward": lambda: _ATEN.convolution(images, weight, None, *arguments),
        "backward_data": lambda: _ATEN.convolution_backward(
            gradient, images, weight, None, *arguments, [True, False, False]
        ),
        "backward_filter": lambda: _ATEN.convolution_backward(
            gradient, images, weight, None, *arguments, [False, True, False]
        ),
    }
    for operation, call in operations.items():
        row = {
            "operation": operation,
            **asdict(shape),
            "math": math,
            "channels_last": channels_last,
            "benchmark": benchmark,
        }
        try:
            yield row | {"workspace_bytes": _temporary_bytes(device, call)}
        except (
            RuntimeError
        ) as error:  # no kernel for it, or no memory: the other rows are still valid
            yield row | {"reason": first_line(error)}


def _temporary_bytes(device: torch.device, call: Callable[[], object]) -> int:
    """Peak bytes that ``call`` allocated, without its result."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    statistics = torch.cuda.memory_stats(device)
    del result
    return int(statistics[_PEAK] - statistics[_CURRENT])


STAGES: Final[dict[str, Stage]] = {
    "allocation": _allocation,
    "matmul": _matmul,
    "convolution": _convolution,
    "attention": _attention,
    "training": _training,
    "blas_workspaces": _blas_workspaces,
    "convolution_workspaces": _convolution_workspaces,
}
"""Name of a stage → what it runs."""
