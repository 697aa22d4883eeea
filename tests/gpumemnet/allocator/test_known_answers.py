"""Worked examples: what PyTorch's constants and rules give by hand."""

from __future__ import annotations

from typing import Any

import pytest

from gpumemnet.allocator import (
    AllocatorSettings,
    CachingAllocator,
    OutOfMemory,
    parse_settings,
    round_size,
    segment_size,
)
from gpumemnet.errors import InvalidRequestError
from tests.gpumemnet.allocator.streams import MIB, segments


def layout(allocator: CachingAllocator) -> list[list[tuple[int, bool]]]:
    """Segments by address: the size and freedom of every block."""
    return [[(block.size, bool(block.key)) for block in blocks] for blocks in segments(allocator)]


def allocator_of(
    text: str = "", capacity_mib: int | None = None, **options: Any
) -> CachingAllocator:
    capacity_bytes = None if capacity_mib is None else capacity_mib * MIB
    return CachingAllocator(parse_settings(text), capacity_bytes, **options)


@pytest.mark.parametrize(
    ("requested", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (10 * MIB + MIB - 512, 11 * MIB - 512, 12 * MIB),
        (64 * MIB, 64 * MIB, 64 * MIB),
    ],
)
def test_the_first_request(requested: int, block: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.malloc(requested)
    assert (allocator.requested_bytes, allocator.allocated_bytes, allocator.reserved_bytes) == (
        requested,
        block,
        segment,
    )
    rest = [(segment - block, True)] if segment > block else []
    assert layout(allocator) == [[(block, False), *rest]]


@pytest.mark.parametrize("requested", [11 * MIB, 11 * MIB + 1, 12 * MIB - 1])
def test_a_large_block_keeps_slack_of_up_to_one_mebibyte(requested: int) -> None:
    allocator = CachingAllocator()
    allocator.malloc(requested)
    assert layout(allocator) == [[(12 * MIB, False)]]
    assert allocator.requested_bytes == requested


def test_nothing_is_allocated_for_zero_bytes() -> None:
    allocator = CachingAllocator()
    assert allocator.malloc(0) is None
    allocator.free(None)
    assert segments(allocator) == []


def test_wrong_calls_are_refused() -> None:
    allocator = CachingAllocator()
    with pytest.raises(ValueError, match="negative"):
        allocator.malloc(-1)
    first, second = allocator.malloc(1), allocator.malloc(1)
    allocator.free(second)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(second)
    allocator.free(first)  # joined with the rest, the second among it
    for block in (first, second):
        with pytest.raises(ValueError, match="not allocated"):
            allocator.free(block)
    allocator.empty_cache()
    for block in (first, second):
        with pytest.raises(ValueError, match="not allocated"):
            allocator.free(block)


def test_the_smallest_sufficient_block_is_taken_and_the_lowest_of_equals() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(size * MIB) for size in (14, 12, 16, 12)]
    for block in blocks:
        allocator.free(block)
    taken = allocator.malloc(11 * MIB + MIB // 2)
    assert taken is not None
    assert taken is blocks[1]
    assert allocator.malloc(12 * MIB) is blocks[3]
    assert allocator.malloc(12 * MIB) is blocks[0]
    assert allocator.reserved_bytes == 54 * MIB


def test_free_neighbours_are_joined() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(4 * MIB) for _ in range(5)]
    for index in (0, 2, 4):
        allocator.free(blocks[index])
    assert layout(allocator) == [
        [(4 * MIB, True), (4 * MIB, False), (4 * MIB, True), (4 * MIB, False), (4 * MIB, True)]
    ]
    allocator.free(blocks[1])
    assert layout(allocator) == [[(12 * MIB, True), (4 * MIB, False), (4 * MIB, True)]]
    allocator.free(blocks[3])
    assert layout(allocator) == [[(20 * MIB, True)]]


def test_streams_and_pools_share_no_segment() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(64 * MIB))
    allocator.malloc(MIB)
    allocator.malloc(MIB, stream=7)
    allocator.malloc(8 * MIB, stream=7)
    found = [
        (blocks[0].pool.is_small, sum(one.size for one in blocks) // MIB)
        for blocks in segments(allocator)
    ]
    assert found == [(False, 64), (True, 2), (True, 2), (False, 20)]


def test_a_segment_takes_the_lowest_free_addresses() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(size * MIB) for size in (30, 40, 50)]
    allocator.free(blocks[1])
    allocator.empty_cache()
    small, large, fits = (allocator.malloc(size * MIB) for size in (24, 42, 16))
    assert small is not None
    assert large is not None
    assert fits is not None
    assert small.address == blocks[1].address  # type: ignore[union-attr]
    assert fits.address == small.address + 24 * MIB
    assert large.address == blocks[2].address + 50 * MIB  # type: ignore[union-attr]


