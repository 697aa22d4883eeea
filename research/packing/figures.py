"""Summarises a run: the figures that the operator of a cluster asks for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from research.packing.amounts import Amounts
from research.packing.inventory import Inventory
from research.packing.simulation import Run
from research.packing.workload import Workload

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
