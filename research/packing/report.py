"""The figures of a comparison, its limits in words, and the JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpumemnet.predict.bundle import Bundle
from research.packing.amounts import (
    EXCLUSIVE,
    LIMIT,
    ORACLE,
    REQUEST,
    TRACED_LIMIT,
    TRACED_REQUEST,
    Amounts,
)
from research.packing.cluster import Inventory, Policy, Run, simulate
from research.packing.trace import Trace, Workload

if TYPE_CHECKING:
    from gpumemnet.predict.bundle import Bundle

_MIB_SECONDS = 1024 * 3600
"""MiB-seconds of a GiB-hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One line of the table.

    Attributes:
        key, title: the estimator.
        jobs: jobs that were run to their end.
        not_run: jobs that need more than any card has.
        collocated_share: share of the jobs that had a neighbour on their card at some time.
        jobs_per_gpu: jobs on a card that has any, on average over time.
        ooms: attempts that ran out of memory.
        oom_jobs: jobs that did.
        alone: jobs that the estimator put on a card of their own: no answer, or more than any card
            has.
        lost_hours: how long failed attempts ran.
        reserved_gib_hours: memory that was set aside, times how long; failed attempts included.
        waste_gib_hours: of that what no job needed: above the true peak, and all of a failed
            attempt.
        waste_share: the same as a share of what was set aside.
        makespan_hours: from the first arrival to the last end.
        wait_hours: mean from arrival to the start of the attempt that ended well.
        gpu_hours: time that cards had a job, summed over the cards.
    """

    key: str
    title: str
    jobs: int
    not_run: int
    collocated_share: float
    jobs_per_gpu: float
    ooms: int
    oom_jobs: int
    alone: int
    lost_hours: float
    reserved_gib_hours: float
    waste_gib_hours: float
    waste_share: float
    makespan_hours: float
    wait_hours: float
    gpu_hours: float


def figures(run: Run, jobs: Workload, amounts: Amounts) -> Figures:
    """The figures of one run."""
    ran = run.is_run
    count = int(ran.sum())
    seconds = run.end_seconds[ran] - run.start_seconds[ran]
    reserved = run.reserved_mib[ran]
    lost_memory = float(run.lost_mib_seconds.sum()) / _MIB_SECONDS
    waste = (
        float((np.maximum(reserved - jobs.peak_mib[ran], 0) * seconds).sum()) / _MIB_SECONDS
        + lost_memory
    )
    set_aside = float((reserved * seconds).sum()) / _MIB_SECONDS + lost_memory
    busy_seconds = float(run.busy_seconds.sum())
    lost_seconds = float(run.lost_seconds.sum())
    return Figures(
        key=amounts.key,
        title=amounts.title,
        jobs=count,
        not_run=len(ran) - count,
        collocated_share=_ratio(float(run.has_shared.sum()), count),
        jobs_per_gpu=_ratio(float(seconds.sum()) + lost_seconds, busy_seconds),
        ooms=int(run.ooms.sum()),
        oom_jobs=int((run.ooms > 0).sum()),
        alone=int(amounts.is_alone[jobs.row_of][ran].sum()),
        lost_hours=lost_seconds / 3600,
        reserved_gib_hours=set_aside,
        waste_gib_hours=waste,
        waste_share=_ratio(waste, set_aside),
        makespan_hours=float(run.end_seconds[ran].max()) / 3600 if count else 0.0,
        wait_hours=float((run.start_seconds - jobs.arrival_seconds)[ran].mean()) / 3600
        if count
        else 0.0,
        gpu_hours=busy_seconds / 3600,
    )


def needed_gib_hours(jobs: Workload, cards: Inventory) -> float:
    """Memory that the jobs really need, times how long they run without neighbours."""
    ran = jobs.peak_mib <= cards.largest_mib
    return float((jobs.peak_mib * jobs.duration_seconds)[ran].sum()) / _MIB_SECONDS


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def notes(
    trace: Trace,
    jobs: Workload,
    cards: Inventory,
    policy: Policy,
    found: Sequence[Amounts],
    bundles: Sequence[Bundle],
) -> list[str]:
    """Sentences, the most important first."""
    return [
        *_seen(trace, found, bundles),
        *(f"synthetic: {sentence}" for sentence in jobs.synthetic),
        *_truth(trace, jobs, cards),
        *_queue(policy),
    ]


def seen_by(trace: Trace, bundles: Sequence[Bundle]) -> dict[str, list[str]]:
    """Files of the trace that are, byte for byte, what a model learned from; each with the models'
    names."""
    models: dict[str, list[str]] = {}
    for path, sha256 in trace.sha256_of.items():
        names = [
            bundle.card.name
            for bundle in bundles
            if bundle.card.document["training_data"].get("sha256") == sha256
        ]
        if names:
            models[path] = names
    return models


def _seen(trace: Trace, found: Sequence[Amounts], bundles: Sequence[Bundle]) -> Iterator[str]:
    ours = [
        outcome
        for outcome in found
        if outcome.key in (LIMIT, REQUEST, TRACED_LIMIT, TRACED_REQUEST)
    ]
    if not ours:
        return
    answered = {name for outcome in ours for name, _ in outcome.answered_by}
    for path, names in seen_by(trace, bundles).items():
        if answered & set(names):
            yield f"{', '.join(names)} learned from {path}: gpumemnet looks better here than on jobs that are new to it"
    first = next((outcome for outcome in ours if outcome.key in (LIMIT, REQUEST)), ours[0])
    yield "answered by " + ", ".join(
        f"{name} ({count:,} rows)" for name, count in first.answered_by
    )
    if any(outcome.key in (TRACED_LIMIT, TRACED_REQUEST) for outcome in ours):
        yield (
            "bounds of traced jobs were calibrated on the published MLP, CNN and transformer readings: judge what goes with a "
            "trace on other rows"
        )


def _truth(trace: Trace, jobs: Workload, cards: Inventory) -> Iterator[str]:
    for reason, count in trace.left_out.items():
        yield f"left out: {count:,} rows {reason}"
    too_large = int((jobs.peak_mib > cards.largest_mib).sum())
    if too_large:
        yield f"not run: {too_large:,} jobs need more than the {cards.largest_mib:,} MiB of the largest card"
    traced = sum(row.is_traced for row in trace.rows)
    if traced:
        yield f"the true peak of {traced:,} of {len(trace.rows):,} rows is a trace's answer, not a measurement"
    own = {kind.gpu for kind in cards.kinds}
    other = sorted({row.gpu for row in trace.rows if row.gpu is not None and row.gpu not in own})
    if other:
        yield f"peaks read on {', '.join(other)} stand for the same jobs on the cards simulated, whose CUDA context may differ"


def _queue(policy: Policy) -> Iterator[str]:
    order = "no job overtakes another"
    if policy.backfill:
        order = f"up to {policy.backfill} jobs behind one that does not fit may go first"
    yield f"{policy.fit} fit, first come first served, {order}"
    yield "the job that was placed last runs out of memory, and runs again on a card of its own"
    yield "neighbours do not slow each other down here: waits and hours show what memory allows, not what compute does"


FORMAT: Final = "gpumemnet-packing"
FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of one trace on one inventory.

    Attributes:
        jobs: how many jobs there were.
        inventory: the cards, in words.
        is_synthetic: whether jobs, arrivals or durations were drawn.
        figures: a line for each estimator.
        notes: what a reader has to know.
        document: all of it for programs.
    """

    jobs: int
    inventory: str
    is_synthetic: bool
    figures: tuple[Figures, ...]
    notes: tuple[str, ...]
    document: dict[str, Any]


