"""The result of ``gpumemnet plan``, and its JSON.  This module loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Final

from gpumemnet.planner.decisions import Decision, Plan, plan_from_dict, plan_to_dict
from gpumemnet.planner.knobs import Knob, knobs_of, script_of
from gpumemnet.tracing.result import TraceAnswer, answer_from_dict, answer_to_dict
from gpumemnet.units import GIB

FITS: Final = "fits"
PLANNED: Final = "planned"
NO_PLAN: Final = "no_plan_fits"
OUTCOMES: Final = (FITS, PLANNED, NO_PLAN)
"""The job fits as it is; it fits by the plan; no plan makes it fit."""
DECISION_TEXTS: Final = {
    Decision.KEEP: "keep",
    Decision.RECOMPUTE: "recompute",
    Decision.RECOMPUTE_CHEAP: "recompute all but products",
    Decision.SWAP: "swap",
    Decision.RECOMPUTE_AND_SWAP_INPUT: "recompute, swap inputs",
}
"""Decision → its words for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One change of a job's settings, and the memory that the job takes with it.

    Attributes:
        name: its name for programs.
        change: what changes.
        expected_bytes, safe_bytes: the job's memory with it, as in
            :class:`~gpumemnet.tracing.result.TraceAnswer`.
        verdict: whether that fits, one of :data:`~gpumemnet.gpu.available.VERDICTS`.
        effect: what it does to numbers and time.
        how: how to make the change, in one line.
        slowdown: share by which a step takes longer, modelled; negative if it is shorter, ``None``
            if it is not modelled.
        trace_options: the options of ``gpumemnet trace`` that trace it; empty if none do.
    """

    name: str
    change: str
    expected_bytes: int
    safe_bytes: int
    verdict: str
    effect: str
    how: str
    slowdown: float | None = None
    trace_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPoint:
    """What one search finds within one budget.

    Attributes:
        optimizer: name of the search.
        process_bytes: predicted peak memory of its plan.
        slowdown: modelled slow-down of its plan.
    """

    optimizer: str
    process_bytes: int
    slowdown: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanAnswer:
    """How a job can be made to fit a budget.

    Attributes:
        before: the job as it stands; its available memory is the budget.
        plan: the plan; ``None`` if the job fits as it is, or no plan makes it fit.
        after: the job with the plan applied, traced again.
        reason: why no plan fits; empty otherwise.
        alternatives: changes of settings, those first that change the training least.
        searches: what every search finds within several budgets, on request.
    """

    before: TraceAnswer
    plan: Plan | None = None
    after: TraceAnswer | None = None
    reason: str = ""
    alternatives: tuple[Alternative, ...] = ()
    searches: tuple[SearchPoint, ...] = ()

    @property
    def script(self) -> str:
        """Python code that applies the plan; empty without one."""
        return "" if self.plan is None else script_of(self.plan)

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """Settings of libraries with the effect of the plan, or why there are none."""
        return () if self.plan is None else knobs_of(self.plan)

    @property
    def budget_bytes(self) -> int:
        """Memory of the process that the job has to fit into."""
        return self.before.available_bytes

    @property
    def outcome(self) -> str:
        """One of :data:`OUTCOMES`."""
        if self.before.fits:
            return FITS
        return NO_PLAN if self.plan is None else PLANNED

    def __repr__(self) -> str:
        smaller = (
            "" if self.after is None else f", with the plan {self.after.safe_bytes / GIB:.2f} GiB"
        )
        amounts = f"{self.outcome} in {self.budget_bytes / GIB:.2f} GiB, safe {self.before.safe_bytes / GIB:.2f} GiB{smaller}"
        return f"<PlanAnswer: {self.before.model}, batch size {self.before.batch_size}: {amounts}>"


def plan_answer_to_dict(answer: PlanAnswer) -> dict[str, Any]:
    """Return the answer as a JSON object, with its outcome and its budget."""
    return {
        "outcome": answer.outcome,
        "budget_bytes": answer.budget_bytes,
        "before": answer_to_dict(answer.before),
        "plan": None if answer.plan is None else plan_to_dict(answer.plan),
        "after": None if answer.after is None else answer_to_dict(answer.after),
        "reason": answer.reason,
        "alternatives": [asdict(each) for each in answer.alternatives],
        "searches": [asdict(point) for point in answer.searches],
        "script": answer.script,
        "knobs": [asdict(knob) for knob in answer.knobs],
    }


def plan_answer_from_dict(document: Mapping[str, Any]) -> PlanAnswer:
    """Return the answer of a JSON object from :func:`plan_answer_to_dict`."""
    plan, after = document["plan"], document["after"]
    return PlanAnswer(
        before=answer_from_dict(document["before"]),
        plan=None if plan is None else plan_from_dict(plan),
        after=None if after is None else answer_from_dict(after),
        reason=document["reason"],
        alternatives=tuple(Alternative(**each) for each in document["alternatives"]),
        searches=tuple(SearchPoint(**point) for point in document["searches"]),
    )


def units_by_decision(plan: Plan) -> dict[Decision, str]:
    """Return the units of each decision in words, such as ``h.0–27, ln_f``; decisions in the order
    of their first unit."""
    texts: dict[Decision, list[str]] = {}
    for decision, units in groupby(plan.units, plan.decision):
        texts.setdefault(decision, []).extend(_ranges(list(units)))
    return {decision: ", ".join(ranges) for decision, ranges in texts.items()}


def _ranges(units: list[str]) -> list[str]:
    """Return names as ranges: those that differ in their last number only, and count up, are
    joined."""
    ranges: list[tuple[str, int | None, int | None]] = []
    for unit in units:
        stem, _, last = unit.rpartition(".")
        number = int(last) if last.isdecimal() else None
        stem = unit if number is None else stem
        if ranges and number is not None and ranges[-1][0] == stem and ranges[-1][2] == number - 1:
            ranges[-1] = (stem, ranges[-1][1], number)
        else:
            ranges.append((stem, number, number))
    return [_range(*each) for each in ranges]


def _range(stem: str, first: int | None, last: int | None) -> str:
    if first is None:
        return stem
    numbers = f"{first}" if first == last else f"{first}–{last}"
    return f"{stem}.{numbers}" if stem else numbers
