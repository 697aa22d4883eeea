"""Blocks of PyTorch's caching allocator: their sizes, their classes, and what they cost in
segments.

Blocks of one class take over each other's segments.  The cost of a block is its share of the
segments that the allocator would fill with blocks like it, because ``nvidia-smi`` shows segments
(``c10/cuda/CUDACachingAllocator.cpp``).

Cython compiles this module with the types of ``allocator_blocks.pxd``.  Without a compiler it runs
as it is.
"""

from __future__ import annotations

from typing import Final

from gpumemnet.allocator import sizes
from gpumemnet.units import MIB

IS_COMPILED: Final = not __file__.endswith(".py")
"""Whether this module is compiled."""

LARGE_LIMIT: Final = 20 * MIB
HUGE_OCTAVES: Final = 7
"""Tensors of 20 to 40 MiB, and so on, up to those above 1,280 MiB."""
_LARGER_FROM: Final = (
    sizes.MINIMUM_LARGE_BYTES,
    *(LARGE_LIMIT << octave for octave in range(HUGE_OCTAVES)),
)
BLOCK_TOPS: Final = (
    sizes.SMALL_BYTES,
    *(limit - sizes.MINIMUM_BLOCK_BYTES for limit in _LARGER_FROM),
)
"""Largest block of each class of tensors that take over each other's segments, but the last, which
has no largest."""
BLOCK_CLASSES: Final = len(BLOCK_TOPS) + 1

# The same numbers once more where the compiled form reads them all the time: allocator_blocks.pxd
# makes C variables of them.
_BLOCK: Final = float(sizes.MINIMUM_BLOCK_BYTES)
_ROUNDING: Final = float(sizes.SEGMENT_ROUNDING_BYTES)
_MEDIUM_SEGMENT: Final = float(sizes.LARGE_SEGMENT_BYTES)
_SMALL_TOP: Final = float(BLOCK_TOPS[0])
_MEDIUM_TOP: Final = float(BLOCK_TOPS[1])
_LARGE_TOP: Final = float(BLOCK_TOPS[2])
_CLASSES: Final = BLOCK_CLASSES


def block_bytes(size: float) -> float:
    """Bytes of the allocator's block for a tensor of ``size`` bytes (``round_size``)."""
    return -(-size // _BLOCK) * _BLOCK


def class_of_block(block: float) -> int:
    """Class of a block: blocks of one class take over each other's segments."""
    if block <= _SMALL_TOP:
        return 0
    if block <= _MEDIUM_TOP:
        return 1
    block_class = 2
    top = _LARGE_TOP
    while block > top and block_class < _CLASSES - 1:
        block_class += 1
        top = 2.0 * (top + _BLOCK) - _BLOCK
    return block_class


def segment_cost(block: float, block_class: int) -> float:
    """Bytes of segment that a block of this class costs among blocks like it
    (``get_allocation_size``).

    One of 7 MiB costs 10: two of them fill a segment of 20 MiB.  Costs are whole bytes.
    """
    if block_class > 1:
        return -(-block // _ROUNDING) * _ROUNDING
    if block_class == 1:
        return _MEDIUM_SEGMENT // (_MEDIUM_SEGMENT // block)
    return block
