"""The record of a traced step: every storage on the GPU, its birth and its death, in order.

Events are numbers, so that a replay costs little: ``e >= 0`` allocates storage ``e``, ``e < 0`` frees storage ``~e``, and
:data:`~gpumemnet.allocator.EMPTY_CACHE` stands for itself.
The memory classes are those of PyTorch's memory profiler (``torch/profiler/_memory_profiler.py``, ``Category``), with workspaces
as a class of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpumemnet.allocator import EMPTY_CACHE

MEMORY_CLASSES: Final = (
    *("parameter", "buffer", "gradient", "optimizer_state", "saved_activation", "input", "temporary"),
    *("communication", "workspace"),
)
STEADY_STEPS: Final = 3
"""How often the last step is repeated in the replay; the measured loop stops when reserved bytes stand still, after 3 to 10."""


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation on the GPU.

    Attributes:
        size_bytes: bytes asked of the allocator; for scratch memory of a library, the bytes expected.
        bound_bytes: the most that it may be; differs from ``size_bytes`` for scratch memory alone.
        memory_class: one of :data:`MEMORY_CLASSES`.
        operator: the operator that allocated it, such as ``aten.mm``.
        module: dotted path of the module that it belongs to; empty for the model itself and outside of it.
        is_scratch: whether a library takes it for the time of one operator; such memory is estimated, not traced.
        stream: the CUDA stream that it is allocated on; 0 is the default one.
    """

    size_bytes: int
    bound_bytes: int
    memory_class: str
    operator: str
    module: str
    is_scratch: bool = False
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the run: ``build``, ``forward``, ``backward``, ``optimizer``.

    Attributes:
        name: what runs.
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
        storages: in order of birth.
        events: see the module's text.
        phases: in order; each lasts until the next one starts.
        step_starts: for each optimizer step, index of its first event; the last entry is the end of the last step.
        ranks: how many GPUs the job runs on, this being the memory of one of them.
        groups: of each process group in which that one has exchanged something, how many ranks it has.
    """

    storages: tuple[Storage, ...]
    events: tuple[int, ...]
    phases: tuple[Phase, ...]
    step_starts: tuple[int, ...]
    ranks: int = 1
    groups: tuple[int, ...] = ()

    @property
    def sizes(self) -> list[int]:
        """Expected bytes of every storage."""
        return [storage.size_bytes for storage in self.storages]

    @property
    def bounds(self) -> list[int]:
        """The most that every storage may take."""
        return [storage.bound_bytes for storage in self.storages]

    @property
    def streams(self) -> list[int] | None:
        """The stream of every storage, ``None`` when all are on the default one."""
        found = [storage.stream for storage in self.storages]
        return found if any(found) else None

    @property
    def convolves(self) -> bool:
        """Whether there are convolutions in it."""
        return any(storage.operator.startswith("aten.convolution") for storage in self.storages)

    def phase_at(self, event: int) -> Phase:
        """The phase in which an event happens."""
        return next(phase for phase in reversed(self.phases) if phase.start <= event)


@dataclass(frozen=True, slots=True, eq=False)
class LongRun:
    """A timeline whose last step was repeated.

    Attributes:
        timeline: the longer run.
        origins: for each of its storages, the index of the storage in the shorter run that it is like.
    """

    timeline: Timeline
    origins: tuple[int, ...]


def repeated(timeline: Timeline, steps: int = STEADY_STEPS) -> LongRun:
    """``timeline`` with its last step repeated ``steps`` times, which is what training goes on to do.

    The last step ends with as many storages of its own as it has freed of the step before; each of these takes the place of the
    one before it, in order of birth.  Where the two do not pair, the step is no steady state, and nothing is repeated.
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
    events, phases, starts = list(timeline.events), list(timeline.phases), list(timeline.step_starts)
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
        phases += [Phase(phase.name, phase.step + step, phase.start + offset) for phase in window_phases]
        starts.append(len(events))
        successor = {old: names[new] for old, new in zip(inherited, left, strict=True)}
    long_storages = tuple(storages[origin] for origin in origins)
    longer = Timeline(long_storages, tuple(events), tuple(phases), tuple(starts), timeline.ranks, timeline.groups)
    return LongRun(longer, tuple(origins))


def _role(storage: Storage) -> tuple[str, int]:
    return storage.memory_class, storage.size_bytes


def peak_of(timeline: Timeline, sizes: Sequence[int]) -> tuple[int, int]:
    """The largest sum of live sizes, without an allocator, and the index of the event after which it stands."""
    live = peak = at = 0
    for index, event in enumerate(timeline.events):
        if event >= 0:
            live += sizes[event]
            if live > peak:
                peak, at = live, index
        elif event != EMPTY_CACHE:
            live -= sizes[~event]
    return peak, at
