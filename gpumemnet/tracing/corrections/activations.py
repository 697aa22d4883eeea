"""Replaces activation gradients that are one kernel on CUDA but several elementwise operators on
meta tensors.

Only ``mish_backward`` (``aten/src/ATen/native/Activation.cpp``) and the fused RMS norm differ in
this way.  They are the only operators of PyTorch with a CUDA kernel, no meta kernel, and a
composite implementation for other devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import Tensor

from gpumemnet.torch_private.operators import aten
from gpumemnet.tracing.corrections.overrides import Override


def _mish_backward(original: Callable[..., Tensor], grad_output: Tensor, self: Tensor) -> Tensor:
    output: Tensor = aten.mul.Tensor(
        grad_output, self
    )  # an elementwise kernel allocates one result in the layout of its inputs
    return output


ACTIVATIONS: Final = (Override(aten.mish_backward.default, _mish_backward),)
"""The overrides that this module defines."""
