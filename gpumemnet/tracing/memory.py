"""The memory of a recorded run on one GPU: replayed through the allocator, with the memory outside
the allocator added.

The parts of the memory are those at the moment of the largest allocation.  The allocator keeps what
it has reserved, so the reserved bytes are largest then.  The start-up may take more: cuDNN's search
for algorithms, or a program that empties the cache before it trains.  Reserved bytes that no tensor
holds are fragmentation: rounding, and cached blocks that no request fits into.

The safe bytes are an upper bound.  Scratch memory and the CUDA context enter at their upper bounds.
A margin on the reserved bytes covers what a trace does not see: other orders of the same
allocations, which fragment memory differently, and the algorithms that cuDNN chooses.  The margins
come from measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from gpumemnet.allocator import EMPTY_CACHE, AllocatorSettings, OutOfMemory, replay, smallest_limit
from gpumemnet.gpu import ContextEstimate, DeviceProfile, available_mib, context
from gpumemnet.physics.replicas import NCCL_SOURCE, communicator_bound_bytes, communicator_bytes
from gpumemnet.tracing.result import Curve, Peak
from gpumemnet.tracing.timeline import CONVOLUTION, MEMORY_CLASSES, LongRun, Timeline, repeated
from gpumemnet.units import MIB

MARGIN: Final = 0.056
"""Share of the reserved bytes added for what a trace does not see."""
WORKSPACE_MARGIN: Final = 2.8
"""How many times the largest convolution workspace is added too: readings of networks with large
workspaces scatter more."""
MARGIN_BASIS: Final = "98.8 % of 2,827 published readings of an A100 lie below, of architecture families that set no margin"
"""From ``benchmarks/real_runs.py``: the margins are in the ratio 0.02 to 1, and scaled so that 99 %
of the readings lie below."""
_MEASURED_GPU: Final = (8, 0)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The memory of a run.

    Attributes:
        reserved_bytes, allocated_bytes, requested_bytes: the allocator's maxima; those of the
        steady state, if the run gave
            memory back to the driver before its second step.
        startup_peak_reserved_bytes: maximum of the reserved bytes over the run.
        capacity_bytes: memory that the allocator could reserve; ``None`` for no limit.
        parts: bytes of each memory class at the peak, and ``fragmentation``; they add up to
            ``reserved_bytes``.
        peak: the peak.
    """

    reserved_bytes: int
    allocated_bytes: int
    requested_bytes: int
    startup_peak_reserved_bytes: int
    capacity_bytes: int | None
    parts: dict[str, int]
    peak: Peak


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """The memory of a run.

    Attributes:
        replayed: the replay with the expected sizes.
        expected_bytes: reserved bytes and the memory outside the allocator.
        safe_bytes: the upper bound.
        startup_peak_bytes: the same as ``expected_bytes`` for the largest amount that is reserved
            at any moment.
    """

    replayed: Replayed
    expected_bytes: int
    safe_bytes: int
    startup_peak_bytes: int


def memory_of(
    run: LongRun,
    sizes: Sequence[int],
    bounds: Sequence[int],
    device: DeviceProfile,
    settings: AllocatorSettings,
) -> Memory:
    """Return the memory of ``run`` on ``device``.

    Args:
        run: the run, its last step repeated.
        sizes, bounds: expected and largest bytes of each storage of the run before its last step
            was repeated.
        device: the GPU.
        settings: settings of the allocator.
    """
    outside = non_allocator_memory(device, run.timeline.groups)
    usable = available_mib(device) * MIB
    expected = _replayed_on(run, sizes, device, settings)
    bound = _Bound(outside, _largest_workspace_bytes(run.timeline, sizes, run.origins))
    safe = _safe_bytes(run, bounds, expected.reserved_bytes, bound, settings, usable)
    expected_bytes = expected.reserved_bytes + outside.expected_bytes
    startup_peak_bytes = expected.startup_peak_reserved_bytes + outside.expected_bytes
    return Memory(expected, expected_bytes, max(safe, expected_bytes), startup_peak_bytes)


def _replayed_on(
    run: LongRun, sizes: Sequence[int], device: DeviceProfile, settings: AllocatorSettings
) -> Replayed:
    """Replay within the capacity, where the allocator gives cached segments back; without a limit
    if that does not fit."""
    timeline, long_sizes = run.timeline, [sizes[origin] for origin in run.origins]
    capacity_bytes = (
        available_mib(device) * MIB - non_allocator_memory(device, timeline.groups).expected_bytes
    )
    try:
        return replayed(timeline, long_sizes, settings, max(capacity_bytes, 0))
    except OutOfMemory:
        return replayed(timeline, long_sizes, settings)


def _safe_bytes(
    run: LongRun,
    bounds: Sequence[int],
    expected_reserved_bytes: int,
    bound: _Bound,
    settings: AllocatorSettings,
    usable_bytes: int,
) -> int:
    """Return the bound on the memory of the process; at most the usable memory if the run fits with
    all sizes at their bounds."""
    timeline = run.timeline
    sizes = [
        0 if timeline.storages[index].is_search else bounds[origin]
        for index, origin in enumerate(run.origins)
    ]
    run_within = partial(
        replay, timeline.events, sizes, settings, streams=timeline.streams, loops=timeline.loops
    )
    safe = bound.of_process(max(run_within().peak_reserved_bytes, expected_reserved_bytes))
    if safe <= usable_bytes:
        return safe
    try:
        run_within(capacity_bytes=max(bound.of_allocator(usable_bytes), 0))
    except OutOfMemory:
        return safe
    return usable_bytes


