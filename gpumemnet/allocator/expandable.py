"""Expandable segments: one address range per stream and pool, with memory mapped page by page on
demand.

Follows ``find_expandable_block``, ``map_block``, ``unmap_block`` and ``ExpandableSegment`` in
PyTorch's ``c10/cuda/CUDACachingAllocator.cpp``.  A range is 9/8 of the device's memory, so a stream
rarely needs a second one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from operator import attrgetter
from typing import Final

from gpumemnet.allocator.addresses import AddressSpace
from gpumemnet.allocator.blocks import Block, Pool, absorb_next, link
from gpumemnet.allocator.sizes import SMALL_SEGMENT_BYTES

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
        self, addresses: AddressSpace, edge: Block, device_bytes: int | None, large_page_bytes: int
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
