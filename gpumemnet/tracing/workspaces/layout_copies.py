"""Copies of arguments whose memory layout a kernel does not support.

Kernels that need contiguous arguments copy views first (``expect_contiguous()``, ``contiguous()``
in the sources named below). PyTorch copies matrices for cuBLAS that are neither row-major nor
column-major.  Elementwise kernels support any layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from gpumemnet.physics.element_types import CHANNELS_LAST_FORMATS
from gpumemnet.torch_private.operators import aten
from gpumemnet.tracing.workspaces.scratch import Call, Rule, Scratch, exactly, tensor_bytes
from gpumemnet.tracing.workspaces.sparse_product import sparse_product

CHANNELS_LAST: Final[dict[int, torch.memory_format]] = {
    dimensions: getattr(torch, name) for dimensions, name in CHANNELS_LAST_FORMATS.items()
}
"""Dimensions of a tensor → its channels-last format."""


def is_channels_last(tensor: Tensor) -> bool:
    """Whether a tensor has channels-last strides, by the rule of ``suggest_memory_format``."""
    if tensor.dim() not in CHANNELS_LAST or tensor.stride(1) == 0:
        return False
    smallest = 0
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        stride, size = tensor.stride(dim), tensor.shape[dim]
        if size == 0 or stride < smallest or (dim == 0 and smallest == tensor.stride(1)):
            return False
        smallest = stride * size if size > 1 else stride
    return True


def memory_format(tensor: Tensor) -> torch.memory_format:
    """Return the memory format of results that are computed from ``tensor``."""
    return CHANNELS_LAST[tensor.dim()] if is_channels_last(tensor) else torch.contiguous_format


def copy_bytes(tensor: Tensor, wanted: torch.memory_format = torch.contiguous_format) -> int:
    """Return the bytes of the copy that ``tensor.contiguous(memory_format=wanted)`` makes; 0 if it
    makes none."""
    return 0 if tensor.is_contiguous(memory_format=wanted) else tensor_bytes(tensor)


def laid_out(tensor: Tensor, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Return a meta tensor with the shape and type of ``tensor`` and this ``layout``."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", memory_format=layout)


def contiguous(*names: str, after: int | None = None) -> Rule:
    """Return a rule for arguments that must be contiguous.

    Structured kernels allocate their outputs before the copies.  Other kernels copy first: pass 0
    for ``after``.
    """

    def copies(call: Call) -> tuple[Scratch, ...]:
        return tuple(
            piece
            for name in names
            for piece in exactly(copy_bytes(call.arguments[name]), "copy", held=True, after=after)
        )

    return copies


def _as_laid_out(of: str, *names: str, after: int | None = None) -> Rule:
    """Return a rule for arguments that must have the memory format of the argument ``of``."""

    def copies(call: Call) -> tuple[Scratch, ...]:
        wanted = memory_format(call.arguments[of])
        amounts = [copy_bytes(call.arguments[name], wanted) for name in names]
        return tuple(
            piece for amount in amounts for piece in exactly(amount, "copy", held=True, after=after)
        )

    return copies


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


def _softmax_gradient(call: Call) -> tuple[Scratch, ...]:
    """Return the product of gradient and output, then the copies (``softmax_backward_cuda_out`` in
    ``cuda/SoftMax.cu``)."""
    output: Tensor = call.arguments["output"]
    product = call.arguments["grad_output"] * output
    amounts = (tensor_bytes(product), copy_bytes(product), copy_bytes(output))
    return tuple(piece for amount in amounts for piece in exactly(amount, "copy", held=True))


def _packed(call: Call) -> tuple[Scratch, ...]:
    """Return the copies of the steps before they are joined (``_pack_padded_sequence`` in
    ``native/PackedSequence.cpp``)."""
    return exactly(tensor_bytes(call.outputs[0]), "copy", held=True, after=0)


RULES: Final[dict[Any, Rule]] = {
    aten._pack_padded_sequence.default: _packed,
    aten.mm.default: _matrices("self", "mat2"),
    aten.addmm.default: _matrices("mat1", "mat2"),
    aten._addmm_activation.default: _matrices("mat1", "mat2"),
    aten._sparse_addmm.default: _matrices("mat1", "mat2"),
    aten.bmm.default: _matrices("self", "mat2"),
    aten.baddbmm.default: _matrices("batch1", "batch2"),
    aten._softmax.default: contiguous("self"),
    aten._log_softmax.default: contiguous("self"),
    aten._softmax_backward_data.default: _softmax_gradient,
    aten._log_softmax_backward_data.default: contiguous("grad_output", "output"),
    aten.max_pool2d_with_indices.default: _as_laid_out("self", "self"),
    aten.max_pool2d_with_indices_backward.default: _as_laid_out("self", "grad_output", "self"),
    aten.cudnn_batch_norm_backward.default: _as_laid_out("input", "grad_output", after=0),
}
