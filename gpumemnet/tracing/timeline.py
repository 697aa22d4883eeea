"""The record of a traced run: every storage on the GPU, its allocation and its release, in order.

Events are integers, which makes a replay fast: ``e >= 0`` allocates storage ``e``, ``e < 0`` frees
storage ``~e``, and :data:`~gpumemnet.allocator.EMPTY_CACHE` empties the cache.
The memory classes are those of PyTorch's memory profiler (``torch/profiler/_memory_profiler.py``,
``Category``), with workspaces as a class of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpumemnet.allocator import EMPTY_CACHE
from gpumemnet.allocator.replay import Loop, find_loops

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
    def bounds(self) -> list[int]:
        """Upper bound of the bytes of every storage."""
        return [storage.bound_bytes for storage in self.storages]

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

    def phase_at(self, event: int) -> Phase:
        """Return the phase of an event."""
        return next(phase for phase in reversed(self.phases) if phase.start <= event)


@dataclass(frozen=True, slots=True, eq=False)
class LongRun:
    """A timeline with its last step repeated.

    Attributes:
        timeline: the longer run.
        origins: for each of its storages, the index of the same storage in the original run.
    """

    timeline: Timeline
    origins: tuple[int, ...]


def repeated(timeline: Timeline, steps: int = STEADY_STEPS) -> LongRun:
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
    storages = timeline.storages
    origins = list(range(len(storages)))
    if [_role(storages[s]) for s in inherited] != [_role(storages[s]) for s in left]:
        return LongRun(timeline, tuple(origins))
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
                names[event] = len(origins)
                origins.append(event)
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
    long_storages = tuple(storages[origin] for origin in origins)
    longer = replace(
        timeline,
        storages=long_storages,
        events=tuple(events),
        phases=tuple(phases),
        step_starts=tuple(starts),
        passes=tuple(passes),
    )
    return LongRun(longer, tuple(origins))


def _role(storage: Storage) -> tuple[str, int]:
    return storage.memory_class, storage.size_bytes


def peak_of(timeline: Timeline, sizes: Sequence[int]) -> tuple[int, int]:
    """Return the largest sum of live sizes in bytes, without an allocator, and the index of its
    event."""
    live = peak = at = 0
    for index, event in enumerate(timeline.events):
        if event >= 0:
            live += sizes[event]
            if live > peak:
                peak, at = live, index
        elif event != EMPTY_CACHE:
            live -= sizes[~event]
    return peak, at
