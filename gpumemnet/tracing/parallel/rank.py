"""The model on one rank: alone on its GPU, one of several replicas, or one shard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gpumemnet.torch_private.modules import is_batch_norm, part_on_rank
from gpumemnet.tracing.meta_tensors import MetaTensors
from gpumemnet.tracing.recorder import Recorder
from gpumemnet.tracing.streams import Streams


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

    from gpumemnet.tracing.parallel.process_group import process_group
    from gpumemnet.tracing.parallel.replicas import replicas_on_meta
    from gpumemnet.tracing.parallel.sharding import sharded, sharding_on_meta

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
