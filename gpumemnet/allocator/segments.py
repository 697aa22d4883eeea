"""Blocks of memory, the pools of free blocks, and the segments that hold them.

The blocks of a segment form a linked list.  A pool keeps its free blocks sorted by size, then by
address.  Both are packed into one integer, the key of the block, so that one bisection finds the
best fit.

PyTorch breaks ties between free blocks of one size by address, so the address of a segment can
decide which block is used.  The driver's choice is not documented.  The simulation uses the lowest
free range that is large enough, aligned to 2 MiB.

An expandable segment is one address range per stream and pool, with memory mapped on demand.  The
rules follow ``find_expandable_block``, ``map_block``, ``unmap_block`` and ``ExpandableSegment`` in
PyTorch's ``c10/cuda/CUDACachingAllocator.cpp``.  A range is 9/8 of the device's memory, so a stream
rarely needs a second one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from gpumemnet.allocator.settings import SMALL_SEGMENT_BYTES

ADDRESS_BITS: Final = 56
"""Room for an address in a key; CUDA addresses have at most 49 bits on current machines."""
IN_USE: Final = 0
"""Key of a block that is allocated or not mapped."""
GONE: Final = -1
"""Key of a block that was merged into its neighbour, or returned to the driver."""


@dataclass(slots=True, eq=False, repr=False)
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

    address: int
    size: int
    pool: Pool
    requested_bytes: int = 0
    key: int = IN_USE
    mapped: bool = True
    born: int = 0
    previous: Block = field(init=False)
    next: Block = field(init=False)

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
        "unmapped",
    )

    def __init__(self, is_small: bool, least_rest: int, split_below: int) -> None:
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


ALIGNMENT_BYTES: Final = 2 * 2**20


class LowestFreeAddress:
    """Assigns address ranges to segments: first fit from ``start`` upwards.

    Args:
        start: the lowest address, a multiple of 2 MiB.
    """

    def __init__(self, start: int = ALIGNMENT_BYTES) -> None:
        self._end = start
        self._holes: list[
            tuple[int, int]
        ] = []  # (address, size) below the end, sorted, never adjacent

    def take(self, size_bytes: int) -> int:
        """Return the lowest free address with room for ``size_bytes``."""
        size = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for index, (address, room) in enumerate(self._holes):
            if room >= size:
                self._holes[index : index + 1] = (
                    [(address + size, room - size)] if room > size else []
                )
                return address
        address = self._end
        self._end += size
        return address

    def give_back(self, address: int, size_bytes: int) -> None:
        """Make the range free again and join it with free neighbours."""
        size = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        index = bisect_left(self._holes, (address, 0))
        if index < len(self._holes) and self._holes[index][0] == address + size:
            size += self._holes.pop(index)[1]
        if index and sum(self._holes[index - 1]) == address:
            index -= 1
            address, room = self._holes.pop(index)
            size += room
        if address + size == self._end:
            self._end = address
        else:
            self._holes.insert(index, (address, size))


UNLIMITED_RANGE_BYTES: Final = 2**42
"""Size of a range if the device's memory is unknown: more than any GPU has."""

_address = attrgetter("address")


