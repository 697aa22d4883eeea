"""Finds a plan that makes a job fit.

:func:`choose_plan` searches on the chain, and checks each plan through the caching allocator.  The
chain adds up live storages; the allocator reserves more, by an amount that depends on the plan.  So
the search starts with a limit on live bytes below the budget, and the limit moves by what the
allocator's replay of each plan found.

:func:`plan_request` gives the whole answer: the trace as it stands, the plan, the trace with the
plan applied, and what else would help.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from torch import nn

from gpumemnet.errors import BudgetError, PlanError
from gpumemnet.extract.module_calls import ModelInputs
from gpumemnet.gpu import context
from gpumemnet.job.job_table import Indices
from gpumemnet.planner.alternatives import alternatives
from gpumemnet.planner.chain import KEEP, OPTIONS, Chain, chain_of
from gpumemnet.planner.costs import Machine, StepCosts, find_machine
from gpumemnet.planner.executor import applied
from gpumemnet.planner.planned_step import (
    Simulation,
    decisions_of,
    outside_bytes,
    simulate,
)
from gpumemnet.planner.plans import DEFAULT_PLANNER, Plan, PlanAnswer, PlanRequest
from gpumemnet.planner.searches import TIME_LIMIT_SECONDS, Found, exact, greedy, single_changes
from gpumemnet.planner.step_units import split_step
from gpumemnet.tracing.model_tracer import ModelTracer
from gpumemnet.tracing.result import TraceAnswer
from gpumemnet.tracing.timeline import safety
from gpumemnet.units import MIB, format_bytes

_LOG: Final = logging.getLogger(__name__)
_LIMIT: Final = (
    "torch.cuda.set_per_process_memory_fraction(share of the GPU's memory, without the context); "
    "convolutions then take smaller workspaces"
)
Search = Callable[[Chain, float, float], Found]
"""Called with a chain, a limit on live bytes, and the seconds that it may take."""
_ROUNDS: Final = 8
_SEARCH_EVENTS: Final = 200_000
"""Once so many events were replayed, the lowest limit is the last one tried."""
_REPAIR_ROUNDS: Final = 3
_REPAIR_EVENTS: Final = 30_000
"""Events that one round of repairs may replay, so that planning stays short for large models."""
_ATTEMPTS: Final = 4
"""How often a plan is made for a smaller budget because its safe bytes do not fit."""
_MANY_GAPS: Final = 0.15
"""Share of the reserved bytes from which on fragmentation is worth a note."""
_CLOSE: Final = 0.01
"""Share of the budget that a plan may leave unused before the search goes on with a higher
limit."""


def choose_plan(
    step: StepCosts,
    machine: Machine,
    budget_bytes: int,
    optimizer: str = DEFAULT_PLANNER,
    *,
    chain: Chain | None = None,
    search: Search | None = None,
    is_refined: bool = True,
) -> Plan:
    """Return the fastest plan found whose process stays within ``budget_bytes``.

    Args:
        step: the traced step, from :func:`~gpumemnet.planner.step_units.split_step`.
        machine: the rates for modelled times, and the host memory that may be taken.
        budget_bytes: memory of the process, CUDA context included.
        optimizer: name of the search, one of :data:`~gpumemnet.planner.plans.PLANNERS`.
        chain: the chain of ``step`` on ``machine``, if it is at hand.
        search: a search of another name.
        is_refined: whether single decisions of the plans found are changed, too.

    Raises:
        MissingExtraError: ``exact`` needs scipy.
        BudgetError: the search found no plan that fits; says how small a plan can be, and where its
            peak lies.
    """
    started = time.perf_counter()
    chain = chain or chain_of(step, machine)
    tries = _Tries(step, machine, chain, budget_bytes)
    keep = tries.simulate(chain.keep_all())
    if keep.process_bytes > budget_bytes:
        # the allocator may refuse the plans of the exact search, and take a greedy one that is faster
        named = {"greedy": (_greedy,), "exact": (_exact, _greedy)}
        for each in (search,) if search else named[optimizer]:
            _search(tries, chain, each, keep)
        if is_refined:
            if tries.best is None:  # from the plans that decide the same for every unit
                for choices in _uniform(chain):
                    tries.simulate(choices)
            _repair(tries, chain)
    best = tries.best
    if best is None:
        raise _too_small(step, tries, optimizer, budget_bytes)
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


@dataclass
class _Tries:
    """Plans that were checked through the allocator.

    Attributes:
        step, machine, chain, budget_bytes: as for :func:`choose_plan`.
        best, best_choices: the fastest that fits.
        bound_seconds: the smallest bound that was proven, which is that of the highest limit.
        smallest: the one with the least memory.
        nearest_choices: of the plans that do not fit, the one that is least above the budget.
    """

    step: StepCosts
    machine: Machine
    chain: Chain
    budget_bytes: int
    best: Simulation | None = None
    best_choices: Indices | None = None
    bound_seconds: float | None = None
    smallest: Simulation | None = None
    nearest_choices: Indices | None = None
    _least_excess: float = np.inf
    seen: dict[bytes, Simulation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.limit_bytes = self.budget_bytes - outside_bytes(self.step)
        self.events = len(self.step.timeline.events)

    def fits(self, result: Simulation) -> bool:
        """Whether a plan stays within the budget and the host memory."""
        return (
            result.process_bytes <= self.budget_bytes
            and result.host_bytes <= self.machine.host_memory_bytes
        )

    def simulate(self, choices: Indices) -> Simulation:
        """Check a plan, and remember it if it is the best so far."""
        key = choices.tobytes()
        if key not in self.seen:
            self.seen[key] = simulate(
                self.step, self.machine, decisions_of(self.step, choices), chain=self.chain
            )
        result = self.seen[key]
        excess = result.process_bytes - self.budget_bytes
        if 0 < excess < self._least_excess:
            self._least_excess, self.nearest_choices = excess, choices
        is_faster = self.best is None or result.step_seconds < self.best.step_seconds
        if self.fits(result) and is_faster:
            self.best, self.best_choices = result, choices
        if self.smallest is None or result.process_bytes < self.smallest.process_bytes:
            self.smallest = result
        return result


def _greedy(chain: Chain, limit_bytes: float, seconds: float) -> Found:
    return greedy(chain, limit_bytes)


def _exact(chain: Chain, limit_bytes: float, seconds: float) -> Found:
    """Search exactly, below the seconds of the greedy search's plan; that one counts if the time is
    over."""
    quick = greedy(chain, limit_bytes)
    known = np.inf if quick.choices is None else chain.seconds_of(quick.choices)
    found = exact(chain, limit_bytes, time_limit_seconds=seconds, known_seconds=known)
    return found if found.choices is not None else Found(quick.choices, found.bound_seconds)


def _uniform(chain: Chain) -> Indices:
    """The plans that decide the same for every unit, as far as it is allowed."""
    return np.where(chain.allowed.T, np.arange(len(OPTIONS))[:, None], KEEP)


def _search(tries: _Tries, chain: Chain, search: Search, keep: Simulation) -> None:
    """Search with moving limits on live bytes, between the highest that fitted and the lowest that
    did not."""
    keep_peak = float(chain.peak_bytes(chain.keep_all()[None])[0])
    least = float(chain.peak_bytes(_uniform(chain)).min())
    high = float(tries.limit_bytes)
    low = min(least, high)
    limit = high - max(keep.peak_allocated_bytes - keep_peak, 0.0)
    deadline = time.perf_counter() + TIME_LIMIT_SECONDS
    farther = 1
    for _ in range(_ROUNDS):
        left_seconds = deadline - time.perf_counter()
        if search is _exact and left_seconds <= 0 and tries.best is not None:
            break
        found = search(chain, limit, max(left_seconds, 1.0))
        if found.bound_seconds is not None:
            tries.bound_seconds = min(found.bound_seconds, tries.bound_seconds or np.inf)
        if found.choices is None:
            if tries.best is not None or limit >= high:
                break
            low, limit = limit, high if high - limit < _CLOSE * high else (limit + high) / 2
            continue
        seconds = chain.seconds_of(found.choices)
        if tries.best is not None and seconds >= tries.best.step_seconds:
            break
        unused = tries.limit_bytes - tries.simulate(found.choices).peak_reserved_bytes
        if unused >= 0:
            low, farther = max(low, limit), 1
            if unused < _CLOSE * tries.limit_bytes:
                break
            limit = min(limit + unused, (limit + high) / 2)
        else:  # the same plan would be found down to its own peak
            high = min(high, float(chain.peak_bytes(found.choices[None])[0]))
            middle = (high + low) / 2 if len(tries.seen) * tries.events < _SEARCH_EVENTS else low
            limit = high + farther * unused if high + farther * unused > low else middle
            if search is not _exact:  # which finds other plans near by
                farther *= 2  # gaps in the allocator may grow while the limit falls
        if high - low < _CLOSE / 4 * abs(high):
            break


def _repair(tries: _Tries, chain: Chain) -> None:
    """Change single decisions of the plans that fit best, and check each through the allocator.

    Fragmentation depends on the plan, so a neighbour of a plan that just does not fit may fit, and
    one that keeps more, too.
    """
    count = max(_REPAIR_EVENTS // tries.events, 1)
    for _ in range(_REPAIR_ROUNDS):
        before = tries.best
        for start in (tries.best_choices, tries.nearest_choices):
            if start is None:
                continue
            rows = single_changes(chain, start)
            rows = rows[chain.peak_bytes(rows) <= max(tries.limit_bytes, 0)]
            seconds = chain.step_seconds(rows)
            limit = np.inf if tries.best is None else tries.best.step_seconds * (1 - 1e-9)
            faster = np.argsort(seconds, kind="stable")[: int((seconds < limit).sum())]
            some = np.linspace(0, len(faster) - 1, min(count, len(faster))).astype(int)
            for row in rows[faster[some]]:
                tries.simulate(row)
        if tries.best is before:
            break


def _fragmentation(step: StepCosts, best: Simulation) -> tuple[str, ...]:
    gaps = best.peak_reserved_bytes - best.peak_allocated_bytes
    if step.settings.expandable_segments or gaps < _MANY_GAPS * best.peak_reserved_bytes:
        return ()
    return (
        f"{format_bytes(gaps)} of the plan's memory are gaps between tensors: with PYTORCH_CUDA_ALLOC_CONF="
        "expandable_segments:True for the job, plan again with the same allocator settings; that plan may be smaller or much faster",
    )


def _too_small(step: StepCosts, tries: _Tries, optimizer: str, budget_bytes: int) -> BudgetError:
    assert tries.smallest is not None
    least = tries.smallest
    place = f" in module '{least.peak.module}'" if least.peak.module else ""
    sentences = (
        f"no plan of '{optimizer}' fits {format_bytes(budget_bytes)}: the smallest one found takes "
        f"{format_bytes(least.process_bytes)}, with its peak in the {least.peak.phase} phase{place}",
        *_fragmentation(step, least),
    )
    return BudgetError("; ".join(sentences), least.process_bytes)


def plan_request(
    model: nn.Module, inputs: ModelInputs, request: PlanRequest, torch_notes: tuple[str, ...] = ()
) -> PlanAnswer:
    """Return how ``model`` fits the memory that is available; the model is left as it was.

    Args:
        model: the model, on any device.
        inputs: what it is called with.
        request: how it is trained, on which GPU, and how to plan.
        torch_notes: notes on the installed PyTorch, from
            :func:`~gpumemnet.tracing.api.checked_torch`.

    Raises:
        ExtractError, InvalidRequestError, PlanError: as :func:`gpumemnet.plan`.
    """
    machine = find_machine(request.trace.gpu, request.host_bytes)
    before = ModelTracer(model, inputs, request.trace, torch_notes).answer()
    if before.fits:
        return PlanAnswer(before=before)
    answer, costs = PlanAnswer(before=before), None
    try:
        _LOG.info("splitting the step into units")
        step = split_step(model, inputs, request.trace)
        chain = chain_of(step, machine)
        costs = step, machine, chain
        plan, after = _fitting_plan(model, inputs, request, step, machine, chain, before)
        answer = replace(answer, plan=plan, after=after)
    except PlanError as error:
        answer = replace(answer, reason=str(error))
    if request.with_alternatives:
        found = alternatives(model, inputs, request.trace, costs)
        useful = (each for each in found if each.expected_bytes != before.expected_bytes)
        answer = replace(answer, alternatives=tuple(useful))
    return answer


def _holds(answer: TraceAnswer, budget_bytes: int) -> bool:
    """Whether a job stays within what is available if its process is limited to that.

    Convolutions then take the workspaces that are left, and the allocator gives cached segments
    back, as ``smallest_bytes`` counts.
    """
    is_expected = answer.expected_bytes <= answer.available_bytes
    return is_expected and answer.smallest_bytes <= budget_bytes


def _fitting_plan(
    model: nn.Module,
    inputs: ModelInputs,
    request: PlanRequest,
    step: StepCosts,
    machine: Machine,
    chain: Chain,
    before: TraceAnswer,
) -> tuple[Plan, TraceAnswer]:
    """Return a plan and the job traced with it, whose safe bytes fit.

    A plan is made for expected bytes.  Where the safe bytes of the traced plan do not fit, the next
    one is made for less.

    Raises:
        PlanError: no plan fits.
    """
    # Less by the bound on the context and by the share for what a trace does not see.
    outside, share = context(step.device), safety()["margins"][step.timeline.kind]
    budget = int((before.available_bytes - outside.bound_bytes) / (1 + share))
    budget += outside.expected_bytes
    available = format_bytes(before.available_bytes)
    target, too_small = budget, None
    for _ in range(_ATTEMPTS):
        _LOG.info("planning for %d MiB with %s", target // MIB, request.planner)
        try:
            plan = choose_plan(
                step, machine, max(target, 1), optimizer=request.planner, chain=chain
            )
        except BudgetError as error:
            if too_small or error.smallest_bytes > before.available_bytes:
                reason = too_small or error
                raise PlanError(
                    f"for safe bytes of {available}, {format_bytes(budget)} may be expected; {reason}"
                ) from None
            target, too_small = (
                error.smallest_bytes,
                error,
            )  # the bound is smaller where the allocator must give segments back
            continue
        _LOG.info("tracing the plan")
        with applied(model, plan):
            after = ModelTracer(model, inputs, request.trace).answer()
        if after.fits:
            return plan, after
        if _holds(after, budget):
            limit = f"the safe bytes are those of a process that is limited to them: {_LIMIT}"
            plan = replace(plan, notes=(*plan.notes, limit))
            return plan, replace(after, safe_bytes=after.available_bytes)
        target = min(target, plan.process_bytes) - (after.safe_bytes - before.available_bytes) - MIB
    raise PlanError(f"no plan of '{request.planner}' was found whose safe bytes fit {available}")