def test_peaks_begin_anew() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(4 * MIB), allocator.malloc(4 * MIB)]
    allocator.free(blocks[0])
    allocator.reset_peaks()
    assert (allocator.peak_allocated_bytes, allocator.peak_requested_bytes) == (4 * MIB, 4 * MIB)
    assert allocator.peak_reserved_bytes == 20 * MIB


@pytest.mark.parametrize(
    ("size", "divisions", "rounded"),
    [
        (1200 * 1024, 4, 1280 * 1024),
        (1280 * 1024, 4, 1280 * 1024),
        (MIB, 4, MIB),
        (MIB + 1, 4, MIB + MIB // 4),
        (MIB + 1, 1, MIB + 512),
        (2048, 4, 2048),
        (2049, 4, 2560),
        (2500, 8, 2560),  # 8 parts only above 4 KiB
        (5000, 8, 5120),
    ],
)
def test_rounding_to_parts_of_a_power_of_two(size: int, divisions: int, rounded: int) -> None:
    assert round_size(size, (divisions,) * 16) == rounded


def test_each_interval_has_its_own_number_of_parts() -> None:
    divisions = parse_settings("roundup_power2_divisions:[2:1,4:2,>:8]").roundup_power2_divisions
    assert round_size(3 * MIB - 100, divisions) == 3 * MIB
    assert round_size(5 * MIB, divisions) == 6 * MIB
    assert round_size(9 * MIB - 1, divisions) == 9 * MIB
    assert round_size(2**36 + 1, divisions) == 2**36 + 2**33


def test_a_large_segment_of_another_size() -> None:
    allocator = allocator_of("large_segment_size_mb:32")
    allocator.malloc(2 * MIB)
    allocator.malloc(10 * MIB)
    assert layout(allocator) == [[(2 * MIB, False), (10 * MIB, False), (20 * MIB, True)]]
    assert segment_size(2 * MIB, 32 * MIB) == 32 * MIB


def test_oversize_blocks_are_neither_split_nor_given_to_smaller_requests() -> None:
    allocator = allocator_of("max_split_size_mb:24")
    big = allocator.malloc(60 * MIB)
    allocator.free(big)
    assert allocator.malloc(23 * MIB) is not big
    assert allocator.malloc(41 * MIB) is big  # less than 20 MiB too large: given whole
    assert allocator.allocated_bytes == (24 + 60) * MIB
    allocator.free(big)
    assert allocator.malloc(40 * MIB) is not big  # 20 MiB too large
    assert allocator.reserved_bytes == (24 + 60 + 40) * MIB


def test_the_slack_of_oversize_blocks_is_settable() -> None:
    allocator = allocator_of("max_split_size_mb:24,max_non_split_rounding_mb:25")
    big = allocator.malloc(60 * MIB)
    allocator.free(big)
    assert allocator.malloc(36 * MIB) is big


def test_without_room_the_cache_is_released_and_the_request_tried_again() -> None:
    allocator = allocator_of(capacity_mib=100)
    kept = allocator.malloc(4 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(80 * MIB)
    assert layout(allocator) == [[(4 * MIB, False), (16 * MIB, True)], [(80 * MIB, False)]]
    with pytest.raises(
        OutOfMemory,
        match="24 MiB do not fit beside 100 MiB that are reserved, 84 MiB of them allocated",
    ) as caught:
        allocator.malloc(24 * MIB)
    assert (caught.value.requested_bytes, caught.value.reserved_bytes, caught.value.allocated_bytes) == (
        24 * MIB, 100 * MIB, 84 * MIB,
    )  # fmt: skip
    allocator.free(kept)


def test_oversize_blocks_are_released_first_and_only_as_many_as_needed() -> None:
    allocator = allocator_of("max_split_size_mb:20", capacity_mib=200)
    for block in [allocator.malloc(size * MIB) for size in (24, 40, 60)]:
        allocator.free(block)
    cached = allocator.malloc(12 * MIB)
    allocator.free(cached)
    allocator.malloc(
        100 * MIB
    )  # 136 of 200 MiB: no single block is of 100 MiB, so the largest two go
    assert layout(allocator) == [[(24 * MIB, True)], [(100 * MIB, False)], [(12 * MIB, True)]]


def test_a_fraction_of_the_device_is_a_limit_of_its_own() -> None:
    allocator = allocator_of(
        "per_process_memory_fraction:0.5", capacity_mib=90, device_bytes=100 * MIB
    )
    allocator.free(allocator.malloc(40 * MIB))
    with pytest.raises(OutOfMemory):
        allocator.malloc(51 * MIB)
    assert allocator.reserved_bytes == 0
    allocator.malloc(50 * MIB)


def test_giving_up_at_once_leaves_the_cache_alone() -> None:
    allocator = allocator_of(
        "per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True", capacity_mib=100
    )
    allocator.free(allocator.malloc(40 * MIB))
    with pytest.raises(OutOfMemory):
        allocator.malloc(50 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_a_fraction_needs_a_device() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"per_process_memory_fraction: needs the device's memory"
    ):
        CachingAllocator(AllocatorSettings(per_process_memory_fraction=0.5))


def test_old_cached_segments_are_collected_above_the_threshold() -> None:
    text = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9"
    allocator = allocator_of(text, capacity_mib=200)  # 180 MiB allowed, collection above 90
    blocks = [allocator.malloc(size * MIB) for size in (30, 40, 50)]
    for block in blocks:
        allocator.free(block)
    allocator.malloc(50 * MIB)
    allocator.malloc(
        60 * MIB
    )  # 120 MiB reserved: 30 and 40 are as old as their mean, both go, though 30 MiB would be enough
    assert layout(allocator) == [[(60 * MIB, False)], [(50 * MIB, False)]]
    assert allocator.peak_reserved_bytes == 120 * MIB
    without = allocator_of(
        "garbage_collection_threshold:0.5", capacity_mib=200
    )  # PyTorch: only with a fraction
    for block in [without.malloc(size * MIB) for size in (30, 40, 50)]:
        without.free(block)
    without.malloc(60 * MIB)
    assert without.reserved_bytes == 180 * MIB


def test_an_expandable_segment_grows_in_pages() -> None:
    allocator = allocator_of("expandable_segments:True")
    small, large = allocator.malloc(1), allocator.malloc(30 * MIB)
    assert small is not None
    assert large is not None
    assert layout(allocator) == [
        [(512, False), (2 * MIB - 512, True)],
        [(30 * MIB, False), (10 * MIB, True)],
    ]
    after = allocator.malloc(
        11 * MIB
    )  # begins in the rest of the last page: no slack, no new segment
    assert after is not None
    assert after.address == large.address + 30 * MIB
    assert allocator.reserved_bytes == (2 + 60) * MIB
    allocator.free(large)
    allocator.empty_cache()  # of the free 30 MiB one page is whole; and the last 19 MiB hold none
    assert allocator.reserved_bytes == (2 + 40) * MIB
    assert layout(allocator)[1] == [(10 * MIB, True), (11 * MIB, False), (19 * MIB, True)]
    allocator.free(small)
    allocator.free(after)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, segments(allocator)) == (0, [])


def test_the_end_that_can_grow_is_kept_for_large_requests() -> None:
    allocator = allocator_of("expandable_segments:True")
    hole, _ = allocator.malloc(30 * MIB), allocator.malloc(5 * MIB)
    allocator.free(hole)  # 30 MiB free in front, 5 MiB free at the end
    assert hole is not None
    found = allocator.malloc(4 * MIB)
    assert found is not None
    assert found.address == hole.address


def test_pages_that_were_mapped_in_vain_count() -> None:
    """A hole, a free block and the end of the segment are mapped one after the other, until memory
    runs out."""
    allocator = allocator_of("expandable_segments:True", capacity_mib=70)
    front, back = allocator.malloc(40 * MIB), allocator.malloc(20 * MIB)
    allocator.free(front)
    allocator.empty_cache()
    allocator.free(back)
    allocator.reset_peaks()
    assert allocator.reserved_bytes == 20 * MIB
    with pytest.raises(OutOfMemory):
        allocator.malloc(61 * MIB)
    assert (allocator.peak_reserved_bytes, allocator.reserved_bytes) == (60 * MIB, 0)


def test_more_than_the_address_range_is_out_of_memory() -> None:
    with pytest.raises(OutOfMemory):
        allocator_of("expandable_segments:True").malloc(2**43)
