"""``fully_shard`` on a model that is traced: parameters, gradients and optimizer state are split among the ranks.

Each block of the model's stacks is a group that is gathered and given up as a whole, and what is left is the outermost group, as
PyTorch's own documentation and trainers do it (``torch/distributed/fsdp/_fully_shard``; Zhao et al., arXiv 2304.11277; the stages
are those of ZeRO, Rajbhandari et al., arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from gpumemnet.errors import ExtractError
from gpumemnet.tracing.checkpointing import blocks
from gpumemnet.tracing.recorder import Recorder
from gpumemnet.tracing.streams import Streams
from gpumemnet.tracing.torch_private import distributed as names
from gpumemnet.tracing.torch_private.distributed import is_sharded
from gpumemnet.tracing.torch_private.modules import OWN_DICTS, own_parameters
from gpumemnet.tracing.torch_private.names import replaced
from gpumemnet.tracing.torch_private.tensors import STORAGE_RESIZE

_META: Final = torch.device("meta")

Arrived = Callable[[Tensor, bool], None]
"""Told of each tensor that the sharding brings to the GPU whole, and whether it is a parameter."""


@contextmanager
def sharding_on_meta(recorder: Recorder, streams: Streams, arrived: Arrived) -> Iterator[None]:
    """Context in which ``fully_shard`` and what it puts into a model work on meta tensors.

    Args:
        recorder: told what is communication, and what is given up early.
        streams: those of the GPU.
        arrived: told of what comes to the GPU whole.
    """
    communicating = recorder.communicating()
    resize: Callable[..., torch.UntypedStorage] = STORAGE_RESIZE.value()

    def resized(storage: torch.UntypedStorage, size_bytes: int) -> torch.UntypedStorage:
        resize(storage, size_bytes)
        recorder.resized(storage)
        return storage

    def move(parameters: list[nn.Parameter], buffers: list[Tensor], device: torch.device) -> None:
        for parameter in parameters:
            arrived(parameter, True)
        for buffer in buffers:
            arrived(buffer, False)

    replacements = (
        (names.DEVICE_MODULE, streams),
        (names.ACCELERATOR_STREAM, streams.current_stream),
        (STORAGE_RESIZE, resized),
        (names.RNG_SUPPORT, lambda mesh: False),
        (names.MESH_DEVICE, lambda mesh: _META),
        (names.MOVE_STATES, move),
        (names.NO_META_CHECK, lambda self: None),
        (names.OFFLOAD_CHECK, _nothing_offloaded),
        *((method, communicating(method.value())) for method in names.COMMUNICATING_METHODS),
    )
    with replaced(replacements):
        yield


def _nothing_offloaded(group: Any) -> None:
    if any(parameter.offload_to_cpu for parameter in group.fsdp_params):
        raise ExtractError("parameters that are offloaded to the host's memory (CPUOffloadPolicy) are not traced")


@contextmanager
def sharded(model: nn.Module, ranks: int, dtype: torch.dtype | None, reshard: bool) -> Iterator[int]:
    """Context in which ``model`` is sharded; it is left as it was.

    Args:
        model: with meta tensors for parameters.
        ranks: among how many.
        dtype: of the gathered parameters and of the forward and backward pass, where it is not the parameters' own; gradients are
            then summed in fp32.
        reshard: whether gathered parameters are given up after the forward pass, as ZeRO-3 does it, or kept for the backward
            pass, as ZeRO-2.

    Yields:
        the number of groups that are gathered as a whole.

    Raises:
        ExtractError: names a parameter that cannot be sharded.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    policy = MixedPrecisionPolicy() if dtype is None else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    stack = blocks(model)
    _check(model, stack)
    groups = (*stack, model)
    with _put_back(model):
        for each in groups:
            whole = [parameter.untyped_storage() for parameter in each.parameters() if not is_sharded(type(parameter))]
            fully_shard(each, mesh=mesh, mp_policy=policy, reshard_after_forward=None if reshard else False)
            for storage in whole:
                storage.resize_(0)  # nobody but the stand-ins' own table knows it any more
        yield len(groups)


def _check(model: nn.Module, stack: list[nn.Module]) -> None:
    """Check that each parameter can be sharded.

    Raises:
        ExtractError: names one that cannot.
    """
    owners: dict[int, set[int]] = {}
    for number, block in enumerate(stack):
        for parameter in block.parameters():
            owners.setdefault(id(parameter), set()).add(number)
    inside = {id(module) for block in stack for module in block.modules()}
    for module in model.modules():
        if id(module) not in inside:
            for own in own_parameters(module).values():
                owners.setdefault(id(own), set()).add(len(stack))
    for name, parameter in model.named_parameters():
        reason = None
        if len(owners[id(parameter)]) > 1:
            reason = "is shared by blocks that are gathered one by one"
        elif parameter.dim() == 0:
            reason = "is a single number"
        elif not parameter.is_contiguous():
            reason = "does not lie contiguously, as with channels_last"
        if reason:
            raise ExtractError(f"the parameter '{name}' {reason}, which fully_shard does not support")


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Context after which the modules of ``model`` are what they were: their classes, their tensors, their hooks."""
    before = [(module, type(module), dict(module.__dict__), _tables(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, kind, attributes, tables in before:
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for table, contents in tables:
                table.clear()
                table.update(contents)
            names.forget_sharding(module)


def _tables(module: nn.Module) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """The dicts of a module that registering a parameter or a hook changes, and what is in them."""
    return [(table, dict(table)) for name, table in module.__dict__.items() if name in OWN_DICTS]
