"""Runs operators on meta tensors: results that are known from earlier calls, and results on sparse
tensors.

Most of PyTorch's meta kernels are Python, a millisecond each; a network repeats its layers, and a
trace its steps.  So a call whose arguments have known layouts makes its results without the kernel.

PyTorch has no kernels for sparse meta tensors.  The number of non-zeros is known: it is the length
of the values.  A sum of equal indices (``coalesce``) may shrink it; here it keeps all, which is the
most that it can take.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from gpumemnet.torch_private.names import aten, dense_parts, schema, storage_id, tree_map_only

_PLAIN: Final = (torch.Tensor, nn.Parameter)
_UNHASHABLE: Final = object()
_GROUPED_PRODUCT: Final = aten._grouped_mm.default
_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


class KnownLayouts:
    """Results by operator and arguments, for one run with one set of kernels."""

    def __init__(self) -> None:
        self._results: dict[Hashable, tuple[type, tuple[_Layout | None, ...]]] = {}
        self._is_pure: dict[Any, bool] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``func`` on meta tensors."""
        pure = self._is_pure.get(func)
        if pure is None:
            pure = self._is_pure[func] = _only_makes_tensors(func)
        key = _key((args, tuple(kwargs.items()))) if pure else _UNHASHABLE
        if key is _UNHASHABLE:
            return call_on_meta(func, args, kwargs)
        whole = (func, key, torch.get_default_dtype())
        known = self._results.get(whole)
        if known is None:
            result = call_on_meta(func, args, kwargs)
            layouts = _layouts(result, args, kwargs)
            if layouts is not None:
                self._results[whole] = (type(result), layouts)
            return result
        kind, layouts = known
        made = [
            None if each is None else torch.empty_strided(*each[:2], dtype=each[2], device="meta")
            for each in layouts
        ]
        return made[0] if kind is torch.Tensor else kind(made)


def call_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator with a meta tensor in place of every real one."""
    if not all(tensor.is_meta for tensor in argument_tensors(args, kwargs)):
        args, kwargs = tree_map_only(torch.Tensor, as_meta, (args, kwargs))
    if func is _GROUPED_PRODUCT and args[0].dtype != torch.bfloat16:
        return _grouped_product(*args, **kwargs)
    if any(argument.name == "device" for argument in schema(func).arguments):
        kwargs = {**kwargs, "device": torch.device("meta")}
    return func(*args, **kwargs)


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
    """Return ``tensor``, or a meta tensor with its layout where it is real."""
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _only_makes_tensors(func: Any) -> bool:
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
    result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
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


_COO: Final = torch.sparse_coo
_COMPRESSED: Final[Mapping[torch.layout, torch.layout]] = {
    torch.sparse_csr: torch.sparse_csc,
    torch.sparse_csc: torch.sparse_csr,
}
"""Layout → the layout of its transpose."""


def is_sparse(tensor: Tensor) -> bool:
    """Whether ``tensor`` has one of the layouts that are traced: COO, CSR or CSC."""
    return tensor.layout is _COO or tensor.layout in _COMPRESSED


def meta_copy(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a sparse meta tensor with as many non-zeros as ``tensor``, which may be real;
    ``dtype`` is that of its values."""
    *indices, values = map(_empty_like, dense_parts(tensor))
    values = values if dtype is None else values.to(dtype)
    return _made(
        (*indices, values),
        tensor.size(),
        tensor.layout,
        tensor.layout is _COO and tensor.is_coalesced(),
    )


def result_on_meta(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operator of which an argument is sparse; ``NotImplemented`` where no
    rule is known."""
    rule = _RULES.get(schema(func).name)
    if rule is None:
        return NotImplemented
    arguments = {
        argument.name: value for argument, value in zip(schema(func).arguments, args, strict=False)
    } | dict(kwargs)
    return rule(arguments)


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _made(
    parts: Sequence[Tensor], size: torch.Size, layout: torch.layout, is_coalesced: bool = False
) -> Tensor:
    """Make a sparse tensor of its parts, which it keeps."""
    if layout is _COO:
        indices, values = parts
        return torch.sparse_coo_tensor(
            indices, values, size, check_invariants=False, is_coalesced=is_coalesced
        )
    compressed, plain, values = parts
    return torch.sparse_compressed_tensor(
        compressed, plain, values, size, layout=layout, check_invariants=False
    )


def _product(left: Tensor, right: Tensor) -> Any:
    """A dense matrix, from a sparse and a dense one; the number of non-zeros of a sparse product is
    not known."""
    if is_sparse(left) and is_sparse(right):
        return NotImplemented
    shape = (left.shape[0], *right.shape[1:])
    return torch.empty(shape, dtype=torch.result_type(left, right), device="meta")


def _transposed(tensor: Tensor) -> Tensor:
    """COO copies its parts, CSR and CSC give the same parts another meaning."""
    size = torch.Size((tensor.shape[1], tensor.shape[0]))
    if tensor.layout is _COO:
        return _made([_empty_like(part) for part in dense_parts(tensor)], size, _COO)
    return _made(dense_parts(tensor), size, _COMPRESSED[tensor.layout])


def _coalesced(tensor: Tensor) -> Tensor:
    return _made([_empty_like(part) for part in dense_parts(tensor)], tensor.size(), _COO, True)


def _scaled(tensor: Any, other: Any = None) -> Any:
    """A sparse tensor times a number, or another function of its values that keeps zeros."""
    if not isinstance(tensor, Tensor) or (isinstance(other, Tensor) and other.ndim):
        return NotImplemented
    return meta_copy(
        tensor, dtype=tensor.dtype if other is None else torch.result_type(tensor, other)
    )


def _dense(arguments: Mapping[str, Any]) -> Tensor:
    tensor = arguments["self"]
    return torch.empty(tensor.shape, dtype=arguments.get("dtype") or tensor.dtype, device="meta")


_Rule = Callable[[Mapping[str, Any]], Any]
_RULES: Final[Mapping[str, _Rule]] = {
    "aten::mm": lambda given: _product(given["self"], given["mat2"]),
    **dict.fromkeys(
        ("aten::addmm", "aten::_sparse_addmm"), lambda given: _product(given["mat1"], given["mat2"])
    ),
    "aten::t": lambda given: _transposed(given["self"]),
    "aten::transpose": lambda given: _transposed(given["self"]),
    "aten::_to_dense": _dense,
    "aten::_coalesce": lambda given: _coalesced(given["self"]),
    "aten::clone": lambda given: meta_copy(given["self"]),
    "aten::_to_copy": lambda given: meta_copy(given["self"], dtype=given.get("dtype")),
    **dict.fromkeys(
        ("aten::mul", "aten::div"), lambda given: _scaled(given["self"], given["other"])
    ),
    **dict.fromkeys(
        ("aten::neg", "aten::abs", "aten::relu", "aten::sqrt"), lambda given: _scaled(given["self"])
    ),
}
"""Operator → the rule for its arguments by name."""
