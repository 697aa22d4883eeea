"""What runs in a measuring process: it trains one job and reports every phase to its campaign.

The loop is that of PyTorch's tutorials, with one function per step:

* gradients are dropped with ``zero_grad(set_to_none=True)`` before the forward pass, so they live
  until the next step;
* batch, logits and loss keep their names until the step returns: they live through the backward
  pass and the optimizer step;
* every microbatch is copied from the host when it is needed, after the one before it has been
  freed;
* the network is in training mode, is not compiled, and its weights never lie on the device twice.

A change of these conventions is a new :data:`~dataset_builder.planned_job.PROTOCOL`.  This module
reads the caching allocator and never NVML: after each phase it waits until the campaign has done
so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, Final

import torch
import torch._dynamo  # every optimizer loads it on first use: loaded once here, before the fork, it costs the children nothing
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional

from gpumemnet.atomic_files import Document
from gpumemnet.errors import first_line
from gpumemnet.physics.element_types import (
    AUTOCAST_TYPES,
    IMAGE_DIMENSIONS,
    MODEL_TYPES,
    SCALED_PRECISIONS,
)
from gpumemnet.physics.optimizers import torch_call

from ..families import TensorSpec, family
from ..families import loss as cross_entropy
from ..families.blocks import checkpoint_blocks
from ..planned_job import Options, PlannedJob, frozen_layers, parse_planned

MIN_STEPS: Final = 3
MAX_STEPS: Final = 10
INITIAL_SCALE: Final = 2.0**8
"""Loss scale of fp16 autocast: low enough that no first step is skipped, since a skipped step
allocates no optimizer state."""
_BLOCK_ELEMENTS: Final = 2**20

Observe = Callable[[str], int]
"""Called with the name of a phase that has ended; returns the allocator's reserved bytes."""


@dataclass(frozen=True)
class _Run:
    members: ModuleType
    planned: PlannedJob
    device: torch.device
    network: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler


def train(planned: PlannedJob, device: torch.device, seed: int, observe: Observe) -> int:
    """Train ``planned`` until the reserved bytes are constant for two steps; at least 3 and at most
    10 steps.

    Args:
        planned: the job.
        device: where to train.
        seed: of weights, inputs and dropout.
        observe: called after ``build``, within the first step after ``forward`` and ``backward``,
            and after each ``step_n``.

    Returns:
        The number of steps.

    Raises:
        RuntimeError: whatever torch raises; :class:`torch.OutOfMemoryError` when the device is
            full.
    """
    torch.manual_seed(seed)
    options = planned.options
    members = family(planned.family)
    set_backends(options)
    network = build_network(planned, device)
    scaler = torch.amp.GradScaler(
        device.type, init_scale=INITIAL_SCALE, enabled=options.precision in SCALED_PRECISIONS
    )
    run = _Run(members, planned, device, network, make_optimizer(network, options), scaler)
    observe("build")
    reserved: list[int] = []
    for step in range(1, MAX_STEPS + 1):
        _step(run, observe if step == 1 else None)
        reserved.append(observe(f"step_{step}"))
        stepped = bool(run.optimizer.state) or options.optimizer == "sgd"
        if step >= MIN_STEPS and stepped and len(set(reserved[-3:])) == 1:
            return step
    if not stepped:
        raise RuntimeError(
            "the gradient scaler skipped every step, so the optimizer's state was never allocated"
        )
    return MAX_STEPS


def _step(run: _Run, observe: Observe | None) -> None:
    """One optimizer step; ``observe`` is called after each phase within it."""
    options = run.planned.options
    run.optimizer.zero_grad(set_to_none=True)
    for microbatch in range(options.gradient_accumulation):
        batch = None  # as in a data loader's loop: the last microbatch is freed before the next one is allocated
        batch = _batch(run)
        with _autocast(options, run.device):
            outputs = run.network(*batch[0])
            loss = cross_entropy(outputs, batch[1]) / options.gradient_accumulation
        if observe and microbatch == 0:
            observe("forward")
        torch.autograd.backward(run.scaler.scale(loss))
    if observe:
        observe("backward")
    run.scaler.step(run.optimizer)
    run.scaler.update()


def set_backends(options: Options) -> None:
    """Process-wide switches: cuDNN's benchmark mode, and TF32.

    Matrix products use TF32 only in ``tf32`` jobs.  Convolutions of ``fp32`` jobs may use it, which
    is PyTorch's default and what nearly all ``fp32`` jobs do.
    """
    torch.backends.cuda.matmul.allow_tf32 = options.precision == "tf32"
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = options.cudnn_benchmark


