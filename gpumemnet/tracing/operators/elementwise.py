"""Elementwise operators: dropout, the gradient of mish, and sums that CUDA computes in place.

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
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from torch import Tensor

from gpumemnet import torch_private
from gpumemnet.torch_private.modules import reference_counts
from gpumemnet.torch_private.operators import aten, called_by_engine
from gpumemnet.tracing.operators.rules import Override


def _dropout(original: Callable[..., Tensor], input: Tensor, p: float, train: bool) -> Tensor:
    if train and 0 < p < 1 and input.numel() > 0:
        output: Tensor = aten.native_dropout(input, p, train)[0]
        return output
    return original(input, p, train)


def _mish_backward(original: Callable[..., Tensor], grad_output: Tensor, self: Tensor) -> Tensor:
    output: Tensor = aten.mul.Tensor(
        grad_output, self
    )  # an elementwise kernel allocates one result in the layout of its inputs
    return output


_OWN_PACKAGES: Final = frozenset({str(__package__), torch_private.__name__})

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
        output: Tensor = aten.add.Scalar(self, other, alpha)
        return output
    if _depth.adding or (_called_by_engine() and _is_held_once(self)):
        return self.add_(other, alpha=alpha)
    return original(self, other, alpha=alpha)


def _linear(
    original: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    if bias is None or input.dim() == 2:
        return original(input, weight, bias)
    with adding_in_place():
        return original(input, weight, bias)


def _index_put(
    original: Callable[..., Tensor],
    self: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
) -> Tensor:
    if _called_by_engine():
        output: Tensor = aten.index_put_.default(
            self, indices, values, accumulate
        )  # the method refuses indices that are None
        return output
    return original(self, indices, values, accumulate)


def _scatter_add(
    original: Callable[..., Tensor], self: Tensor, dim: int, index: Tensor, src: Tensor
) -> Tensor:
    return (
        self.scatter_add_(dim, index, src)
        if _called_by_engine()
        else original(self, dim, index, src)
    )


def _scatter(
    original: Callable[..., Tensor], self: Tensor, dim: int, index: Tensor, src: Tensor
) -> Tensor:
    return (
        self.scatter_(dim, index, src) if _called_by_engine() else original(self, dim, index, src)
    )


def _index_add(
    original: Callable[..., Tensor],
    self: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    *,
    alpha: float = 1,
) -> Tensor:
    if _called_by_engine():
        return self.index_add_(dim, index, source, alpha=alpha)
    return original(self, dim, index, source, alpha=alpha)


def _called_by_engine() -> bool:
    """Whether the backward engine itself calls, not Python code that it runs."""
    return called_by_engine(_OWN_PACKAGES)


def _is_held_once(tensor: Tensor) -> bool:
    """``can_accumulate_inplace`` of ``input_buffer.cpp``."""
    return reference_counts(tensor) == _HELD_ONCE and bool(
        aten.is_non_overlapping_and_dense.default(tensor)
    )


OVERRIDES: Final = (
    Override(aten.dropout.default, _dropout),
    Override(aten.mish_backward.default, _mish_backward),
    Override(aten.add.Tensor, _add),
    Override(aten.linear.default, _linear),
    Override(aten.index_put.default, _index_put),
    Override(aten.scatter_add.default, _scatter_add),
    Override(aten.scatter.src, _scatter),
    Override(aten.index_add.default, _index_add),
)
"""Overrides of this module."""
