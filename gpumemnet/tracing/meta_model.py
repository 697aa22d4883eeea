"""The model as it lies on the simulated GPU: its weights as meta tensors, alone on
its GPU or as one of several replicas or shards.

:func:`with_meta_tensors` replaces parameters and buffers as ``module.to(device)`` does with CUDA
tensors.  The model itself is left as it was: its weights are not read or copied and get no
gradients.  Small buffers keep their values, because models read them, such as position tables and
masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
