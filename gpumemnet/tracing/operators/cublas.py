"""Matrix products: the workspace of cuBLAS, copies of operands, and products of sparse matrices.

The workspace is allocated when a thread first calls cuBLAS, and kept until the process ends.
Source: ``aten/src/ATen/cuda/CublasHandlePool.cpp``.  Each thread has one handle, with one workspace
per stream.  So the forward and the backward thread have one workspace each.  cuBLASLt (bias
epilogues of ``addmm``) shares this workspace unless ``TORCH_CUBLASLT_UNIFIED_WORKSPACE`` is 0;
sharing is the default of torch 2.13.  Earlier versions kept a separate 1 MiB per handle
(``CUBLASLT_WORKSPACE_SIZE``).  Convolutions and attention kernels do not call cuBLAS through
PyTorch.

Matrices that are neither row-major nor column-major are copied.

For products of a sparse COO matrix and a dense one, the indices are sorted and summed first where
the matrix is not coalesced, then converted to 32-bit CSR.  cuSPARSE writes its result by columns,
so a result by rows is copied.  cuSPARSE's own buffer is not modelled.  Sources:
``aten/src/ATen/native/sparse/cuda/{SparseCUDATensor,SparseCUDATensorMath}.cu`` and
``SparseBlasLegacy.cpp``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.torch_private.modules import dense_parts
from gpumemnet.torch_private.operators import OpOverload, aten
from gpumemnet.tracing.operators.indexing import INDEX_BYTES, radix_sort_bytes
from gpumemnet.tracing.operators.rules import Call, Rule, Scratch, exactly, tensor_bytes
from gpumemnet.tracing.options import Platform

KIB: Final = 1024

BLAS_OPERATORS: Final = frozenset(
    {
        aten.mm,
        aten.addmm,
        aten._addmm_activation,
        aten.bmm,
        aten.baddbmm,
        aten.addbmm,
        aten.mv,
        aten.addmv,
        aten.dot,
        aten.vdot,
        aten._scaled_mm,
        aten._int_mm,
    }
)
"""Operators that use cuBLAS."""

_SETTING: Final = re.compile(r":([0-9]+):([0-9]+)")


def blas_workspace(operator: OpOverload, platform: Platform) -> int | None:
    """Return the bytes that a thread keeps after it first calls ``operator``; ``None`` if that does
    not use cuBLAS."""
    return (
        platform.device.blas_workspace_bytes if operator.overloadpacket in BLAS_OPERATORS else None
    )


def parse_workspace_setting(text: str) -> int:
    """Return the bytes that ``CUBLAS_WORKSPACE_CONFIG`` requests, such as ``:4096:2:16:8`` (pairs
    of KiB and count).

    To trace a job that uses this setting:
    ``dataclasses.replace(profile, blas_workspace_bytes=parse_workspace_setting(":4096:8"))``.

    Raises:
        InvalidRequestError: the text has no such pair.
    """
    pairs = _SETTING.findall(text)
    if not pairs:
        raise InvalidRequestError(
            f"must be pairs of KiB and count such as ':4096:8', not {describe(text)}",
            "CUBLAS_WORKSPACE_CONFIG",
        )
    return sum(int(size) * int(count) for size, count in pairs) * KIB


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


def _matrices(*names: str) -> Rule:
    """Return a rule for two matrices; for dense ones see ``prepare_matrix_for_cublas`` in
    ``ATen/native/cuda/Blas.cpp``."""

    def copies(call: Call) -> tuple[Scratch, ...]:
        left, right = (call.arguments[name] for name in names)
        if not (left.layout is right.layout is torch.strided):
            return sparse_product(left, right, call.outputs[0])
        return tuple(
            piece
            for matrix in (left, right)
            if not _is_matrix(matrix.shape[-2:], matrix.stride()[-2:])
            for piece in exactly(tensor_bytes(matrix), "copy", held=True)
        )

    return copies


def _is_matrix(shape: Sequence[int], strides: Sequence[int]) -> bool:
    rows, columns = shape
    by_columns = strides[0] == 1 and strides[1] >= max(1, rows)
    by_rows = strides[1] == 1 and strides[0] >= max(1, columns)
    return by_columns or by_rows or not rows or not columns


SCRATCH_RULES: Final[dict[Any, Rule]] = {
    aten.mm.default: _matrices("self", "mat2"),
    aten.addmm.default: _matrices("mat1", "mat2"),
    aten._addmm_activation.default: _matrices("mat1", "mat2"),
    aten._sparse_addmm.default: _matrices("mat1", "mat2"),
    aten.bmm.default: _matrices("self", "mat2"),
    aten.baddbmm.default: _matrices("batch1", "batch2"),
}