def report(
    trace: Trace,
    jobs: Workload,
    cards: Inventory,
    policy: Policy,
    found: Sequence[Amounts],
    bundles: Sequence[Bundle],
) -> Report:
    """Simulate the workload once with each of the estimators ``found``."""
    lines = tuple(figures(simulate(jobs, one, cards, policy), jobs, one) for one in found)
    sentences = tuple(notes(trace, jobs, cards, policy, found, bundles))
    needed = needed_gib_hours(jobs, cards)
    document = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "jobs": len(jobs.row_of),
        "rows": len(trace.rows),
        "files": [{"path": path, "sha256": sha256} for path, sha256 in trace.sha256_of.items()],
        "left_out": dict(trace.left_out),
        "seen_by": seen_by(trace, bundles),
        "gpus": [
            {"gpu": kind.gpu, "mig": kind.mig, "available_mib": kind.available_mib, "count": count}
            for kind, count in zip(cards.kinds, cards.counts, strict=True)
        ],
        "policy": asdict(policy),
        "needed_gib_hours": round(needed, 3),
        "estimators": [_line(line, one) for line, one in zip(lines, found, strict=True)],
        "notes": list(sentences),
    }
    return Report(
        jobs=len(jobs.row_of),
        inventory=str(cards),
        is_synthetic=bool(jobs.synthetic),
        figures=lines,
        notes=sentences,
        document=document,
    )


def _line(line: Figures, amounts: Amounts) -> dict[str, Any]:
    values = {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in asdict(line).items()
    }
    if amounts.key not in (EXCLUSIVE, ORACLE):
        values |= {"rows_unanswered": amounts.unanswered, "rows_too_large": amounts.too_large}
    if amounts.answered_by:
        values["answered_by"] = dict(amounts.answered_by)
    return values
