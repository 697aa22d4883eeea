"""PyTorch's CUDA caching allocator without a GPU: the same blocks and segments for the same
requests.

It follows ``DeviceCachingAllocator`` in ``c10/cuda/CUDACachingAllocator.cpp`` (PyTorch 2.13).  Left
out are private pools (CUDA graphs, ``MemPool``), blocks that wait for another stream after
``record_stream``, changes of settings at run time, and fragmentation of physical memory in the
driver.  A training process that uses none of these behaves the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable

from gpumemnet.allocator.segments import (
    ADDRESS_BITS,
    GONE,
    IN_USE,
    Block,
    ExpandableSegments,
    LowestFreeAddress,
    Pool,
    edge_block,
)
from gpumemnet.allocator.settings import (
    DEFAULT_SETTINGS,
    MINIMUM_BLOCK_BYTES,
    SMALL_BYTES,
    AllocatorSettings,
    round_size,
    segment_size,
)
from gpumemnet.errors import GpumemnetError, InvalidRequestError
from gpumemnet.units import format_bytes

_UNLIMITED = 1 << 62


class OutOfMemory(GpumemnetError):
    """A request does not fit, even after the cache was released.

    Attributes:
        requested_bytes: size of the request.
        reserved_bytes: size of all segments.
        allocated_bytes: size of all allocated blocks.
        event: in a replay, the index of the event that failed.
    """

    event: int | None = None

    def __init__(self, requested_bytes: int, reserved_bytes: int, allocated_bytes: int) -> None:
        self.requested_bytes = requested_bytes
        self.reserved_bytes = reserved_bytes
        self.allocated_bytes = allocated_bytes
        super().__init__(requested_bytes, reserved_bytes, allocated_bytes)

    def __str__(self) -> str:
        return (
            f"out of memory: {format_bytes(self.requested_bytes)} do not fit beside {format_bytes(self.reserved_bytes)} that are reserved, "
            f"{format_bytes(self.allocated_bytes)} of them allocated"
        )


class CachingAllocator:
    """The allocator of one device.

    Args:
        settings: as ``PYTORCH_CUDA_ALLOC_CONF`` would set them.
        capacity_bytes: memory that the driver has for segments; ``None`` for no limit.
        device_bytes: total memory of the device, to which ``per_process_memory_fraction`` applies;
            by default the capacity.
        addresses: assigns addresses to segments, see :mod:`gpumemnet.allocator.segments`.

    Attributes:
        allocated_bytes, requested_bytes, reserved_bytes: sizes of blocks, of requests and of
        segments. peak_allocated_bytes, peak_requested_bytes, peak_reserved_bytes: their maxima
        since the last :meth:`reset_peaks`.

    Raises:
        InvalidRequestError: a memory fraction without a device of known size.
    """

    def __init__(
        self,
        settings: AllocatorSettings = DEFAULT_SETTINGS,
        capacity_bytes: int | None = None,
        *,
        device_bytes: int | None = None,
        addresses: LowestFreeAddress | None = None,
    ) -> None:
        device_bytes = capacity_bytes if device_bytes is None else device_bytes
        fraction = settings.per_process_memory_fraction
        if fraction < 1 and device_bytes is None:
            raise InvalidRequestError(
                "needs the device's memory: pass capacity_bytes or device_bytes",
                "per_process_memory_fraction",
            )
        self._capacity_bytes = capacity_bytes
        self._allowed_bytes = (
            int(fraction * device_bytes) if fraction < 1 and device_bytes is not None else None
        )
        self._throws_early = settings.throw_on_cudamalloc_oom
        self._collect_above_bytes = (
            int(settings.garbage_collection_threshold * self._allowed_bytes)
            if settings.garbage_collection_threshold
            and self._allowed_bytes is not None
            and not settings.expandable_segments
            else None
        )
        self._divisions = settings.roundup_power2_divisions
        self._rounding_is_plain = max(self._divisions) <= 1
        self._large_segment_bytes = settings.large_segment_bytes
        self._max_split = settings.max_split_bytes or _UNLIMITED
        self._non_split_slack = (
            settings.max_non_split_rounding_bytes or settings.large_segment_bytes
        )
        self._addresses = LowestFreeAddress() if addresses is None else addresses
        self._pools: dict[int, tuple[Pool, Pool]] = {}
        self._edge = edge_block()
        self._expandable = (
            ExpandableSegments(
                self._addresses, self._edge, device_bytes, settings.large_segment_bytes
            )
            if settings.expandable_segments
            else None
        )
        self._choice_is_plain = (
            self._expandable is None
            and settings.max_split_bytes is None
            and self._collect_above_bytes is None
        )
        self._searches = 0  # in the large pools of all streams, counted for garbage collection
        self.allocated_bytes = self.requested_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_requested_bytes = self.peak_reserved_bytes = 0

    # malloc and free run for every event of a trace: they inline Pool.add, Pool.remove and
    # absorb_next for speed.

    def malloc(self, size_bytes: int, stream: int = 0) -> Block | None:
        """Allocate a block; return ``None`` for zero bytes, for which PyTorch uses no block.

        Raises:
            OutOfMemory: the capacity or the memory fraction is too small.
        """
        if size_bytes <= 0:
            if size_bytes < 0:
                raise ValueError(f"size_bytes is negative: {size_bytes}")
            return None
        size = (
            size_bytes + 511 & -512
            if self._rounding_is_plain
            else round_size(size_bytes, self._divisions)
        )
        pools = self._pools.get(stream) or self._open_pools(stream)
        pool = pools[size > SMALL_BYTES]
        keys = pool.keys
        position = bisect_left(keys, size << ADDRESS_BITS)
        if not self._choice_is_plain:
            position = self._choose(pool, size, position)
        if position < len(keys):
            block = pool.blocks.pop(keys[position])
            del keys[position]
            following = block.next
        else:
            block = self._new_block(pool, size, size_bytes)
            following = block.next
        rest_size = block.size - size
        if rest_size >= pool.least_rest and size < pool.split_below:
            rest = Block(block.address + size, rest_size, pool)
            rest.previous = block
            rest.next = following
            following.previous = block.next = rest
            rest.key = key = rest_size << ADDRESS_BITS | rest.address
            insort(keys, key)
            pool.blocks[key] = rest
            block.size = size
        else:
            size = block.size
        block.key = IN_USE
        block.requested_bytes = size_bytes
        self.requested_bytes = requested = self.requested_bytes + size_bytes
        if requested > self.peak_requested_bytes:
            self.peak_requested_bytes = requested
        self.allocated_bytes = allocated = self.allocated_bytes + size
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        return block

    def free(self, block: Block | None) -> None:
        """Free a block; ``None`` (zero bytes) has no effect.

        Raises:
            ValueError: the block is not allocated.
        """
        if block is None:
            return
        if block.key:
            raise ValueError("this block is not allocated")
        size = block.size
        self.allocated_bytes -= size
        self.requested_bytes -= block.requested_bytes
        pool = block.pool
        keys = pool.keys
        blocks = pool.blocks
        following = block.next
        key = following.key
        if key:
            del keys[bisect_left(keys, key)], blocks[key]
            following.key = GONE
            size += following.size
            block.next = following = following.next
            following.previous = block
        previous = block.previous
        key = previous.key
        if key:
            del keys[bisect_left(keys, key)], blocks[key]
            block.key = GONE
            size += previous.size
            previous.next = following
            following.previous = previous
            block = previous
        block.size = size
        block.born = self._searches
        block.key = key = size << ADDRESS_BITS | block.address
        insort(keys, key)
        blocks[key] = block

    def empty_cache(self) -> None:
        """Release every segment, and every page of an expandable segment, that holds no
        allocation."""
        for large in (True, False):
            for pools in self._pools.values():
                pool = pools[large]
                if self._expandable:
                    self.reserved_bytes -= self._expandable.release(pool)
                else:
                    for block in [
                        block for block in pool.blocks.values() if block.previous is block.next
                    ]:
                        self._release(block)

    def reset_peaks(self) -> None:
        """Reset every peak to the current value."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_requested_bytes = self.requested_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def state(self) -> Hashable:
        """Return a value that is equal for two moments at which the same requests would have the
        same effect.

        Two moments are compared at which the same blocks are in use, or others at the same places.
        ``None`` if the settings make an effect depend on more than what is free: expandable
        segments, garbage collection.
        """
        if self._expandable is not None or self._collect_above_bytes is not None:
            return None
        pools = tuple(
            (stream, tuple(pool.keys), tuple(pool.segments))
            for stream, pair in self._pools.items()
            for pool in pair
        )
        return pools, self.reserved_bytes, self.allocated_bytes, self.requested_bytes

    def _open_pools(self, stream: int) -> tuple[Pool, Pool]:
        # Only large blocks outside of expandable segments keep slack of up to 1 MiB, and obey the
        # largest size to split.
        least_rest, split_below = (
            (SMALL_BYTES + 1, self._max_split)
            if self._expandable is None
            else (MINIMUM_BLOCK_BYTES, _UNLIMITED)
        )
        pools = (
            Pool(True, MINIMUM_BLOCK_BYTES, _UNLIMITED),
            Pool(False, least_rest, split_below),
        )
        self._pools[stream] = pools
        return pools

    def _choose(self, pool: Pool, size: int, position: int) -> int:
        """Return the index in ``pool.keys`` of the block for ``size``, starting at the best fit;
        their number if none fits."""
        if not pool.is_small:
            self._searches += 1
        keys, blocks = pool.keys, pool.blocks
        none = len(keys)
        if position == none:
            return none
        block = blocks[keys[position]]
        if (
            self._expandable
        ):  # the last block of a segment counts with the size that it could grow to
            while position + 1 < none:
                larger = blocks[keys[position + 1]]
                if _expandable_size(larger) >= _expandable_size(block):
                    break
                position += 1
                block = larger
        if size < self._max_split <= block.size:
            return none
        if size >= self._max_split and block.size >= size + self._non_split_slack:
            return none
        return position

    def _new_block(self, pool: Pool, size: int, requested_bytes: int) -> Block:
        """Return a block from new memory, in no list; attempts are in PyTorch's order."""
        if self._collect_above_bytes is not None:
            self._collect_garbage(self._collect_above_bytes)
        bytes_needed = segment_size(size, self._large_segment_bytes)
        block = self._reserve(pool, size, bytes_needed)
        if block is None and (self._is_allowed(bytes_needed) or not self._throws_early):
            if self._release_oversize(pool, size):
                block = self._reserve(pool, size, bytes_needed)
            if block is None:
                self.empty_cache()
                block = self._reserve(pool, size, bytes_needed)
        if block is None:
            raise OutOfMemory(requested_bytes, self.reserved_bytes, self.allocated_bytes)
        return block

    def _is_allowed(self, more_bytes: int) -> bool:
        return (
            self._allowed_bytes is None or self.reserved_bytes + more_bytes <= self._allowed_bytes
        )

    def _reserve(self, pool: Pool, size: int, bytes_needed: int) -> Block | None:
        if not self._is_allowed(bytes_needed):
            return None
        room_bytes = (
            None if self._capacity_bytes is None else self._capacity_bytes - self.reserved_bytes
        )
        block: Block | None
        if self._expandable:
            block, bytes_needed = self._expandable.take(pool, size, room_bytes)
        elif room_bytes is not None and bytes_needed > room_bytes:
            return None
        else:
            block = Block(self._addresses.take(bytes_needed), bytes_needed, pool)
            block.previous = block.next = self._edge
            pool.segments[block.address] = block
        self.reserved_bytes += bytes_needed
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release cached blocks of at least ``max_split_size`` until the request fits; return
        whether they suffice."""
        if self._max_split == _UNLIMITED or self._expandable:
            return False
        wanted = max(size, self._max_split)
        position = bisect_left(pool.keys, wanted << ADDRESS_BITS)
        if position < len(pool.keys):
            self._release(pool.blocks[pool.keys[position]])
            return True
        released = 0
        while released < wanted and pool.keys:
            largest = pool.blocks[pool.keys[-1]]
            if largest.size < self._max_split:
                break
            released += largest.size
            self._release(largest)
        return released >= wanted

    def _collect_garbage(self, threshold_bytes: int) -> None:
        """Release old cached segments of the large pools until the reserved memory is below the
        threshold."""
        if self.reserved_bytes <= threshold_bytes:
            return
        wanted = self.reserved_bytes - threshold_bytes
        cached = [
            block
            for _, pool in self._pools.values()
            for block in pool.blocks.values()
            if block.previous is block.next
        ]
        while wanted > 0 and cached:
            mean_age = sum(self._searches - block.born for block in cached) / len(cached)
            old = [block for block in cached if self._searches - block.born >= mean_age]
            cached = [block for block in cached if self._searches - block.born < mean_age]
            for block in old:
                wanted -= block.size
                self._release(block)

    def _release(self, block: Block) -> None:
        """Return a free block that is a whole segment to the driver."""
        pool = block.pool
        pool.remove(block)
        block.key = GONE
        del pool.segments[block.address]
        self._addresses.give_back(block.address, block.size)
        self.reserved_bytes -= block.size


def _expandable_size(block: Block) -> int:
    following = block.next
    return block.size if following.mapped else block.size + following.size
