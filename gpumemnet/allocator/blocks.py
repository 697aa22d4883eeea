"""Blocks of memory, the pools of free blocks, and the segments and counters that describe them.

The blocks of a segment form a linked list.  A pool keeps its free blocks sorted by size, then by
address.  Both are packed into one integer, the key of the block, so that one bisection finds the
best fit.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

ADDRESS_BITS: Final = 56
"""Room for an address in a key; CUDA addresses have at most 49 bits on current machines."""
IN_USE: Final = 0
"""Key of a block that is allocated or not mapped."""
GONE: Final = -1
"""Key of a block that was merged into its neighbour, or returned to the driver."""


class Block:
    """A piece of a segment; also the handle of an allocation.

    Attributes:
        address: its first byte.
        size: its bytes.
        requested_bytes: requested bytes, while it is allocated.
        key: ``size << ADDRESS_BITS | address`` while it is free; :data:`IN_USE` or :data:`GONE`
            otherwise.
        previous, next: neighbours in the segment, or the allocator's edge.  Only a block that is a
            whole segment has the same on both sides.
        pool: the pool that it returns to.
        mapped: whether it has physical memory; false only in expandable segments.
        born: number of searches for large blocks when it was freed, for garbage collection.
    """

    __slots__ = (
        "address",
        "born",
        "key",
        "mapped",
        "next",
        "pool",
        "previous",
        "requested_bytes",
        "size",
    )

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

    @property
    def place(self) -> tuple[int, int, int]:
        """Where it is, and how large it and its request are."""
        return self.address, self.size, self.requested_bytes


class Pool:
    """The free blocks of one stream, either the small or the large ones.

    Attributes:
        is_small: whether it serves requests up to 1 MiB.
        least_rest: a block is split if at least this many bytes remain.
        split_below: only requests below this size split a block.
        keys: keys of the free blocks, sorted.
        blocks: the free blocks by key.
        segments: first block of every segment, by address.
        unmapped: in expandable segments, the blocks without memory, by address.
    """

    __slots__ = (
        "blocks",
        "is_small",
        "keys",
        "least_rest",
        "segments",
        "split_below",
        "stream",
        "unmapped",
    )

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
        """Add a block to the free ones."""
        key = block.size << ADDRESS_BITS | block.address
        block.key = key
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        del self.keys[bisect_left(self.keys, block.key)]
        del self.blocks[block.key]
        block.key = IN_USE


def edge_block() -> Block:
    """Return the block before the first and after the last one of a segment: it is never free, so
    nothing is merged with it."""
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
    """Merge ``block`` with the next block, which must be in no list."""
    absorbed = block.next
    block.size += absorbed.size
    block.next = absorbed.next
    absorbed.next.previous = block
    absorbed.key = GONE


@dataclass(frozen=True, slots=True)
class SegmentBlock:
    """One block of a :class:`Segment`; ``requested_bytes`` is 0 for a free one."""

    address: int
    size_bytes: int
    requested_bytes: int
    free: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """One contiguous piece of reserved memory, as ``torch.cuda.memory_snapshot`` lists it."""

    address: int
    size_bytes: int
    stream: int
    is_small: bool
    blocks: tuple[SegmentBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """The counters of ``torch.cuda.memory_stats`` of the same names.

    Expandable segments count neither as segments nor as split.  ``active_bytes`` equals
    ``allocated_bytes``, because no block waits for another stream.
    """

    allocated_bytes: int
    requested_bytes: int
    reserved_bytes: int
    inactive_split_bytes: int
    peak_allocated_bytes: int
    peak_requested_bytes: int
    peak_reserved_bytes: int
    peak_inactive_split_bytes: int
    segments: int
    small_segments: int
    large_segments: int
    alloc_retries: int
    ooms: int


def segments_of(pools: Iterable[Pool], edge: Block) -> list[Segment]:
    """Return all segments of ``pools`` by address; expandable segments as their contiguous mapped
    pieces."""
    found = []
    for pool in pools:
        for first in pool.segments.values():
            run: list[SegmentBlock] = []
            block = first
            while True:
                if block is not edge and block.mapped:
                    requested_bytes = 0 if block.key else block.requested_bytes
                    run.append(
                        SegmentBlock(block.address, block.size, requested_bytes, bool(block.key))
                    )
                elif run:
                    size_bytes = sum(one.size_bytes for one in run)
                    found.append(
                        Segment(run[0].address, size_bytes, pool.stream, pool.is_small, tuple(run))
                    )
                    run = []
                if block is edge:
                    break
                block = block.next
    return sorted(found, key=lambda segment: segment.address)
