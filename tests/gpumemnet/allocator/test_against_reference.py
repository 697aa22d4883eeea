"""The simulator against a slow reference that was written from the rules alone: every address,
every statistic, every event."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemnet.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from tests.gpumemnet.allocator.reference import (
    FREE,
    Piece,
    Range,
    ReferenceAllocator,
    ReferenceOutOfMemory,
)
from tests.gpumemnet.allocator.streams import (
    EDGES,
    MIB,
    SETTINGS,
    segments,
    settings_and_capacity,
    sizes,
)


class Both:
    """The two allocators, given the same requests."""

    def __init__(
        self, settings: AllocatorSettings, capacity: int | None, device: int | None = None
    ) -> None:
        self.simulator = CachingAllocator(settings, capacity, device_bytes=device)
        self.reference = ReferenceAllocator(settings, capacity, device)
        self.live: list[tuple[object, tuple[Range, Piece]]] = []
        self.peaks = [0, 0, 0]

    def malloc(self, size: int, stream: int) -> None:
        try:
            expected = self.reference.malloc(size, stream)
        except ReferenceOutOfMemory:
            with pytest.raises(OutOfMemory) as caught:
                self.simulator.malloc(size, stream)
            assert caught.value.requested_bytes == size
            assert caught.value.reserved_bytes == self.reference.reserved
        else:
            block = self.simulator.malloc(size, stream)
            assert block is not None
            assert (block.address, block.size) == (
                expected[0].address_of(expected[1]),
                expected[1].size,
            )
            self.live.append((block, expected))
        self.check()

    def free(self, index: int) -> None:
        block, expected = self.live.pop(index)
        self.simulator.free(block)  # type: ignore[arg-type]
        self.reference.free(*expected)
        self.check()

    def empty_cache(self) -> None:
        self.simulator.empty_cache()
        self.reference.empty_cache()
        self.check()

    def check(self) -> None:
        found, expected = self.simulator, self.reference
        now = [expected.allocated, expected.requested, expected.reserved]
        assert now == [found.allocated_bytes, found.requested_bytes, found.reserved_bytes]
        self.peaks = [max(pair) for pair in zip(self.peaks, now, strict=True)]
        assert self.peaks[:2] == [found.peak_allocated_bytes, found.peak_requested_bytes]
        assert (
            self.peaks[2] <= found.peak_reserved_bytes
        )  # within one request, memory may come before it goes

    def check_blocks(self) -> None:
        found = [
            (one.address, one.size, bool(one.key), 0 if one.key else one.requested_bytes)
            for blocks in segments(self.simulator)
            for one in blocks
        ]
        expected = [
            (one.address_of(piece), piece.size, piece.state == FREE, piece.requested)
            for one in self.reference.ranges
            for piece in one.pieces
            if piece.state != "unmapped"
        ]
        assert found == sorted(expected)


request = st.tuples(st.sampled_from("aaaaffffe"), sizes, st.integers(0, 1), st.integers(0, 10**6))
requests = st.integers(0, 100).flatmap(
    lambda length: st.lists(request, min_size=length, max_size=length)
)


@given(requests, settings_and_capacity())
def test_same_blocks_as_the_reference(
    requests: list[tuple[str, int, int, int]], chosen: tuple[AllocatorSettings, int | None]
) -> None:
    both = Both(*chosen)
    for action, size, stream, which in requests:
        if action == "a":
            both.malloc(size, stream)
        elif action == "e" and which % 4 == 0:
            both.empty_cache()
        elif both.live:
            both.free(which % len(both.live))
    both.check_blocks()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("capacity_mib", [None, 400, 150])
def test_same_blocks_over_a_long_stream(name: str, capacity_mib: int | None) -> None:
    """Long streams make old cached segments, holes in expandable segments and retries that short
    ones do not."""
    generator = random.Random(f"{name} {capacity_mib}")
    both = Both(
        SETTINGS[name],
        None if capacity_mib is None else capacity_mib * MIB,
        (capacity_mib or 400) * MIB,
    )
    for step in range(1500):
        wanted = 40 if step // 150 % 2 else 10  # grow, then shrink, and so on
        if both.live and generator.random() * 2 * wanted < len(both.live):
            both.free(generator.randrange(len(both.live)))
        else:
            size = (
                generator.choice(EDGES)
                if generator.random() < 0.3
                else int(2 ** generator.uniform(0, 26))
            )
            both.malloc(size, int(generator.random() < 0.2))
        if generator.random() < 0.003:
            both.empty_cache()
        if step % 100 == 0:
            both.check_blocks()
    both.check_blocks()
