"""Copies that an operator makes of an argument whose layout its kernel does not read.

Kernels that ask for contiguous arguments copy views into place first (``expect_contiguous()``, ``contiguous()`` in the sources
named below); cuBLAS copies matrices that lie neither by rows nor by columns.  Elementwise kernels read any layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from gpumemnet.trace.reduction_scratch import WARP
from gpumemnet.trace.scratch import Call, Rule, Scratch, ceil_div, exactly, tensor_bytes

TALL_ROWS: Final = 64 * 1024
"""Rows from which the gradients of a layer norm's scale and shift are summed in two passes."""
ROWS_PER_BLOCK: Final = 32
MAX_GRID: Final = 32 * 1024


def is_channels_last(tensor: Tensor) -> bool:
    """Whether the strides of a 4- or 5-dimensional tensor say channels last, as ``suggest_memory_format`` reads them."""
    if tensor.dim() not in (4, 5) or tensor.stride(1) == 0:
        return False
    smallest = 0
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        stride, size = tensor.stride(dim), tensor.shape[dim]
        if size == 0 or stride < smallest or (dim == 0 and smallest == tensor.stride(1)):
            return False
        smallest = stride * size if size > 1 else stride
    return True


def memory_format(tensor: Tensor) -> torch.memory_format:
    """The format that ``tensor`` suggests for what is computed from it."""
    if not is_channels_last(tensor):
        return torch.contiguous_format
    return torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d


def copy_bytes(tensor: Tensor, wanted: torch.memory_format = torch.contiguous_format) -> int:
    """Bytes of the copy that ``tensor.contiguous(memory_format=wanted)`` makes: 0 where it is in place already."""
    return 0 if tensor.is_contiguous(memory_format=wanted) else tensor_bytes(tensor)


def _contiguous(*names: str) -> Rule:
    """Arguments that are read contiguous."""

    def copies(call: Call) -> tuple[Scratch, ...]:
        return tuple(piece for name in names for piece in exactly(copy_bytes(call.arguments[name]), "copy", held=True))

    return copies


def _as_laid_out(of: str, *names: str) -> Rule:
    """Arguments that are read in the memory format that argument ``of`` suggests."""

    def copies(call: Call) -> tuple[Scratch, ...]:
        wanted = memory_format(call.arguments[of])
        return tuple(piece for name in names for piece in exactly(copy_bytes(call.arguments[name], wanted), "copy", held=True))

    return copies


def _matrices(*names: str) -> Rule:
    """Arguments that are matrices for cuBLAS (``prepare_matrix_for_cublas`` in ``ATen/native/cuda/Blas.cpp``)."""

    def copies(call: Call) -> tuple[Scratch, ...]:
        return tuple(
            piece
            for name in names
            if not _is_matrix(call.arguments[name].shape[-2:], call.arguments[name].stride()[-2:])
            for piece in exactly(tensor_bytes(call.arguments[name]), "copy", held=True)
        )

    return copies


def _is_matrix(shape: Sequence[int], strides: Sequence[int]) -> bool:
    rows, columns = shape
    by_columns = strides[0] == 1 and strides[1] >= max(1, rows)
    by_rows = strides[1] == 1 and strides[0] >= max(1, columns)
    return by_columns or by_rows or not rows or not columns


def _layer_norm_gradient(call: Call) -> tuple[Scratch, ...]:
    """``LaunchGammaBetaBackwardCUDAKernel`` in ``ATen/native/cuda/layer_norm_kernel.cu``: partial sums where rows are many."""
    tensor: Tensor = call.arguments["input"]
    weight: Tensor | None = call.arguments["weight"]
    copies = _contiguous("grad_out", "input")(call)
    if weight is None or not any(call.arguments["output_mask"][1:]):
        return copies
    columns = weight.numel()
    rows = tensor.numel() // columns if columns else 0
    if rows <= TALL_ROWS or columns // WARP >= call.platform.device.multiprocessors // 2:
        return copies
    blocks = min(MAX_GRID // ceil_div(columns, WARP), ceil_div(rows, ROWS_PER_BLOCK))
    sums = blocks * columns * weight.element_size()
    return (*copies, *sum(call.arguments["output_mask"][1:]) * exactly(sums, "norm", held=True))


_ATEN: Any = torch.ops.aten
RULES: Final[dict[Any, Rule]] = {
    _ATEN.mm.default: _matrices("self", "mat2"),
    _ATEN.addmm.default: _matrices("mat1", "mat2"),
    _ATEN._addmm_activation.default: _matrices("mat1", "mat2"),
    _ATEN.bmm.default: _matrices("self", "mat2"),
    _ATEN.baddbmm.default: _matrices("batch1", "batch2"),
    _ATEN.native_layer_norm.default: _contiguous("input"),
    _ATEN.native_layer_norm_backward.default: _layer_norm_gradient,
    _ATEN._fused_rms_norm.default: _contiguous("input"),
    _ATEN._fused_rms_norm_backward.default: _layer_norm_gradient,
    _ATEN._softmax.default: _contiguous("self"),
    _ATEN._log_softmax.default: _contiguous("self"),
    _ATEN._softmax_backward_data.default: _contiguous("grad_output", "output"),
    _ATEN._log_softmax_backward_data.default: _contiguous("grad_output", "output"),
    _ATEN.max_pool2d_with_indices.default: _as_laid_out("self", "self"),
    _ATEN.max_pool2d_with_indices_backward.default: _as_laid_out("self", "grad_output", "self"),
    _ATEN.cudnn_batch_norm_backward.default: _as_laid_out("input", "grad_output"),
}
