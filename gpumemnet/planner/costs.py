"""What a traced training step costs: its units, who holds which storage until when, and the work of
its operators with their modelled seconds.

A storage that is saved for the backward pass stays until everything has let go of it: the program,
which refers to it by its variables, and every unit, and every operator outside of units, that saved
it.  Positions are numbers of events of the timeline.

An operator takes the longer of two times: of its floating-point operations at the peak rate of
their element type, and of the bytes that it moves at the bandwidth of the memory.  That is the
roofline model (Williams et al., CACM 2009).  Peak rates come from the maker's data sheets.
Programs reach a part of them: one factor, :data:`EFFICIENCY`, applies to all rates, so which plan
is best does not depend on it.  Nothing here is measured, unless the rates come from a file of the
user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from gpumemnet.allocator import AllocatorSettings
from gpumemnet.extract.extraction import DEFAULT_GPU
from gpumemnet.gpu import DeviceProfile, find_profile
from gpumemnet.job.job_table import Array
from gpumemnet.planner.plans import (
    COPIES_BEHIND,
    FETCHED_AHEAD,
    MIN_SWAPPED_BYTES,
    Decision,
)
from gpumemnet.tracing.timeline import Timeline
from gpumemnet.units import GIB

if TYPE_CHECKING:
    from gpumemnet.planner.step_recorder import OperatorCost

EFFICIENCY: Final = 0.7
"""Share of every peak rate that programs are assumed to reach."""
HOST_MEMORY_BYTES: Final = 64 * GIB
"""Pinned host memory that a plan may take, if nothing else is said."""


@dataclass(frozen=True)
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
        products: storages that its matrix products, convolutions and attention made, with their
            scratch memory.
        forward, backward: indices of the operators of its forward and of its backward pass.
        rerun: indices of those of its forward pass that run again when it is recomputed.
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
    products: frozenset[int]
    forward: tuple[int, ...]
    rerun: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True)
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


@dataclass(frozen=True, eq=False)
class StepCosts:
    """A traced training step, split into units.

    Attributes:
        units: names of the units in the order of the forward pass, as in ``named_modules()``.
        passes: every microbatch of every recorded step, in order.
        timeline: the recorded steps.
        unreferenced: saved storage → position from which the program does not refer to it any more.
        released: saved storage → position at which operators outside of units let go of it.
        allocated, freed: storage → index of the event that allocates and that frees it.
        operators: all recorded operators.
        optimizer: indices of the operators of the optimizer's step.
        evictable: whether each unit may do anything but keep: the last one may not if it is the
            head of the model, or if hardly anything runs between its passes.
        device: the GPU.
        settings: settings of the caching allocator.
        microbatches: number of passes in a step.
        notes: one sentence for each assumption.
    """

    units: tuple[str, ...]
    passes: tuple[Pass, ...]
    timeline: Timeline
    unreferenced: Mapping[int, int]
    released: Mapping[int, int]
    allocated: Mapping[int, int]
    freed: Mapping[int, int]
    operators: Sequence[OperatorCost]
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


def swapped_storages(step: StepCosts, unit: UnitPass, decision: Decision) -> list[int]:
    """Return the storages that ``unit`` copies to the host."""
    sizes = step.timeline.storages
    candidates: Sequence[int] = ()
    if decision is Decision.SWAP:
        candidates = [storage for storage in unit.saved if storage not in unit.weights]
    elif decision is Decision.RECOMPUTE_AND_SWAP_INPUT:
        candidates = unit.inputs
    return [storage for storage in candidates if sizes[storage].size_bytes >= MIN_SWAPPED_BYTES]


def kept_products(step: StepCosts, unit: UnitPass, decision: Decision) -> list[int]:
    """Return the results of products that ``unit`` keeps although it is recomputed."""
    if decision is not Decision.RECOMPUTE_CHEAP:
        return []
    storages = step.timeline.storages
    return [each for each in unit.products if storages[each].memory_class != "workspace"]


def held_until(step: StepCosts, unit: UnitPass, decision: Decision) -> dict[int, int]:
    """Return the storages that a unit holds on the GPU from its forward pass on, and the positions
    where it lets go."""
    if decision is Decision.KEEP:
        return dict(unit.saved)
    swapped = set(swapped_storages(step, unit, decision))
    if decision is Decision.SWAP:
        return {storage: end for storage, end in unit.saved.items() if storage not in swapped}
    held = {
        storage: end
        for storage, end in unit.saved.items()
        if not unit.start <= step.allocated[storage] < unit.end
    }
    held |= dict.fromkeys(unit.inputs, unit.backward_end)
    for storage in kept_products(step, unit, decision):
        held[storage] = max(unit.saved.get(storage, 0), unit.backward_start)
    return {storage: end for storage, end in held.items() if storage not in swapped}


def fetched_at(each: Pass, unit: int) -> int:
    """Return the position at which the swapped storages of a unit are fetched."""
    order = each.backward_order
    return each.units[order[max(order.index(unit) - FETCHED_AHEAD, 0)]].backward_start


def copied_at(each: Pass, unit: int) -> int:
    """Return the position at which the GPU memory of a unit's swapped storages is released."""
    behind = unit + COPIES_BEHIND
    return (
        each.units[behind].end
        if behind < len(each.units)
        else each.units[each.backward_order[0]].backward_start
    )


