"""The model as it lies on the simulated GPU: its weights as meta tensors, its blocks recomputed in
the backward pass if asked for, alone on its GPU or as one of several replicas or shards.

:func:`with_meta_tensors` replaces parameters and buffers as ``module.to(device)`` does with CUDA
tensors.  The model itself is left as it was: its weights are not read or copied and get no
gradients.  Small buffers keep their values, because models read them, such as position tables and
masks.

Activation checkpointing recomputes each block of a stack.  A block is a child of a ``ModuleList``
or ``Sequential`` whose children are mostly of one class that holds other modules.  This is what
trainers wrap (Chen et al., arXiv 1604.06174; the block policies of FSDP and DeepSpeed).
Hierarchical networks have a stack of stages, each with a stack of its own.  There the blocks inside
the stages are meant, as timm and diffusers recompute them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpumemnet.errors import ExtractError
from gpumemnet.extract.placement import is_small
from gpumemnet.physics.element_types import IMAGE_DIMENSIONS
from gpumemnet.torch_private.modules import (
    is_batch_norm,
    own_buffers,
    own_parameters,
    part_on_rank,
    storage_id,
)
from gpumemnet.tracing.recorder import Recorder
from gpumemnet.tracing.script.simulated_cuda import Streams


@dataclass(frozen=True, slots=True)
class MetaTensors:
    """The meta tensors of a model.

    Attributes:
        parameters: meta parameter by the ``id`` of the model's own.
        moves: ``(tensor, module path, whether it is a parameter)`` for all that goes to the GPU, in
            the order of ``module.to(device)``.
    """

    parameters: dict[int, nn.Parameter]
    moves: list[tuple[Tensor, str, bool]]


@contextmanager
def with_meta_tensors(
    model: nn.Module, dtype: torch.dtype | None = None, channels_last: bool = False
) -> Iterator[MetaTensors]:
    """Context in which the model's parameters and buffers are meta tensors.

    Args:
        model: the model.
        dtype: floating-point type to convert to, as by ``model.to(dtype)``.
        channels_last: whether 4-dimensional parameters take the NHWC memory format.

    Yields:
        the meta tensors.
    """
    parameters: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    storages: dict[int, Tensor] = {}
    moves: list[tuple[Tensor, str, bool]] = []
    undo: list[tuple[dict[str, Any], str, Tensor]] = []

    def convert(tensor: Tensor, real: bool) -> Tensor:
        target_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if real:
            return tensor.detach().to(target_dtype, copy=True)
        shared = None if tensor.is_meta else storages.get(storage_id(tensor))
        if (
            shared is not None
            and target_dtype == shared.dtype
            and shared.numel() >= tensor.storage_offset() + tensor.numel()
        ):
            return shared.reshape(-1).as_strided(
                tensor.shape, tensor.stride(), tensor.storage_offset()
            )
        layout = (
            torch.channels_last
            if channels_last and tensor.ndim == IMAGE_DIMENSIONS
            else torch.preserve_format
        )
        converted = torch.empty_like(
            tensor, dtype=target_dtype, device="meta", memory_format=layout
        )
        if not tensor.is_meta:
            storages[storage_id(tensor)] = converted
        return converted

    def replace(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            replace(child, f"{path}.{name}" if path else name)
        if isinstance(module, torch.jit.ScriptModule):
            return
        for name, parameter in own_parameters(module).items():
            if parameter is None:
                continue
            if id(parameter) not in parameters:
                parameters[id(parameter)] = nn.Parameter(
                    convert(parameter.detach(), False), parameter.requires_grad
                )
                moves.append((parameters[id(parameter)], path, True))
            undo.append((own_parameters(module), name, parameter))
        for name, buffer in own_buffers(module).items():
            if buffer is None:
                continue
            if id(buffer) not in buffers:
                buffers[id(buffer)] = convert(buffer, not buffer.is_meta and is_small(buffer))
                moves.append((buffers[id(buffer)], path, False))
            undo.append((own_buffers(module), name, buffer))

    with torch.no_grad():
        replace(model, "")
    try:
        for tensors, name, original in undo:
            tensors[name] = (
                parameters[id(original)] if id(original) in parameters else buffers[id(original)]
            )
        yield MetaTensors(parameters, moves)
    finally:
        for tensors, name, original in undo:
            tensors[name] = original


_MIN_BLOCKS = 2
_MIN_WEIGHTS = 2
_MIN_STAGE_SHARE = 1 / 3
"""Share of a stage's parameters that lie in its blocks; adapters in a block are far fewer."""


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the outermost stacks inside ``model``, in order; its own if there is no
    other stack."""
    return _inner(model) or _stack_members(model)


def _inner(model: nn.Module) -> list[nn.Module]:
    return [block for child in model.children() for block in _stack_members(child) or _inner(child)]


def _stack_members(stack: nn.Module) -> list[nn.Module]:
    """Return the blocks of ``stack``, none if it is not a stack of blocks or of stages."""
    members = list(stack.children()) if isinstance(stack, nn.ModuleList | nn.Sequential) else []
    counts = Counter(
        type(member) for member in members if next(member.children(), None) is not None
    )
    if not counts or counts.most_common(1)[0][1] < _MIN_BLOCKS:
        return []
    called = [part for member in members if type(member) in counts for part in _called(member)]
    of_stages = [_stage_blocks(part) for part in called]
    if not any(of_stages):
        return called
    return [
        block
        for part, own in zip(called, of_stages, strict=True)
        for block in own or [part]
        if _is_block(block)
    ]


def _stage_blocks(stage: nn.Module) -> list[nn.Module]:
    """Return the blocks in the stacks of ``stage``, none if it is not a stage.

    The parts of a block are no blocks: a convolution with its norm has a single weight, and experts
    and attention heads have no norms; adapters have few parameters.  Plain ``Sequential`` modules
    in a list are branches, which run side by side.
    """
    stacks = [stage] if isinstance(stage, nn.Sequential) else list(stage.children())
    found = []
    for stack in stacks:
        parts = list(stack.children()) if isinstance(stack, nn.ModuleList | nn.Sequential) else []
        are_branches = (
            isinstance(stack, nn.ModuleList) and type(next(iter(parts), None)) is nn.Sequential
        )
        if len(set(map(type, parts))) == 1 and not are_branches and all(map(_is_block, parts)):
            found += parts
    is_stage = _parameters(*found) >= _MIN_STAGE_SHARE * _parameters(stage)
    return found if is_stage else []


def _parameters(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _is_block(module: nn.Module) -> bool:
    """Whether ``module`` holds at least two weight matrices or filters, and a norm."""
    ranks = [
        [parameter.ndim for parameter in part.parameters(recurse=False)]
        for part in module.modules()
    ]
    weights = sum(max(own, default=0) > 1 for own in ranks)
    return weights >= _MIN_WEIGHTS and any(max(own, default=0) == 1 for own in ranks)


def _called(block: nn.Module) -> list[nn.Module]:
    """Return ``block``, or its children if it is a list or dict, which has no forward pass."""
    if type(block) in (nn.ModuleList, nn.ModuleDict):
        return [called for child in block.children() for called in _called(child)]
    return [block]


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[int]:
    """Context in which every block of ``model`` is recomputed in the backward pass.

    Yields:
        the number of blocks.

    Raises:
        ExtractError: the model has none.
    """
    stack = blocks(model)
    if not stack:
        raise ExtractError(
            "checkpointing: the model has no stack of blocks; call torch.utils.checkpoint in it, or use 'none'"
        )
    own = [vars(block).get("forward") for block in stack]
    for block in stack:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield len(stack)
    finally:
        for block, forward in zip(stack, own, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward


@dataclass(frozen=True, slots=True)
class Rank:
    """What a rank trains.

    Attributes:
        model: the module to call.
        parameters: the rank's own parameter for each of the model's, by the ``id`` of the latter.
        owners: path of the module that owns a parameter or a buffer, by the ``id`` of the rank's
            own.
        notes: one sentence on how the GPUs are used.
    """

    model: nn.Module
    parameters: dict[int, nn.Parameter]
    owners: dict[int, str]
    notes: tuple[str, ...] = ()


@contextmanager
def on_rank(
    model: nn.Module,
    meta_tensors: MetaTensors,
    recorder: Recorder,
    parallel: str,
    ranks: int,
    dtype: torch.dtype | None,
) -> Iterator[Rank]:
    """Context in which ``model`` is on the GPU of one rank; enter it inside the recorder's context.

    Args:
        model: the model, with meta tensors in place.
        meta_tensors: its meta tensors.
        recorder: records what arrives on the GPU.
        parallel: one of :data:`~gpumemnet.tracing.options.PARALLEL`.
        ranks: number of ranks.
        dtype: as :func:`gathered_in` says.

    Raises:
        ExtractError: this process is part of a process group, or the model cannot be sharded.
    """
    owners = {id(tensor): path for tensor, path, _ in meta_tensors.moves}

    def arrived(tensor: Tensor, is_parameter: bool) -> None:
        recorder.arrived(
            tensor, "parameter" if is_parameter else "buffer", owners.get(id(tensor), "")
        )

    if parallel in ("none", "ddp"):
        for tensor, _, is_parameter in meta_tensors.moves:
            arrived(tensor, is_parameter)
    if parallel == "none":
        yield Rank(model, meta_tensors.parameters, owners)
        return
    from torch.nn.parallel import DistributedDataParallel

    from gpumemnet.tracing.parallel import (
        process_group,
        replicas_on_meta,
        sharded,
        sharding_on_meta,
    )

    recorder.set_ranks(ranks)
    with ExitStack() as stack:
        stack.enter_context(process_group(ranks, recorder.exchanged))
        if parallel == "ddp":
            note = f"each of {ranks:,} GPUs holds all of the model (DistributedDataParallel with its defaults) and its own batch"
            stack.enter_context(replicas_on_meta(recorder))
            yield Rank(DistributedDataParallel(model), meta_tensors.parameters, owners, (note,))
            return
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        of_model = {key: names[id(parameter)] for key, parameter in meta_tensors.parameters.items()}
        stack.enter_context(sharding_on_meta(recorder, Streams(recorder.use_stream), arrived))
        groups = stack.enter_context(sharded(model, ranks, dtype, parallel == "fsdp"))
        shards = dict(model.named_parameters())
        for name, shard in shards.items():
            owners[id(shard)] = name.rpartition(".")[0]
            recorder.classify((part_on_rank(shard),), "parameter", owners[id(shard)])
        yield Rank(
            model,
            {key: shards[name] for key, name in of_model.items()},
            owners,
            (_sharding_note(ranks, groups, dtype),),
        )


def gathered_in(
    model: nn.Module, parallel: str, autocast: torch.dtype | None
) -> torch.dtype | None:
    """Return the type in which sharded parameters are gathered and used; ``None`` for their own
    type.

    ``fully_shard`` replaces autocast, except in models with batch norms: those keep fp32 statistics
    and accept no other weights.

    Args:
        model: the model.
        parallel: one of :data:`~gpumemnet.tracing.options.PARALLEL`.
        autocast: the type that autocast would compute in; ``None`` without autocast.
    """
    normalizes = any(is_batch_norm(module) for module in model.modules())
    return autocast if parallel.startswith("fsdp") and not normalizes else None


def _sharding_note(ranks: int, groups: int, dtype: torch.dtype | None) -> str:
    gathered = (
        ""
        if dtype is None
        else f", gathered in {str(dtype).removeprefix('torch.')}, gradients summed in float32"
    )
    return f"the first of {ranks:,} ranks, which holds the largest shards: fully_shard in {groups:,} groups{gathered}"
