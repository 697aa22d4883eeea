"""Requests and settings that the allocator's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Final

from hypothesis import strategies as st

from gpumemnet.allocator import AllocatorSettings, CachingAllocator, parse_settings
from gpumemnet.allocator.segments import Block

MIB: Final = 2**20

EDGES: Final = [
    1, 511, 512, 513, 1024, MIB - 512, MIB - 1, MIB, MIB + 1, 2 * MIB, 2 * MIB + 1, 10 * MIB - 1, 10 * MIB, 10 * MIB + 1,
    20 * MIB - 512, 20 * MIB, 20 * MIB + 1, 21 * MIB, 39 * MIB, 40 * MIB, 64 * MIB,
]  # fmt: skip

sizes = st.one_of(
    st.sampled_from(EDGES),
    st.integers(1, 4096),
    st.integers(1, MIB),
    st.integers(MIB, 12 * MIB),
    st.integers(10 * MIB, 64 * MIB),
)

SETTINGS: Final = {
    text or "default": parse_settings(text)
    for text in (
        "",
        "expandable_segments:True",
        "max_split_size_mb:20",
        "max_split_size_mb:24,max_non_split_rounding_mb:21",
        "roundup_power2_divisions:4",
        "roundup_power2_divisions:[1:8,4:2,16:1,>:16]",
        "large_segment_size_mb:11",
        "large_segment_size_mb:64,expandable_segments:True",
        "expandable_segments:True,max_split_size_mb:20,roundup_power2_divisions:2",
        "per_process_memory_fraction:0.75",
        "per_process_memory_fraction:0.75,throw_on_cudamalloc_oom:True",
        "per_process_memory_fraction:0.9,garbage_collection_threshold:0.3",
        "per_process_memory_fraction:0.9,garbage_collection_threshold:0.5,max_split_size_mb:22",
        "per_process_memory_fraction:0.8,expandable_segments:True,garbage_collection_threshold:0.5",
    )
}

limited_settings = st.sampled_from(list(SETTINGS.values()))
unlimited_settings = limited_settings.map(
    lambda settings: replace(settings, per_process_memory_fraction=1.0)
)


@st.composite
def settings_and_capacity(draw: st.DrawFn) -> tuple[AllocatorSettings, int | None]:
    """Settings with a capacity that is often too small, sometimes none."""
    capacity = draw(st.one_of(st.none(), st.integers(1, 400).map(lambda mib: mib * MIB)))
    return draw(unlimited_settings if capacity is None else limited_settings), capacity


@st.composite
def event_streams(draw: st.DrawFn, max_storages: int = 60) -> tuple[list[int], list[int]]:
    """Events and sizes as ``replay`` takes them, zero-byte storages included; some storages are
    never freed."""
    length = draw(st.integers(0, max_storages))
    storages = draw(st.lists(st.one_of(st.just(0), sizes), min_size=length, max_size=length))
    events: list[int] = []
    live: list[int] = []
    for number in range(len(storages)):
        events.append(number)
        live.append(number)
        for _ in range(draw(st.integers(0, 2))):
            if live:
                events.append(~live.pop(draw(st.integers(0, len(live) - 1))))
    return events, storages


def segments(allocator: CachingAllocator) -> list[list[Block]]:
    """The mapped blocks of each segment, by address; of an expandable one, of each piece."""
    firsts = [
        first
        for pools in allocator._pools.values()
        for pool in pools
        for first in pool.segments.values()
    ]
    found = [
        list(blocks)
        for first in firsts
        for is_mapped, blocks in groupby(_from(first, allocator._edge), lambda block: block.mapped)
        if is_mapped
    ]
    return sorted(found, key=lambda blocks: blocks[0].address)


def _from(block: Block, edge: Block) -> Iterator[Block]:
    while block is not edge:
        yield block
        block = block.next