def replayed(
    timeline: Timeline,
    sizes: Sequence[int],
    settings: AllocatorSettings,
    capacity_bytes: int | None = None,
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
        shrinkable=timeline.shrinkable,
        steady_from=timeline.steady_from,
        loops=timeline.loops,
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


def non_allocator_memory(device: DeviceProfile, groups: Sequence[int]) -> ContextEstimate:
    """Return the GPU memory of a training process outside the caching allocator: CUDA context and
    NCCL's buffers.

    Args:
        device: profile of the GPU.
        groups: number of ranks in each process group that the process communicates in.
    """
    alone, bound_bytes = context(device), communicator_bound_bytes(groups)
    if not bound_bytes:
        return alone
    return ContextEstimate(
        alone.expected_bytes + communicator_bytes(groups),
        alone.bound_bytes + bound_bytes,
        f"{alone.source}; {NCCL_SOURCE}",
    )


@dataclass(frozen=True, slots=True)
class _Bound:
    """The bound on a process, by what its allocator reserves with all scratch memory at its bound.

    Attributes:
        outside: memory outside the allocator.
        workspace_bytes: the largest expected workspace of a convolution.
    """

    outside: ContextEstimate
    workspace_bytes: int

    def of_process(self, reserved_bytes: int) -> int:
        """Return the bound on a process whose allocator reserves ``reserved_bytes``."""
        return round(reserved_bytes * (1 + MARGIN) + self._fixed_bytes())

    def of_allocator(self, usable_bytes: int) -> int:
        """Return what is left for the allocator within ``usable_bytes``: the inverse of
        :meth:`of_process`."""
        return int((usable_bytes - self._fixed_bytes()) / (1 + MARGIN))

    def _fixed_bytes(self) -> float:
        return WORKSPACE_MARGIN * self.workspace_bytes + self.outside.bound_bytes


def _largest_workspace_bytes(
    timeline: Timeline, sizes: Sequence[int], origins: Sequence[int]
) -> int:
    """Return the largest expected workspace of a convolution; what a search tries does not
    count."""
    return max(
        (
            sizes[origin]
            for storage, origin in zip(timeline.storages, origins, strict=True)
            if storage.is_scratch
            and not storage.is_search
            and storage.operator.startswith(CONVOLUTION)
        ),
        default=0,
    )


def safe_basis(device: DeviceProfile, convolves: bool, exchanges: bool = False) -> str:
    """Return in words how the safe bytes are computed.

    Args:
        device: the GPU.
        convolves: whether the run has convolutions.
        exchanges: whether it exchanges data with other GPUs.
    """
    outside = ", CUDA context and NCCL" if exchanges else " and CUDA context"
    workspaces = (
        f", and {WORKSPACE_MARGIN} times the largest convolution workspace" if convolves else ""
    )
    is_measured = device.compute_capability == _MEASURED_GPU and not exchanges
    coverage = MARGIN_BASIS if is_measured else "no coverage has been measured on this GPU"
    return (
        f"scratch memory{outside} at their bounds, and {MARGIN:.1%} of the reserved bytes{workspaces} for what a trace "
        f"does not see; {coverage}"
    )


def steady_run(timeline: Timeline, device: DeviceProfile) -> Replayed:
    """Return what ``timeline`` takes from the allocator on ``device``, with its last step repeated;
    the bound is not computed."""
    return _replayed_on(repeated(timeline), timeline.sizes, device, AllocatorSettings())


def steady_memory(
    timeline: Timeline, device: DeviceProfile, settings: AllocatorSettings | None = None
) -> Memory:
    """Return the memory of ``timeline`` on ``device`` in steady state, with its last step
    repeated."""
    return memory_of(
        repeated(timeline), timeline.sizes, timeline.bounds, device, settings or AllocatorSettings()
    )


def smallest_bytes(
    run: LongRun, sizes: Sequence[int], device: DeviceProfile, settings: AllocatorSettings
) -> int:
    """Return the smallest memory in which the run succeeds, context included.

    Cached blocks are released on demand, and convolutions do without workspaces.
    """
    timeline = run.timeline
    shrinkable = timeline.shrinkable
    needed = [
        0 if index in shrinkable else sizes[origin] for index, origin in enumerate(run.origins)
    ]
    within = smallest_limit(
        timeline.events, needed, settings, streams=timeline.streams, loops=timeline.loops
    )
    return within + non_allocator_memory(device, timeline.groups).expected_bytes


def curve_of(
    run: LongRun, sizes: Sequence[int], settings: AllocatorSettings, capacity_bytes: int | None
) -> Curve:
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
        shrinkable=timeline.shrinkable,
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
        phases=tuple(
            (phase.name, phase.start - start)
            for phase in timeline.phases
            if start <= phase.start < end
        ),
    )