@dataclass(frozen=True)
class Machine:
    """A GPU and its host.

    Attributes:
        flops_per_second: rate of each element type; one without a rate has that of ``fp32``.
        memory_bytes_per_second: bandwidth of the GPU's memory.
        link_bytes_per_second: bandwidth of copies to pinned host memory, and of those back.
        host_memory_bytes: pinned host memory that a plan may take.
        source: where the rates come from.
    """

    flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float
    link_bytes_per_second: float
    host_memory_bytes: int = HOST_MEMORY_BYTES
    source: str = ""

    def seconds(self, operators: Sequence[OperatorCost]) -> Array:
        """Return the modelled seconds of each operator, shape ``[operators]``."""
        rates, fallback = self.flops_per_second, self.flops_per_second["fp32"]
        computing = [each.flops / rates.get(each.element_type, fallback) for each in operators]
        moving = [each.moved_bytes / self.memory_bytes_per_second for each in operators]
        return np.maximum(computing, moving)


def find_machine(gpu: DeviceProfile | str, host_memory_bytes: int | None = None) -> Machine:
    """Return the machine with the rates of a GPU; those of another GPU, which ``source`` names, if it
    states none.

    Args:
        gpu: its profile, its name in the catalogue, or the path of a profile's file.
        host_memory_bytes: pinned host memory that a plan may take; :data:`HOST_MEMORY_BYTES` by
            default.

    Raises:
        InvalidRequestError: there is no such GPU.
    """
    profile = find_profile(gpu)
    fp32, fp16 = profile.fp32_tflops, profile.fp16_tflops
    memory, link = profile.memory_gb_per_second, profile.host_link_gb_per_second
    if fp32 is None or fp16 is None or memory is None or link is None:
        known = find_machine(DEFAULT_GPU, host_memory_bytes)
        return replace(known, source=f"{known.source}, as {profile.name} states none")
    flops = {"fp32": fp32, "fp16": fp16, "tf32": profile.tf32_tflops or fp32}
    if profile.compute_capability >= (8, 0):
        flops["bf16"] = fp16
    return Machine(
        flops_per_second={name: EFFICIENCY * rate * 1e12 for name, rate in flops.items()},
        memory_bytes_per_second=EFFICIENCY * memory * 1e9,
        link_bytes_per_second=EFFICIENCY * link * 1e9,
        host_memory_bytes=host_memory_bytes or HOST_MEMORY_BYTES,
        source=f"modelled at {EFFICIENCY:.0%} of the peak rates of {profile.name}",
    )
