"""Normalization and softmax: operators that run as one kernel on CUDA and as a composite on meta
tensors.

* Batch norm goes to cuDNN unless it is bfloat16, has no weights, or works on vectors
  (``_select_batch_norm_backend`` in ``aten/src/ATen/native/Normalization.cpp``).
* RMS norm is one kernel that keeps its input and one statistic per row (``_fused_rms_norm`` in
  ``tools/autograd/derivatives.yaml``); the composite keeps three tensors of the size of the input.
* Softmax of float16 with a float32 result casts inside the kernel
  (``aten/src/ATen/native/SoftMax.cpp``), not before it.

Layer norm, group norm and the native batch norm keep the same statistics, of the same types, on
meta tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from gpumemnet.torch_private.operators import aten, below_autograd
from gpumemnet.tracing.corrections.overrides import Override
from gpumemnet.tracing.workspaces.layout_copies import memory_format

_LARGEST_CUDNN_BATCH: Final = {True: 880801, False: 65535}
"""By whether it trains."""


def _batch_norm(
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


def _rms_norm(
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


NORMALIZATION: Final = (
    Override(aten.batch_norm.default, _batch_norm),
    Override(aten.rms_norm.default, _rms_norm),
    Override(aten.softmax.int, _softmax),
    Override(aten.log_softmax.int, _log_softmax),
)
"""Overrides of this module."""
