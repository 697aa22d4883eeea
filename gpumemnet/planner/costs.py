"""What a traced training step costs: its units, who holds which storage until when, and the work of
its operators.

A storage that is saved for the backward pass stays until everything has let go of it: the program,
which refers to it by its variables, and every unit, and every operator outside of units, that saved
it.  Positions are numbers of events of the timeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpumemnet.allocator import AllocatorSettings
from gpumemnet.gpu.catalogue import DeviceProfile
from gpumemnet.tracing.timeline import Timeline

ELEMENT_TYPES = ("fp64", "fp32", "tf32", "fp16", "bf16")


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Operators, one entry for each, in order.

    Attributes:
        flops: floating-point operations of matrix products, convolutions and attention, shape
            ``[operators]``.
        moved_bytes: bytes read and written, shape ``[operators]``.
        element_types: index into :data:`ELEMENT_TYPES`, shape ``[operators]``.
    """

    flops: NDArray[np.float64]
    moved_bytes: NDArray[np.float64]
    element_types: NDArray[np.int64]

    def of(self, operators: NDArray[np.int64]) -> Work:
        """Return some of the operators."""
        return Work(
            self.flops[operators], self.moved_bytes[operators], self.element_types[operators]
        )


@dataclass(frozen=True, slots=True)
class UnitPass:
    """One forward and backward pass of a unit.

    Attributes:
        start, end: positions of its forward pass.
        stop: position at which a second forward pass could stop, because everything was saved.
        backward_start: position at which its backward pass first needs something that was saved.
        backward_end: position at which its backward pass has let go of everything.
        saved: storage that it saved → position at which its backward pass lets go of it; without
            parameters, buffers and what was there before the step.
        used_until: saved storage → position at which its backward pass does not need it any more,
            where it ever did: a copy that only the backward pass knows ends there.
        inputs: storages of its arguments, without the same.
        weights: those of ``saved`` that are weights cast by autocast.
        heavy: storages that its matrix products, convolutions and attention made, with their
            scratch memory.
        results: those of ``heavy`` that are no scratch memory.
        forward, backward: indices of the operators of its forward and of its backward pass.
        rerun, cheap: indices of those of its forward pass that run again when it is recomputed;
            without matrix products, convolutions and attention.
    """

    start: int
    end: int
    stop: int
    backward_start: int
    backward_end: int
    saved: Mapping[int, int]
    used_until: Mapping[int, int]
    inputs: tuple[int, ...]
    weights: frozenset[int]
    heavy: frozenset[int]
    results: frozenset[int]
    forward: tuple[int, ...]
    rerun: tuple[int, ...]
    cheap: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pass:
    """The forward and backward pass of one microbatch.

    Attributes:
        units: passes of the units, in the order of the forward pass.
        start, forward_end, end: positions of the forward pass, the backward pass and its end.
        before: operators before the first unit.
        between: for each unit, the operators between its forward pass and that of the next unit, or
            the backward pass.
        turn: operators of the backward pass before the first backward pass of a unit.
        after: for each unit, the operators after its backward pass until that of the next one, or
            the end of the pass.
    """

    units: tuple[UnitPass, ...]
    start: int
    forward_end: int
    end: int
    before: tuple[int, ...]
    between: tuple[tuple[int, ...], ...]
    turn: tuple[int, ...]
    after: tuple[tuple[int, ...], ...]

    @property
    def backward_order(self) -> list[int]:
        """Indices of the units in the order of their backward passes."""
        return sorted(range(len(self.units)), key=lambda index: self.units[index].backward_start)


@dataclass(frozen=True, slots=True, eq=False)
class StepCosts:
    """A traced training step, split into units.

    Attributes:
        units: names of the units in the order of the forward pass, as in ``named_modules()``.
        kinds: class of each unit's module.
        passes: every microbatch of every recorded step, in order.
        timeline: the recorded steps.
        unreferenced: saved storage → position from which the program does not refer to it any more.
        released: saved storage → position at which operators outside of units let go of it.
        allocated, freed: storage → index of the event that allocates and that frees it.
        work: all recorded operators.
        optimizer: indices of the operators of the optimizer's step.
        evictable: whether each unit may do anything but keep: the last one may not if it is the
            head of the model, or if hardly anything runs between its passes.
        device: the GPU.
        settings: settings of the caching allocator.
        microbatches: number of passes in a step.
        notes: one sentence for each assumption.
    """

    units: tuple[str, ...]
    kinds: tuple[str, ...]
    passes: tuple[Pass, ...]
    timeline: Timeline
    unreferenced: Mapping[int, int]
    released: Mapping[int, int]
    allocated: Mapping[int, int]
    freed: Mapping[int, int]
    work: Work
    optimizer: tuple[int, ...]
    evictable: tuple[bool, ...]
    device: DeviceProfile
    settings: AllocatorSettings
    microbatches: int
    notes: tuple[str, ...] = field(default=())

    @property
    def sizes(self) -> list[int]:
        """Bytes of every storage."""
        return self.timeline.sizes

    def outside_until(self, storage: int) -> int:
        """Position until which the program, or operators outside of units, hold ``storage``."""
        end = self.freed.get(storage, len(self.timeline.events))
        return min(max(self.unreferenced.get(storage, end), self.released.get(storage, 0)), end)
