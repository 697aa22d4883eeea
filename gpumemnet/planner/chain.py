"""A training step as a chain of units with linear costs: what every search for a plan works on.

The chain follows the rules of :mod:`gpumemnet.planner.plans`.  Its memory is the sum of live
storages by regions of the step,
bounded from above: a storage counts as gone only where it is gone for a whole region.  Its times
are those of one forward and one
backward pass:

* the forward pass of a unit follows the one before, and waits at its end for the copies of the unit
  :data:`COPIES_BEHIND` before;
* copies to the host follow each other, and start when the unit's forward pass has ended;
* the backward pass starts when they have all ended;
* copies from the host follow each other, and start when the backward pass reaches the unit
  :data:`FETCHED_AHEAD` before;
* the backward pass of a unit waits for them, then recomputes, then runs.

Every maximum is one of a sum that is minimized, so the same model is a mixed-integer linear
programme without loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from gpumemnet.allocator import signed_bytes
from gpumemnet.job.job_table import Array, Flags, Indices
from gpumemnet.planner.costs import (
    Machine,
    Pass,
    StepCosts,
    UnitPass,
    copied_at,
    fetched_at,
    held_until,
    swapped_storages,
)
from gpumemnet.planner.plans import COPIES_BEHIND, FETCHED_AHEAD, Decision, pinned_bytes

OPTIONS: Final = tuple(Decision)
"""The decisions in the order of the columns of every array below."""
KEEP: Final = 0
_MOST_HOLDERS: Final = 4
"""A storage that more units hold counts as never gone."""


@dataclass(frozen=True)
class SharedStorages:
    """Storages that several units hold: they are gone only if all of them let go.

    Attributes:
        units: the units.
        lets_go: for each of them, whether it lets go with each option, shape ``[units, options]``.
        amount_bytes: bytes that are then gone.
        regions: whether they are gone in each region, shape ``[regions]``.
    """

    units: tuple[int, ...]
    lets_go: Flags
    amount_bytes: float
    regions: Flags


@dataclass(frozen=True, eq=False)
class Chain:
    """The costs of every decision.  Shapes: ``n`` units, ``o`` options, ``r`` regions.

    Attributes:
        allowed: whether a unit has an option, ``[n, o]``; it always has the first one, to keep.
        forward_seconds, backward_seconds: of each unit, with the operators outside of units before
            it and after it, ``[n]``.
        turn_forward_seconds, turn_backward_seconds: between the last forward and the first backward
        pass of a unit.
        other_seconds: the optimizer's step.
        recompute_seconds, copy_seconds, host_bytes: of each option, ``[n, o]``: recomputation,
            copies to the host, which take as long as those back, host memory.
        backward_order: indices of the units in the order of their backward passes.
        live_bytes: largest sum of live storages in each region if everything is kept, ``[r]``.
        gone_bytes: what an option takes away from it, below 0 for what it adds, ``[n, o, r]``.
        shared: storages that several units hold.
        host_limit_bytes: host memory that a plan may take.
        passes: number of such passes in a step.
    """

    allowed: Flags
    forward_seconds: Array
    backward_seconds: Array
    turn_forward_seconds: float
    turn_backward_seconds: float
    other_seconds: float
    recompute_seconds: Array
    copy_seconds: Array
    host_bytes: Array
    backward_order: tuple[int, ...]
    live_bytes: Array
    gone_bytes: Array
    shared: tuple[SharedStorages, ...] = ()
    host_limit_bytes: float = float("inf")
    passes: int = 1

    @property
    def units(self) -> int:
        """Number of units."""
        return len(self.forward_seconds)

    def seconds_of(self, choices: Indices) -> float:
        """Return the seconds of a step with an option for each unit, shape ``[n]``."""
        return float(self.step_seconds(choices[None])[0])

    def step_seconds(self, choices: Indices) -> Array:
        """Return the seconds of a step for each row of ``choices``.

        Args:
            choices: option of each unit, shape ``[plans, n]``.
        """
        each = np.arange(self.units)
        kept = (
            self.forward_seconds.sum()
            + self.turn_forward_seconds
            + self.turn_backward_seconds
            + self.backward_seconds.sum()
        )
        seconds = self.recompute_seconds[each, choices].sum(axis=1) + kept
        swapping = np.flatnonzero(self.copy_seconds[each, choices].any(axis=1))
        if len(swapping):
            seconds[swapping] = self._seconds_with_copies(choices[swapping])
        return seconds * self.passes + self.other_seconds

    def _seconds_with_copies(self, choices: Indices) -> Array:
        """Return the seconds of one pass for each row of ``choices``."""
        each = np.arange(self.units)
        recompute, copy = (
            np.ascontiguousarray(table[each, choices].T)
            for table in (self.recompute_seconds, self.copy_seconds)
        )
        never = np.where(copy > 0, 0.0, -np.inf)  # nothing waits for no copy
        time = np.zeros(len(choices))
        queue = np.zeros(len(choices))
        copied: list[Array] = []
        for unit in range(self.units):
            time = time + self.forward_seconds[unit]
            queue = np.maximum(queue, time + never[unit]) + copy[unit]
            copied.append(queue)
            if unit >= COPIES_BEHIND:
                time = np.maximum(time, copied[unit - COPIES_BEHIND])
        time = np.maximum(time + self.turn_forward_seconds, queue)
        time = time + self.turn_backward_seconds
        arrivals = [time] * FETCHED_AHEAD
        queue = np.zeros(len(choices))
        for place, unit in enumerate(self.backward_order):
            arrivals.append(time)
            queue = np.maximum(queue, arrivals[place] + never[unit]) + copy[unit]
            time = (
                np.maximum(time, queue + never[unit])
                + recompute[unit]
                + self.backward_seconds[unit]
            )
        return time

    def region_bytes(self, choices: Indices) -> Array:
        """Return the bytes in each region for each row of ``choices``, shape ``[plans, r]``."""
        amounts = self.live_bytes - self._shared_gone_bytes(choices)
        first = choices[:1].sum(axis=0)  # the first row; keep all, where there is none
        amounts -= self.gone_bytes[np.arange(self.units), first].sum(axis=0)
        # most searches ask for rows that differ in a few units
        for unit in np.flatnonzero((choices != first).any(axis=0)):
            rows = np.flatnonzero(choices[:, unit] != first[unit])
            gone = self.gone_bytes[unit]
            amounts[rows] += gone[first[unit]] - gone[choices[rows, unit]]
        return amounts

    def changed_region_bytes(self, amounts: Array, before: Indices, after: Indices) -> Array:
        """Return the bytes in each region for each row of ``after``, which differs from that row of
        ``before`` in at most one unit; much faster than :meth:`region_bytes`.

        Args:
            amounts: the bytes in each region for each row of ``before``.
            before, after: options of each unit; ``before`` may have one row for all.
        """
        units = (before != after).argmax(axis=1)[:, None]
        old, new = (
            np.take_along_axis(rows, units, 1) for rows in np.broadcast_arrays(before, after)
        )
        changed = (amounts + self.gone_bytes[units, old][:, 0]) - self.gone_bytes[units, new][:, 0]
        if self.shared:
            changed += self._shared_gone_bytes(before) - self._shared_gone_bytes(after)
        return changed

    def _shared_gone_bytes(self, choices: Indices) -> Array:
        amounts = np.zeros((len(choices), len(self.live_bytes)))
        for shared in self.shared:
            gone = np.ones(len(choices), dtype=bool)
            for row, unit in enumerate(shared.units):
                gone &= shared.lets_go[row, choices[:, unit]]
            amounts[np.ix_(gone, shared.regions)] += shared.amount_bytes
        return amounts

    def peak_bytes(self, choices: Indices) -> Array:
        """Return the largest bytes of any region for each row of ``choices``."""
        return self.region_bytes(choices).max(axis=1)

    def host_bytes_of(self, choices: Indices) -> Array:
        """Return the host memory for each row of ``choices``."""
        return self.host_bytes[np.arange(self.units), choices].sum(axis=1)

    def fits(self, choices: Indices, limit_bytes: float) -> Flags:
        """Return which rows of ``choices`` fit both budgets."""
        fits_host = self.host_bytes_of(choices) <= self.host_limit_bytes
        return (self.peak_bytes(choices) <= limit_bytes) & fits_host

    def keep_all(self) -> Indices:
        """Return the choices that keep everything, shape ``[n]``."""
        return np.zeros(self.units, dtype=np.int64)


def chain_of(step: StepCosts, machine: Machine) -> Chain:
    """Return the chain of the last pass of ``step`` on ``machine``."""
    each = step.passes[-1]
    seconds = machine.seconds(step.operators)

    def total(operators: Sequence[int]) -> float:
        return float(seconds[list(operators)].sum())

    units = each.units
    order = each.backward_order
    n, o = len(units), len(OPTIONS)
    recompute, moved, host = np.zeros((n, o)), np.zeros((n, o)), np.zeros((n, o))
    for number, unit in enumerate(units):
        for column, option in enumerate(OPTIONS):
            if option.recomputes:
                recompute[number, column] = total(
                    [
                        index
                        for index in unit.rerun
                        if option is not Decision.RECOMPUTE_CHEAP
                        or not step.operators[index].is_kept
                    ]
                )
            swapped = [
                step.timeline.storages[s].size_bytes for s in swapped_storages(step, unit, option)
            ]
            moved[number, column] = sum(swapped)
            host[number, column] = sum(map(pinned_bytes, swapped))
    memory = _Memory(step, each)
    live, gone, shared = memory.tables()
    allowed = np.asarray((gone > 0).any(axis=2))  # the options that free something
    for storages in shared:
        allowed[list(storages.units)] |= storages.lets_go
    allowed &= np.array(step.evictable)[:, None]
    allowed[:, KEEP] = True
    return Chain(
        allowed=allowed,
        forward_seconds=np.array(
            [
                total(unit.forward) + total(each.between[i - 1] if i else each.before)
                for i, unit in enumerate(units)
            ]
        ),
        backward_seconds=np.array(
            [
                total(unit.backward) + total(after)
                for unit, after in zip(units, each.after, strict=True)
            ]
        ),
        turn_forward_seconds=total(each.between[-1]),
        turn_backward_seconds=total(each.turn),
        other_seconds=total(step.optimizer),
        recompute_seconds=recompute,
        copy_seconds=moved / machine.link_bytes_per_second,
        host_bytes=host,
        backward_order=tuple(order),
        live_bytes=live,
        gone_bytes=gone,
        shared=shared,
        host_limit_bytes=machine.host_memory_bytes,
        passes=step.microbatches,
    )


class _Memory:
    """Divides the events of a pass into regions, and finds where each decision frees what."""

    def __init__(self, step: StepCosts, each: Pass) -> None:
        self._step = step
        self._pass = each
        self._sizes = step.sizes
        self._held = {
            (number, option): held_until(step, unit, option)
            for number, unit in enumerate(each.units)
            for option in OPTIONS
        }
        events = step.timeline.events
        live = np.cumsum(signed_bytes(events, self._sizes))
        cuts = {each.start, each.forward_end, each.end, len(events)}
        for unit in each.units:
            cuts |= {unit.start, unit.end, unit.backward_start}
        ordered = sorted(cuts)
        spans = list(pairwise(ordered))
        at = [unit.backward_start for unit in each.units]
        self._starts = np.array([a for a, _ in spans] + at)
        self._ends = np.array([b for _, b in spans] + at)
        self._baseline = np.array(
            [float(live[a:b].max()) for a, b in spans] + [float(live[max(a - 1, 0)]) for a in at]
        )
        self._first_point = len(spans)

    def tables(self) -> tuple[Array, Array, tuple[SharedStorages, ...]]:
        """Return the live bytes of every region, what each option takes away, and the storages that
        units share."""
        units = self._pass.units
        gone = np.zeros((len(units), len(OPTIONS), len(self._baseline)))
        for number, unit in enumerate(units):
            for column, option in enumerate(OPTIONS):
                if option.recomputes:
                    gone[number, column, self._first_point + number] -= self._second_pass_bytes(
                        unit, option
                    )
                    self._add_longer_holds(gone[number, column], unit, option)
        holders: dict[int, list[int]] = defaultdict(list)
        for number, unit in enumerate(units):
            for storage in unit.saved.keys() | set(unit.inputs):
                if storage in self._step.freed:
                    holders[storage].append(number)
        shared: dict[tuple[tuple[int, ...], bytes, bytes], float] = defaultdict(float)
        for storage, numbers in holders.items():
            if len(numbers) == 1:
                for column, option in enumerate(OPTIONS):
                    start, end = self._absence(storage, numbers[0], option)
                    gone[numbers[0], column, self._inside(start, end)] += self._sizes[storage]
            elif len(numbers) <= _MOST_HOLDERS:
                spans = [
                    [self._absence(storage, number, option) for option in OPTIONS]
                    for number in numbers
                ]
                lets_go = np.array([[start < end for start, end in row] for row in spans])
                if not lets_go.any(axis=1).all():
                    continue
                used = [
                    span
                    for row, own in zip(spans, lets_go, strict=True)
                    for span, ok in zip(row, own, strict=True)
                    if ok
                ]
                regions = self._inside(max(start for start, _ in used), min(end for _, end in used))
                if regions.any():
                    shared[tuple(numbers), lets_go.tobytes(), regions.tobytes()] += self._sizes[
                        storage
                    ]
        groups = tuple(
            SharedStorages(
                numbers,
                np.frombuffer(lets_go, dtype=bool).reshape(len(numbers), len(OPTIONS)),
                amount,
                np.frombuffer(regions, dtype=bool),
            )
            for (numbers, lets_go, regions), amount in shared.items()
        )
        return self._baseline, gone, groups

    def _inside(self, start: int, end: int) -> Flags:
        """Return the regions within positions ``start`` to ``end``."""
        return (self._starts >= start) & (self._ends <= end)

    def _absence(self, storage: int, number: int, option: Decision) -> tuple[int, int]:
        """Return the positions between which a unit does not hold a storage that it did; an empty
        range if it always does.

        A unit that never held it lets go of it everywhere.
        """
        step, unit = self._step, self._pass.units[number]
        if storage in self._held[number, option]:
            return 1, 0
        outside = step.outside_until(storage)
        if storage in swapped_storages(step, unit, option):
            return max(outside, copied_at(self._pass, number)), fetched_at(self._pass, number)
        return outside, unit.backward_start if option.recomputes else step.freed[storage]

    def _second_pass_bytes(self, unit: UnitPass, option: Decision) -> float:
        """Return the largest sum of what a second forward pass allocates."""
        live = peak = 0
        copies: set[int] = set()
        skipped = unit.products if option is Decision.RECOMPUTE_CHEAP else frozenset()
        for event in self._step.timeline.events[unit.start : unit.stop]:
            if event >= 0 and event in self._step.freed and event not in skipped:
                copies.add(event)
                live += self._sizes[event]
                peak = max(peak, live)
            elif event < 0 and ~event in copies:
                live -= self._sizes[~event]
        return peak

    def _add_longer_holds(self, gone: Array, unit: UnitPass, option: Decision) -> None:
        """Subtract what is held for the second forward pass, and was not held before, from one
        option's row of a table."""
        step = self._step
        for storage, end in held_until(step, unit, option).items():
            freed = step.freed.get(storage, end)
            if storage not in unit.saved and freed < end:
                overlap = (self._starts < end) & (self._ends > freed)
                gone[overlap] -= self._sizes[storage]
        for storage in unit.saved:
            if storage in step.freed and unit.start <= step.allocated[storage] < unit.end:
                outside = step.outside_until(storage)
                if (
                    outside > unit.backward_start
                ):  # the program holds the first copy beside the second one
                    overlap = (self._starts < unit.saved[storage]) & (
                        self._ends > unit.backward_start
                    )
                    gone[overlap] -= self._sizes[storage]
