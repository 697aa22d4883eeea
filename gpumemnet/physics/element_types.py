"""Element types and memory layouts: what a job's precision makes of inputs, weights and activations,
autocast's lists, and which tensors are channels last.

Sources: ``torch/amp/autocast_mode.py``; ``aten/src/ATen/autocast_mode.h`` and
``c10/core/MemoryFormat.h`` of PyTorch 2.11; NVIDIA, "Convolutional Layers User's Guide", tensor
layouts.  Autocast keeps weights, gradients and optimizer state in fp32, and caches a copy of the
weights in half precision.  The trace casts the tensors of each operator by autocast's lists.  The
closed form knows layers, not operators: what becomes of them is in the table of layer kinds
(:data:`gpumemnet.job.layers.KIND_TABLE`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpumemnet.atomic_files import shipped_json

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


ELEMENT_BYTES: Final = {
    "fp32": ElementBytes(4, 4, 4, 0),
    "tf32": ElementBytes(4, 4, 4, 0),
    "amp_fp16": ElementBytes(4, 4, 2, 2),
    "amp_bf16": ElementBytes(4, 4, 2, 2),
    "bf16": ElementBytes(2, 2, 2, 0),
}
"""Precision → bytes per element."""

AUTOCAST_TYPES: Final = {"amp_fp16": "float16", "amp_bf16": "bfloat16"}
"""Precision → the type that autocast computes in, by its name in torch; only the precisions that
use autocast."""
MODEL_TYPES: Final = {"bf16": "bfloat16"}
"""Precision → the type that the model and its inputs are converted to; only the precisions that
convert them."""
SCALED_PRECISIONS: Final = frozenset({"amp_fp16"})
"""Precisions that need a gradient scaler."""


_AUTOCAST: Final = shipped_json("physics/autocast.json")
LOWER_PRECISION: Final[Sequence[str]] = _AUTOCAST["lower_precision"]
"""Operators whose tensors are cast to the type of the region."""
FLOAT32: Final[Sequence[str]] = _AUTOCAST["float32"]
"""Operators whose tensors are cast to float32."""
FLOAT32_RESULT: Final[Sequence[str]] = _AUTOCAST["float32_result"]
"""Operators with a result type of their own, which becomes float32 where the call gives none."""
FLOAT32_APPENDED: Final[Mapping[str, str]] = _AUTOCAST["float32_appended"]
"""Operators without a result type, and what runs instead, with one."""
PROMOTE: Final[Sequence[str]] = _AUTOCAST["promote"]
"""Operators whose tensors are cast to the widest type among them."""
BANNED: Final[Sequence[str]] = _AUTOCAST["banned"]
"""Operators that raise."""


CHANNELS_LAST_FORMATS: Final = {4: "channels_last", 5: "channels_last_3d"}
"""Dimensions of a tensor → its channels-last format, by its name in torch.  Tensors of other
dimensions have none."""
IMAGE_DIMENSIONS: Final = 4
"""Dimensions of the tensors that the option ``channels_last`` converts: batches of images, and the
filters of 2D convolutions.

``Module.to(memory_format=torch.channels_last)`` converts no others.
"""

TENSOR_CORE_VECTOR_BYTES: Final = 16
"""Tensor cores read channels last, in multiples of this many bytes; operands in another layout are
copied."""
TF32_SMALLEST_CHANNELS: Final = 4
"""Fewest channels per group for which fp32 convolutions run on TF32 tensor cores."""
IMAGE_CHANNELS: Final = 3
"""Channels that the closed form takes an image to have, as photographs do; so TF32 tensor cores
take no first layer."""
_HALF_CHANNELS: Final = TENSOR_CORE_VECTOR_BYTES // HALF_BYTES
PADDED_IMAGE: Final = -(-IMAGE_CHANNELS // _HALF_CHANNELS) * _HALF_CHANNELS / IMAGE_CHANNELS
"""Elements of an image whose channels are padded for a kernel in half precision, as a multiple of
the image's."""
