"""The record of a traced run, every storage on the GPU with its allocation and its release, and the
memory that the run takes: replayed through the allocator, with the memory outside of it added.

Events are integers, which makes a replay fast: ``e >= 0`` allocates storage ``e``, ``e < 0`` frees
storage ``~e``, and :data:`~gpumemnet.allocator.EMPTY_CACHE` empties the cache.
The memory classes are those of PyTorch's memory profiler (``torch/profiler/_memory_profiler.py``,
``Category``), with workspaces as a class of their own.

The parts of the memory are those at the moment of the largest allocation.  The allocator keeps what
it has reserved, so the reserved bytes are largest then.  The start-up may take more: cuDNN's search
for algorithms, or a program that empties the cache before it trains.  Reserved bytes that no tensor
holds are fragmentation: rounding, and cached blocks that no request fits into.

The safe bytes are an upper bound.  Scratch memory and the CUDA context enter at their upper bounds.
A margin on the reserved bytes covers what a trace does not see: other orders of the same
allocations, which fragment memory differently, and the algorithms that cuDNN chooses.  Its size
depends on the kind of the run and comes from readings that others published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Final

from gpumemnet.allocator import (
    EMPTY_CACHE,
    AllocatorSettings,
    OutOfMemory,
    replay,
    signed_bytes,
    smallest_limit,
)
from gpumemnet.allocator.replay import Loop, find_loops
from gpumemnet.atomic_files import shipped_json
from gpumemnet.gpu import ContextEstimate, DeviceProfile, available_mib, context
from gpumemnet.physics.replicas import NCCL_SOURCE, communicator_bound_bytes, communicator_bytes
from gpumemnet.tracing.result import Curve, Peak, PhasePeak
from gpumemnet.units import MIB

MEMORY_CLASSES: Final = (
    "parameter",
    "buffer",
    "gradient",
    "optimizer_state",
    "saved_activation",
    "input",
    "temporary",
    "communication",
    "workspace",
)
CONVOLUTION: Final = "aten.convolution"
"""How the names of the operators of convolutions begin."""
CONVOLUTION_WORKSPACE: Final = "convolution"
"""Kind of the scratch memory of a convolution."""
CONVOLUTION_SEARCH: Final = "convolution_benchmark"
"""Kind of what cuDNN takes when it searches for the fastest algorithm
(``torch.backends.cudnn.benchmark``)."""
_OF_STEPS: Final = ("forward", "backward", "optimizer")
STEADY_STEPS: Final = 3
"""How often the replay repeats the last step; the measured loop stops when reserved bytes are
steady, after 3 to 10 steps."""


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation on the GPU.

    Attributes:
        size_bytes: bytes requested from the allocator; for scratch memory of a library, the
            expected bytes.
        bound_bytes: upper bound of ``size_bytes``; differs from it only for scratch memory.
        memory_class: one of :data:`MEMORY_CLASSES`.
        operator: the operator that allocated it, such as ``aten.mm``.
        module: dotted path of the module that it belongs to; empty for the model itself and outside
            of it.
        scratch: kind of the scratch memory that a library uses during one operator
            (:class:`~gpumemnet.tracing.operators.rules.Scratch`); such memory is estimated, not
            traced.  Empty for a tensor.
        stream: the CUDA stream that it is allocated on; 0 is the default stream.
    """

    size_bytes: int
    bound_bytes: int
    memory_class: str
    operator: str
    module: str
    scratch: str = ""
    stream: int = 0

    @property
    def is_scratch(self) -> bool:
        """Whether it is scratch memory."""
        return bool(self.scratch)

    @property
    def is_search(self) -> bool:
        """Whether cuDNN uses it to try algorithms."""
        return self.scratch == CONVOLUTION_SEARCH


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the run: ``build``, ``forward``, ``backward`` or ``optimizer``.

    Attributes:
        name: the part.
        step: the optimizer step that it belongs to, from 1; 0 for the build.
        start: index of its first event.
    """

    name: str
    step: int
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Storages and events of a run of one or more training steps.

    Attributes:
        storages: in order of allocation.
        events: see the module's docstring.
        phases: in order; each lasts until the next one starts.
        step_starts: for each optimizer step, index of its first event; the last entry is the end of
            the last step.
        ranks: number of GPUs that the job runs on; the timeline is that of one of them.
        groups: number of ranks in each process group that this GPU communicated in.
        passes: index of the event at which each pass through a model begins, if the run may repeat
            equal ones.
    """

    storages: tuple[Storage, ...]
    events: tuple[int, ...]
    phases: tuple[Phase, ...]
    step_starts: tuple[int, ...]
    ranks: int = 1
    groups: tuple[int, ...] = ()
    passes: tuple[int, ...] = ()

    @property
    def loops(self) -> tuple[Loop, ...]:
        """Where the run repeats passes with the same events."""
        return find_loops(self.events, self.passes)

    @property
    def sizes(self) -> list[int]:
        """Expected bytes of every storage."""
        return [storage.size_bytes for storage in self.storages]

    @property
    def streams(self) -> list[int] | None:
        """The stream of every storage, ``None`` when all are on the default one."""
        found = [storage.stream for storage in self.storages]
        return found if any(found) else None

    @property
    def shrinkable(self) -> frozenset[int]:
        """Indices of the storages that are smaller where memory is short: the workspaces of
        convolutions.

        A search takes what is free.  Else PyTorch tries cuDNN's plans in turn, until the workspace
        of one can be allocated (``aten/src/ATen/native/cudnn/Conv_v8.cpp``).
        """
        kinds = (CONVOLUTION_WORKSPACE, CONVOLUTION_SEARCH)
        return frozenset(
            index for index, storage in enumerate(self.storages) if storage.scratch in kinds
        )

    @property
    def steady_from(self) -> int | None:
        """Index of the event at which the second step begins; ``None`` if there is one step
        only."""
        return self.step_starts[1] if len(self.step_starts) > 2 else None

    @property
    def convolves(self) -> bool:
        """Whether the run has convolutions."""
        return any(storage.operator.startswith(CONVOLUTION) for storage in self.storages)

    @property
    def kind(self) -> str:
        """Which margin its safe bytes have."""
        if any(ranks > 1 for ranks in self.groups):
            return RANKS
        if any(each.scratch == CONVOLUTION_WORKSPACE and each.size_bytes for each in self.storages):
            return CONVOLUTIONS
        gradients, weights = (
            sum(each.size_bytes for each in self.storages if each.memory_class == name)
            for name in ("gradient", "parameter")
        )
        return FROZEN if 2 * gradients < weights else OTHERS


