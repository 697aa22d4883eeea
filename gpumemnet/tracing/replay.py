"""Replays a timeline through the caching allocator: the reserved bytes at the peak, and their parts.

The parts are those at the moment of the largest allocation.  The allocator keeps what it has reserved, so the reserved bytes are
largest then.  The start-up may take more: cuDNN's search for algorithms, or a program that empties the cache before it trains.
Reserved bytes that no tensor holds are fragmentation: rounding, and cached blocks that no request fits into.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpumemnet.allocator import EMPTY_CACHE, AllocatorSettings, replay
from gpumemnet.tracing.timeline import MEMORY_CLASSES, Timeline


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment at which the allocated bytes reach their maximum.

    Attributes:
        event: index of the event.
        phase: ``build``, ``forward``, ``backward`` or ``optimizer``.
        step: optimizer step, from 1.
        operator: the operator that allocated the memory.
        module: dotted path of the module that it belongs to.
        modules: ``(module, bytes)``, largest first.
    """

    event: int
    phase: str
    step: int
    operator: str
    module: str
    modules: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The memory of a run.

    Attributes:
        reserved_bytes, allocated_bytes, requested_bytes: the allocator's maxima; those of the steady state, if the run gave
            memory back to the driver before its second step.
        startup_peak_reserved_bytes: maximum of the reserved bytes over the run.
        capacity_bytes: memory that the allocator could reserve; ``None`` for no limit.
        parts: bytes of each memory class at the peak, and ``fragmentation``; they add up to ``reserved_bytes``.
        peak: the peak.
    """

    reserved_bytes: int
    allocated_bytes: int
    requested_bytes: int
    startup_peak_reserved_bytes: int
    capacity_bytes: int | None
    parts: dict[str, int]
    peak: Peak


def replayed(
    timeline: Timeline, sizes: Sequence[int], settings: AllocatorSettings, capacity_bytes: int | None = None
) -> Replayed:
    """Replay ``timeline``.

    Args:
        timeline: the run.
        sizes: bytes of each of its storages.
        settings: settings of the allocator.
        capacity_bytes: memory that the allocator can reserve; ``None`` for no limit.

    Raises:
        OutOfMemory: the run does not fit.
    """
    run = replay(
        timeline.events,
        sizes,
        settings,
        capacity_bytes,
        streams=timeline.streams,
        shrinkable=timeline.searches,
        steady_from=timeline.steady_from,
    )
    at = run.peak_allocated_event
    parts = dict.fromkeys(MEMORY_CLASSES, 0)
    modules: dict[str, int] = {}
    for index in live_at(timeline, at):
        storage = timeline.storages[index]
        parts[storage.memory_class] += sizes[index]
        modules[storage.module] = modules.get(storage.module, 0) + sizes[index]
    parts["fragmentation"] = run.peak_reserved_bytes - sum(parts.values())
    phase = timeline.phase_at(at)
    cause = timeline.storages[max(timeline.events[at], 0)]
    largest = tuple(sorted(modules.items(), key=lambda pair: -pair[1]))
    return Replayed(
        run.peak_reserved_bytes,
        run.peak_allocated_bytes,
        run.peak_requested_bytes,
        run.startup_peak_reserved_bytes,
        capacity_bytes,
        parts,
        Peak(at, phase.name, phase.step, cause.operator, cause.module, largest),
    )


def live_at(timeline: Timeline, event: int) -> list[int]:
    """Return the storages that are alive after ``event``, in order of allocation."""
    alive: dict[int, None] = {}
    for each in timeline.events[: event + 1]:
        if each >= 0:
            alive[each] = None
        elif each != EMPTY_CACHE:
            del alive[~each]
    return list(alive)
