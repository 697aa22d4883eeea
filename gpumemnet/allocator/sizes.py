"""Sizes that PyTorch uses for a request: the rounded block, and the segment that it requests from
the driver.

Constants and rules of ``c10/core/AllocatorConfig.h`` and ``c10/cuda/CUDACachingAllocator.cpp``
(``round_size``, ``roundup_power2_next_division``, ``get_allocation_size``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpumemnet.units import MIB

MINIMUM_BLOCK_BYTES: Final = 512
SMALL_BYTES: Final = MIB
"""Largest rounded size that is served from the small pool."""
SMALL_SEGMENT_BYTES: Final = 2 * MIB
MINIMUM_LARGE_BYTES: Final = 10 * MIB
"""Requests of at least this size get a segment of their own size."""
LARGE_SEGMENT_BYTES: Final = 20 * MIB
SEGMENT_ROUNDING_BYTES: Final = 2 * MIB


def round_size(size_bytes: int, divisions: Sequence[int]) -> int:
    """Return the block size for ``size_bytes``, at least 1, without slack of the block that is
    found.

    Args:
        size_bytes: bytes of a tensor's storage.
        divisions: ``AllocatorSettings.roundup_power2_divisions``.
    """
    if size_bytes < MINIMUM_BLOCK_BYTES:
        return MINIMUM_BLOCK_BYTES
    parts = divisions[
        min(max(size_bytes.bit_length() - SMALL_BYTES.bit_length(), 0), len(divisions) - 1)
    ]
    if parts > 1 and size_bytes > MINIMUM_BLOCK_BYTES * parts:
        step = (1 << size_bytes.bit_length() - 1) // parts
        return -(-size_bytes // step) * step
    return -(-size_bytes // MINIMUM_BLOCK_BYTES) * MINIMUM_BLOCK_BYTES


def segment_size(block_bytes: int, large_segment_bytes: int = LARGE_SEGMENT_BYTES) -> int:
    """Return the segment size for a block of ``block_bytes``, a rounded size."""
    if block_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < MINIMUM_LARGE_BYTES:
        return large_segment_bytes
    return -(-block_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
