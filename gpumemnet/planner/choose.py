"""Finds a plan that fits a budget: a search on the chain, checked through the caching allocator,
again and again.

The chain adds up live storages; the allocator reserves more, by an amount that depends on the plan.
So the search starts with a limit on live bytes below the budget, and the limit moves by what the
allocator's replay of each plan found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import BudgetError, InvalidRequestError
from gpumemnet.planner.chain import KEEP, OPTIONS, Chain, chain_of
from gpumemnet.planner.costs import StepCosts
from gpumemnet.planner.decisions import Plan
from gpumemnet.planner.machine import Machine
from gpumemnet.planner.searches.exact import TIME_LIMIT_SECONDS, exact
from gpumemnet.planner.searches.found import Found
from gpumemnet.planner.searches.greedy import greedy
from gpumemnet.planner.searches.references import (
    autoswap,
    capuchin,
    every_block,
    every_sqrt,
    vdnn_all,
    vdnn_convolutions,
)
from gpumemnet.planner.searches.swarm import swarm
from gpumemnet.planner.simulator import Simulation, decisions_of, outside_bytes, simulate
from gpumemnet.units import format_bytes

Search = Callable[[Chain, float], Found]
SEARCHES: Final[Mapping[str, Search]] = {
    "greedy": greedy,
    "exact": exact,
    "swarm": swarm,
    "capuchin": capuchin,
    "autoswap": autoswap,
    "every_block": every_block,
    "every_sqrt": every_sqrt,
    "vdnn_all": vdnn_all,
    "vdnn_convolutions": vdnn_convolutions,
}
"""Name of an optimizer → its search; ``greedy`` is the default, those outside of :data:`PLANNING`
are for comparison."""
FIXED: Final = frozenset({"every_block", "every_sqrt", "vdnn_all", "vdnn_convolutions"})
"""Optimizers that do not look at the budget: their one plan fits or not."""
PLANNING: Final = frozenset({"greedy", "exact", "swarm"})
"""Optimizers to plan with; the others are for comparison."""
_ROUNDS: Final = 8
_OTHERS: Final = 2
"""How many further plans of one search are checked."""
_SEARCH_EVENTS: Final = 200_000
"""Once so many events were replayed, further plans of a search are not checked, and the lowest
limit is the last one tried."""
_REPAIR_ROUNDS: Final = 3
_REPAIR_EVENTS: Final = 30_000
"""Events that one round of repairs may replay, so that planning stays short for large models."""
_RELAX_EVENTS: Final = 120_000
_FEWEST_RELAXED: Final = 8
"""As many plans at least are checked where the first plan that fits does too much."""
_MANY_GAPS: Final = 0.15
"""Share of the reserved bytes from which on fragmentation is worth a note."""
_CLOSE: Final = 0.01
"""Share of the budget that a plan may leave unused before the search goes on with a higher
limit."""


def choose_plan(
    step: StepCosts,
    machine: Machine,
    budget_bytes: int,
    optimizer: str = "greedy",
    *,
    chain: Chain | None = None,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
) -> Plan:
    """Return the fastest plan found whose process stays within ``budget_bytes``.

    Args:
        step: the traced step, from :func:`~gpumemnet.planner.units.plan_units`.
        machine: the rates for modelled times, and the host memory that may be taken.
        budget_bytes: memory of the process, CUDA context included.
        optimizer: a name of :data:`SEARCHES`.
        chain: the chain of ``step`` on ``machine``, if it is at hand.
        time_limit_seconds: for ``exact``, time for its searches; the best plan so far counts when
            it is over.

    Raises:
        InvalidRequestError: there is no such optimizer, or the budget is not positive.
        MissingExtraError: ``exact`` needs scipy.
        BudgetError: the search found no plan that fits; says how small a plan can be, and where its
            peak lies.
    """
    started = time.perf_counter()
    if optimizer not in SEARCHES:
        raise InvalidRequestError(
            f"must be one of {', '.join(SEARCHES)}, not {optimizer!r}", "optimizer"
        )
    if budget_bytes <= 0:
        raise InvalidRequestError(f"must be above 0 bytes, not {budget_bytes:,}", "budget")
    chain = chain or chain_of(step, machine)
    tries = _Tries(step, machine, chain, budget_bytes)
    keep = tries.simulate(chain.keep_all())
    if optimizer in FIXED:
        found = SEARCHES[optimizer](chain, np.inf)
        if found.choices is not None:
            tries.simulate(found.choices)
    elif keep.process_bytes > budget_bytes:
        _search(tries, chain, optimizer, keep, time_limit_seconds)
    best = tries.best
    if best is None:
        best = _search_from_extremes(tries, chain, optimizer)
    if best is None:
        raise _too_small(tries, optimizer, budget_bytes)
    return Plan(
        decisions=best.decisions,
        optimizer=optimizer,
        gpu=step.device.name,
        budget_bytes=budget_bytes,
        process_bytes=best.process_bytes,
        peak_reserved_bytes=best.peak_reserved_bytes,
        peak_allocated_bytes=best.peak_allocated_bytes,
        peak_phase=best.peak.phase,
        peak_module=best.peak.module,
        keep_process_bytes=keep.process_bytes,
        step_seconds=best.step_seconds,
        keep_step_seconds=keep.step_seconds,
        bound_step_seconds=keep.step_seconds if best is keep else tries.bound_seconds,
        host_bytes=best.host_bytes,
        planning_seconds=time.perf_counter() - started,
        units=step.units,
        notes=(
            *step.notes,
            *_fragmentation(step, best),
            f"times are modelled, not measured: {machine.source}",
        ),
    )


class _Tries:
    """Plans that were checked through the allocator."""

    def __init__(self, step: StepCosts, machine: Machine, chain: Chain, budget_bytes: int) -> None:
        self._step = step
        self._machine = machine
        self._chain = chain
        self._budget_bytes = budget_bytes
        self.limit_bytes = budget_bytes - outside_bytes(step)
        self.best: Simulation | None = None
        self.bound_seconds: float | None = None
        """The smallest bound that was proven, which is that of the highest limit."""
        self.smallest: Simulation | None = None
        self.best_choices: NDArray[np.int64] | None = None
        self.nearest_choices: NDArray[np.int64] | None = None
        """Of the plans that do not fit, the one that is least above the budget."""
        self._least_excess = np.inf
        self._seen: dict[bytes, Simulation] = {}

    def would_be_best(self, choices: NDArray[np.int64]) -> bool:
        """Whether a plan is faster than the best one so far."""
        return (
            self.best is None
            or float(self._chain.step_seconds(choices[None])[0]) < self.best.step_seconds
        )

    @property
    def events(self) -> int:
        """Number of the recorded events."""
        return len(self._step.timeline.events)

    @property
    def replayed_events(self) -> int:
        """Number of the recorded events that the checks so far replayed."""
        return len(self._seen) * self.events

    def fits(self, result: Simulation) -> bool:
        """Whether a plan stays within the budget and the host memory."""
        return (
            result.process_bytes <= self._budget_bytes
            and result.host_bytes <= self._machine.host_memory_bytes
        )

    def simulate(self, choices: NDArray[np.int64]) -> Simulation:
        """Check a plan, and remember it if it is the best so far."""
        key = choices.tobytes()
        if key not in self._seen:
            self._seen[key] = simulate(
                self._step, self._machine, decisions_of(self._step, choices), chain=self._chain
            )
        result = self._seen[key]
        excess = result.process_bytes - self._budget_bytes
        if 0 < excess < self._least_excess:
            self._least_excess, self.nearest_choices = excess, choices
        is_faster = self.best is None or result.step_seconds < self.best.step_seconds
        if self.fits(result) and is_faster:
            self.best, self.best_choices = result, choices
        if self.smallest is None or result.process_bytes < self.smallest.process_bytes:
            self.smallest = result
        return result

    def simulate_extremes(self) -> None:
        """Check the plans that decide the same for every unit: they show how small a plan can
        be."""
        for option in range(1, len(OPTIONS)):
            self.simulate(np.where(self._chain.allowed[:, option], option, KEEP))


def _search(
    tries: _Tries, chain: Chain, optimizer: str, keep: Simulation, time_limit_seconds: float
) -> None:
    """Search with moving limits on live bytes, between the highest that fitted and the lowest that
    did not."""
    keep_peak = float(chain.peak_bytes(chain.keep_all()[None])[0])
    uniform = [np.where(chain.allowed[:, option], option, KEEP) for option in range(len(OPTIONS))]
    least = float(chain.peak_bytes(np.array(uniform)).min())
    high = float(tries.limit_bytes)
    low = min(least, high)
    limit = high - max(keep.peak_allocated_bytes - keep_peak, 0.0)
    deadline = time.perf_counter() + time_limit_seconds
    for _ in range(_ROUNDS):
        left_seconds = deadline - time.perf_counter()
        if optimizer == "exact" and left_seconds <= 0 and tries.best is not None:
            break
        found = _run(chain, optimizer, limit, max(left_seconds, 1.0))
        if found.bound_seconds is not None:
            tries.bound_seconds = min(found.bound_seconds, tries.bound_seconds or np.inf)
        if found.choices is None:
            if tries.best is not None or limit >= high:
                break
            low, limit = limit, high if high - limit < _CLOSE * high else (limit + high) / 2
            continue
        if not tries.would_be_best(found.choices):
            break
        unused = tries.limit_bytes - tries.simulate(found.choices).peak_reserved_bytes
        if unused < 0:
            for other in found.others[:_OTHERS]:
                if tries.would_be_best(other) and tries.replayed_events < _SEARCH_EVENTS:
                    tries.simulate(other)
        if unused >= 0:
            low = max(low, limit)
            if unused < _CLOSE * tries.limit_bytes:
                break
            limit = min(limit + unused, (limit + high) / 2)
        else:  # the same plan would be found down to its own peak
            high = min(high, float(chain.peak_bytes(found.choices[None])[0]))
            middle = (high + low) / 2 if tries.replayed_events < _SEARCH_EVENTS else low
            limit = high + unused if high + unused > low else middle
        if high - low < _CLOSE / 4 * abs(high):
            break
    if optimizer in PLANNING:
        _repair(tries, chain)


def _search_from_extremes(tries: _Tries, chain: Chain, optimizer: str) -> Simulation | None:
    """Search from the plans that decide the same for every unit, where no plan found so far
    fits."""
    nearest = tries.nearest_choices
    tries.simulate_extremes()
    extreme = tries.best_choices
    if optimizer not in PLANNING or extreme is None:
        return None
    _repair(tries, chain)
    if nearest is not None:
        _relax(tries, extreme, nearest)
        _repair(tries, chain)
    return tries.best


def _repair(tries: _Tries, chain: Chain) -> None:
    """Change single decisions of the plans that fit best, and check each through the allocator.

    Fragmentation depends on the plan, so a neighbour of a plan that just does not fit may fit, and
    one that keeps more, too.
    """
    count = max(_REPAIR_EVENTS // tries.events, 1)
    for _ in range(_REPAIR_ROUNDS):
        before = tries.best
        starts = [tries.best_choices, tries.nearest_choices]
        for start in starts:
            if start is None:
                continue
            rows = np.repeat(start[None], int(chain.allowed.sum()), axis=0)
            units, options = np.nonzero(chain.allowed)
            rows[np.arange(len(rows)), units] = options
            seconds = chain.step_seconds(rows)
            limit = np.inf if tries.best is None else tries.best.step_seconds
            rows = rows[np.argsort(seconds, kind="stable")][
                : int((seconds < limit * (1 - 1e-9)).sum())
            ]
            peaks = chain.peak_bytes(rows)
            promising = rows[peaks <= max(tries.limit_bytes, 0)]
            for row in promising[
                np.linspace(0, len(promising) - 1, min(count, len(promising))).astype(int)
            ]:
                tries.simulate(row)
        if tries.best is before:
            break


def _fragmentation(step: StepCosts, best: Simulation) -> tuple[str, ...]:
    gaps = best.peak_reserved_bytes - best.peak_allocated_bytes
    if step.settings.expandable_segments or gaps < _MANY_GAPS * best.peak_reserved_bytes:
        return ()
    return (
        f"{format_bytes(gaps)} of the plan's memory are gaps between tensors: with PYTORCH_CUDA_ALLOC_CONF="
        "expandable_segments:True for the job, plan again with the same allocator settings; that plan may be much faster",
    )


def _relax(tries: _Tries, choices: NDArray[np.int64], faster: NDArray[np.int64]) -> None:
    """Give units of a plan that fits the decisions of a faster one that does not, as many together
    as still fit.

    Where fragmentation decides, the chain's searches may all exceed the budget, and the only plan
    that fits does far too much.
    """
    left = max(_RELAX_EVENTS // tries.events, _FEWEST_RELAXED)
    parts = [np.flatnonzero(faster != choices)]
    while parts and left > 0:
        units = parts.pop()
        relaxed = choices.copy()
        relaxed[units] = faster[units]
        left -= 1
        if tries.fits(tries.simulate(relaxed)):
            choices = relaxed
        elif len(units) > 1:
            parts += reversed(np.array_split(units, 2))


def _run(chain: Chain, optimizer: str, limit: float, time_limit_seconds: float) -> Found:
    if optimizer != "exact":
        return SEARCHES[optimizer](chain, limit)
    quick = greedy(chain, limit)
    known = np.inf if quick.choices is None else float(chain.step_seconds(quick.choices[None])[0])
    found = exact(chain, limit, time_limit_seconds=time_limit_seconds, known_seconds=known)
    return found if found.choices is not None else Found(quick.choices, found.bound_seconds)


def _too_small(tries: _Tries, optimizer: str, budget_bytes: int) -> BudgetError:
    assert tries.smallest is not None
    least = tries.smallest
    place = f" in module '{least.peak.module}'" if least.peak.module else ""
    return BudgetError(
        f"no plan of '{optimizer}' fits {format_bytes(budget_bytes)}: the smallest one found takes "
        f"{format_bytes(least.process_bytes)}, with its peak in the {least.peak.phase} phase{place}",
        least.process_bytes,
    )