def repeated(timeline: Timeline, steps: int = STEADY_STEPS) -> Timeline:
    """Repeat the last step of ``timeline`` ``steps`` times, as further training would.

    A step in steady state leaves as many storages as it frees of the previous step; they are paired
    in order of allocation.  If they do not pair, the step is not in steady state, and nothing is
    repeated.
    """
    start = timeline.step_starts[-2]
    window = timeline.events[start:]
    born = [event for event in window if event >= 0]
    died = {~event for event in window if event < 0 and event != EMPTY_CACHE}
    inherited = sorted(storage for storage in died if not born or storage < born[0])
    left = [storage for storage in born if storage not in died]
    storages = list(timeline.storages)
    roles = attrgetter("memory_class", "size_bytes")
    if [roles(storages[s]) for s in inherited] != [roles(storages[s]) for s in left]:
        return timeline
    events, phases, starts = (
        list(timeline.events),
        list(timeline.phases),
        list(timeline.step_starts),
    )
    passes = list(timeline.passes)
    window_passes = [index for index in passes if index >= start]
    window_phases = [phase for phase in phases if phase.start >= start]
    successor = dict(zip(inherited, left, strict=True))
    for step in range(1, steps + 1):
        offset = len(events) - start
        names: dict[int, int] = {}
        for event in window:
            if event >= 0:
                names[event] = len(storages)
                storages.append(storages[event])
                events.append(names[event])
            elif event == EMPTY_CACHE:
                events.append(event)
            else:
                events.append(~names[~event] if ~event in names else ~successor[~event])
        phases += [
            Phase(phase.name, phase.step + step, phase.start + offset) for phase in window_phases
        ]
        passes += [index + offset for index in window_passes]
        starts.append(len(events))
        successor = {old: names[new] for old, new in zip(inherited, left, strict=True)}
    return replace(
        timeline,
        storages=tuple(storages),
        events=tuple(events),
        phases=tuple(phases),
        step_starts=tuple(starts),
        passes=tuple(passes),
    )


