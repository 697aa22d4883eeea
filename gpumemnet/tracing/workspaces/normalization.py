"""Scratch memory of normalization layers: partial sums that a second kernel adds up.

There is one partial sum per thread block, or per sample and channel.  Sources, all in
``aten/src/ATen/native/cuda``: ``Normalization.cuh`` (``flexible_launch_configs`` and the
channels-last kernels, which also handle matrices), ``group_norm_kernel.cu``,
``layer_norm_kernel.cu``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from gpumemnet.torch_private.operators import aten
from gpumemnet.tracing.workspaces.layout_copies import contiguous, is_channels_last
from gpumemnet.tracing.workspaces.reduction import (
    MOMENTS_BYTES,
    WARP,
    accumulator_bytes,
    last_power_of_2,
    reduction_scratch,
)
from gpumemnet.tracing.workspaces.scratch import (
    Call,
    Rule,
    Scratch,
    ceil_div,
    exactly,
    tensor_bytes,
)

KIND: Final = "norm"

TALL_ROWS: Final = 64 * 1024
"""Above this number of rows, the gradients of a layer norm's scale and shift are summed in two
passes."""
ROWS_PER_BLOCK: Final = 32
MAX_GRID: Final = 32 * 1024

BLOCK_THREADS: Final = 512
VALUES_PER_THREAD: Final = 16
BLOCKS_LIMIT: Final = 128
LARGEST_INDEX: Final = 2**31 - 1
FEWEST_BLOCKS: Final = 8
"""With fewer blocks than this, a single block sums each channel of a batch norm."""


def batch_norm_blocks(values: int, channels: int) -> int:
    """Return how many blocks share the ``values`` of each channel in a channels-last batch norm; 1
    needs no scratch."""
    width = min(last_power_of_2(channels), WARP)
    height = min(last_power_of_2(ceil_div(values, VALUES_PER_THREAD)), BLOCK_THREADS // width)
    blocks = min(ceil_div(values, height * VALUES_PER_THREAD), BLOCKS_LIMIT)
    return blocks if blocks >= FEWEST_BLOCKS else 1


def _batch_norm(call: Call) -> tuple[Scratch, ...]:
    tensor: Tensor = call.arguments["input"]
    if not call.arguments["training"]:
        return ()
    if (
        tensor.numel() >= LARGEST_INDEX
    ):  # generic mean and variance of a copy in fp32 (``batch_norm_choose_impl``)
        copy = torch.empty_like(tensor, dtype=torch.float32)
        dims = [dim for dim in range(tensor.dim()) if dim != 1]
        moments = reduction_scratch(copy, dims, MOMENTS_BYTES, call.platform)
        return (
            *exactly(tensor_bytes(copy) if tensor.element_size() == 2 else 0, KIND, held=True),
            *moments,
        )
    return _staged(call, sums=4)


def _batch_norm_gradient(call: Call) -> tuple[Scratch, ...]:
    return _staged(call, sums=2) if call.arguments["train"] else ()


def _staged(call: Call, sums: int) -> tuple[Scratch, ...]:
    """Return ``sums`` numbers of four bytes per channel and block, and one semaphore per block of
    channels."""
    tensor: Tensor = call.arguments["input"]
    channels = tensor.shape[1] if tensor.dim() > 1 else 0
    if not 0 < tensor.numel() < LARGEST_INDEX or not (
        _is_matrix(tensor) or is_channels_last(tensor)
    ):
        return ()
    blocks = batch_norm_blocks(tensor.numel() // channels, channels)
    if blocks == 1:
        return ()
    staging = exactly(sums * channels * blocks * 4, KIND, held=True)
    return (
        *staging,
        *exactly(ceil_div(channels, min(last_power_of_2(channels), WARP)) * 4, KIND, held=True),
    )


def _is_matrix(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.stride(1) == 1


def _group_norm(call: Call) -> tuple[Scratch, ...]:
    """Return a factor and a summand per sample and channel."""
    arguments = call.arguments
    if arguments["HxW"] <= 1 or (arguments["weight"] is None and arguments["bias"] is None):
        return ()
    return 2 * exactly(_per_channel(call), KIND, held=True)


def _group_norm_gradient(call: Call) -> tuple[Scratch, ...]:
    """Return two sums and, for several pixels, a scale per sample and channel, and two factors per
    group."""
    arguments = call.arguments
    groups = _per_channel(call) // max(1, arguments["C"]) * arguments["group"]
    sums = 2 * exactly(_per_channel(call), KIND, held=True)
    if not arguments["output_mask"][0]:
        return sums
    scaled = _per_channel(call) if arguments["HxW"] > 1 and arguments["weight"] is not None else 0
    return (*sums, *(2 * exactly(groups, KIND, held=True)), *exactly(scaled, KIND, held=True))


def _per_channel(call: Call) -> int:
    return (
        int(call.arguments["N"])
        * int(call.arguments["C"])
        * accumulator_bytes(call.arguments["input"].dtype)
    )


def _layer_norm_gradient(call: Call) -> tuple[Scratch, ...]:
    """Return the partial sums for many rows, and the scratch of their reduction
    (``LaunchGammaBetaBackwardCUDAKernel``)."""
    tensor: Tensor = call.arguments["input"]
    weight: Tensor | None = call.arguments["weight"]
    copies = contiguous("grad_out", "input", after=0)(call)
    if weight is None or not any(call.arguments["output_mask"][1:]):
        return copies
    columns = weight.numel()
    rows = tensor.numel() // columns if columns else 0
    if rows <= TALL_ROWS or columns // WARP >= call.platform.device.multiprocessors // 2:
        return copies
    blocks = min(MAX_GRID // ceil_div(columns, WARP), ceil_div(rows, ROWS_PER_BLOCK))
    sums = torch.empty(blocks, columns, dtype=weight.dtype, device="meta")
    total = reduction_scratch(sums, [0], accumulator_bytes(weight.dtype), call.platform)
    ended = tuple(replace(piece, held=False) for piece in total)
    wanted = sum(call.arguments["output_mask"][1:])
    return (
        *copies,
        *wanted * exactly(tensor_bytes(sums), KIND, held=True),
        *(wanted - 1) * ended,
        *total,
    )


RULES: Final[dict[Any, Rule]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_gradient,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_gradient,
    aten.native_layer_norm.default: contiguous("input", after=0),
    aten.native_layer_norm_backward.default: _layer_norm_gradient,
    aten._fused_rms_norm.default: contiguous("input", after=0),
    aten._fused_rms_norm_backward.default: _layer_norm_gradient,
}
