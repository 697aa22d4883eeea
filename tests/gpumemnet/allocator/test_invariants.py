"""What must hold after every request, whatever the settings and the stream."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpumemnet.allocator import AllocatorSettings, CachingAllocator, OutOfMemory, replay
from gpumemnet.allocator.blocks import Block
from tests.gpumemnet.allocator.streams import (
    MIB,
    event_streams,
    settings_and_capacity,
    sizes,
    unlimited_settings,
)


class Requests(RuleBasedStateMachine):
    """Random mallocs, frees and releases of the cache, on two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.live: list[tuple[Block, int, int]] = []
        self.peaks = (0, 0, 0)

    @initialize(chosen=settings_and_capacity())
    def start(self, chosen: tuple[AllocatorSettings, int | None]) -> None:
        self.settings, self.capacity = chosen
        self.allocator = CachingAllocator(*chosen)

    @rule(size=sizes, stream=st.integers(0, 1))
    def malloc(self, size: int, stream: int) -> None:
        try:
            block = self.allocator.malloc(size, stream)
        except OutOfMemory:
            assert self.capacity is not None
        else:
            assert block is not None
            assert block.size >= size
            self.live.append((block, size, stream))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block, _, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.allocator.free(block)

    @rule()
    def empty_cache(self) -> None:
        self.allocator.empty_cache()
        if not self.settings.expandable_segments:
            assert all(
                any(not block.free for block in segment.blocks)
                for segment in self.allocator.segments()
            )
        if not self.live:
            assert self.allocator.reserved_bytes == 0

    @invariant()
    def every_byte_is_in_one_block(self) -> None:
        end = 0
        for segment in self.allocator.segments():
            assert segment.address >= end
            end = segment.address
            for block in segment.blocks:
                assert block.address == end
                assert block.size_bytes > 0
                assert block.size_bytes % 512 == 0
                end += block.size_bytes
            assert end == segment.address + segment.size_bytes

    @invariant()
    def allocations_lie_in_the_segments_of_their_stream_and_pool(self) -> None:
        homes = {
            block.address: (segment, block)
            for segment in self.allocator.segments()
            for block in segment.blocks
            if not block.free
        }
        assert len(homes) == len(self.live)
        for block, size, stream in self.live:
            segment, listed = homes[block.address]
            assert (listed.size_bytes, listed.requested_bytes) == (block.size, size)
            assert segment.stream == stream
            # Slack can only make a block larger, and no slack crosses the border between the pools.
            assert segment.is_small == (block.size <= MIB)

    @invariant()
    def free_neighbours_are_one_block(self) -> None:
        for segment in self.allocator.segments():
            for one, other in zip(segment.blocks, segment.blocks[1:], strict=False):
                assert not (one.free and other.free)

    @invariant()
    def amounts_add_up(self) -> None:
        found = self.allocator.statistics()
        segments = self.allocator.segments()
        assert found.reserved_bytes == sum(segment.size_bytes for segment in segments)
        assert found.allocated_bytes == sum(block.size for block, _, _ in self.live)
        assert found.requested_bytes == sum(size for _, size, _ in self.live)
        assert found.reserved_bytes >= found.allocated_bytes + found.inactive_split_bytes
        assert found.allocated_bytes >= found.requested_bytes
        assert self.capacity is None or found.reserved_bytes <= self.capacity
        if not self.settings.expandable_segments:
            assert found.segments == len(segments)

    @invariant()
    def peaks_never_fall(self) -> None:
        found = self.allocator.statistics()
        peaks = (found.peak_allocated_bytes, found.peak_requested_bytes, found.peak_reserved_bytes)
        now = (found.allocated_bytes, found.requested_bytes, found.reserved_bytes)
        assert all(peak >= before for peak, before in zip(peaks, self.peaks, strict=True))
        assert all(peak >= present for peak, present in zip(peaks, now, strict=True))
        self.peaks = peaks


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=60, stateful_step_count=40)


@given(event_streams(), unlimited_settings)
def test_freeing_everything_leaves_whole_segments_and_releasing_them_nothing(
    stream: tuple[list[int], list[int]], chosen: AllocatorSettings
) -> None:
    events, storages = stream
    allocator = CachingAllocator(chosen)
    blocks: dict[int, Block | None] = {}
    for event in events:
        if event < 0:
            allocator.free(blocks.pop(~event))
        else:
            blocks[event] = allocator.malloc(storages[event])
    for block in blocks.values():
        allocator.free(block)
    assert allocator.allocated_bytes == allocator.requested_bytes == 0
    assert all(len(segment.blocks) == 1 for segment in allocator.segments())
    assert allocator.statistics().inactive_split_bytes == 0
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.segments() == []


@given(stream=event_streams(), chosen=unlimited_settings)
def test_a_capacity_that_is_never_reached_changes_nothing(
    stream: tuple[list[int], list[int]], chosen: AllocatorSettings
) -> None:
    assert replay(*stream, chosen, 2**36) == replay(*stream, chosen)
