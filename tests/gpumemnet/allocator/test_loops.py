"""Passes that a stream repeats: what is not replayed would have changed nothing."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemnet.allocator import (
    EMPTY_CACHE,
    AllocatorSettings,
    CachingAllocator,
    OutOfMemory,
    Replay,
    replay,
)
from gpumemnet.allocator.replay import Loop, find_loops
from tests.gpumemnet.allocator.streams import MIB, settings_and_capacity, sizes

PASS = [20 * MIB, 3 * MIB, 600]


def double_buffered(passes: int) -> tuple[list[int], list[int], list[int]]:
    """Events, sizes and beginnings of passes that keep their first storage until the next pass has
    allocated its own."""
    events: list[int] = []
    starts = []
    for number in range(passes):
        first = 3 * number
        starts.append(len(events))
        events += [
            first,
            *([~(first - 3)] if number else []),
            first + 1,
            first + 2,
            ~(first + 1),
            ~(first + 2),
        ]
    return events, PASS * passes, starts


def test_a_loop_by_hand() -> None:
    events, _, starts = double_buffered(100)
    # The first pass frees nothing of an earlier one; where the last pass ends, nothing says.
    assert find_loops(events, starts) == (
        Loop(start=5, events=6, passes=98, first=3, storages=3, reach=3),
    )
    assert find_loops(events, starts[:4]) == ()
    assert (
        find_loops([event + 1 if event >= 0 else event - 1 for event in events], starts) == ()
    )  # numbered in another way


def test_a_hundred_passes_cost_a_few() -> None:
    events, sizes_of, starts = double_buffered(100)
    with patch.object(
        CachingAllocator, "malloc", autospec=True, side_effect=CachingAllocator.malloc
    ) as malloc:
        short = replay(events, sizes_of, loops=find_loops(events, starts))
    assert malloc.call_count < 30
    assert short == replay(events, sizes_of)


@st.composite
def repeated_passes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """A few storages that stay, equal passes that keep some storages for one or two passes more,
    and a release of the rest."""
    steady = draw(st.lists(sizes, max_size=4))
    own = draw(st.lists(st.one_of(st.just(0), sizes), min_size=1, max_size=6))
    kept_passes = [draw(st.integers(0, 3)) for _ in own]  # 3: for ever
    order = draw(st.permutations(range(len(own))))
    empties = draw(st.booleans())
    passes = draw(st.integers(5, 14))
    events = list(range(len(steady)))
    starts: list[int] = []
    is_late = draw(st.booleans())
    late = {len(steady) - 1} if steady and is_late else set[int]()
    live: set[int] = set(range(len(steady)))
    for number in range(passes):
        first = len(steady) + number * len(own)
        starts.append(len(events))
        events += [first + index for index in range(len(own))]
        live |= {first + index for index in range(len(own))}
        for index in order:
            storage = first + index - kept_passes[index] * len(own)
            if storage in live and storage >= len(steady) and kept_passes[index] < 3:
                events.append(~storage)
                live.remove(storage)
        if empties:
            events.append(EMPTY_CACHE)
    events += [~storage for storage in sorted(live - late)]
    return events, steady + own * passes, starts


@given(repeated_passes(), settings_and_capacity(), st.data())
def test_loops_change_no_result(
    stream: tuple[list[int], list[int], list[int]],
    chosen: tuple[AllocatorSettings, int | None],
    data: st.DataObject,
) -> None:
    events, sizes_of, starts = stream
    steady_from = data.draw(st.one_of(st.none(), st.integers(0, len(events) - 1)))

    def outcome(loops: tuple[Loop, ...]) -> Replay | str:
        try:
            return replay(events, sizes_of, *chosen, steady_from=steady_from, loops=loops)
        except OutOfMemory as error:
            return f"{error} {error.event}"

    assert outcome(find_loops(events, starts)) == outcome(())


def test_passes_of_other_sizes_are_replayed() -> None:
    events, sizes_of, starts = double_buffered(20)
    sizes_of[30] = 90 * MIB
    found = replay(events, sizes_of, loops=find_loops(events, starts))
    assert found == replay(events, sizes_of)
    assert found.peak_requested_bytes == pytest.approx(110 * MIB, abs=MIB)
