"""Replays a timeline through the caching allocator: the reserved bytes at the peak, and their parts.

The parts are those at the moment of the largest allocation.  The allocator keeps what it has reserved, so the reserved bytes are
largest then.  Reserved bytes that no tensor holds are fragmentation: rounding, and cached blocks that no request fits into.
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
        reserved_bytes, allocated_bytes, requested_bytes: the allocator's maxima over the run.
        parts: bytes of each memory class at the peak, and ``fragmentation``; they add up to ``reserved_bytes``.
        peak: the peak.
    """

    reserved_bytes: int
    allocated_bytes: int
    requested_bytes: int
    parts: dict[str, int]
    peak: Peak


def replayed(timeline: Timeline, sizes: Sequence[int], settings: AllocatorSettings) -> Replayed:
    """Replay ``timeline`` with these ``sizes`` of its storages, in bytes."""
    run = replay(timeline.events, sizes, settings, streams=timeline.streams)
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
