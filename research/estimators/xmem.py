"""xMem (arXiv 2510.21048): a run on the CPU under the profiler, replayed through the allocator."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from gpumemnet.allocator import OutOfMemory, replay
from gpumemnet.tracing.losses_and_optimizers import loss_function, optimizer_factory
from research.estimators.estimator import NotCoveredError, PublishedEstimator, Subject, Training

ITERATIONS: Final = 3
MARK: Final = "xmem "
"""How the names of the marks begin: ``xmem layer``, ``xmem loss``, ``xmem batch``, ``xmem
optimizer``."""
BACKWARD: Final = "autograd::engine::evaluate_function"


@dataclass(frozen=True, slots=True)
class Block:
    """One allocation.

    Attributes:
        size_bytes: its size.
        start, end: microseconds of its allocation and of its release; infinite if it was not
            released.
        place: ``layer``, ``operator`` (of the forward pass, outside of leaf layers), ``backward``,
            ``loss``, ``batch`` or ``optimizer``; empty for others.
        place_end: when that part of the program ended.
    """

    size_bytes: int
    start: float
    end: float
    place: str
    place_end: float


def run_on_cpu(training: Training) -> list[Block]:
    """Train for :data:`ITERATIONS` on the CPU; returns the blocks in the order of their allocation.

    Weights are small random numbers and all buffers zero: only their sizes matter.

    Raises:
        NotCoveredError: the model does not run on the CPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        try:
            _profiled(training, path)
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
            raise NotCoveredError(f"does not run on the CPU: {error}"[:160]) from None
        return blocks_of(json.loads(path.read_text("utf-8"))["traceEvents"])


def _profiled(training: Training, path: Path) -> None:
    network, options = _on_cpu(training.network), training.options
    optimizer = optimizer_factory(options, {})(
        [each for each in network.parameters() if each.requires_grad]
    )
    loss_of = loss_function(options.loss)
    network.train()
    with (
        _marked(network),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        for _ in range(ITERATIONS):
            if options.zero_grad == "before_forward":
                optimizer.zero_grad(set_to_none=True)
            with record_function(f"{MARK}batch"):
                inputs = training.inputs.mapped(_filled)
            output = network(*inputs.args, **inputs.kwargs)
            with record_function(f"{MARK}loss"):
                loss = loss_of(output, _target)
            if options.zero_grad == "before_backward":
                optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            with record_function(f"{MARK}optimizer"):
                optimizer.step()
            if options.zero_grad == "after_step":
                optimizer.zero_grad(set_to_none=True)
            if not options.keeps_names:
                del inputs, output, loss
    profiler.export_chrome_trace(str(path))


def _on_cpu(network: nn.Module) -> nn.Module:
    """``network`` with memory on the CPU; it is changed."""
    network = network.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.02)
        for buffer in network.buffers():
            buffer.zero_()
    return network


