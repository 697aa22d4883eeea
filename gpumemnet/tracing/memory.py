"""The memory of a recorded run on one GPU: replayed through the allocator, with the CUDA context added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpumemnet.allocator import EMPTY_CACHE, AllocatorSettings, replay, smallest_limit
from gpumemnet.gpu.catalogue import DeviceProfile
from gpumemnet.tracing.non_allocator_memory import non_allocator_memory
from gpumemnet.tracing.replay import Replayed, replayed
from gpumemnet.tracing.report.answer import Curve
from gpumemnet.tracing.safe_bytes import safe_bytes
from gpumemnet.tracing.timeline import MEMORY_CLASSES, LongRun, Timeline, repeated


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """The memory of a run.

    Attributes:
        run: the replay with the expected sizes.
        expected_bytes: reserved bytes and the memory outside the allocator.
        safe_bytes: the upper bound.
    """

    run: Replayed
    expected_bytes: int
    safe_bytes: int


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
    expected = replayed(run.timeline, [sizes[origin] for origin in run.origins], settings)
    bound = expected.reserved_bytes
    if bounds != sizes:
        most = replay(run.timeline.events, [bounds[origin] for origin in run.origins], settings, streams=run.timeline.streams)
        bound = max(bound, most.peak_reserved_bytes)
    safe = safe_bytes(bound, other, run.timeline.convolves)
    return Memory(expected, expected.reserved_bytes + other.expected_bytes, safe)


def steady_memory(timeline: Timeline, device: DeviceProfile, settings: AllocatorSettings | None = None) -> Memory:
    """Return the memory of ``timeline`` on ``device`` in steady state, with its last step repeated."""
    return memory_of(repeated(timeline), timeline.sizes, timeline.bounds, device, settings or AllocatorSettings())


def smallest_bytes(run: LongRun, sizes: Sequence[int], device: DeviceProfile, settings: AllocatorSettings) -> int:
    """Return the smallest memory in which the run succeeds, context included; cached blocks are released on demand."""
    timeline = run.timeline
    within = smallest_limit(timeline.events, [sizes[origin] for origin in run.origins], settings, streams=timeline.streams)
    return within + non_allocator_memory(device, timeline.groups).expected_bytes


def curve_of(run: LongRun, sizes: Sequence[int], settings: AllocatorSettings) -> Curve:
    """Return the memory over the last step of ``run``."""
    timeline = run.timeline
    start, end = timeline.step_starts[-2], timeline.step_starts[-1]
    replay_sizes = [sizes[origin] for origin in run.origins]
    reserved = replay(timeline.events, replay_sizes, settings, streams=timeline.streams, with_curves=True).reserved_curve_bytes
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
