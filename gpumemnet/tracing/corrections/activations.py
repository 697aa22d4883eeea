"""Activations whose gradient is one kernel on CUDA and a chain of elementwise operators on meta tensors.

Of all operators of PyTorch that have a kernel for CUDA, none for meta tensors and a composite for the rest, ``mish_backward``
(``aten/src/ATen/native/Activation.cpp``) is the only one besides the fused RMS norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import Tensor

from gpumemnet.tracing.corrections.overrides import Override
from gpumemnet.tracing.torch_private.operators import aten


def _mish_backward(original: Callable[..., Tensor], grad_output: Tensor, self: Tensor) -> Tensor:
    output: Tensor = aten.mul.Tensor(grad_output, self)  # as every elementwise kernel: one result, laid out as its inputs are
    return output


ACTIVATIONS: Final = (Override(aten.mish_backward.default, _mish_backward),)
"""Overrides of this module."""
