"""Memory layouts: the layout of results on CUDA, where meta kernels differ (mostly strides), and the
copies of arguments whose layout a kernel does not support.

Layouts cost no memory themselves, but a later convolution or pooling may have to copy because of
them.  Kernels that need contiguous arguments copy views first (``expect_contiguous()``,
``contiguous()`` in the sources named below).  Elementwise kernels support any layout.

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
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from gpumemnet.physics.element_types import CHANNELS_LAST_FORMATS
from gpumemnet.torch_private.operators import aten, operator_name
from gpumemnet.tracing.operators.rules import Call, Rule, Scratch, exactly, tensor_bytes

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


def as_laid_out(of: str, *names: str, after: int | None = None) -> Rule:
    """Return a rule for arguments that must have the memory format of the argument ``of``."""

    def copies(call: Call) -> tuple[Scratch, ...]:
        wanted = memory_format(call.arguments[of])
        amounts = [copy_bytes(call.arguments[name], wanted) for name in names]
        return tuple(
            piece for amount in amounts for piece in exactly(amount, "copy", held=True, after=after)
        )

    return copies


def result_layout(given: Tensor, weight: Tensor) -> torch.memory_format:
    """Return the layout that a CUDA convolution uses for its result and for copies of its operands.

    It is channels last if the input or the weight is, except for fp64
    (``cudnn_conv_suggest_memory_format``).  Meta tensors do not follow this rule.
    """
    if given.dtype == torch.float64 or not (is_channels_last(given) or is_channels_last(weight)):
        return torch.contiguous_format
    return CHANNELS_LAST[weight.dim()]


SCRATCH_RULES: Final[dict[Any, Rule]] = {
    aten.max_pool2d_with_indices.default: as_laid_out("self", "self"),
    aten.max_pool2d_with_indices_backward.default: as_laid_out("self", "grad_output", "self"),
}


@dataclass(frozen=True, slots=True)
class GradientLayouts:
    """Memory layouts of a convolution's gradients.

    ``is_moved`` is true if the gradient of the result must be copied into another layout.
    """

    of_input: torch.memory_format
    of_weight: torch.memory_format
    is_moved: bool


def gradient_layouts(
    grad: Tensor, given: Tensor, weight: Tensor, needs_weight: bool
) -> GradientLayouts:
    """Return the layouts that ``cudnn_convolution_backward`` uses.

    The gradient of the result takes the layout of the input.  The other gradients depend on both.
    The strides decide each layout, so an image of one pixel, which needs no copy, keeps its
    strides.
    """
    wanted = result_layout(given, weight)
    read = laid_out(given, wanted) if needs_weight and copy_bytes(given, wanted) else given
    common = memory_format(read)
    is_moved = memory_format(grad) is not common
    moved = laid_out(grad, common) if is_moved else grad
    return GradientLayouts(result_layout(moved, weight), result_layout(read, moved), is_moved)


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
    if operator in _LAYOUT_RULES:
        return _LAYOUT_RULES[operator]
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


def _convolution_layout(arguments: Sequence[Any], result: Tensor) -> Tensor | None:
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


def _contiguous_result(arguments: Sequence[Any], result: Tensor) -> Tensor:
    return _with_strides_of(result, laid_out(result))


def _first_contiguous(arguments: Sequence[Any], results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (_contiguous_result(arguments, results[0]), *results[1:])


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
    return result if _keeps_strides(arguments, result) else _contiguous_result(arguments, result)


def _elementwise(arguments: Sequence[Any], result: Any) -> Any:
    if not isinstance(result, Tensor) or _keeps_strides(arguments, result):
        return result
    return _contiguous_result(arguments, result)


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


_LAYOUT_RULES: Final[dict[Any, LayoutRule]] = {
    aten.convolution.default: _convolution_layout,
    aten.convolution_backward.default: _convolution_gradients,
    aten.native_group_norm.default: _first_contiguous,
    aten._softmax.default: _contiguous_result,
    aten._softmax_backward_data.default: _contiguous_result,
    aten._log_softmax.default: _contiguous_result,
    aten._log_softmax_backward_data.default: _contiguous_result,
    aten.glu_backward.default: _contiguous_result,
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
