"""The state of the allocator: segments with their blocks, and counters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpumemnet.allocator.blocks import Block, Pool


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
