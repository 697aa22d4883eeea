"""Elementwise operators and indexing: layouts of results, sums that CUDA computes in place, and the
scratch memory of copies and sorts.

Memory layouts: those of results on CUDA, where meta kernels differ (mostly strides), and the copies
of arguments whose layout a kernel does not support.

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

Elementwise operators: dropout, the gradient of mish, and sums that CUDA computes in place.

* Dropout is one kernel on CUDA that keeps a mask of one byte per element; the composite keeps noise
  in the input's type.  Of all forms of dropout only ``aten::dropout`` has such a kernel
  (``aten/src/ATen/native/Dropout.cpp``).  The in-place form, feature and alpha dropout, and any
  form with ``p`` of 0 or 1, run the same composite on every device.
* ``mish_backward`` (``aten/src/ATen/native/Activation.cpp``) is one kernel on CUDA and several
  elementwise operators on meta tensors.  It and the fused RMS norm are the only operators of
  PyTorch with a CUDA kernel, no meta kernel, and a composite implementation for other devices.
* PyTorch code that must also work on tensors without memory checks ``at::isTensorSubclassLike``,
  which is always true for meta tensors, and then allocates a new tensor.  In a training step this
  happens in four places: sums of the gradients of several consumers of one tensor
  (``torch/csrc/autograd/input_buffer.cpp``), the bias of a linear layer whose input is not
  contiguous, the mask of the math attention kernel, and backward formulas of indexing.

Indexing, embeddings and sorting: scratch memory of operators that sort on the GPU.

The rows of equal indices must be summed in order.  So the gradient of an embedding sorts its
indices and sums pieces of ten rows.  Memory is allocated for the largest possible number of pieces,
which can exceed the incoming gradient.  Sources:
``aten/src/ATen/native/cuda/{Embedding,EmbeddingBackwardKernel,Indexing,SortStable}.cu`` and
``ATen/cuda/cub-RadixSortPairs.cuh``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from gpumemnet import torch_private
from gpumemnet.physics.element_types import CHANNELS_LAST_FORMATS
from gpumemnet.torch_private.names import (
    aten,
    called_by_engine,
    is_sparse,
    operator_name,
    reference_counts,
    without_function_modes,
)
from gpumemnet.tracing.operators.rules import (
    OVERRIDES,
    SCRATCH_RULES,
    Call,
    Rule,
    Scratches,
    ceil_div,
    exactly,
    round_up,
)

CHANNELS_LAST: Final = {
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
    return 0 if tensor.is_contiguous(memory_format=wanted) else tensor.nbytes


def laid_out(tensor: Tensor, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Return a meta tensor with the shape and type of ``tensor`` and this ``layout``."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", memory_format=layout)


def contiguous(*names: str, like: str = "", after: int | None = None) -> Rule:
    """Return a rule for arguments that must be contiguous, or have the memory format of ``like``.

    Structured kernels allocate their outputs before the copies.  Other kernels copy first: pass 0
    for ``after``.
    """

    def copies(call: Call) -> Scratches:
        given = call.arguments
        wanted = memory_format(given[like]) if like else torch.contiguous_format
        return exactly("copy", *(copy_bytes(given[name], wanted) for name in names), after=after)

    return copies


def result_layout(given: Tensor, weight: Tensor) -> torch.memory_format:
    """Return the layout that a CUDA convolution uses for its result and for copies of its operands.

    It is channels last if the input or the weight is, except for fp64
    (``cudnn_conv_suggest_memory_format``).  Meta tensors do not follow this rule.
    """
    if given.dtype == torch.float64 or not (is_channels_last(given) or is_channels_last(weight)):
        return torch.contiguous_format
    return CHANNELS_LAST[weight.dim()]


SCRATCH_RULES.update(
    {
        **dict.fromkeys((aten.reflection_pad2d.default, aten.col2im.default), contiguous("self")),
        aten.max_pool2d_with_indices.default: contiguous("self", like="self"),
        aten.max_pool2d_with_indices_backward.default: contiguous(
            "grad_output", "self", like="self"
        ),
    }
)


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
    aten.convolution.default: lambda arguments, result: _laid_out(
        result, result_layout(*arguments[:2])
    ),
    aten.convolution_backward.default: _convolution_gradients,
    aten.native_group_norm.default: _first_contiguous,
    aten._softmax.default: _contiguous_result,
    aten._softmax_backward_data.default: _contiguous_result,
    aten._log_softmax.default: _contiguous_result,
    aten._log_softmax_backward_data.default: _contiguous_result,
    aten.glu_backward.default: _contiguous_result,
    aten.native_batch_norm_backward.default: _batch_norm_gradients,
    # made like what it joins, and made smaller afterwards (``cuda/Col2Im.cu``)
    aten.col2im.default: lambda arguments, result: laid_out(arguments[0]).resize_(result.shape),
    # an empty buffer on CUDA (``cuda/ActivationLogSigmoidKernel.cu``)
    aten.log_sigmoid_forward.default: lambda _, results: (results[0], results[1].new_empty(0)),
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


def _dropout(original: Callable[..., Tensor], input: Tensor, p: float, train: bool) -> Tensor:
    if train and 0 < p < 1 and input.numel() > 0:
        return aten.native_dropout(input, p, train)[0]
    return original(input, p, train)


_OWN_PACKAGES: Final = frozenset({str(__package__), torch_private.__name__})
"""Code that the backward engine may run without being asked by a script's."""

