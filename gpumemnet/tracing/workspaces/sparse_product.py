"""Scratch memory of products of a sparse COO matrix and a dense one.

The indices are sorted and summed first where the matrix is not coalesced, then converted to 32-bit
CSR.  cuSPARSE writes its result by columns, so a result by rows is copied.  cuSPARSE's own buffer
is not modelled.  Sources:
    ``aten/src/ATen/native/sparse/cuda/{SparseCUDATensor,SparseCUDATensorMath}.cu`` and
    ``SparseBlasLegacy.cpp``.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from gpumemnet.torch_private.modules import dense_parts
from gpumemnet.tracing.workspaces.scratch import Scratch, exactly, tensor_bytes
from gpumemnet.tracing.workspaces.sorting import INDEX_BYTES, radix_sort_bytes

_KIND: Final = "sparse_product"
_INT_BYTES: Final = 4
_SORTED_LISTS: Final = 3
"""Flattened indices, their original positions, and where each new index begins."""


def sparse_product(matrix: Tensor, dense: Tensor, result: Tensor) -> tuple[Scratch, ...]:
    """Return the scratch memory of the product of ``matrix`` and ``dense``; nothing for another
    layout than COO."""
    if matrix.layout is not torch.sparse_coo:
        return ()
    rows, columns = result.shape
    count = len(dense_parts(matrix)[-1])
    is_by_columns = result.stride() == (1, rows)
    is_read_in_place = dense.stride() == (1, dense.shape[0]) or (
        dense.stride(1) == 1 and dense.stride(0) != columns
    )
    return (
        *(() if matrix.is_coalesced() else _coalescing(matrix, count)),
        *exactly(_INT_BYTES * (rows + 1), _KIND, held=True),
        *exactly(_INT_BYTES * count, _KIND),  # rows as 32-bit numbers
        *exactly(_INT_BYTES * count, _KIND, held=True),
        *exactly(0 if is_by_columns else tensor_bytes(result), "copy", held=True),
        *exactly(
            0 if is_read_in_place or dense.is_contiguous() else tensor_bytes(dense),
            "copy",
            held=True,
        ),
    )


def _coalescing(matrix: Tensor, count: int) -> tuple[Scratch, ...]:
    lists = _SORTED_LISTS * INDEX_BYTES * count
    return (
        *exactly(lists + radix_sort_bytes(count, 2 * INDEX_BYTES), "sort"),
        *exactly(sum(map(tensor_bytes, dense_parts(matrix))), "copy", held=True),
    )
