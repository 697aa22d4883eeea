"""Memory layouts: which tensors can be channels last, and which layout tensor-core convolutions
read.

Sources: ``c10/core/MemoryFormat.h`` of PyTorch 2.11; NVIDIA, "Convolutional Layers User's Guide",
    tensor layouts.
"""

from __future__ import annotations

from typing import Final

from gpumemnet.physics.element_types import HALF_BYTES

CHANNELS_LAST_FORMATS: Final[dict[int, str]] = {4: "channels_last", 5: "channels_last_3d"}
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
