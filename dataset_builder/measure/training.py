"""The training steps that are measured: build, move to the device, then forward, loss, backward,
optimizer step.

The loop is that of PyTorch's tutorials, with one function per step:

* gradients are dropped with ``zero_grad(set_to_none=True)`` before the forward pass, so they live
  until the next step;
* batch, logits and loss keep their names until the step returns: they live through the backward
  pass and the optimizer step;
* every microbatch is copied from the host when it is needed, after the one before it has been
  freed;
* the network is in training mode, is not compiled, and its weights never lie on the device twice.

A change of these conventions is a new :data:`~dataset_builder.recipe.planned_job.PROTOCOL`.  This
module reads neither NVML nor CUDA's statistics: the caller passes ``observe``, which is called when
a phase has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from gpumemnet.physics.element_types import (
    AUTOCAST_TYPES,
    IMAGE_DIMENSIONS,
    MODEL_TYPES,
    SCALED_PRECISIONS,
)
from gpumemnet.physics.optimizers import torch_call

from ..families import Family, TensorSpec, family
from ..families.blocks import checkpoint_blocks
from ..recipe.planned_job import Options, PlannedJob, frozen_layers

MIN_STEPS: Final = 3
MAX_STEPS: Final = 10
INITIAL_SCALE: Final = 2.0**8
"""Loss scale of fp16 autocast: low enough that no first step is skipped, since a skipped step
allocates no optimizer state."""
_BLOCK_ELEMENTS: Final = 2**20

Observe = Callable[[str], int]
"""Called with the name of a phase that has ended; returns the allocator's reserved bytes."""


@dataclass(frozen=True, slots=True)
class _Run:
    members: Family
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
            loss = run.members.loss(outputs, batch[1]) / options.gradient_accumulation
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

    It is built on the meta device.  Each tensor is then allocated on ``device`` in the order of
    ``module.to(device)`` and filled from the host.  The allocations equal those of a network that
    is built on the host, without the seconds of its initialisation.
    """
    members = family(planned.family)
    with torch.device("meta"):
        network = members.build(planned.architecture)
    if any(name.rpartition(".")[2] not in _BUFFER_VALUES for name, _ in network.named_buffers()):
        # Tables that the network computes (positions, masks) must keep their values: build it in
        # full.
        network = _apply_options(members.build(planned.architecture), planned.options).to(device)
    else:
        network = _apply_options(network, planned.options)
        _allocate(network, device, {})
    return network.train()


def meta_network(planned: PlannedJob) -> nn.Module:
    """The network on meta tensors, with its options except precision and memory format; used where
    nothing is trained."""
    with torch.device("meta"):
        network = family(planned.family).build(planned.architecture)
    return _apply_options(network, replace(planned.options, precision="fp32", channels_last=False))


def _apply_options(network: nn.Module, options: Options) -> nn.Module:
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


def _allocate(module: nn.Module, device: torch.device, allocated: dict[int, nn.Parameter]) -> None:
    """Make every meta tensor of ``module`` on ``device``, children first as ``module.to`` does;
    tied weights stay tied."""
    for child in module.children():
        _allocate(child, device, allocated)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            if id(parameter) not in allocated:
                values = torch.empty_like(parameter, device=device, requires_grad=False)
                _copy_over(values, _weight_values(name, parameter))
                allocated[id(parameter)] = nn.Parameter(
                    values, requires_grad=parameter.requires_grad
                )
            module._parameters[name] = allocated[id(parameter)]
    for name, buffer in module._buffers.items():
        if buffer is not None:
            values = torch.empty_like(buffer, device=device)
            _copy_over(
                values, torch.full((_BLOCK_ELEMENTS,), _BUFFER_VALUES[name], dtype=buffer.dtype)
            )
            module._buffers[name] = values


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
