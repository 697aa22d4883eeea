"""What a plan decides for each module, and a plan with its predicted figures; a plan is also a JSON
object.

A unit is a module that runs once in a forward pass, such as a block of a transformer.  The rules
below say what the simulator assumes of the executor, so that a plan takes on a GPU what was
predicted:

* Recomputing runs the unit inside ``torch.utils.checkpoint`` (non-reentrant, early stop): its
  inputs stay, what it saved for the backward pass is freed when its forward pass ends.  Its forward
  pass runs again when its backward pass starts.
* Swapping copies each storage that the unit saved to pinned host memory once, however many tensors
  share it; parameters, buffers and weights cast by autocast stay.  The copies start when the unit's
  forward pass ends.  The GPU memory is released when the forward pass of the unit
  :data:`COPIES_BEHIND` units later ends, at the latest when the backward pass starts; the
  computation waits there for the copies.  Storages of less than :data:`MIN_SWAPPED_BYTES` stay.
* A swapped unit is fetched when the backward pass of the unit :data:`FETCHED_AHEAD` units before it
  (in backward order) starts.
* Copies to the host have one queue, copies from the host another one; each is worked off in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from gpumemnet.atomic_files import (
    Document,
    from_json,
    stated_json,
)
from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import check_choice, describe
from gpumemnet.tracing.api import TraceRequest
from gpumemnet.tracing.result import TraceAnswer, answer_to_dict
from gpumemnet.units import GIB

COPIES_BEHIND: Final = 1
"""How many units the forward pass may be ahead of a copy to the host that has not ended."""
FETCHED_AHEAD: Final = 1
"""How many units before its own backward pass a swapped unit is fetched."""
MIN_SWAPPED_BYTES: Final = 2**16
"""Smallest storage that is swapped: a copy of less takes longer to start than to run."""
EXPENSIVE_OPERATORS: Final = frozenset(
    {
        *("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm"),
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_flash_attention_forward",
        "_scaled_dot_product_efficient_attention",
        "_efficient_attention_forward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    }
)
"""Operators of ``torch.ops.aten`` whose results :attr:`Decision.RECOMPUTE_CHEAP` keeps.  Attention
with dropout is recomputed all the same: the random numbers of the rest depend on it."""
PLAN_FORMAT: Final = "gpumemnet-plan"
PLAN_VERSION: Final = 1


def pinned_bytes(size_bytes: int) -> int:
    """Return the host memory that PyTorch takes for a pinned tensor: it rounds up to a power of
    two.

    From ``aten/src/ATen/core/CachingHostAllocator.h``.
    """
    return 1 << max(size_bytes - 1, 0).bit_length()


class Decision(StrEnum):
    """What happens to the tensors that a unit saves for its backward pass."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    """They are dropped, and the unit's forward pass runs again before its backward pass."""
    SWAP = "swap"
    """They wait in host memory."""
    RECOMPUTE_AND_SWAP_INPUT = "recompute_and_swap_input"
    """They are recomputed, and the unit's inputs wait in host memory."""
    RECOMPUTE_CHEAP = "recompute_cheap"
    """Results of matrix products, convolutions and attention are kept, everything else is
    recomputed."""

    @property
    def recomputes(self) -> bool:
        """Whether the unit's forward pass, or a part of it, runs twice."""
        return self not in (Decision.KEEP, Decision.SWAP)

    @property
    def swaps(self) -> bool:
        """Whether something waits in host memory."""
        return self in (Decision.SWAP, Decision.RECOMPUTE_AND_SWAP_INPUT)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan for one model, with its predicted figures.  All times are modelled from the rates of
    the machine, not measured.

    Attributes:
        decisions: decision for each unit that does not keep what it saves, by its name in
            ``named_modules()``, in the order of the forward pass.
        optimizer: name of the search that found it.
        gpu: name of the GPU.
        budget_bytes: memory of the process that it had to fit into.
        process_bytes: predicted peak memory of the process, CUDA context included.
        peak_reserved_bytes, peak_allocated_bytes: maxima of the caching allocator.
        peak_phase: phase of the training step with the largest allocation: ``forward``,
            ``backward`` or ``optimizer``.
        peak_module: module of that allocation; empty outside of the model.
        keep_process_bytes: predicted peak memory of the process if everything is kept.
        step_seconds: modelled seconds of a training step.
        keep_step_seconds: the same if everything is kept.
        bound_step_seconds: a proven lower bound on the step's seconds within the budget, before the
            allocator's fragmentation; ``None`` if the search proves none.
        host_bytes: pinned host memory for swapped tensors.
        planning_seconds: seconds that the search took, without the trace.
        units: names of all units in the order of the forward pass.
        notes: one sentence for each assumption.
    """

    decisions: Mapping[str, Decision]
    optimizer: str
    gpu: str
    budget_bytes: int
    process_bytes: int
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    peak_phase: str
    peak_module: str
    keep_process_bytes: int
    step_seconds: float
    keep_step_seconds: float
    bound_step_seconds: float | None
    host_bytes: int
    planning_seconds: float
    units: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def slowdown(self) -> float:
        """Modelled extra time of a step as a share of the step that keeps everything: 0.1 is 10
        %."""
        return self.step_seconds / self.keep_step_seconds - 1

    @property
    def gap(self) -> float | None:
        """How far the slow-down may be from the smallest one, as a share of the step that keeps
        everything."""
        if self.bound_step_seconds is None:
            return None
        return max(self.step_seconds - self.bound_step_seconds, 0.0) / self.keep_step_seconds

    def decision(self, unit: str) -> Decision:
        """Return the decision for the module called ``unit``."""
        return self.decisions.get(unit, Decision.KEEP)


DEFAULT_PLANNER: Final = "greedy"
PLANNERS: Final = (DEFAULT_PLANNER, "exact")
"""Names of the searches, see :mod:`gpumemnet.planner.searches`."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a plan is asked with besides the model.

    Attributes:
        trace: how the model is trained, and the GPU; the memory that is available on it is the
            budget.
        planner: name of the search.
        host_bytes: pinned host memory that may be used; ``None`` for what the machine has.
        with_alternatives: whether to trace other settings of the job too.

    Raises:
        InvalidRequestError: there is no such search, or the job uses several GPUs, or checkpoints
            already.
    """

    trace: TraceRequest
    planner: str = DEFAULT_PLANNER
    host_bytes: int | None = None
    with_alternatives: bool = True

    def __post_init__(self) -> None:
        check_choice(self.planner, PLANNERS, "planner")
        options = self.trace.options
        if options.parallel != "none":
            raise InvalidRequestError(
                "a plan is for one GPU; use 'none', and give each rank the same plan", "parallel"
            )
        if options.checkpointing != "none":
            raise InvalidRequestError(
                "the plan decides what is recomputed; use 'none'", "checkpointing"
            )


def plan_to_dict(plan: Plan) -> Document:
    """Return ``plan`` as a JSON object."""
    return {"format": PLAN_FORMAT, "version": PLAN_VERSION, **asdict(plan)}


def plan_from_dict(document: object) -> Plan:
    """Return the plan that :func:`plan_to_dict` turned into a JSON object.

    Raises:
        InvalidRequestError: names the field that is missing, unknown or wrong.
    """
    if not isinstance(document, Mapping) or document.get("format") != PLAN_FORMAT:
        raise InvalidRequestError(f"is no plan: its 'format' must be '{PLAN_FORMAT}'", "plan")
    if document.get("version") != PLAN_VERSION:
        raise InvalidRequestError(
            f"has version {describe(document.get('version'))}, and this gpumemnet reads {PLAN_VERSION}",
            "plan",
        )
    decisions = checked_decisions(document.get("decisions"), "plan.decisions")
    try:
        plan: Plan = from_json(Plan, {**document, "decisions": decisions})
    except TypeError as error:
        raise InvalidRequestError(f"is no plan: {error}", "plan") from None
    return plan


def load_plan(path: Path | str) -> Plan:
    """Return the plan in the file that ``gpumemnet plan --out`` wrote.

    Raises:
        InvalidRequestError: the file cannot be read, or holds no plan.
    """
    return plan_from_dict(stated_json(Path(path), "plan"))


def checked_decisions(document: object, field: str = "decisions") -> dict[str, Decision]:
    """Return decisions by the name of their module.

    Raises:
        InvalidRequestError: names the entry that is wrong.
    """
    if not isinstance(document, Mapping):
        raise InvalidRequestError(
            f"must be an object of decisions by module, not {describe(document)}", field
        )
    for name, value in document.items():
        check_choice(value, Decision, f"{field}[{describe(name)}]")
    return {str(name): Decision(value) for name, value in document.items()}


FITS: Final = "fits"
PLANNED: Final = "planned"
NO_PLAN: Final = "no_plan_fits"
DECISION_TEXTS: Final = {
    Decision.KEEP: "keep",
    Decision.RECOMPUTE: "recompute",
    Decision.RECOMPUTE_CHEAP: "recompute all but products",
    Decision.SWAP: "swap",
    Decision.RECOMPUTE_AND_SWAP_INPUT: "recompute, swap inputs",
}
"""Decision → its words for people."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One change of a job's settings, and the memory that the job takes with it.

    Attributes:
        name: its name for programs.
        change: what changes.
        expected_bytes, safe_bytes: the job's memory with it, as in
            :class:`~gpumemnet.tracing.result.TraceAnswer`.
        verdict: whether that fits, one of those of :data:`~gpumemnet.gpu.VERDICT_TEXTS`.
        effect: what it does to numbers.
        time: what it does to the time of a step, and how that is known.
        how: how to make the change, in a line or two.
        trace_options: the options of ``gpumemnet trace`` that trace it; empty if none do.
    """

    name: str
    change: str
    expected_bytes: int
    safe_bytes: int
    verdict: str
    effect: str
    time: str
    how: str
    trace_options: Document = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanAnswer:
    """How a job can be made to fit a budget.

    Attributes:
        before: the job as it stands; its available memory is the budget.
        plan: the plan; ``None`` if the job fits as it is, or no plan makes it fit.
        after: the job with the plan applied, traced again.
        reason: why no plan fits; empty otherwise.
        alternatives: changes of settings, those first that change the training least.
    """

    before: TraceAnswer
    plan: Plan | None = None
    after: TraceAnswer | None = None
    reason: str = ""
    alternatives: tuple[Alternative, ...] = ()

    @property
    def budget_bytes(self) -> int:
        """Memory of the process that the job has to fit into."""
        return self.before.available_bytes

    @property
    def outcome(self) -> str:
        """Whether the job ``fits`` as it is, is ``planned`` to fit, or ``no_plan_fits``."""
        if self.before.fits:
            return FITS
        return NO_PLAN if self.plan is None else PLANNED

    def __repr__(self) -> str:
        smaller = (
            "" if self.after is None else f", with the plan {self.after.safe_bytes / GIB:.2f} GiB"
        )
        amounts = f"{self.outcome} in {self.budget_bytes / GIB:.2f} GiB, safe {self.before.safe_bytes / GIB:.2f} GiB{smaller}"
        return f"<PlanAnswer: {self.before.model}, batch size {self.before.batch_size}: {amounts}>"


def plan_answer_to_dict(answer: PlanAnswer) -> Document:
    """Return the answer as a JSON object, with its outcome and its budget."""
    return {
        "outcome": answer.outcome,
        "budget_bytes": answer.budget_bytes,
        **asdict(answer),
        "before": answer_to_dict(answer.before),
        "plan": None if answer.plan is None else plan_to_dict(answer.plan),
        "after": None if answer.after is None else answer_to_dict(answer.after),
    }


def plan_answer_from_dict(document: Mapping[str, Any]) -> PlanAnswer:
    """Return the answer of a JSON object from :func:`plan_answer_to_dict`."""
    answer: PlanAnswer = from_json(PlanAnswer, document)
    return answer if answer.plan is None else replace(answer, plan=plan_from_dict(document["plan"]))


def units_by_decision(plan: Plan) -> dict[Decision, str]:
    """Return the units of each decision in words, such as ``h.0–27, ln_f``; decisions in the order
    of their first unit."""
    texts: dict[Decision, list[str]] = {}
    for decision, units in groupby(plan.units, plan.decision):
        texts.setdefault(decision, []).extend(ranges(units))
    return {decision: ", ".join(found) for decision, found in texts.items()}


def ranges(units: Iterable[str]) -> Iterator[str]:
    """Yield names as ranges: those that differ in their last number only, and count up, are
    joined."""
    for stem, names in _series(units):
        first, last = names[0], names[-1]
        yield first if first == last else f"{first}–{last.removeprefix(stem)}"


def _series(units: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield runs of names that differ in their last number only, which counts up, with what they
    begin with."""

    def series(place: tuple[int, str]) -> tuple[str, int]:
        index, unit = place
        stem, dot, last = unit.rpartition(".")
        return (stem + dot, int(last) - index) if last.isdecimal() else (unit, index)

    for (stem, _), places in groupby(enumerate(units), series):
        yield stem, [unit for _, unit in places]


def python_lines(plan: Plan) -> Iterator[str]:
    """Yield lines of Python that make a dict ``plan`` of the decision for every unit.

    Units that keep everything are named too: swapped memory is released and fetched as they run.
    """
    yield "plan = {}"
    for decision, units in groupby(plan.units, plan.decision):
        for stem, names in _series(units):
            if len(names) == 1:
                yield f'plan["{names[0]}"] = "{decision}"'
                continue
            first, last = (int(name.removeprefix(stem)) for name in (names[0], names[-1]))
            yield f"for n in range({first}, {last + 1}):"
            yield f'    plan[f"{stem}{{n}}"] = "{decision}"'
