"""Dropout: CUDA runs one kernel that keeps a mask of one byte per element; the composite keeps
noise in the input's type.

Of all forms of dropout only ``aten::dropout`` has such a kernel
(``aten/src/ATen/native/Dropout.cpp``).  The in-place form, feature and alpha dropout, and any form
with ``p`` of 0 or 1, run the same composite on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import Tensor

from gpumemnet.torch_private.operators import aten
from gpumemnet.tracing.corrections.overrides import Override


def _dropout(original: Callable[..., Tensor], input: Tensor, p: float, train: bool) -> Tensor:
    if train and 0 < p < 1 and input.numel() > 0:
        output: Tensor = aten.native_dropout(input, p, train)[0]
        return output
    return original(input, p, train)


DROPOUT: Final = (Override(aten.dropout.default, _dropout),)
"""Overrides of this module."""