def peak_of(timeline: Timeline, sizes: Sequence[int]) -> tuple[int, int]:
    """Return the largest sum of live sizes in bytes, without an allocator, and the index of its
    event."""
    live = [*accumulate(signed_bytes(timeline.events, sizes))]
    peak = max(live, default=0)
    return peak, live.index(peak) if live else 0


def up_to_peak(timeline: Timeline) -> Timeline:
    """Return ``timeline`` up to its largest sum of live bytes, as one step: an evaluation that did
    not end may repeat the same thousands of times."""
    end = peak_of(timeline, timeline.sizes)[1] + 1
    return replace(
        timeline,
        events=timeline.events[:end],
        phases=tuple(phase for phase in timeline.phases if phase.start < end),
        step_starts=(0, end),
        passes=tuple(start for start in timeline.passes if start < end),
    )


def phases_of(
    timeline: Timeline, first_steps: int, step_names: Mapping[int, str]
) -> tuple[PhasePeak, ...]:
    """Return the largest sum of live bytes in each kind of phase, in order.

    Args:
        timeline: the run.
        first_steps: number of steps that are not called later ones; 0 for all.
        step_names: step → the batch that it trains on, where that was chosen.
    """
    found: dict[str, PhasePeak] = {}
    starts = [phase.start for phase in timeline.phases] + [len(timeline.events)]
    live = [*accumulate(signed_bytes(timeline.events, timeline.sizes), initial=0)]
    for phase, begin, end in zip(timeline.phases, starts, starts[1:], strict=False):
        peak = max(live[begin : end + 1])
        later = "a later step" if 0 < first_steps < phase.step else ""
        what = step_names.get(phase.step, later)
        name = f"{phase.name} of {what}" if what and phase.name in _OF_STEPS else phase.name
        if name not in found or peak > found[name].requested_bytes:
            found[name] = PhasePeak(name, phase.step, peak)
    return tuple(found.values())


CONVOLUTIONS, RANKS, FROZEN, OTHERS = "convolutions", "ranks", "frozen", "others"
"""Kinds of runs, each with a margin of its own: with workspaces of convolutions, on several GPUs,
most of the weights frozen, and any other."""


safety: Final = partial(shipped_json, "tracing/safety.json")
"""What the safe bytes add, and how it did: ``python -m research readings FOLDER --exact --write``
makes the file.

* ``margins``: kind of run → share of the reserved bytes;
* ``workspaces``: how many times the largest convolution workspace is added too, as readings of
  networks with large workspaces scatter more;
* ``coverage``: name of a GPU → published readings below the safe bytes, and all of them, each with
  the margins of other model families.
"""


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


def memory_of(run: Timeline, device: DeviceProfile, settings: AllocatorSettings) -> Memory:
    """Return the memory of ``run``, its last step repeated, on ``device``."""
    outside = non_allocator_memory(device, run.groups)
    usable = available_mib(device) * MIB
    try:  # within the capacity, where the allocator gives cached segments back
        expected = replayed(run, settings, max(usable - outside.expected_bytes, 0))
    except OutOfMemory:
        expected = replayed(run, settings)
    workspaces = (
        storage.size_bytes
        for storage in run.storages
        if storage.is_scratch
        and not storage.is_search  # what a search tries does not count
        and storage.operator.startswith(CONVOLUTION)
    )
    fixed_bytes = safety()["workspaces"] * max(workspaces, default=0) + outside.bound_bytes
    safe = _safe_bytes(run, expected.reserved_bytes, fixed_bytes, settings, usable)
    expected_bytes = expected.reserved_bytes + outside.expected_bytes
    startup_peak_bytes = expected.startup_peak_reserved_bytes + outside.expected_bytes
    return Memory(expected, expected_bytes, max(safe, expected_bytes), startup_peak_bytes)


