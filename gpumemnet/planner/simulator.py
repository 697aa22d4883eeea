"""Simulates a training step with a plan: peak memory through the caching allocator, and modelled
time.

Times come from :class:`~gpumemnet.planner.chain.Chain`, memory from a replay of the planned step's
allocations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import InvalidRequestError, did_you_mean
from gpumemnet.planner.chain import OPTIONS, Chain, chain_of
from gpumemnet.planner.costs import StepCosts
from gpumemnet.planner.decisions import Decision, pinned_bytes
from gpumemnet.planner.events import planned_timeline, swapped_storages
from gpumemnet.planner.machine import Machine
from gpumemnet.tracing.memory import Replayed, non_allocator_memory, replayed
from gpumemnet.tracing.result import Peak
from gpumemnet.tracing.timeline import Timeline, repeated


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """A simulated training step.

    Attributes:
        decisions: what was simulated.
        process_bytes: peak memory of the process, CUDA context included.
        peak_reserved_bytes, peak_allocated_bytes: maxima of the caching allocator.
        peak: where the largest allocation happens.
        parts: bytes of each memory class at the peak, and ``fragmentation``.
        step_seconds: modelled seconds of a step.
        host_bytes: pinned host memory.
        timeline: allocations of the planned steps.
    """

    decisions: Mapping[str, Decision]
    process_bytes: int
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    peak: Peak
    parts: Mapping[str, int]
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
        step: the traced step, from :func:`~gpumemnet.planner.units.plan_units`.
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
    return Simulation(
        decisions={
            name: decisions[name]
            for name in step.units
            if decisions.get(name, Decision.KEEP) is not Decision.KEEP
        },
        process_bytes=memory.reserved_bytes + outside_bytes(step),
        peak_reserved_bytes=memory.reserved_bytes,
        peak_allocated_bytes=memory.allocated_bytes,
        peak=memory.peak,
        parts=memory.parts,
        step_seconds=float(chain.step_seconds(choices_of(step, decisions)[None])[0]),
        host_bytes=sum(
            pinned_bytes(step.timeline.storages[storage].size_bytes) for storage in host
        ),
        timeline=timeline,
    )


def peak_memory(step: StepCosts, timeline: Timeline) -> Replayed:
    """Return what ``timeline`` takes from an allocator without a limit, its last step run twice."""
    run = repeated(timeline, 1)
    sizes = timeline.sizes
    return replayed(run.timeline, [sizes[origin] for origin in run.origins], step.settings)


def outside_bytes(step: StepCosts) -> int:
    """Return the memory of the process outside of the caching allocator."""
    return non_allocator_memory(step.device, step.timeline.groups).expected_bytes


def choices_of(step: StepCosts, decisions: Mapping[str, Decision]) -> NDArray[np.int64]:
    """Return the option of each unit, as indices into :data:`~gpumemnet.planner.chain.OPTIONS`."""
    return np.array(
        [OPTIONS.index(decisions.get(name, Decision.KEEP)) for name in step.units], dtype=np.int64
    )


def decisions_of(step: StepCosts, choices: NDArray[np.int64]) -> dict[str, Decision]:
    """Return the decisions of the units that do not keep."""
    return {
        name: OPTIONS[option] for name, option in zip(step.units, choices, strict=True) if option
    }
