"""``fully_shard`` on a traced model: parameters, gradients and optimizer state are split among the
ranks.

Each block of the model's stacks is a group whose parameters are gathered and freed together; the
other parameters are the outermost group.  PyTorch's documentation and trainers do the same
(``torch/distributed/fsdp/_fully_shard``; Zhao et al., arXiv 2304.11277; the stages are those of
ZeRO, Rajbhandari et al., arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from gpumemnet.errors import ExtractError
from gpumemnet.torch_private import distributed as names
from gpumemnet.torch_private.distributed import is_sharded
from gpumemnet.torch_private.modules import OWN_DICTS, STORAGE_RESIZE, own_parameters
from gpumemnet.torch_private.names import replaced
from gpumemnet.tracing.checkpointing import blocks
from gpumemnet.tracing.recorder import Recorder
from gpumemnet.tracing.streams import Streams

_META: Final = torch.device("meta")

Arrived = Callable[[Tensor, bool], None]
"""Called for each unsharded tensor that arrives on the GPU, and whether it is a parameter."""


@contextmanager
def sharding_on_meta(recorder: Recorder, streams: Streams, arrived: Arrived) -> Iterator[None]:
    """Context in which ``fully_shard`` and its hooks work on meta tensors.

    Args:
        recorder: records communication, and parameters that are freed early.
        streams: streams of the simulated GPU.
        arrived: called for each unsharded tensor that arrives on the GPU.
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
        raise ExtractError(
            "offloading parameters to host memory (CPUOffloadPolicy) is not supported; trace without it"
        )


@contextmanager
def sharded(
    model: nn.Module, ranks: int, dtype: torch.dtype | None, reshard: bool
) -> Iterator[int]:
    """Context in which ``model`` is sharded; it is left as it was.

    Args:
        model: the model, with meta tensors in place.
        ranks: number of ranks.
        dtype: type of gathered parameters and of the forward and backward pass; ``None`` for the
            parameters' own type.  With a type, gradients are summed in fp32.
        reshard: whether gathered parameters are freed after the forward pass (ZeRO-3), or kept for
            the backward pass (ZeRO-2).

    Yields:
        the number of groups that are gathered as a whole.

    Raises:
        ExtractError: names a parameter that cannot be sharded.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    policy = (
        MixedPrecisionPolicy()
        if dtype is None
        else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    )
    stack = blocks(model)
    _check(model, stack)
    groups = (*stack, model)
    with _restored(model):
        for each in groups:
            whole = [
                parameter.untyped_storage()
                for parameter in each.parameters()
                if not is_sharded(type(parameter))
            ]
            fully_shard(
                each, mesh=mesh, mp_policy=policy, reshard_after_forward=None if reshard else False
            )
            for storage in whole:
                storage.resize_(0)  # only the table of meta tensors still refers to it
        yield len(groups)


def _check(model: nn.Module, stack: list[nn.Module]) -> None:
    """Check that each parameter can be sharded.

    Raises:
        ExtractError: names a parameter that cannot be sharded.
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
            reason = "is not contiguous, as with channels_last"
        if reason:
            raise ExtractError(
                f"the parameter '{name}' {reason}, which fully_shard does not support"
            )


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Context that restores classes, tensors and hooks of the modules of ``model`` on exit."""
    before = [
        (module, type(module), dict(module.__dict__), _tables(module)) for module in model.modules()
    ]
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
    """Return the dicts of a module that registering a parameter or a hook changes, with copies of
    them."""
    return [(table, dict(table)) for name, table in module.__dict__.items() if name in OWN_DICTS]
