"""Replays a stream of allocations and frees through the simulated allocator.

A stream is a sequence of integers: event ``e >= 0`` allocates storage ``e``, event ``e < 0`` frees
storage ``~e``, and :data:`EMPTY_CACHE` empties the cache.  The sizes of the storages are separate,
because one stream is replayed with the sizes of many batch sizes.

A script may repeat a pass hundreds of times (:class:`Loop`), such as the batches of a validation.
Once a pass ends in the state in which an earlier one ended, the passes that are left would repeat
what lies between, and are not replayed.

Without a limit, PyTorch reserves cache that it would release under pressure, so a job may succeed
with less.  :func:`smallest_limit` replays the events under limits to find how much less.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from gpumemnet.allocator.caching_allocator import CachingAllocator, OutOfMemory
from gpumemnet.allocator.segments import GONE, Block
from gpumemnet.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from gpumemnet.job.job_table import Indices
from gpumemnet.units import MIB

EMPTY_CACHE: Final = -(2**62)
"""The event of ``torch.cuda.empty_cache()``."""

Integers = Sequence[int] | Indices
_LEAST_PASSES: Final = 4
"""Fewer passes are replayed as fast without a comparison."""
_EMPTIES: Final = 2
_STEP_BYTES: Final = 2 * MIB
"""Precision of the smallest limit: the driver maps memory in pages of 2 MiB."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A number of passes with the same events: each numbers its storages higher than the pass
    before, by the same amount.

    Attributes:
        start: index of the first event.
        events: number of events of a pass.
        passes: number of passes.
        first: the first storage that the first pass allocates.
        storages: number of storages that a pass allocates.
        reach: a pass frees storages of earlier passes; the first of them was allocated so many
            storages before the pass.
    """

    start: int
    events: int
    passes: int
    first: int
    storages: int
    reach: int

    @property
    def end(self) -> int:
        """Index of the event behind the last pass."""
        return self.start + self.passes * self.events

    def alike(self, values: Indices) -> bool:
        """Whether ``values``, one for each storage of the stream, are the same in every pass, and
        in what a pass frees."""
        rows = values[self.first : self.first + self.passes * self.storages].reshape(
            self.passes, self.storages
        )
        return bool((rows == rows[0]).all())


def find_loops(events: Integers, passes: Sequence[int]) -> tuple[Loop, ...]:
    """Return the loops of a stream.

    Args:
        events: the stream; there are none if its storages are not numbered in the order of their
            allocation.
        passes: index of the event at which each pass begins; it ends where the next one begins.
    """
    if len(passes) <= _LEAST_PASSES:
        return ()
    order = np.asarray(events, dtype=np.int64)
    allocates = order >= 0
    if not np.array_equal(order[allocates], np.arange(np.count_nonzero(allocates))):
        return ()
    born = np.concatenate(([0], np.cumsum(allocates)))
    found: list[Loop] = []
    number = 0
    while number < len(passes) - 1:
        start, end = passes[number], passes[number + 1]
        own = _relative(order, start, end, int(born[start]))
        count = 1
        while number + count < len(passes) - 1:
            other, other_end = passes[number + count], passes[number + count + 1]
            if other_end - other != end - start:
                break
            if not np.array_equal(own, _relative(order, other, other_end, int(born[other]))):
                break
            count += 1
        if count >= _LEAST_PASSES and end > start:
            reach = max(0, -int(own[1].min()))
            found.append(
                Loop(
                    start, end - start, count, int(born[start]), int(born[end] - born[start]), reach
                )
            )
        number += count
    return tuple(found)


def signed_bytes(events: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return by how many bytes each event changes what is allocated."""
    return [0 if e == EMPTY_CACHE else sizes[e] if e >= 0 else -sizes[~e] for e in events]


def _relative(order: Indices, start: int, end: int, first: int) -> Indices:
    """The events of a pass, shape ``[2, events]``: what each does, and its storage, numbered from
    0; earlier ones are below."""
    window = order[start:end]
    empties, allocates = window == EMPTY_CACHE, window >= 0
    return np.stack(
        (
            np.where(empties, _EMPTIES, allocates),
            np.where(empties, 0, np.where(allocates, window, ~window) - first),
        )
    )