class ExpandableSegments:
    """Maps and unmaps the pages of all expandable segments of one device.

    Args:
        addresses: assigns the ranges.
        edge: the block before the first and after the last one of a segment.
        device_bytes: total memory of the device; ``None`` if unknown.
        large_page_bytes: page of the large pools; the small pools' is 2 MiB.
    """

    def __init__(
        self,
        addresses: LowestFreeAddress,
        edge: Block,
        device_bytes: int | None,
        large_page_bytes: int,
    ) -> None:
        self._addresses = addresses
        self._edge = edge
        self._large_page_bytes = large_page_bytes
        self._range_bytes = (
            UNLIMITED_RANGE_BYTES if device_bytes is None else device_bytes + device_bytes // 8
        )

    def take(self, pool: Pool, size: int, room_bytes: int | None) -> tuple[Block | None, int]:
        """Return a block of at least ``size`` bytes at the lowest address where pages can be added.

        Args:
            pool: the pool of the request.
            size: the rounded request.
            room_bytes: memory that may be mapped; ``None`` for no limit.

        Returns:
            the block, in no list, or ``None`` if the room is too small; and the bytes that were
            mapped, even then.
        """
        block = self._lowest_place(pool, size)
        if block is None:
            return None, 0
        mapped = 0
        while not block.mapped or block.size < size:
            page = block if not block.mapped else block.next
            missing = min(page.size, size if not block.mapped else size - block.size)
            grown = self._map(
                pool, page, missing, None if room_bytes is None else room_bytes - mapped
            )
            if grown is None:
                return None, mapped
            block, added = grown
            mapped += added
        pool.remove(block)
        return block, mapped

    def release(self, pool: Pool) -> int:
        """Unmap all pages of ``pool`` that hold no allocation.

        Returns:
            the bytes that were unmapped.
        """
        released = 0
        for key in pool.keys.copy():
            released += self._unmap(pool, pool.blocks[key])
        return released

    def _lowest_place(self, pool: Pool, size: int) -> Block | None:
        for unmapped in pool.unmapped:
            before = unmapped.previous
            first = before if before.key else unmapped
            block, room = first, 0
            while room < size and (block.key or not block.mapped):
                room += block.size
                block = block.next
            if room >= size:
                return first
        page = self._page_bytes(pool)
        range_bytes = -(-self._range_bytes // page) * page
        if size > range_bytes:
            return None
        block = Block(self._addresses.take(range_bytes), range_bytes, pool)
        block.previous = block.next = self._edge
        block.mapped = False
        pool.segments[block.address] = block
        insort(pool.unmapped, block, key=_address)
        return block

    def _map(
        self, pool: Pool, block: Block, size: int, room_bytes: int | None
    ) -> tuple[Block, int] | None:
        page = self._page_bytes(pool)
        added = -(-size // page) * page
        if room_bytes is not None and added > room_bytes:
            return None
        del pool.unmapped[bisect_left(pool.unmapped, block.address, key=_address)]
        if added < block.size:
            rest = Block(block.address + added, block.size - added, pool)
            rest.mapped = False
            link(rest, block, block.next)
            insort(pool.unmapped, rest, key=_address)
            block.size = added
        block.mapped = True
        if block.next.key:
            pool.remove(block.next)
            absorb_next(block)
        if block.previous.key:
            block = block.previous
            pool.remove(block)
            absorb_next(block)
        pool.add(block)
        return block, added

    def _unmap(self, pool: Pool, block: Block) -> int:
        page = self._page_bytes(pool)
        start = self._start_of_segment(pool, block)
        begin = start + -(-(block.address - start) // page) * page
        end = start + (block.address + block.size - start) // page * page
        if begin >= end:
            return 0
        pool.remove(block)
        if end < block.address + block.size:
            behind = Block(end, block.address + block.size - end, pool)
            link(behind, block, block.next)
            pool.add(behind)
        if begin > block.address:
            front = block
            block = Block(begin, end - begin, pool)
            link(block, front, front.next)
            front.size = begin - front.address
            pool.add(front)
        block.size = end - begin
        block.mapped = False
        if not block.next.mapped:
            pool.unmapped.remove(block.next)
            absorb_next(block)
        if not block.previous.mapped:
            block = block.previous
            pool.unmapped.remove(block)
            absorb_next(block)
        if block.previous is block.next:  # nothing is left of the segment
            del pool.segments[block.address]
            self._addresses.give_back(block.address, block.size)
        else:
            insort(pool.unmapped, block, key=_address)
        return end - begin

    def _start_of_segment(self, pool: Pool, block: Block) -> int:
        starts = sorted(pool.segments)
        return starts[bisect_right(starts, block.address) - 1]

    def _page_bytes(self, pool: Pool) -> int:
        return SMALL_SEGMENT_BYTES if pool.is_small else self._large_page_bytes
