"""Results of operators on sparse meta tensors, for which PyTorch has no kernels.

The number of non-zeros is known: it is the length of the values.  A sum of equal indices
(``coalesce``) may shrink it; here it keeps all, which is the most that it can take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor

from gpumemnet.extract.known_layouts import meta_like, only_makes_tensors
from gpumemnet.torch_private.names import (
    Arguments,
    dense_parts,
    is_sparse,
    schema,
    tree_map_only,
)

_MOST_ZEROS: Final = 2**26
_COO: Final = torch.sparse_coo
_TRANSPOSED: Final = {
    torch.sparse_csr: torch.sparse_csc,
    torch.sparse_csc: torch.sparse_csr,
}
"""Layout → the layout of its transpose."""


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


def result_on_meta(func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operator of which an argument is sparse, or that has no meta kernel: by
    a rule, or as the host computes one; ``NotImplemented`` where there is neither."""
    rule = _RULES.get(schema(func).name)
    arguments = {
        argument.name: value for argument, value in zip(schema(func).arguments, args, strict=False)
    } | dict(kwargs)
    result = NotImplemented if rule is None else rule(arguments)
    if result is NotImplemented and only_makes_tensors(func):
        with suppress(RuntimeError):  # the host lacks the kernel
            args, kwargs = tree_map_only(Tensor, _on_host, (args, dict(kwargs)))
            return tree_map_only(Tensor, _on_meta, func(*args, **kwargs))
    return result


def _on_host(tensor: Tensor) -> Tensor:
    """Zeros in the place of a meta tensor; a sparse one has as many non-zeros, each at a place of
    its own."""
    values = dense_parts(tensor)[-1]
    if not values.is_meta or values.numel() > _MOST_ZEROS:
        return tensor
    if not is_sparse(tensor):
        return torch.zeros_like(tensor, device="cpu")
    size = tensor.shape[: tensor.ndim - values.ndim + 1]
    places = torch.arange(len(values)) % max(size.numel(), 1)
    made = torch.sparse_coo_tensor(
        torch.stack(torch.unravel_index(places, size)),
        torch.zeros(values.shape, dtype=values.dtype),
        tensor.size(),
        is_coalesced=tensor.layout is not _COO or tensor.is_coalesced(),
    )
    return made if tensor.layout is _COO else made.to_sparse(layout=tensor.layout)


def _on_meta(tensor: Tensor) -> Tensor:
    return meta_copy(tensor) if is_sparse(tensor) else meta_like(tensor)


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
    return _made(dense_parts(tensor), size, _TRANSPOSED[tensor.layout])


def _coalesced(tensor: Tensor) -> Tensor:
    indices, values = dense_parts(tensor)
    places = tensor.size()[: len(indices)].numel()  # none is there twice
    parts = [_empty_like(indices[:, :places]), _empty_like(values[:places])]
    return _made(parts, tensor.size(), _COO, True)


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
    "aten::sparse_mask": lambda given: meta_copy(given["mask"], dtype=given["self"].dtype),
    "aten::add_": lambda given: NotImplemented if is_sparse(given["self"]) else given["self"],
    "aten::_coalesce": lambda given: _coalesced(given["self"]),
    **dict.fromkeys(
        ("aten::clone", "aten::_to_copy"),
        lambda given: meta_copy(given["self"], dtype=given.get("dtype")),
    ),
}
"""Operator → the rule for its arguments by name."""
