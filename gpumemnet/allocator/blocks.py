"""Blocks, and the pool of those that are free.

A block's neighbours in its segment hang on it as a linked list; a pool keeps its free blocks sorted by size, then address.
To find the best fit with one bisection, both are packed into one integer, the block's key.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

ADDRESS_BITS: Final = 56
"""Room for an address in a key; CUDA's addresses have at most 49 bits on the machines of today."""
IN_USE: Final = 0
"""Key of a block that is allocated or not mapped."""
GONE: Final = -1
"""Key of a block that has become part of its neighbour, or has gone back to the driver."""


class Block:
    """A piece of a segment; also the handle of an allocation.

    Attributes:
        address: where it begins.
        size: in bytes.
        requested_bytes: what was asked for, while it is allocated.
        key: ``size << ADDRESS_BITS | address`` while it is free; :data:`IN_USE` or :data:`GONE` otherwise.
        previous, next: neighbours in the segment, or the allocator's edge.  Only a block that is a whole segment has the same
            on both sides.
        pool: the pool that it returns to.
        mapped: whether memory lies behind it; false only in expandable segments.
        born: the count of searches for large blocks when it was freed, for garbage collection.
    """

    __slots__ = ("address", "born", "key", "mapped", "next", "pool", "previous", "requested_bytes", "size")

    previous: Block
    next: Block

    def __init__(self, address: int, size: int, pool: Pool) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.requested_bytes = 0
        self.key = IN_USE
        self.mapped = True
        self.born = 0


class Pool:
    """The free blocks of one stream, either the small or the large ones.

    Attributes:
        is_small: whether requests up to 1 MiB come here.
        least_rest: a found block is split where at least this many bytes are left over.
        split_below: only requests below this size split a block.
        keys: keys of the free blocks, sorted.
        blocks: the free blocks by key.
        segments: first block of every segment, by address.
        unmapped: in expandable segments, the blocks without memory, by address.
    """

    __slots__ = ("blocks", "is_small", "keys", "least_rest", "segments", "split_below", "stream", "unmapped")

    def __init__(self, stream: int, is_small: bool, least_rest: int, split_below: int) -> None:
        self.stream = stream
        self.is_small = is_small
        self.least_rest = least_rest
        self.split_below = split_below
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.segments: dict[int, Block] = {}
        self.unmapped: list[Block] = []

    def add(self, block: Block) -> None:
        """Take a block up among the free ones."""
        key = block.size << ADDRESS_BITS | block.address
        block.key = key
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Take a free block out."""
        del self.keys[bisect_left(self.keys, block.key)]
        del self.blocks[block.key]
        block.key = IN_USE


def edge_block() -> Block:
    """A block that stands before the first and behind the last of a segment: never free, so that nothing is joined with it."""
    edge = Block.__new__(Block)
    edge.key, edge.size, edge.mapped, edge.previous, edge.next = IN_USE, 0, True, edge, edge
    return edge


def link(block: Block, previous: Block, following: Block) -> None:
    """Put ``block`` between two neighbours."""
    block.previous = previous
    block.next = following
    previous.next = block
    following.previous = block


def absorb_next(block: Block) -> None:
    """Join ``block`` with the block behind it, which must be in no list."""
    absorbed = block.next
    block.size += absorbed.size
    block.next = absorbed.next
    absorbed.next.previous = block
    absorbed.key = GONE