def replayable(
    loops: Sequence[Loop],
    sizes: Integers,
    streams: Sequence[int] | None,
    shrinkable: Collection[int],
    steady_from: int | None,
) -> list[Loop]:
    """Return those ``loops`` whose passes allocate the same sizes on the same streams; arguments as
    for ``replay``."""
    if not loops:
        return []
    values = [np.asarray(sizes, dtype=np.int64)]
    if streams:
        values.append(np.asarray(streams, dtype=np.int64))
    if shrinkable:
        shrinks = np.zeros(len(sizes), dtype=np.int64)
        shrinks[list(shrinkable)] = 1
        values.append(shrinks)
    return [
        loop
        for loop in loops
        if not (steady_from is not None and loop.start < steady_from < loop.end)
        and all(map(loop.alike, values))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The result of a replay.

    Attributes:
        allocated_bytes, requested_bytes, reserved_bytes: sizes of blocks, of requests and of
        segments after the last event. peak_allocated_bytes, peak_requested_bytes,
        peak_reserved_bytes: their maxima; in steady state only, if memory was given
            back to the driver before it began.
        startup_peak_reserved_bytes: maximum of the reserved bytes over all events.
        peak_allocated_event: index of the event that first reached the maximum; -1 if none
            allocates.
        reserved_curve_bytes: the reserved bytes after every event, shape ``[n_events]``, on
            request.
    """

    allocated_bytes: int
    requested_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_requested_bytes: int
    peak_reserved_bytes: int
    startup_peak_reserved_bytes: int
    peak_allocated_event: int
    reserved_curve_bytes: Indices | None = field(default=None, compare=False)


def replay(
    events: Integers,
    sizes: Integers,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    capacity_bytes: int | None = None,
    *,
    streams: Sequence[int] | None = None,
    shrinkable: Collection[int] = (),
    steady_from: int | None = None,
    loops: Sequence[Loop] = (),
    with_curve: bool = False,
) -> Replay:
    """Run ``events`` through a new allocator.

    Args:
        events: the stream; every storage is freed at most once between two of its allocations.
        sizes: bytes of every storage, by its number.
        settings: as ``PYTORCH_CUDA_ALLOC_CONF`` would set them.
        capacity_bytes: memory for segments; ``None`` for no limit.
        streams: the CUDA stream on which each storage is allocated, by the storage's number; stream
            0 by default. A freed block returns to the pool of its stream at once.
        shrinkable: storages that take what is left: their size is halved until they fit.  cuDNN's
            search for an algorithm does so with its workspace, and a smaller plan stands in for one
            whose workspace does not fit (``aten/src/ATen/native/cudnn/Conv_v8.cpp``).
        steady_from: index of the event at which the steady state begins; by default all events
            count.
        loops: where ``events`` repeats passes; the result is the same without.
        with_curve: whether to return the reserved bytes after every event.

    Raises:
        OutOfMemory: the stream does not fit; its ``event`` is the index.
        ValueError: an event allocates a storage that is allocated, or frees one that is not.
    """
    if capacity_bytes is None:  # there is no share of an unlimited device
        settings = replace(settings, per_process_memory_fraction=1.0)
    allocator = CachingAllocator(settings, capacity_bytes)
    startup_peak_reserved = 0
    malloc, free = allocator.malloc, allocator.free
    order, bytes_of = _plain(events), _plain(sizes)
    stream_of = streams or [0] * len(bytes_of)
    absent = _absent()
    blocks: list[Block | None] = [absent] * len(bytes_of)
    reserved_curve: list[int] = []
    index = peak_allocated_event = -1
    peak_allocated = 0
    known_loops = [] if with_curve else replayable(loops, sizes, streams, shrinkable, steady_from)
    try:
        for start, end in _stretches(len(order), known_loops, allocator, blocks, absent):
            for index, event in enumerate(order[start:end], start):
                if (
                    index == steady_from
                    and allocator.reserved_bytes < allocator.peak_reserved_bytes
                ):
                    startup_peak_reserved = allocator.peak_reserved_bytes
                    allocator.reset_peaks()
                    peak_allocated = allocator.allocated_bytes
                    peak_allocated_event = index - 1
                if event < 0:
                    if event == EMPTY_CACHE:
                        allocator.empty_cache()
                    else:
                        free(blocks[~event])
                        blocks[~event] = absent
                else:
                    if blocks[event] is not absent:
                        raise ValueError("it is allocated already")
                    if event in shrinkable:
                        blocks[event] = _malloc_what_fits(
                            allocator, bytes_of[event], stream_of[event]
                        )
                    else:
                        blocks[event] = malloc(bytes_of[event], stream_of[event])
                    if allocator.peak_allocated_bytes > peak_allocated:
                        peak_allocated = allocator.peak_allocated_bytes
                        peak_allocated_event = index
                if with_curve:
                    reserved_curve.append(allocator.reserved_bytes)
    except OutOfMemory as error:
        error.event = index
        raise
    except ValueError as error:
        raise ValueError(f"event {index} of the stream: {error}") from None
    return Replay(
        allocated_bytes=allocator.allocated_bytes,
        requested_bytes=allocator.requested_bytes,
        reserved_bytes=allocator.reserved_bytes,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_requested_bytes=allocator.peak_requested_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        startup_peak_reserved_bytes=max(startup_peak_reserved, allocator.peak_reserved_bytes),
        peak_allocated_event=peak_allocated_event,
        reserved_curve_bytes=np.array(reserved_curve, dtype=np.int64) if with_curve else None,
    )


def _stretches(
    events: int,
    loops: Sequence[Loop],
    allocator: CachingAllocator,
    blocks: list[Block | None],
    absent: Block,
) -> Iterator[tuple[int, int]]:
    """Yield the ranges of events to replay: all of them, but for passes that would repeat the one
    before.

    Between two ranges ``allocator`` and ``blocks`` are brought to where all the events so far would
    have left them.
    """
    done = 0
    for loop in loops:
        yield done, loop.start
        number = 0
        seen: dict[Hashable, int] = {}
        while number < loop.passes:
            first = loop.first + number * loop.storages
            carried = blocks[first - loop.reach : first]
            places = tuple(
                None if block is absent or block is None else block.place for block in carried
            )
            free = allocator.state()
            period = number - seen.setdefault((free, places), number)
            if period and free is not None:  # double buffers change places: their period is 2
                skipped = (loop.passes - number) // period * period
                kept = [
                    block if block is None else absent
                    for block in blocks[first - loop.storages : first]
                ]
                blocks[first : first + skipped * loop.storages] = kept * skipped
                blocks[first - loop.reach : first] = [
                    block if block is None else absent for block in carried
                ]
                end = first + skipped * loop.storages
                blocks[end - loop.reach : end] = carried
                number += skipped
                seen.clear()
                continue
            yield loop.start + number * loop.events, loop.start + (number + 1) * loop.events
            number += 1
        done = loop.end
    yield done, events


def _malloc_what_fits(allocator: CachingAllocator, size_bytes: int, stream: int) -> Block | None:
    """Allocate the largest of ``size_bytes``, a half of it, a quarter of it … that fits; ``None``
    if nothing does."""
    while size_bytes:
        try:
            return allocator.malloc(size_bytes, stream)
        except OutOfMemory:
            size_bytes //= 2
    return None


def _plain(numbers: Integers) -> Sequence[int]:
    """Python integers: numpy's are slow one by one, and overflow in the keys of blocks."""
    return numbers.tolist() if isinstance(numbers, np.ndarray) else numbers


def _absent() -> Block:
    """Placeholder for a storage that is not allocated: freeing it raises."""
    block = Block.__new__(Block)
    block.key = GONE
    return block


def smallest_limit(
    events: Integers,
    sizes: Integers,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    *,
    streams: Sequence[int] | None = None,
    loops: Sequence[Loop] = (),
) -> int:
    """Return the smallest capacity, in whole steps, under which ``events`` succeed; 0 if they need
    no memory.

    Bisection finds it: the stream succeeds with the answer and fails with one step less.  Smaller
    capacities may happen to work too, because the allocator then uses other blocks; they are not
    searched.

    Args:
        events, sizes, settings, streams, loops: as for
        :func:`~gpumemnet.allocator.replay.replay`.

    Raises:
        ValueError: the stream is malformed.
    """

    run = partial(
        replay,
        events,
        sizes,
        settings,
        streams=streams,
        loops=loops,
    )

    def runs(steps: int) -> bool:
        try:
            run(capacity_bytes=steps * _STEP_BYTES)
        except OutOfMemory:
            return False
        return True

    unlimited = run()
    works = -(-unlimited.peak_reserved_bytes // _STEP_BYTES)
    fails = (
        -(-unlimited.peak_requested_bytes // _STEP_BYTES) - 1
    )  # all requests alive at one moment must be reserved
    # The range of an expandable segment ends with the device, and may be full of holes.
    while works and settings != DEFAULT_SETTINGS and not runs(works):
        fails, works = works, 2 * works
    while works - fails > 1:
        middle = (works + fails) // 2
        fails, works = (fails, middle) if runs(middle) else (middle, works)
    return works * _STEP_BYTES