_HELD_ONCE: Final = (3, 2)
"""Reference counts of a tensor and its storage inside a kernel, if only the calling C++ code holds
the tensor."""


class _Depth(threading.local):
    adding = 0


_depth = _Depth()


@contextmanager
def adding_in_place() -> Iterator[None]:
    """Context for a composite operator that adds to its own tensor: ``add`` runs as ``add_``."""
    _depth.adding += 1
    try:
        yield
    finally:
        _depth.adding -= 1


def _add(
    original: Callable[..., Tensor], self: Tensor, other: Tensor | complex, *, alpha: complex = 1
) -> Tensor:
    if not isinstance(
        other, Tensor
    ):  # a number, which PyTorch wraps into a tensor for the kernel and unwraps for Python
        return aten.add.Scalar(self, other, alpha)
    with without_function_modes():  # in a backward pass, they would see each of these lines
        is_sum = (
            called_by_engine(_OWN_PACKAGES)
            and self.shape == other.shape
            and not self._is_zerotensor()
        )
        if _depth.adding or (is_sum and _is_held_once(self)):  # of gradients
            return self.add_(other, alpha=alpha)
    return original(self, other, alpha=alpha)


def _linear(
    original: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    if bias is None or input.dim() == 2:
        return original(input, weight, bias)
    with adding_in_place():
        return original(input, weight, bias)


def _in_backward(
    in_place: Callable[..., Tensor], original: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """Run an operator of indexing; in a backward formula, the one that writes into its first
    argument."""
    return (in_place if called_by_engine(_OWN_PACKAGES) else original)(*args, **kwargs)


def _is_held_once(tensor: Tensor) -> bool:
    """``can_accumulate_inplace`` of ``input_buffer.cpp``."""
    return not is_sparse(tensor) and (
        reference_counts(tensor) == _HELD_ONCE
        and (tensor.is_contiguous() or aten.is_non_overlapping_and_dense.default(tensor))
    )


def _where(original: Callable[..., Tensor], condition: Tensor, *args: Any) -> Tensor:
    """Choose by bytes, as old code does: kernels of the GPU convert a copy of them
    (``TensorCompare.cpp``), meta tensors refuse them."""
    if condition.dtype != torch.uint8:
        return original(condition, *args)
    _copy = condition.to(torch.bool)  # lives while the kernel runs; the graph keeps the bytes
    return original(condition.view(torch.bool), *args)


def _with_logits(
    _original: object,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Tensor:
    """Run losses that keep and take as much: the gradient of this one is formed in place on CUDA
    (``FunctionsManual.cpp``), in one tensor, or in three with weights of positive examples."""
    _logarithms = aten.log_sigmoid_forward(self.detach())
    loss = (
        aten.binary_cross_entropy(self, target, weight, 0)
        if pos_weight is None
        else aten.soft_margin_loss(self, target.detach(), 0)
    )
    return loss.sum() / (loss.numel() if reduction == 1 else 1) if reduction else loss


OVERRIDES.update(
    {
        aten.where.self: _where,
        aten.binary_cross_entropy_with_logits.default: _with_logits,
        aten.dropout.default: _dropout,
        # an elementwise kernel allocates one result in the layout of its inputs
        aten.mish_backward.default: lambda _, grad, given: aten.mul.Tensor(grad, given),
        aten.add.Tensor: _add,
        aten.linear.default: _linear,
        aten.index_put.default: partial(_in_backward, aten.index_put_.default),
        aten.scatter_add.default: partial(_in_backward, aten.scatter_add_.default),
        aten.scatter.src: partial(_in_backward, aten.scatter_.src),
        aten.index_add.default: partial(_in_backward, aten.index_add_.default),
    }
)


UNSORTED_LIMIT: Final = 3072
"""Up to this number of indices, the gradient of an embedding is summed without sorting."""
ROWS_PER_PIECE: Final = 10
MAX_BLOCK: Final = 1024
BLOCKS_FOR_ATOMICS: Final = 4
"""Below this number of thread blocks per multiprocessor, partial sums are added in place.

PyTorch's name for it is ``MAX_ATOMIC_ACCUM_BLOCKS_PER_SM``.
"""
SMALL_SORT: Final = 4096
"""Up to this number of elements, a slice is sorted in place (``should_use_small_sort``)."""
MANY_SEGMENTS: Final = 128
_LARGEST: Final = 2
"""Mode of bags of embeddings that takes the largest."""
LONG_SEGMENT: Final = 1_000_000
"""From this length on, slices are sorted one by one; :data:`MANY_SEGMENTS` are sorted as they are."""
INDEX_BYTES: Final = 8


def radix_sort_bytes(count: int, pair_bytes: int) -> int:
    """Return the bytes that ``cub::DeviceRadixSort`` needs for ``count`` pairs: a second buffer of
    keys and values."""
    return count * pair_bytes


def _embedding_gradient(call: Call) -> Scratches:
    """Return what the gradient of an embedding takes, or that of bags (``cuda/EmbeddingBag.cu``)."""
    mode = call.arguments.get("mode")
    if mode == _LARGEST:
        return ()
    grad = call.arguments["grad_output" if mode is None else "grad"]
    indices = call.arguments["indices"]
    count, by_frequency = indices.numel(), call.arguments["scale_grad_by_freq"]
    copy = exactly("copy", copy_bytes(grad))
    if count <= UNSORTED_LIMIT and mode is None and not by_frequency:
        return copy
    width, index_bytes = indices.element_size(), indices.element_size()
    kept = (3 if by_frequency else 2) * count * width  # sorted, original positions, frequencies
    sorting = count * width + radix_sort_bytes(count, 2 * index_bytes)
    return (
        *copy,
        *exactly("embedding_backward", kept),
        *exactly(
            "embedding_backward", sorting, _pieces_bytes(call, grad, count, width), held=False
        ),
    )


def _pieces_bytes(call: Call, grad: Tensor, count: int, index_bytes: int) -> int:
    """Return the bytes of the partial sums, and of the tables that assign them to rows."""
    rows = call.arguments["num_weights"]
    width = grad.shape[-1]
    segments = min(count, rows)
    pieces = count // ROWS_PER_PIECE + segments
    tables = (count + 2 * segments + pieces) * index_bytes
    warps = round_up(width, 32)
    blocks = ceil_div(segments * warps, min(warps, MAX_BLOCK))
    in_place = (
        blocks < call.platform.device.multiprocessors * BLOCKS_FOR_ATOMICS
        and pieces > 4 * blocks
        and not torch.are_deterministic_algorithms_enabled()
    )
    if in_place:
        return tables + pieces * index_bytes + (rows * width * 4 if grad.element_size() < 4 else 0)
    return tables + pieces * width * max(4, grad.element_size())


def _indexed_write(call: Call) -> Scratches:
    if not call.arguments["accumulate"] and not torch.are_deterministic_algorithms_enabled():
        return ()  # values are written in any order, without a sort
    indices = call.arguments["indices"]
    given = [index for index in indices if index is not None]
    if not given or given[0].dtype in (torch.bool, torch.uint8):
        return ()  # the number of elements that a mask selects is only known at run time
    shapes = (tensor.shape for tensor in given)
    count = math.prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    values = call.arguments["values"]
    target = call.arguments["self"]
    selected = count * math.prod(
        target.shape[dim]
        for dim in range(target.dim())
        if dim >= len(indices) or indices[dim] is None
    )
    expanded = selected != values.numel() or not values.is_contiguous()
    return (
        *exactly("copy", selected * values.element_size() if expanded else 0),
        *exactly("index_put", 4 * count * INDEX_BYTES),  # linear, sorted, original position, range
        *exactly("index_put", radix_sort_bytes(count, 2 * INDEX_BYTES), held=False),
    )


def _sort(call: Call) -> Scratches:
    tensor = call.arguments["self"]
    if not tensor.dim():
        return ()
    dim = call.arguments["dim"] % tensor.dim()
    length = tensor.shape[dim]
    # The input, and both results before they are laid out as it is.
    entry = 2 * tensor.element_size() + INDEX_BYTES
    copied = tensor.numel() * entry if length > SMALL_SORT and tensor.stride(dim) != 1 else 0
    return (*exactly("copy", copied), *_sorting(tensor.numel(), length, tensor.element_size()))


def _sorting(count: int, length: int, key_bytes: int) -> Scratches:
    """What ``launch_stable_sort_kernel`` of ATen/native/cuda/SortStable.cu takes."""
    pair_bytes = key_bytes + INDEX_BYTES
    if length <= SMALL_SORT:
        return ()
    if length < count < MANY_SEGMENTS * length and length < LONG_SEGMENT:
        # all slices at once: (index, slice) pairs, twice, and the keys
        full = count * key_bytes + radix_sort_bytes(count, key_bytes + 8)
        return (*exactly("sort", 2 * count * 8), *exactly("sort", full, held=False))
    if length < count and length < LONG_SEGMENT:
        length = count  # else one slice after the other
    sorted_bytes = length * INDEX_BYTES + radix_sort_bytes(length, pair_bytes)
    return exactly("sort", sorted_bytes, held=False)


def _topk(call: Call) -> Scratches:
    """Above :data:`SMALL_SORT` what was found is sorted by itself, see ATen/native/cuda/TensorTopK.cpp."""
    tensor = call.arguments["self"]
    k = call.arguments["k"]
    if not (tensor.dim() and call.arguments["sorted"] and k > SMALL_SORT):
        return ()
    count = tensor.numel() // tensor.shape[call.arguments["dim"]] * k
    return (
        *exactly("sorted", count * (tensor.element_size() + INDEX_BYTES)),
        *_sorting(count, k, tensor.element_size()),
        *exactly("gather", count * INDEX_BYTES, held=False),
    )


def _before(name: str, times: Callable[[Call], int]) -> Rule:
    """Return a rule for as many times the bytes of an argument, taken before the result."""
    return lambda call: exactly("copy", call.arguments[name].nbytes * times(call), after=0)


SCRATCH_RULES.update(
    {
        # what is summed into the result (``aten/src/ATen/native/Loss.cpp``)
        **dict.fromkeys(
            (aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default),
            _before("self", lambda call: bool(call.arguments["reduction"])),
        ),
        aten.soft_margin_loss_backward.default: lambda call: exactly(
            "loss", 3 * call.arguments["self"].nbytes, held=False, after=0
        ),
        aten.embedding_dense_backward.default: _embedding_gradient,
        aten._embedding_bag_backward.default: _embedding_gradient,
        # the result, made like the image before it is made larger (``cuda/Im2Col.cu``)
        aten.im2col.default: _before(
            "self", lambda call: call.outputs[0].nbytes > call.arguments["self"].nbytes
        ),
        aten.masked_scatter.default: _before("mask", lambda _: INDEX_BYTES),  # sums of the mask
        aten.roll.default: _before("self", lambda call: len(call.arguments["dims"]) > 1),
        # the result, complex, whose real part is taken (``UnaryOps.cpp``)
        **dict.fromkeys(
            (aten.abs.default, aten.angle.default),
            _before("self", lambda call: call.arguments["self"].is_complex()),
        ),
        aten.index_put.default: _indexed_write,
        aten.index_put_.default: _indexed_write,
        aten._index_put_impl_.default: _indexed_write,
        aten._unsafe_index_put.default: _indexed_write,
        aten.sort.default: _sort,
        aten.sort.stable: _sort,
        aten.topk.default: _topk,
    }
)
