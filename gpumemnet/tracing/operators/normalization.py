"""Normalization and softmax: what they keep on CUDA, and their scratch memory.

Operators that run as one kernel on CUDA and as a composite on meta tensors:

* Batch norm goes to cuDNN unless it is bfloat16, has no weights, or works on vectors
  (``_select_batch_norm_backend`` in ``aten/src/ATen/native/Normalization.cpp``).
* RMS norm is one kernel that keeps its input and one statistic per row (``_fused_rms_norm`` in
  ``tools/autograd/derivatives.yaml``); the composite keeps three tensors of the size of the input.
* Softmax of float16 with a float32 result casts inside the kernel
  (``aten/src/ATen/native/SoftMax.cpp``), not before it.

Layer norm, group norm and the native batch norm keep the same statistics, of the same types, on
meta tensors: nothing is corrected.

Scratch memory is partial sums that a second kernel adds up, one per thread block, or per sample and
channel.  Sources, all in ``aten/src/ATen/native/cuda``: ``Normalization.cuh``
(``flexible_launch_configs`` and the channels-last kernels, which also handle matrices),
``group_norm_kernel.cu``, ``layer_norm_kernel.cu``, ``SoftMax.cu``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from gpumemnet.torch_private.operators import aten, below_autograd
from gpumemnet.tracing.operators.layouts import (
    as_laid_out,
    contiguous,
    copy_bytes,
    is_channels_last,
    memory_format,
)
from gpumemnet.tracing.operators.reductions import (
    MOMENTS_BYTES,
    WARP,
    accumulator_bytes,
    last_power_of_2,
    reduction_scratch,
)
from gpumemnet.tracing.operators.rules import (
    Call,
    Override,
    Rule,
    Scratch,
    ceil_div,
    exactly,
    tensor_bytes,
)

_LARGEST_CUDNN_BATCH: Final = {True: 880801, False: 65535}
"""By whether it trains."""


def _run_batch_norm(
    original: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    arguments = (weight, bias, running_mean, running_var, training, momentum, eps)
    if not (
        cudnn_enabled
        and weight is not None
        and bias is not None
        and _cudnn_takes(input, weight, training)
    ):
        return original(input, *arguments, cudnn_enabled)
    if (running_mean is None) != (running_var is None) or (running_mean is None and not training):
        return original(input, *arguments, cudnn_enabled)
    dense = input.contiguous(memory_format=memory_format(input))
    output: Tensor = aten.cudnn_batch_norm(dense, *arguments)[0]
    return output


def _cudnn_takes(input: Tensor, weight: Tensor, training: bool) -> bool:
    return (
        torch.bfloat16 not in (input.dtype, weight.dtype)
        and (input.dtype != torch.float16 or weight.dtype == torch.float32)
        and input.dim() >= 3
        and input.shape[0] <= _LARGEST_CUDNN_BATCH[training]
        and 0 < input.numel() < 2**31 - 1
    )


def _run_rms_norm(
    original: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    unfused = (
        (weight is not None and weight.dtype != input.dtype)
        or input.is_complex()
        or memory_format(input) != torch.contiguous_format
    )
    if unfused:
        return original(input, normalized_shape, weight, eps)
    output: Tensor = _FusedRmsNorm.apply(input, list(normalized_shape), weight, eps)  # type: ignore[no-untyped-call]
    return output


class _FusedRmsNorm(torch.autograd.Function):
    """The derivative of ``_fused_rms_norm`` as a kernel; on meta tensors PyTorch decomposes the
    operator."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        normalized_shape: list[int],
        weight: Tensor | None,
        eps: float | None,
    ) -> Tensor:
        with below_autograd():
            output, rstd = aten._fused_rms_norm(input, normalized_shape, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        ctx.normalized_shape = normalized_shape
        kept: Tensor = output
        return kept

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        input, weight, rstd = ctx.saved_tensors
        needs_gradient = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with below_autograd():
            results = aten._fused_rms_norm_backward(
                gradients[0], input, ctx.normalized_shape, rstd, weight, needs_gradient
            )
        return results[0], None, results[1], None


def _softmax(
    original: Callable[..., Tensor], input: Tensor, dim: int, dtype: torch.dtype | None = None
) -> Tensor:
    return _cast_inside(aten._softmax.default, original, input, dim, dtype)


def _log_softmax(
    original: Callable[..., Tensor], input: Tensor, dim: int, dtype: torch.dtype | None = None
) -> Tensor:
    return _cast_inside(aten._log_softmax.default, original, input, dim, dtype)


def _cast_inside(
    kernel: Any, original: Callable[..., Tensor], input: Tensor, dim: int, dtype: torch.dtype | None
) -> Tensor:
    if input.dtype == torch.float16 and dtype == torch.float32:
        output: Tensor = kernel(input, dim, True)
        return output
    return original(input, dim, dtype)


OVERRIDES: Final = (
    Override(aten.batch_norm.default, _run_batch_norm),
    Override(aten.rms_norm.default, _run_rms_norm),
    Override(aten.softmax.int, _softmax),
    Override(aten.log_softmax.int, _log_softmax),
)
"""Overrides of this module."""


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


def _softmax_gradient(call: Call) -> tuple[Scratch, ...]:
    """Return the product of gradient and output, then the copies (``softmax_backward_cuda_out`` in
    ``cuda/SoftMax.cu``)."""
    output: Tensor = call.arguments["output"]
    product = call.arguments["grad_output"] * output
    amounts = (tensor_bytes(product), copy_bytes(product), copy_bytes(output))
    return tuple(piece for amount in amounts for piece in exactly(amount, "copy", held=True))


SCRATCH_RULES: Final[dict[Any, Rule]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_gradient,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_gradient,
    aten.native_layer_norm.default: contiguous("input", after=0),
    aten.native_layer_norm_backward.default: _layer_norm_gradient,
    aten._fused_rms_norm.default: contiguous("input", after=0),
    aten._fused_rms_norm_backward.default: _layer_norm_gradient,
    aten.cudnn_batch_norm_backward.default: as_laid_out("input", "grad_output", after=0),
    aten._softmax.default: contiguous("self"),
    aten._log_softmax.default: contiguous("self"),
    aten._softmax_backward_data.default: _softmax_gradient,
    aten._log_softmax_backward_data.default: contiguous("grad_output", "output"),
}
