"""Replaces a model's parameters and buffers by meta tensors while it is traced, as
``module.to(device)`` does with CUDA tensors.

The model itself is left as it was: its weights are not read or copied and get no gradients.  Small
    buffers keep their values,
because models read them, such as position tables and masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpumemnet.extract.placement import is_small
from gpumemnet.physics.element_types import IMAGE_DIMENSIONS
from gpumemnet.torch_private.modules import own_buffers, own_parameters, storage_id


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
