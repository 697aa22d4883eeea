"""The memory layout of results on CUDA, where meta kernels differ: mostly strides.

Layouts cost no memory themselves, but a later convolution or pooling may have to copy because of
them.

* Convolutions are contiguous on meta tensors, and the gradients of their weights lie as those;
  cuDNN's follow what they are computed from (``aten/src/ATen/native/cudnn/ConvShared.cpp``).
* Group norm, softmax and the gradient of a gated linear unit are contiguous on CUDA, whatever they
  are computed from, and the gradient of a native batch norm's input lies as the input does
  (``aten/src/ATen/native/cuda/Normalization.cu``).
* Elementwise gradients lie as their kernel's first operand, mostly the gradient of the result.
  Some are taken apart on meta tensors, and the parts end in the layout of the other operand.
* An image of one pixel is contiguous and channels last at once.  Of elementwise operators
  ``TensorIteratorBase::fast_set_up`` (``aten/src/ATen/TensorIterator.cpp``) makes the result
  contiguous then; meta kernels keep the strides.
* Some losses are formed element by element and summed into the same tensor, made small afterwards:
  its storage stays as large as the output that is compared (``aten/src/ATen/native/BinaryOps.cpp``,
  ``Loss.cpp``, ``cuda/Loss.cu``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from gpumemnet.torch_private.operators import aten, operator_name
from gpumemnet.tracing.workspaces.convolution import gradient_layouts, result_layout
from gpumemnet.tracing.workspaces.layout_copies import CHANNELS_LAST, laid_out, memory_format

LayoutRule = Callable[[Sequence[Any], Any], Any]
"""Called with arguments and result of an operator on meta tensors; returns the result with the
layout on CUDA."""

_BINARY: Final = frozenset(
    {
        "add",
        "sub",
        "rsub",
        "mul",
        "div",
        "fmod",
        "remainder",
        "copysign",
        "xlogy",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "bitwise_left_shift",
        "bitwise_right_shift",
    }
)
"""Elementwise operators of which an operand may be a number, which the iterator takes for a tensor
of another shape."""
_KEEP_STRIDES: Final = frozenset(
    {
        "clone",
        "hardtanh",
        "masked_fill",
        "native_dropout_backward",
        "nan_to_num",
        "_conj_physical",
        "deg2rad",
        "rad2deg",
    }
)
"""Said to be elementwise, but they fill a tensor that is made like their argument."""
_UNTAGGED: Final = frozenset({"hardswish", "leaky_relu_backward", "mish_backward"})
"""Elementwise operators that do not say so in their tags."""
_TAKEN_APART: Final = frozenset(
    f"{name}_backward" for name in ("hardtanh", "elu", "hardswish", "hardsigmoid", "softplus")
)
"""Elementwise gradients that are several operators on meta tensors."""


def layout_rule(operator: Any) -> LayoutRule | None:
    """Return the rule for the layout of ``operator``'s results on CUDA; ``None`` if meta tensors
    have the same layout."""
    if operator in _RULES:
        return _RULES[operator]
    name = operator_name(operator)
    if name in _TAKEN_APART:
        return _elementwise_gradient
    if name in _UNTAGGED or (
        torch.Tag.pointwise in operator.tags
        and name not in _KEEP_STRIDES
        and not name.startswith("special_")
    ):
        return _binary if name in _BINARY else _elementwise
    return None


def _convolution(arguments: Sequence[Any], result: Tensor) -> Tensor | None:
    return _laid_out(result, result_layout(arguments[0], arguments[1]))


def _convolution_gradients(
    arguments: Sequence[Any], gradients: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    grad, given, weight = arguments[:3]
    layouts = gradient_layouts(grad, given, weight, gradients[1] is not None)
    return (
        _laid_out(gradients[0], layouts.of_input),
        _laid_out(gradients[1], layouts.of_weight),
        gradients[2],
    )


def _laid_out(result: Tensor | None, layout: torch.memory_format) -> Tensor | None:
    if result is None or layout not in (torch.contiguous_format, CHANNELS_LAST.get(result.dim())):
        return result
    return _with_strides_of(result, laid_out(result, layout))


def _with_strides_of(result: Tensor, other: Tensor) -> Tensor:
    return result if result.stride() == other.stride() else other


def _contiguous(arguments: Sequence[Any], result: Tensor) -> Tensor:
    return _with_strides_of(result, laid_out(result))


def _first_contiguous(arguments: Sequence[Any], results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (_contiguous(arguments, results[0]), *results[1:])


def _batch_norm_gradients(arguments: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
    given: Tensor = arguments[1]
    if results[0] is None:
        return results
    if not given.is_contiguous(memory_format=memory_format(given)):
        return _first_contiguous(arguments, results)
    return (_with_strides_of(results[0], torch.empty_like(given, device="meta")), *results[1:])


def _binary(arguments: Sequence[Any], result: Any) -> Any:
    return (
        _elementwise(arguments, result)
        if all(isinstance(argument, Tensor) for argument in arguments[:2])
        else result
    )


def _elementwise_gradient(arguments: Sequence[Any], result: Tensor) -> Tensor:
    grad, given = (argument for argument in arguments if isinstance(argument, Tensor))
    if grad.dim() in CHANNELS_LAST and grad.stride() != given.stride():
        result = _with_strides_of(
            result, aten.gelu_backward(grad, given)
        )  # a gradient that meta tensors do not take apart
    return result if _keeps_strides(arguments, result) else _contiguous(arguments, result)


def _elementwise(arguments: Sequence[Any], result: Any) -> Any:
    if not isinstance(result, Tensor) or _keeps_strides(arguments, result):
        return result
    return _contiguous(arguments, result)


def _loss(arguments: Sequence[Any], result: Tensor) -> Tensor:
    compared = torch.broadcast_shapes(*(argument.shape for argument in arguments[:2]))  # type: ignore[no-untyped-call]
    if result.shape == compared:  # nothing was summed
        return result
    return torch.empty(compared, dtype=result.dtype, device="meta").resize_(result.shape)


def _keeps_strides(arguments: Sequence[Any], result: Tensor) -> bool:
    """Whether an elementwise result lies as its operands do; else they are one shape, contiguous,
    and channels last besides."""
    if result.dim() not in CHANNELS_LAST or result.stride(-1) == 1 or not result.is_contiguous():
        return True
    operands = [argument for argument in arguments if isinstance(argument, Tensor)]
    return any(
        operand is result or operand.shape != result.shape or not operand.is_contiguous()
        for operand in operands
    )


_RULES: Final[dict[Any, LayoutRule]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_gradients,
    aten.native_group_norm.default: _first_contiguous,
    aten._softmax.default: _contiguous,
    aten._softmax_backward_data.default: _contiguous,
    aten._log_softmax.default: _contiguous,
    aten._log_softmax_backward_data.default: _contiguous,
    aten.glu_backward.default: _contiguous,
    aten.native_batch_norm_backward.default: _batch_norm_gradients,
    **dict.fromkeys(
        (
            aten.mse_loss.default,
            aten.smooth_l1_loss.default,
            aten.soft_margin_loss.default,
            aten.binary_cross_entropy.default,
        ),
        _loss,
    ),
}
