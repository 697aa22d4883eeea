"""Results of operators on meta tensors, without the kernel where it has run before.

Most of PyTorch's meta kernels are Python, a millisecond each; a network repeats its layers, and a
trace its steps.  So a call whose arguments have known layouts makes its results without the kernel.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from functools import cache
from typing import Any, Final

import torch
from torch import nn

from gpumemnet.torch_private.names import (
    Arguments,
    Keywords,
    aten,
    schema,
    storage_id,
    tree_map_only,
)

_PLAIN: Final = (torch.Tensor, nn.Parameter)
_UNHASHABLE: Final = object()
_GROUPED_PRODUCT: Final = aten._grouped_mm.default
_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


class KnownLayouts:
    """Results by operator and arguments, for one run with one set of kernels."""

    def __init__(self) -> None:
        self._results: dict[Hashable, tuple[type, tuple[_Layout | None, ...]]] = {}

    def call(self, func: Any, args: Arguments, kwargs: Keywords) -> Any:
        """Return the result of ``func`` on meta tensors."""
        writes = _only_writes(func)
        key = _UNHASHABLE
        if writes:  # whatever the numbers are, such as a learning rate
            key = _key(argument_tensors(args, kwargs))
        elif only_makes_tensors(func):
            key = _key((args, tuple(kwargs.items())))
        if key is _UNHASHABLE:
            return call_on_meta(func, args, kwargs)
        whole = (func, key, torch.get_default_dtype())
        known = self._results.get(whole)
        if known is None:
            result = call_on_meta(func, args, kwargs)
            layouts = () if writes else _layouts(result, args, kwargs)
            if layouts is not None:
                self._results[whole] = (type(result), layouts)
            return result
        returned, layouts = known
        if writes:  # and computes nothing
            return None if returned is type(None) else args[0]
        made = [
            None if each is None else torch.empty_strided(*each[:2], dtype=each[2], device="meta")
            for each in layouts
        ]
        return made[0] if returned is torch.Tensor else returned(made)


def call_on_meta(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Run an operator with a meta tensor in place of every real one."""
    tensors = argument_tensors(args, kwargs)
    if not all(each.is_meta and type(each).to is torch.Tensor.to for each in tensors):
        args, kwargs = tree_map_only(torch.Tensor, as_meta, (args, kwargs))
    if func is _GROUPED_PRODUCT and args[0].dtype != torch.bfloat16:
        return _grouped_product(*args, **kwargs)
    if _takes_device(func):
        kwargs = {**kwargs, "device": torch.device("meta")}
    return func(*args, **kwargs)


@cache
def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in schema(func).arguments)


def _grouped_product(
    left: torch.Tensor,
    right: torch.Tensor,
    offsets: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return the products of groups of rows or columns, whose meta kernel knows bfloat16 alone, and
    the CUDA kernel others too.

    Rows of the result begin at multiples of 16 bytes (``create_grouped_gemm_output_tensor`` in
    ``ATen/native/GroupedMMUtils.h``).
    """
    is_flat = left.ndim == right.ndim == 2
    groups = len(offsets) if is_flat and offsets is not None else right.shape[0]
    lead = (
        (groups, left.shape[0])
        if is_flat
        else left.shape[:-1]
        if right.ndim == 3
        else left.shape[1:-1]
    )
    shape = (*lead, right.shape[-1])
    aligned = 16 // (dtype or left.dtype).itemsize
    padded = -(-shape[-1] // aligned) * aligned
    strides = (shape[-2] * padded, padded, 1)[-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=dtype or left.dtype, device="meta")


@cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that the operator writes into."""
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(schema(func).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def argument_tensors(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among an operator's arguments, which nest in lists and tuples only."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += argument_tensors(value, {})
    return found


def as_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or a meta tensor with its layout where it is real.

    It is of no class with methods of its own: PyTorch's meta kernels in Python would call them.
    """
    if tensor.is_meta:
        return tensor if type(tensor).to is torch.Tensor.to else tensor.as_subclass(torch.Tensor)
    return meta_like(tensor)


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new meta tensor with the layout of ``tensor``."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


@cache
def only_makes_tensors(func: Any) -> bool:
    """Whether the operator neither writes into its arguments nor returns views, and returns tensors
    only."""
    declared = schema(func)
    if (
        any(value.alias_info is not None for value in (*declared.arguments, *declared.returns))
        or not declared.returns
    ):
        return False
    return all(
        str(value.type) in ("Tensor", "Optional[Tensor]", "List[Tensor]")
        for value in declared.returns
    )


@cache
def _only_writes(func: Any) -> bool:
    """Whether the operator does no more than write into its first argument, whose layout stays."""
    return (
        func.namespace == "aten"
        and [index for index, _ in written_arguments(func)] == [0]
        and torch.Tag.inplace_view not in func.tags
    )


def _key(value: Any) -> Any:
    """A key that is equal for arguments of equal layouts; :data:`_UNHASHABLE` where only the kernel
    can tell."""
    if isinstance(value, torch.Tensor):
        if (
            type(value) not in _PLAIN
            or value.layout != torch.strided
            or value.is_conj()
            or value.is_neg()
        ):
            return _UNHASHABLE
        return value.shape, value.stride(), value.dtype, value.storage_offset()
    if isinstance(value, list | tuple):
        entries = tuple(_key(entry) for entry in value)
        return _UNHASHABLE if any(entry is _UNHASHABLE for entry in entries) else entries
    return (type(value), value) if value is None or isinstance(value, Hashable) else _UNHASHABLE


def _layouts(
    result: Any, args: Arguments, kwargs: Mapping[str, Any]
) -> tuple[_Layout | None, ...] | None:
    """The layouts of new tensors; ``None`` where they share memory or are not dense from the start
    of their storage."""
    values = [result] if isinstance(result, torch.Tensor) else result
    if not isinstance(values, list | tuple) or type(result) not in (torch.Tensor, list, tuple):
        return None
    taken = {storage_id(tensor) for tensor in argument_tensors(args, kwargs)}
    layouts: list[_Layout | None] = []
    for value in values:
        if value is None:
            layouts.append(None)
            continue
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return None
        if not value.is_meta or value.storage_offset() or storage_id(value) in taken:
            return None
        layout = (value.shape, value.stride(), value.dtype)
        alike = torch.empty_strided(*layout[:2], dtype=layout[2], device="meta")
        if alike.untyped_storage().nbytes() != value.untyped_storage().nbytes():
            return None
        taken.add(storage_id(value))
        layouts.append(layout)
    return tuple(layouts)
