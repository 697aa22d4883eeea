"""Replays: peaks and where they are, curves, streams that are wrong or too large, and the smallest
limit."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given

from gpumemnet.allocator import (
    EMPTY_CACHE,
    AllocatorSettings,
    OutOfMemory,
    Replay,
    replay,
    smallest_limit,
)
from tests.gpumemnet.allocator.streams import MIB, event_streams, unlimited_settings

# Storages 0 and 1 are alive together, then 2 reuses 1's place; 3 is empty.
EVENTS = [0, 1, ~1, 2, ~0, 3, ~3, ~2]
SIZES = [4 * MIB, 30 * MIB + 1, 24 * MIB, 0]


def test_a_replay_by_hand() -> None:
    assert replay(EVENTS, SIZES) == Replay(
        allocated_bytes=0,
        requested_bytes=0,
        reserved_bytes=52 * MIB,
        peak_allocated_bytes=4 * MIB + 30 * MIB + 512,
        peak_requested_bytes=34 * MIB + 1,
        peak_reserved_bytes=52 * MIB,
        startup_peak_reserved_bytes=52 * MIB,
        peak_allocated_event=1,
    )


def test_the_curve_has_a_value_for_every_event() -> None:
    found = replay(np.array(EVENTS), np.array(SIZES), with_curve=True).reserved_curve_bytes
    assert found is not None
    assert found.tolist() == [20 * MIB] + [52 * MIB] * 7


def test_memory_given_back_before_the_steady_state_counts_for_the_start_up_only() -> None:
    # Storage 1 is a search of the first step; the second step begins with event 5.
    events = [0, 1, ~1, EMPTY_CACHE, ~0, 0, 2, ~2, ~0]
    found = replay(events, SIZES, steady_from=5)
    assert found.startup_peak_reserved_bytes == (20 + 32) * MIB
    assert found.peak_reserved_bytes == (20 + 24) * MIB
    assert found.peak_allocated_bytes == (4 + 24) * MIB
    assert found.peak_allocated_event == 6
    kept = [event for event in events if event != EMPTY_CACHE]
    assert replay(kept, SIZES, steady_from=4) == replay(
        kept, SIZES
    )  # nothing is given back: all of the run counts


@pytest.mark.parametrize(("capacity_mib", "got_mib"), [(52, 32), (36, 16), (20, 0)])
def test_a_shrinkable_storage_takes_what_is_left(capacity_mib: int, got_mib: int) -> None:
    events, sizes = [0, 1, ~1], [20 * MIB, 32 * MIB]
    found = replay(events, sizes, capacity_bytes=capacity_mib * MIB, shrinkable={1})
    assert found.peak_allocated_bytes == (20 + got_mib) * MIB
    if got_mib < 32:
        with pytest.raises(OutOfMemory):
            replay(events, sizes, capacity_bytes=capacity_mib * MIB)


def test_the_same_stream_with_the_sizes_of_another_batch() -> None:
    doubled = replay(EVENTS, [2 * size for size in SIZES])
    assert doubled.peak_requested_bytes == 2 * replay(EVENTS, SIZES).peak_requested_bytes


@pytest.mark.parametrize(
    ("events", "sentence"),
    [
        ([0, ~0, ~0], "event 2 of the stream: this block is not allocated"),
        (
            [0, ~0, 1, ~0],
            "event 3 of the stream: this block is not allocated",
        ),  # though 1 lies where 0 lay
        ([~1], "event 0 of the stream: this block is not allocated"),
        ([0, 1, 0], "event 2 of the stream: it is allocated already"),
    ],
)
def test_a_malformed_stream_is_refused(events: list[int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replay(events, [MIB, MIB])


def test_a_storage_can_come_back() -> None:
    assert replay([0, ~0, 0], [MIB]).allocated_bytes == MIB


def test_out_of_memory_says_where() -> None:
    with pytest.raises(OutOfMemory) as caught:
        replay(EVENTS, SIZES, capacity_bytes=50 * MIB)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.event, again.requested_bytes) == (str(caught.value), 1, 30 * MIB + 1)


def test_the_smallest_limit_by_hand() -> None:
    events = [
        0,
        ~0,
        1,
        ~1,
        2,
    ]  # three that never live together, and of which none fits another's segment
    sizes = [30 * MIB, 40 * MIB, 50 * MIB]
    assert replay(events, sizes).peak_reserved_bytes == 120 * MIB
    assert smallest_limit(events, sizes) == 50 * MIB
    assert smallest_limit([], []) == 0


def test_a_range_with_holes_needs_more_than_what_was_reserved_without_a_limit() -> None:
    events = [0, 1, ~0, 2, 3, ~1, 4]
    sizes = [40894464, 10485759, 1048577, 10485759, 41943040]
    settings = AllocatorSettings(expandable_segments=True)
    limit = smallest_limit(events, sizes, settings)
    assert limit > replay(events, sizes, settings).peak_reserved_bytes
    assert replay(events, sizes, settings, limit).peak_reserved_bytes <= limit
    with pytest.raises(OutOfMemory):
        replay(events, sizes, settings, limit - 2 * MIB)


@given(event_streams(max_storages=25), unlimited_settings)
def test_one_step_less_than_the_smallest_limit_fails(
    stream: tuple[list[int], list[int]], chosen: AllocatorSettings
) -> None:
    limit = smallest_limit(*stream, chosen)
    unlimited = replay(*stream, chosen)
    limited = replay(*stream, chosen, limit)
    assert limited.peak_reserved_bytes <= limit
    assert (
        chosen.expandable_segments
        or limit <= -(-unlimited.peak_reserved_bytes // (2 * MIB)) * 2 * MIB
    )
    assert limit >= limited.peak_requested_bytes == unlimited.peak_requested_bytes
    if limit:
        with pytest.raises(OutOfMemory):
            replay(*stream, chosen, limit - 2 * MIB)


def test_streams_have_pools_of_their_own() -> None:
    events, sizes = [0, ~0, 1, ~1], [30 * MIB, 30 * MIB]
    assert replay(events, sizes).peak_reserved_bytes == 30 * MIB
    assert replay(events, sizes, streams=[3, 3]).peak_reserved_bytes == 30 * MIB
    assert replay(events, sizes, streams=[0, 1]).peak_reserved_bytes == 60 * MIB
    assert (
        smallest_limit(events, sizes, streams=[0, 1]) == 30 * MIB
    )  # what one stream has cached is released for another
