"""A training step with a plan: its allocations, its peak memory and its modelled time.

The allocations are made from those of the recorded step.  What a unit saved is freed when nothing
else holds it any more.  A second forward pass repeats the events of the first one; it stops when
everything is saved again, as ``torch.utils.checkpoint`` does.  A swapped storage is freed when its
copy has ended, and its successor is allocated when it is fetched.

Memory is a replay of these allocations through the caching allocator; times come from
:class:`~gpumemnet.planner.chain.Chain`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpumemnet.allocator import EMPTY_CACHE
from gpumemnet.errors import InvalidRequestError, did_you_mean
from gpumemnet.job.job_table import Indices
from gpumemnet.planner.chain import OPTIONS, Chain, chain_of
from gpumemnet.planner.costs import (
    Machine,
    Pass,
    StepCosts,
    UnitPass,
    copied_at,
    fetched_at,
    held_until,
    kept_products,
    swapped_storages,
)
from gpumemnet.planner.plans import (
    Decision,
    pinned_bytes,
)
from gpumemnet.tracing.result import Peak
from gpumemnet.tracing.timeline import (
    Replayed,
    Storage,
    Timeline,
    non_allocator_memory,
    repeated,
    replayed,
)


def planned_timeline(step: StepCosts, decisions: Mapping[str, Decision]) -> Timeline:
    """Return the timeline of the recorded steps with ``decisions``.

    Args:
        step: the recorded step.
        decisions: decision for each unit that does not keep, by name.
    """
    chosen = [decisions.get(name, Decision.KEEP) for name in step.units]
    if all(decision is Decision.KEEP for decision in chosen):
        return step.timeline
    edit = _Edit(step)
    for each in step.passes:
        edit.change(each, chosen)
    return edit.result()


class _Edit:
    """Changes to a timeline: frees that are left out, and events that are put in."""

    def __init__(self, step: StepCosts) -> None:
        self.step = step
        self.storages: list[Storage] = list(step.timeline.storages)
        self._left_out: set[int] = set()
        self._put_in: dict[int, list[tuple[int, int, list[int]]]] = defaultdict(list)

    def new_storage(self, origin: int) -> int:
        """Return a new storage like ``origin``."""
        self.storages.append(self.storages[origin])
        return len(self.storages) - 1

    def put_in(self, position: int, events: list[int], priority: int) -> None:
        """Put ``events`` in at ``position``, those of the lowest ``priority`` first."""
        self._put_in[position].append((priority, len(self._put_in[position]), events))

    def free(self, storage: int, position: int) -> None:
        """Free a recorded storage at ``position`` instead of where it was freed."""
        self._left_out.add(self.step.freed[storage])
        self.put_in(position, [~storage], 0)

    def change(self, each: Pass, chosen: Sequence[Decision]) -> None:
        """Put the changes of one pass in."""
        step, units = self.step, each.units
        touched: set[int] = set()
        for unit, decision in zip(units, chosen, strict=True):
            if decision is not Decision.KEEP:
                touched |= unit.saved.keys() | set(unit.inputs)
                touched |= set(kept_products(step, unit, decision))
        until = {
            storage: step.outside_until(storage) for storage in touched if storage in step.freed
        }
        last = dict(until)
        """Where the recorded holders of a storage have all let go: an event or a few before it was
        freed."""
        for unit in units:
            for storage in unit.saved.keys() & until.keys():
                last[storage] = max(last[storage], unit.saved[storage])
        fetched: dict[int, tuple[int, int]] = {}
        for number, (unit, decision) in enumerate(zip(units, chosen, strict=True)):
            for storage, end in held_until(step, unit, decision).items():
                if storage in until:
                    until[storage] = max(until[storage], end)
            for storage in swapped_storages(step, unit, decision):
                if storage not in until:
                    continue
                if storage not in fetched:  # of several units, the first one copies it
                    until[storage] = max(until[storage], copied_at(each, number))
                start = fetched_at(each, number)
                end = (
                    unit.used_until.get(storage, unit.backward_end)
                    if decision is Decision.SWAP
                    else unit.backward_end
                )
                before = fetched.get(storage, (start, end))
                fetched[storage] = (min(before[0], start), max(before[1], end))
            if decision.recomputes:
                self._recompute(unit, decision)
        for storage, (start, end) in list(fetched.items()):
            if until[storage] >= start:  # it is still there when it would be fetched
                until[storage] = max(until[storage], end)
                del fetched[storage]
        for storage, end in until.items():
            if end > step.freed[storage] or end < last[storage]:
                self.free(storage, end)
        for storage, (start, end) in fetched.items():
            copy = self.new_storage(storage)
            self.put_in(start, [copy], 1)
            self.put_in(end, [~copy], 3)

    def _recompute(self, unit: UnitPass, decision: Decision) -> None:
        """Put the second forward pass in."""
        step = self.step
        skipped = unit.products if decision is Decision.RECOMPUTE_CHEAP else frozenset()
        copies: dict[int, int] = {}
        events: list[int] = []
        for event in step.timeline.events[unit.start : unit.stop]:
            if event == EMPTY_CACHE:
                continue
            if event >= 0:
                if event in step.freed and event not in skipped:
                    copies[event] = self.new_storage(event)
                    events.append(copies[event])
            elif ~event in copies:
                events.append(~copies.pop(~event))
        for storage, copy in list(copies.items()):
            if storage in unit.saved:
                self.put_in(unit.used_until.get(storage, unit.backward_end), [~copy], 3)
            else:
                events.append(~copy)
        self.put_in(unit.backward_start, events, 2)

    def result(self) -> Timeline:
        """Return the changed timeline."""
        timeline = self.step.timeline
        events: list[int] = []
        moved: list[int] = []
        put_in, left_out = self._put_in, self._left_out
        for position in range(len(timeline.events) + 1):
            moved.append(len(events))
            for _, _, added in sorted(put_in.get(position, ())):
                events += added
            if position not in left_out:
                events += timeline.events[position : position + 1]
        moved[-1] = len(events)
        return replace(
            timeline,
            storages=tuple(self.storages),
            events=tuple(events),
            phases=tuple(replace(phase, start=moved[phase.start]) for phase in timeline.phases),
            step_starts=tuple(moved[start] for start in timeline.step_starts),
            passes=tuple(moved[start] for start in timeline.passes),
        )


@dataclass(frozen=True, eq=False)
class Simulation:
    """A simulated training step.

    Attributes:
        decisions: what was simulated.
        process_bytes: peak memory of the process, CUDA context included.
        peak_reserved_bytes, peak_allocated_bytes: maxima of the caching allocator.
        peak: where the largest allocation happens.
        step_seconds: modelled seconds of a step.
        host_bytes: pinned host memory.
        timeline: allocations of the planned steps.
    """

    decisions: Mapping[str, Decision]
    process_bytes: int
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    peak: Peak
    step_seconds: float
    host_bytes: int
    timeline: Timeline


def simulate(
    step: StepCosts,
    machine: Machine,
    decisions: Mapping[str, Decision],
    *,
    chain: Chain | None = None,
) -> Simulation:
    """Simulate a training step with ``decisions``.

    Args:
        step: the traced step, from :func:`~gpumemnet.planner.step_units.split_step`.
        machine: the rates for modelled times.
        decisions: decision for each unit that does not keep, by name.
        chain: the chain of ``step`` on ``machine``, if it is at hand.

    Raises:
        InvalidRequestError: a name is no unit of the step.
    """
    for name in decisions:
        if name not in step.units:
            hint = did_you_mean(name, step.units, f"units are {', '.join(step.units[:4])} …")
            raise InvalidRequestError(f"is no unit of the model: {hint}", f"decisions[{name}]")
    chain = chain or chain_of(step, machine)
    timeline = planned_timeline(step, decisions)
    memory = peak_memory(step, timeline)
    units = zip(step.units, step.passes[-1].units, strict=True)
    host = {
        s
        for name, unit in units
        for s in swapped_storages(step, unit, decisions.get(name, Decision.KEEP))
    }
    choices = choices_of(step, decisions)
    return Simulation(
        decisions=decisions_of(step, choices),
        process_bytes=memory.reserved_bytes + outside_bytes(step),
        peak_reserved_bytes=memory.reserved_bytes,
        peak_allocated_bytes=memory.allocated_bytes,
        peak=memory.peak,
        step_seconds=chain.seconds_of(choices),
        host_bytes=sum(
            pinned_bytes(step.timeline.storages[storage].size_bytes) for storage in host
        ),
        timeline=timeline,
    )


def peak_memory(step: StepCosts, timeline: Timeline) -> Replayed:
    """Return what ``timeline`` takes from an allocator without a limit, its last step run twice."""
    return replayed(repeated(timeline, 1), step.settings)


def outside_bytes(step: StepCosts) -> int:
    """Return the memory of the process outside of the caching allocator."""
    return non_allocator_memory(step.device, step.timeline.groups).expected_bytes


def choices_of(step: StepCosts, decisions: Mapping[str, Decision]) -> Indices:
    """Return the option of each unit, as indices into :data:`~gpumemnet.planner.chain.OPTIONS`."""
    return np.array(
        [OPTIONS.index(decisions.get(name, Decision.KEEP)) for name in step.units], dtype=np.int64
    )


def decisions_of(step: StepCosts, choices: Indices) -> dict[str, Decision]:
    """Return the decisions of the units that do not keep."""
    return {
        name: OPTIONS[option] for name, option in zip(step.units, choices, strict=True) if option
    }
