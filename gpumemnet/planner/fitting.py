"""Makes a job fit: the trace as it stands, the plan, the trace with the plan applied, and what else
would help."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
from torch import nn

from gpumemnet.errors import BudgetError, MissingExtraError, PlanError
from gpumemnet.extract.inputs import ModelInputs
from gpumemnet.planner.alternatives import alternatives
from gpumemnet.planner.answer import PlanAnswer, SearchPoint
from gpumemnet.planner.chain import Chain, chain_of
from gpumemnet.planner.choose import FIXED, choose_plan
from gpumemnet.planner.costs import StepCosts
from gpumemnet.planner.decisions import Decision, Plan
from gpumemnet.planner.executor import applied
from gpumemnet.planner.machine import Machine, requested_machine
from gpumemnet.planner.options import PLANNERS, PlanRequest
from gpumemnet.planner.simulator import choices_of, simulate
from gpumemnet.planner.units import plan_units
from gpumemnet.tracing.memory import MARGIN
from gpumemnet.tracing.model_on_gpu import blocks
from gpumemnet.tracing.model_tracer import ModelTracer
from gpumemnet.tracing.result import TraceAnswer
from gpumemnet.units import MIB, format_bytes

_LOG: Final = logging.getLogger(__name__)
_ATTEMPTS: Final = 4
"""How often a plan is made for a smaller budget because its safe bytes do not fit."""
_SEARCH_SECONDS: Final = 3.0
"""Time limit of each search for the picture."""
_BUDGETS: Final = 7
"""Number of budgets of that picture."""


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
    machine = requested_machine(request)
    before = ModelTracer(model, inputs, request.trace, torch_notes).answer()
    if before.fits:
        return PlanAnswer(before=before)
    answer, checkpointing = PlanAnswer(before=before), None
    try:
        _LOG.info("splitting the step into units")
        step = plan_units(model, inputs, request.trace)
        chain = chain_of(step, machine)
        checkpointing = _slowdown_of_checkpointing(model, step, machine, chain)
        plan, after = _fitting_plan(model, inputs, request, step, machine, chain, before)
        answer = replace(answer, plan=plan, after=after)
        if request.with_searches:
            answer = replace(answer, searches=tuple(_search_points(step, machine, chain)))
    except PlanError as error:
        answer = replace(answer, reason=str(error))
    if request.with_alternatives:
        found = alternatives(model, inputs, request.trace)
        slowdowns = {"checkpointing": checkpointing}
        answer = replace(
            answer,
            alternatives=tuple(replace(each, slowdown=slowdowns.get(each.name)) for each in found),
        )
    return answer


def expected_budget(
    available_bytes: int, expected_bytes: int, safe_bytes: int, reserved_bytes: int
) -> int:
    """Return the expected bytes at which the safe bytes of a job take all that is available.

    The bound above the expected bytes is a share of the reserved bytes and a fixed amount.

    Args:
        available_bytes: memory that the process may use.
        expected_bytes, safe_bytes, reserved_bytes: of the job without a plan.
    """
    fixed, context_bytes = (
        safe_bytes - expected_bytes - MARGIN * reserved_bytes,
        expected_bytes - reserved_bytes,
    )
    return int((available_bytes - fixed + MARGIN * context_bytes) / (1 + MARGIN))


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
    budget = expected_budget(
        before.available_bytes, before.expected_bytes, before.safe_bytes, before.reserved_bytes
    )
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
        target = min(target, plan.process_bytes) - (after.safe_bytes - before.available_bytes) - MIB
    raise PlanError(f"no plan of '{request.planner}' was found whose safe bytes fit {available}")


def _slowdown_of_checkpointing(
    model: nn.Module, step: StepCosts, machine: Machine, chain: Chain
) -> float | None:
    """Return the modelled slow-down if every block is recomputed; ``None`` if the blocks are no
    units of the step."""
    stack = blocks(model)
    decisions = {
        name: Decision.RECOMPUTE
        for name, module in model.named_modules()
        if any(module is block for block in stack)
    }
    if not stack or not decisions.keys() <= set(step.units):
        return None
    choices = np.array([choices_of(step, decisions), chain.keep_all()])
    every_block, keep = chain.step_seconds(choices)
    return float(every_block / keep - 1)


def _search_points(step: StepCosts, machine: Machine, chain: Chain) -> Iterator[SearchPoint]:
    """Yield what every search finds within several budgets; a search that finds nothing within one
    has no point there."""
    most = simulate(step, machine, {}, chain=chain).process_bytes
    for optimizer in PLANNERS:
        seen: set[int] = set()
        for budget_bytes in (
            (most - 1,) if optimizer in FIXED else _budgets(step, machine, chain, most)
        ):
            _LOG.info("planning for %d MiB with %s", budget_bytes // MIB, optimizer)
            try:
                plan = choose_plan(
                    step,
                    machine,
                    budget_bytes,
                    optimizer,
                    chain=chain,
                    time_limit_seconds=_SEARCH_SECONDS,
                )
            except (PlanError, MissingExtraError):
                break
            if plan.process_bytes not in seen:
                seen.add(plan.process_bytes)
                yield SearchPoint(
                    optimizer=optimizer, process_bytes=plan.process_bytes, slowdown=plan.slowdown
                )


def _budgets(step: StepCosts, machine: Machine, chain: Chain, most: int) -> list[int]:
    """Return budgets from ``most`` down to the memory of the smallest plan."""
    try:
        least = choose_plan(step, machine, 1, chain=chain).process_bytes
    except BudgetError as error:
        least = error.smallest_bytes
    return [most - (most - least) * part // (_BUDGETS - 1) for part in range(_BUDGETS)]
