"""Element types: what a job's precision makes of inputs, weights and activations.

Source: ``torch/amp/autocast_mode.py``.  Autocast keeps weights, gradients and optimizer state in
    fp32, and caches a copy of the
weights in half precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HALF_BYTES: Final = 2
FULL_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes per element under one precision.

    Attributes:
        inputs: of the input batch.
        weight: of weights, gradients and optimizer state.
        activation: of the outputs of most layers.
        weight_copy: of the copies that autocast makes of weights; 0 without autocast.
    """

    inputs: int
    weight: int
    activation: int
    weight_copy: int

    @property
    def is_autocast(self) -> bool:
        """Whether autocast is on."""
        return self.weight_copy > 0

    @property
    def uncast(self) -> int:
        """Bytes per element of outputs that autocast leaves alone or raises to fp32, the loss among
        them."""
        return FULL_BYTES if self.is_autocast else self.activation


ELEMENT_BYTES: Final[dict[str, ElementBytes]] = {
    "fp32": ElementBytes(4, 4, 4, 0),
    "tf32": ElementBytes(4, 4, 4, 0),
    "amp_fp16": ElementBytes(4, 4, 2, 2),
    "amp_bf16": ElementBytes(4, 4, 2, 2),
    "bf16": ElementBytes(2, 2, 2, 0),
}
"""Precision → bytes per element."""

AUTOCAST_TYPES: Final[dict[str, str]] = {"amp_fp16": "float16", "amp_bf16": "bfloat16"}
"""Precision → the type that autocast computes in, by its name in torch; only the precisions that
use autocast."""
MODEL_TYPES: Final[dict[str, str]] = {"bf16": "bfloat16"}
"""Precision → the type that the model and its inputs are converted to; only the precisions that
convert them."""
SCALED_PRECISIONS: Final = frozenset({"amp_fp16"})
"""Precisions that need a gradient scaler."""