def _safe_bytes(
    run: Timeline,
    expected_reserved_bytes: int,
    fixed_bytes: float,
    settings: AllocatorSettings,
    usable_bytes: int,
) -> int:
    """Return the bound on the memory of the process; at most the usable memory if the run fits with
    all sizes at their bounds.  ``fixed_bytes`` are those outside the allocator at their bound, and
    the margin for workspaces."""
    factor: float = 1 + safety()["margins"][run.kind]
    sizes = [0 if storage.is_search else storage.bound_bytes for storage in run.storages]
    run_within = partial(replay, run.events, sizes, settings, streams=run.streams, loops=run.loops)
    reserved_bytes = max(run_within().peak_reserved_bytes, expected_reserved_bytes)
    safe = round(reserved_bytes * factor + fixed_bytes)
    if safe <= usable_bytes:
        return safe
    try:
        run_within(capacity_bytes=max(int((usable_bytes - fixed_bytes) / factor), 0))
    except OutOfMemory:
        return safe
    return usable_bytes


def replayed(
    timeline: Timeline, settings: AllocatorSettings, capacity_bytes: int | None = None
) -> Replayed:
    """Replay ``timeline``.

    Args:
        timeline: the run.
        settings: settings of the allocator.
        capacity_bytes: memory that the allocator can reserve; ``None`` for no limit.

    Raises:
        OutOfMemory: the run does not fit.
    """
    run = replay(
        timeline.events,
        timeline.sizes,
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
        parts[storage.memory_class] += storage.size_bytes
        modules[storage.module] = modules.get(storage.module, 0) + storage.size_bytes
    parts["fragmentation"] = run.peak_reserved_bytes - sum(parts.values())
    phase = next(each for each in reversed(timeline.phases) if each.start <= at)
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
    alone = context(device)
    if all(ranks == 1 for ranks in groups):
        return alone
    return ContextEstimate(
        alone.expected_bytes + communicator_bytes(groups),
        alone.bound_bytes + communicator_bound_bytes(groups),
        f"{alone.source}; {NCCL_SOURCE}",
    )


def safe_basis(device: DeviceProfile, timeline: Timeline) -> str:
    """Return in words how the safe bytes of ``timeline`` on ``device`` are computed, and what share
    of published readings lies below."""
    known, kind = safety(), timeline.kind
    outside = ", CUDA context and NCCL" if timeline.groups else " and CUDA context"
    below, rows = known["coverage"].get(device.name, (0, 0))
    coverage = (
        f"{below / rows:.1%} of {rows:,} published readings of this GPU lie below, of model families that set no margin"
        if rows and kind != RANKS
        else "no coverage has been measured on this GPU"
    )
    return (
        f"scratch memory{outside} at their bounds, and {known['margins'][kind]:.1%} of the reserved bytes, "
        f"and {known['workspaces']} times the largest convolution workspace, for what a trace does not see; {coverage}"
    )


def steady_memory(
    timeline: Timeline, device: DeviceProfile, settings: AllocatorSettings | None = None
) -> Memory:
    """Return the memory of ``timeline`` on ``device`` in steady state, with its last step
    repeated."""
    return memory_of(repeated(timeline), device, settings or AllocatorSettings())


def smallest_bytes(run: Timeline, device: DeviceProfile, settings: AllocatorSettings) -> int:
    """Return the smallest memory in which the run succeeds, context included.

    Cached blocks are released on demand, and convolutions do without workspaces.
    """
    shrinkable = run.shrinkable
    needed = [0 if index in shrinkable else size for index, size in enumerate(run.sizes)]
    within = smallest_limit(run.events, needed, settings, streams=run.streams, loops=run.loops)
    return within + non_allocator_memory(device, run.groups).expected_bytes


def curve_of(timeline: Timeline, settings: AllocatorSettings, capacity_bytes: int | None) -> Curve:
    """Return the memory over the last step of a run, within the capacity that its replay had."""
    start, end = timeline.step_starts[-2], timeline.step_starts[-1]
    reserved = replay(
        timeline.events,
        timeline.sizes,
        settings,
        capacity_bytes,
        streams=timeline.streams,
        shrinkable=timeline.shrinkable,
        with_curve=True,
    ).reserved_curve_bytes
    assert reserved is not None
    row_of = {name: row for row, name in enumerate(MEMORY_CLASSES)}
    rows: list[list[int]] = [[] for _ in MEMORY_CLASSES]
    live = [0] * len(MEMORY_CLASSES)
    for index, change in enumerate(signed_bytes(timeline.events[:end], timeline.sizes)):
        event = timeline.events[index]
        if event != EMPTY_CACHE:
            live[row_of[timeline.storages[max(event, ~event)].memory_class]] += change
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