def _filled(tensor: Tensor) -> Tensor:
    """A tensor on the CPU: zeros, which are valid tokens too, and ones for whole numbers of few
    values such as masks."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _target(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    with record_function(f"{MARK}batch"):
        return torch.zeros(shape, dtype=dtype)


@contextmanager
def _marked(network: nn.Module) -> Iterator[None]:
    """Context in which every leaf layer marks its forward pass in the profile."""
    open_marks: list[Any] = []

    def enter(module: nn.Module, arguments: Any) -> None:
        mark = record_function(f"{MARK}layer")
        mark.__enter__()  # type: ignore[no-untyped-call]
        open_marks.append(mark)

    def leave(module: nn.Module, arguments: Any, output: Any) -> None:
        open_marks.pop().__exit__(None, None, None)

    leaves = [module for module in network.modules() if not any(module.children())]
    handles = [leaf.register_forward_pre_hook(enter) for leaf in leaves]
    handles += [leaf.register_forward_hook(leave) for leaf in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def blocks_of(events: list[dict[str, Any]]) -> list[Block]:
    """Blocks from the events of a Chrome trace: the first event of an address allocates, the next
    one frees.

    Frees of addresses that were allocated before the profile began are left out.
    """
    spans = _spans(events)
    memory = sorted(
        (
            event
            for event in events
            if event.get("name") == "[memory]" and event["args"].get("Device Type", 0) == 0
        ),
        key=lambda event: float(event["ts"]),
    )
    begun: dict[int, tuple[float, int]] = {}
    found: list[tuple[float, float, int]] = []
    for event in memory:
        size, address, at = (
            int(event["args"]["Bytes"]),
            int(event["args"]["Addr"]),
            float(event["ts"]),
        )
        if size > 0:
            begun[address] = (at, size)
        elif address in begun:
            start, allocated = begun.pop(address)
            found.append((start, at, allocated))
    found += [(start, float("inf"), size) for start, size in begun.values()]
    blocks = []
    at_span, open_spans = 0, list[tuple[float, str]]()
    for start, end, size in sorted(found):
        while at_span < len(spans) and spans[at_span][0] <= start:
            open_spans.append(spans[at_span][1:])
            at_span += 1
        open_spans = [span for span in open_spans if span[0] >= start]
        place, place_end = _place(open_spans)
        blocks.append(Block(size, start, end, place, place_end))
    return blocks


def _spans(events: list[dict[str, Any]]) -> list[tuple[float, float, str]]:
    """Start, end and place of the parts of the program, by start."""
    found = []
    for event in events:
        if event.get("ph") != "X":
            continue
        name, start = str(event["name"]), float(event["ts"])
        end = start + float(event["dur"])
        if name.startswith(MARK):
            found.append((start, end, name.removeprefix(MARK)))
        elif name.startswith(BACKWARD):
            found.append((start, end, "backward"))
        elif event.get("cat") == "cpu_op":
            found.append((start, end, "operator"))
    return sorted(found, key=lambda span: (span[0], -span[1]))


def _place(open_spans: list[tuple[float, str]]) -> tuple[str, float]:
    """The part of the program that decides about a block, among those that run, outermost first."""
    for wanted in ("loss", "batch", "optimizer", "backward", "layer", "operator"):
        for end, place in open_spans:
            if place == wanted:
                return place, end
    return "", float("inf")


_KEPT_WHOLE: Final = ("loss", "batch")


def kept_blocks(blocks: Sequence[Block], parameter_sizes: Sequence[int]) -> list[Block]:
    """The blocks that are replayed.

    Blocks of layers and backward operators must outlive them; those of the loss and the batch are
    all kept; those of the optimizer must be as large as a parameter.

    Args:
        blocks: of the run.
        parameter_sizes: bytes of each parameter.
    """
    sizes = set(parameter_sizes)
    return [
        block
        for block in blocks
        if block.place in _KEPT_WHOLE
        or (block.place == "optimizer" and block.size_bytes in sizes)
        or (block.place in ("layer", "operator", "backward") and block.end > block.place_end)
    ]


def stream(blocks: Sequence[Block], parameter_sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Allocations and frees, and the bytes of each storage: parameters first, which stay, then the
    blocks in their order."""
    sizes = [*parameter_sizes, *(block.size_bytes for block in blocks)]
    first = len(parameter_sizes)
    moments = [(block.start, 1, first + index) for index, block in enumerate(blocks)]
    moments += [
        (block.end, 0, ~(first + index))
        for index, block in enumerate(blocks)
        if block.end != float("inf")
    ]
    return [*range(first), *(event for _, _, event in sorted(moments))], sizes


def parts(subject: Subject) -> Mapping[str, int]:
    """Reserved bytes of the replayed run, and the context.

    Raises:
        NotCoveredError: the model does not run on the CPU.
    """
    training = subject.training()
    sizes = parameter_sizes(training.network)
    events, bytes_of = stream(kept_blocks(run_on_cpu(training), sizes), sizes)
    capacity = max(subject.gpu.capacity_bytes - subject.context_bytes, 0)
    try:
        run = replay(events, bytes_of, capacity_bytes=capacity)
    except OutOfMemory:
        run = replay(events, bytes_of)
    return {"reserved": run.peak_reserved_bytes, "context": subject.context_bytes}


def parameter_sizes(network: nn.Module) -> list[int]:
    """Bytes of each parameter, shared ones once."""
    return [parameter.numel() * parameter.element_size() for parameter in network.parameters()]


XMEM: Final = PublishedEstimator(
    name="xMem",
    needs="cpu run",
    leaves_out="workspaces of CUDA libraries; kernels that keep other tensors on a GPU than on a CPU",
    source="Shi et al., Middleware 2025, arXiv 2510.21048",
    parts=parts,
)


__all__ = ["XMEM"]