def build_network(planned: PlannedJob, device: torch.device) -> nn.Module:
    """The network with its options applied, on ``device``, in training mode.

    It is built on the meta device.  Its tensors, none of which two modules share, are then allocated
    on ``device`` in the order of ``module.to(device)`` and filled from the host.  The allocations
    equal those of a network that is built on the host, without the seconds of its initialisation.
    """
    with torch.device("meta"):
        network = family(planned.family).build(planned.architecture)
    network = apply_options(network, planned.options).to_empty(device=device)
    for name, parameter in network.named_parameters():
        _copy_over(parameter.detach(), _weight_values(name, parameter))
    for name, buffer in network.named_buffers():  # of batch norms, as no network has others
        value = _BUFFER_VALUES[name.rpartition(".")[2]]
        _copy_over(buffer, torch.full((_BLOCK_ELEMENTS,), value, dtype=buffer.dtype))
    return network.train()


def apply_options(network: nn.Module, options: Options) -> nn.Module:
    """The network with the options of its run, without a change of values."""
    if options.precision in MODEL_TYPES:
        network = network.to(getattr(torch, MODEL_TYPES[options.precision]))
    if options.channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    owners = [
        module
        for module in network.modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    for module in owners[: frozen_layers(options.frozen_share, len(owners))]:
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(False)
    if options.checkpointing == "every_block":
        checkpoint_blocks(network)
    return network


_BUFFER_VALUES: Final = {"running_mean": 0.0, "running_var": 1.0, "num_batches_tracked": 0.0}


def _weight_values(name: str, parameter: Tensor) -> Tensor:
    """A block of initial values, as many as one copy moves: uniform within 1/√fan-in, zero biases,
    unit scales."""
    block = torch.empty(min(parameter.numel(), _BLOCK_ELEMENTS))
    if parameter.dim() >= 2:
        bound = 1 / math.sqrt(max(1, parameter[0].numel()))
        return block.uniform_(-bound, bound).to(parameter.dtype)
    return block.fill_(0.0 if name.endswith("bias") else 1.0).to(parameter.dtype)


def _copy_over(tensor: Tensor, block: Tensor) -> None:
    """Copy ``block`` over ``tensor`` until it is full: host-to-device copies only, no kernel, no
    scratch memory."""
    flat = torch.as_strided(tensor, (tensor.numel(),), (1,))
    for start in range(0, tensor.numel(), len(block)):
        part = flat[start : start + len(block)]
        part.copy_(block[: len(part)])


def make_optimizer(network: nn.Module, options: Options) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters, in the implementation of ``options``."""
    class_name, arguments = torch_call(options.optimizer, options.optimizer_implementation)
    make: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, class_name)
    return make(
        (parameter for parameter in network.parameters() if parameter.requires_grad), **arguments
    )


def _autocast(options: Options, device: torch.device) -> torch.autocast:
    name = AUTOCAST_TYPES.get(options.precision)
    return torch.autocast(
        device.type, dtype=getattr(torch, name or "bfloat16"), enabled=name is not None
    )


def _batch(run: _Run) -> tuple[tuple[Tensor, ...], Tensor]:
    """Fresh inputs and targets on the device."""
    specs, target = run.members.tensors(run.planned.architecture)
    return tuple(_random(spec, run) for spec in specs), _random(target, run)


def _random(spec: TensorSpec, run: _Run) -> Tensor:
    options = run.planned.options
    shape = (options.batch_size, *spec.shape)
    is_image = len(shape) == IMAGE_DIMENSIONS and spec.high is None
    layout = torch.channels_last if options.channels_last and is_image else torch.contiguous_format
    count = min(math.prod(shape), _BLOCK_ELEMENTS)
    if spec.high is None:
        dtype: torch.dtype = getattr(torch, MODEL_TYPES.get(options.precision, "float32"))
        block = torch.randn(count).to(dtype)
    else:
        block = torch.randint(spec.high, (count,))
    tensor = torch.empty(shape, dtype=block.dtype, device=run.device, memory_format=layout)
    _copy_over(tensor, block)
    return tensor


_PHASE_READINGS: Final = {
    "allocated_bytes": "allocated_bytes.all.current",
    "reserved_bytes": "reserved_bytes.all.current",
    "peak_allocated_bytes": "allocated_bytes.all.peak",
    "peak_reserved_bytes": "reserved_bytes.all.peak",
}
_PEAKS: Final = {
    "requested_bytes.all.peak": "peak_requested_bytes",
    "active_bytes.all.peak": "peak_active_bytes",
    "inactive_split_bytes.all.peak": "peak_inactive_split_bytes",
}
"""Peaks are reset with every phase, so the maximum over the run is kept here."""
_COUNTERS: Final = {
    "num_alloc_retries": "alloc_retries",
    "num_ooms": "ooms",
    "inactive_split_bytes.all.current": "inactive_split_bytes",
    "allocation.all.allocated": "allocations",
    "segment.all.current": "segments",
    "segment.small_pool.current": "small_segments",
    "segment.large_pool.current": "large_segments",
}
_OUT_OF_MEMORY: Final = (
    *("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED",
)
"""Failures that mean a full card: of CUDA libraries that do not ask the allocator, and of the
allocator's message about a full card where NVML does not list processes, as in some containers
(``reportProcessMemoryInfo`` in ``CUDACachingAllocator.cpp``)."""


def measure(request: Mapping[str, Any], connection: Connection) -> None:
    """Train the job of ``request`` and report over ``connection``.

    Args:
        request: ``planned`` and ``seed``, or ``probe_bytes`` (amounts to allocate one after the
            other), or ``profile`` (see :func:`_profile`); ``visible`` is the GPU's UUID.
        connection: every message is a phase or, with ``status``, the result.  The campaign answers
            when it has read NVML.

    Raises:
        EOFError, ConnectionError: when the campaign is gone.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = request["visible"]
    allocator: dict[str, int] = {}

    def report(message: Mapping[str, Any]) -> None:
        connection.send(message)
        connection.recv()

    try:
        outcome = {"status": "ok"} | _measure_on_gpu(request, report, allocator)
    except (EOFError, ConnectionError):
        raise
    except RuntimeError as error:
        is_full = isinstance(error, torch.OutOfMemoryError) or any(
            each in str(error) for each in _OUT_OF_MEMORY
        )
        outcome = {"status": "oom" if is_full else "error", "reason": first_line(error)}
    except Exception as error:
        outcome = {"status": "error", "reason": f"{type(error).__name__}: {first_line(error)}"}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        note_statistics(torch.cuda.memory_stats(), allocator)
    report(outcome | {"allocator": allocator})


def _measure_on_gpu(
    request: Mapping[str, Any],
    report: Callable[[Mapping[str, Any]], None],
    allocator: dict[str, int],
) -> Document:
    """Run the job; ``allocator`` takes up the allocator's statistics, also of a job that fails."""
    device = torch.device("cuda", 0)

    def observe(name: str, **details: object) -> int:
        torch.cuda.synchronize(device)
        statistics = torch.cuda.memory_stats(device)
        note_statistics(statistics, allocator)
        phase = {reading: int(statistics.get(key, 0)) for reading, key in _PHASE_READINGS.items()}
        report({"name": name, **phase, **details})
        torch.cuda.reset_peak_memory_stats(device)
        return phase["reserved_bytes"]

    stack = software_stack()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.mem_get_info(device)  # makes the context
    observe("context", stack=stack)
    if "profile" in request:
        return {"found": _profile(device, observe)}
    held = []
    for size_bytes in request.get("probe_bytes", ()):
        held.append(torch.empty(size_bytes, dtype=torch.uint8, device=device).zero_())
        observe("probe")
    if held:
        return {}
    return {"steps": train(parse_planned(request["planned"]), device, request["seed"], observe)}


def software_stack() -> dict[str, str | None]:
    """Versions that a label depends on, and the allocator's settings.

    Raises:
        RuntimeError: when cuDNN is not the one that PyTorch was built for.
    """
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    settings = (
        os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    )
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "allocator_settings": settings,
    }


def note_statistics(statistics: Mapping[str, int], totals: dict[str, int]) -> None:
    """Write the caching allocator's statistics to ``totals``, under the names of the dataset."""
    for key, name in _COUNTERS.items():
        if key in statistics:
            totals[name] = int(statistics[key])
    for key, name in _PEAKS.items():
        if key in statistics:
            totals[name] = max(totals.get(name, 0), int(statistics[key]))


def _profile(device: torch.device, observe: Callable[[str], int]) -> Document:
    """What a device profile holds beside the context, which the phase ``training`` shows."""
    properties = torch.cuda.get_device_properties(device)
    found = {
        "compute_capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "blas_workspace_bytes": blas_workspace_bytes(device),
    }
    small_training_run(device)
    observe("training")
    return found


def blas_workspace_bytes(device: torch.device) -> int:
    """Growth of the allocator at the first matrix product of a thread."""
    square, product = torch.randn(256, 256, device=device), torch.empty(256, 256, device=device)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    torch.mm(square, square, out=product)
    torch.cuda.synchronize(device)
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.current"] - before)


def small_training_run(device: torch.device) -> None:
    """Load the kernels of convolutions, attention and matrix products, in fp32 and with autocast:
    the driver keeps them in the context."""
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
