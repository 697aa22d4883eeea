"""The memory of a recorded run on one GPU: replayed through the allocator, with the CUDA context added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from gpumemnet.allocator import EMPTY_CACHE, AllocatorSettings, OutOfMemory, replay, smallest_limit
from gpumemnet.gpu.catalogue import ContextEstimate, DeviceProfile
from gpumemnet.gpu.mig import available_mib
from gpumemnet.tracing.non_allocator_memory import non_allocator_memory
from gpumemnet.tracing.replay import Replayed, replayed
from gpumemnet.tracing.report.answer import Curve
from gpumemnet.tracing.safe_bytes import allocator_bytes, safe_bytes
from gpumemnet.tracing.timeline import MEMORY_CLASSES, LongRun, Timeline, repeated
from gpumemnet.units import MIB


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """The memory of a run.

    Attributes:
        run: the replay with the expected sizes.
        expected_bytes: reserved bytes and the memory outside the allocator.
        safe_bytes: the upper bound.
        startup_peak_bytes: the same as ``expected_bytes`` for the largest amount that is reserved at any moment.
    """

    run: Replayed
    expected_bytes: int
    safe_bytes: int
    startup_peak_bytes: int


def memory_of(
    run: LongRun, sizes: Sequence[int], bounds: Sequence[int], device: DeviceProfile, settings: AllocatorSettings
) -> Memory:
    """Return the memory of ``run`` on ``device``.

    Args:
        run: the run, its last step repeated.
        sizes, bounds: expected and largest bytes of each storage of the run before its last step was repeated.
        device: the GPU.
        settings: settings of the allocator.
    """
    other = non_allocator_memory(device, run.timeline.groups)
    usable = available_mib(device) * MIB
    expected = _expected(run.timeline, [sizes[origin] for origin in run.origins], settings, usable - other.expected_bytes)
    safe = _safe_bytes(run, bounds, expected.reserved_bytes, other, settings, usable)
    expected_bytes = expected.reserved_bytes + other.expected_bytes
    startup_peak_bytes = expected.startup_peak_reserved_bytes + other.expected_bytes
    return Memory(expected, expected_bytes, max(safe, expected_bytes), startup_peak_bytes)


def _expected(timeline: Timeline, sizes: Sequence[int], settings: AllocatorSettings, capacity_bytes: int) -> Replayed:
    """Replay within the capacity, where the allocator gives cached segments back; without a limit if that does not fit."""
    try:
        return replayed(timeline, sizes, settings, max(capacity_bytes, 0))
    except OutOfMemory:
        return replayed(timeline, sizes, settings)


def _safe_bytes(
    run: LongRun,
    bounds: Sequence[int],
    expected_reserved_bytes: int,
    other: ContextEstimate,
    settings: AllocatorSettings,
    usable_bytes: int,
) -> int:
    """Return the bound on the memory of the process; at most the usable memory if the run fits with all sizes at their bounds."""
    timeline = run.timeline
    sizes = [0 if timeline.storages[index].is_search else bounds[origin] for index, origin in enumerate(run.origins)]
    run_within = partial(replay, timeline.events, sizes, settings, streams=timeline.streams)
    safe = safe_bytes(max(run_within().peak_reserved_bytes, expected_reserved_bytes), other, timeline.convolves)
    if safe <= usable_bytes:
        return safe
    try:
        run_within(capacity_bytes=max(allocator_bytes(usable_bytes, other, timeline.convolves), 0))
    except OutOfMemory:
        return safe
    return usable_bytes


def steady_memory(timeline: Timeline, device: DeviceProfile, settings: AllocatorSettings | None = None) -> Memory:
    """Return the memory of ``timeline`` on ``device`` in steady state, with its last step repeated."""
    return memory_of(repeated(timeline), timeline.sizes, timeline.bounds, device, settings or AllocatorSettings())


def smallest_bytes(run: LongRun, sizes: Sequence[int], device: DeviceProfile, settings: AllocatorSettings) -> int:
    """Return the smallest memory in which the run succeeds, context included; cached blocks are released on demand."""
    timeline = run.timeline
    needed = [0 if timeline.storages[index].is_search else sizes[origin] for index, origin in enumerate(run.origins)]
    within = smallest_limit(timeline.events, needed, settings, streams=timeline.streams)
    return within + non_allocator_memory(device, timeline.groups).expected_bytes


def curve_of(run: LongRun, sizes: Sequence[int], settings: AllocatorSettings, capacity_bytes: int | None) -> Curve:
    """Return the memory over the last step of ``run``, within the capacity that its replay had."""
    timeline = run.timeline
    start, end = timeline.step_starts[-2], timeline.step_starts[-1]
    replay_sizes = [sizes[origin] for origin in run.origins]
    reserved = replay(
        timeline.events,
        replay_sizes,
        settings,
        capacity_bytes,
        streams=timeline.streams,
        shrinkable=timeline.searches,
        with_curves=True,
    ).reserved_curve_bytes
    assert reserved is not None
    row_of = {name: row for row, name in enumerate(MEMORY_CLASSES)}
    rows: list[list[int]] = [[] for _ in MEMORY_CLASSES]
    live = [0] * len(MEMORY_CLASSES)
    for index, event in enumerate(timeline.events[:end]):
        if event != EMPTY_CACHE:
            storage = event if event >= 0 else ~event
            size = replay_sizes[storage]
            live[row_of[timeline.storages[storage].memory_class]] += size if event >= 0 else -size
        if index >= start:
            for row, amount in zip(rows, live, strict=True):
                row.append(amount)
    return Curve(
        classes=MEMORY_CLASSES,
        bytes_by_class=tuple(map(tuple, rows)),
        reserved_bytes=tuple(int(value) for value in reserved[start:end]),
        phases=tuple((phase.name, phase.start - start) for phase in timeline.phases if start <= phase.start < end),
    )
