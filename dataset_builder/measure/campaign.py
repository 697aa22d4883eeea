"""A campaign: the jobs of a recipe measured on every visible GPU until all are done or the time
budget is used up.

Jobs run side by side where the driver reads each process.  A job starts when its estimated memory
fits into what is free, less what the running jobs may still take.  Neighbours must not influence a
label: a job that ran out of memory or time, or made the allocator retry, while it had neighbours is
run again alone.  Finished jobs are in the journal.  Jobs that were running when a campaign stops
are measured again by the next run.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from multiprocessing.connection import wait
from pathlib import Path
from typing import Final

from gpumemnet.atomic_files import Document
from gpumemnet.job.measurement import Measurement

from ..planned_job import PROTOCOL, PlannedJob, rough_bytes, unextracted_job
from .gpu_process import (
    ONE_AT_A_TIME,
    SETTLE_BYTES,
    SETTLE_SECONDS,
    GpuProcess,
    find_label_source,
)
from .nvml import NvmlMeter

ADMISSION_MARGIN: Final = 1.25
"""Factor on the rough estimate of a job that is admitted."""
_RERUNS_BEFORE_DRAIN: Final = 4
"""Jobs that wait to run alone before the GPU is emptied for them."""
_STEADY_PHASES: Final = 3
_WAIT_SECONDS: Final = 0.02
_MAX_GRACE_SECONDS: Final = 20.0

Record = Callable[[PlannedJob, Measurement], None]


@dataclass(frozen=True)
class RunSettings:
    """Settings that all jobs of a campaign share.

    Attributes:
        recipe: name of the recipe, stored in each row.
        seed: seed of weights and inputs.
        workers: largest number of jobs at a time on one GPU.
        deadline_seconds: seconds after which a job is killed.
        folder: the campaign's folder.
    """

    recipe: str
    seed: int
    workers: int
    deadline_seconds: float
    folder: Path


@dataclass(slots=True)
class Tally:
    """Progress of a campaign.

    Attributes:
        total: jobs of the plan.
        before: jobs that earlier runs had finished.
        statuses: jobs that this run has finished, by status.
        started: when this run began, on the monotonic clock.
        budget_seconds: time that this run may take; without a limit by default.
    """

    total: int
    before: int
    started: float
    budget_seconds: float = inf
    statuses: Counter[str] = field(default_factory=Counter)

    @property
    def progress(self) -> tuple[str, float]:
        """What is done, in words, and as a share of the jobs or of the time, whichever is larger."""
        done = self.before + self.statuses.total()
        counts = "".join(f", {count:,} {status}" for status, count in self.statuses.items())
        share = max(done / self.total, (time.monotonic() - self.started) / self.budget_seconds)
        return f"{done:,} of {self.total:,} jobs{counts}", min(share, 1.0)


def run_campaign(
    planned: Iterable[PlannedJob],
    record: Record,
    meters: Sequence[NvmlMeter],
    settings: RunSettings,
    tally: Tally,
    show: Callable[[str, float], None],
) -> None:
    """Measure ``planned`` on the GPUs of this machine.

    Args:
        planned: the jobs that are left, in the order of measuring.
        record: takes every finished job before the next is begun.
        meters: the GPUs.
        settings: how jobs are run.
        tally: is kept up to date; its budget ends the run.
        show: called about fifty times a second with what is done, see :attr:`Tally.progress`.

    Raises:
        MeasurementError: when a GPU cannot be used, its readings cannot be trusted, or it is lost.
        DatasetError: when a measurement cannot be recorded.
    """

    def count_and_record(job: PlannedJob, measurement: Measurement) -> None:
        record(job, measurement)
        tally.statuses[measurement.status] += 1

    queue = deque(planned)
    pools = [Pool(meter, find_label_source(meter), settings, count_and_record) for meter in meters]
    grace = min(_MAX_GRACE_SECONDS, tally.budget_seconds / 10)  # running jobs may end in it
    end = tally.started + tally.budget_seconds
    try:
        while time.monotonic() < end - grace / 3:
            may_admit = time.monotonic() < end - grace
            for pool in pools:
                pool.kill_overdue()
                if may_admit:
                    pool.admit(queue)
            show(*tally.progress)
            if not any(pool.running for pool in pools) and not (
                may_admit and (queue or any(p.alone for p in pools))
            ):
                return
            senders = {
                job.process.connection: (pool, job) for pool in pools for job in pool.running
            }
            ready = wait(list(senders), _WAIT_SECONDS)
            for connection, (pool, job) in senders.items():
                if connection in ready:
                    pool.receive(job)
    finally:
        for pool in pools:
            for job in pool.running:
                job.process.kill()


@dataclass(slots=True, eq=False)
class RunningJob:
    """A job on the GPU; ``neighbours`` is the most jobs that ran beside it at any time."""

    planned: PlannedJob
    process: GpuProcess
    neighbours: int = 0


class Pool:
    """The jobs of one GPU.

    Attributes:
        running: the jobs on it now.
        alone: jobs that have to run alone.
    """

    def __init__(
        self, meter: NvmlMeter, label_source: str, settings: RunSettings, record: Record
    ) -> None:
        self.running: list[RunningJob] = []
        self.alone: deque[PlannedJob] = deque()
        self._meter = meter
        self._label_source = label_source
        self._settings = settings
        self._record = record
        self._workers = 1 if label_source == ONE_AT_A_TIME else settings.workers
        self._empty_since = time.monotonic()
        self._idle = meter.device()

    def admit(self, queue: deque[PlannedJob]) -> None:
        """Start the next job if it fits; one process at a time makes its context, so that the
        driver's list tells which one is new."""
        if not self.running and not self._settle_idle():
            return
        if any(not job.process.phases or job.planned in self.alone for job in self.running):
            return
        if len(self.alone) >= _RERUNS_BEFORE_DRAIN or (self.alone and not queue):
            if not self.running:
                self._start(self.alone[0])
        elif queue and len(self.running) < self._workers:
            fits = not self.running or _admission_bytes(queue[0]) <= self._free_bytes()
            if fits:
                self._start(queue.popleft())

    def _settle_idle(self) -> bool:
        """Take the idle reading; ``False`` while the driver still takes back an ended job's
        memory."""
        idle = self._meter.device()
        waited = time.monotonic() - self._empty_since
        if idle.used_bytes > self._idle.used_bytes + SETTLE_BYTES and waited < SETTLE_SECONDS:
            return False
        self._idle = idle
        return True

    def _free_bytes(self) -> int:
        """Free memory, less what the running jobs may still take."""
        growth = sum(
            max(0, _admission_bytes(job.planned) - job.process.process_bytes)
            for job in self.running
        )
        return self._meter.device().free_bytes - growth

    def _start(self, planned: PlannedJob) -> None:
        request = {"planned": planned.to_dict(), "seed": self._settings.seed}
        log = self._settings.folder / "children.log"
        process = GpuProcess(self._meter, request, log)
        self.running.append(RunningJob(planned, process))
        for job in self.running:
            job.neighbours = max(job.neighbours, len(self.running) - 1)

    def kill_overdue(self) -> None:
        """Kill the jobs that have passed their deadline."""
        deadline = self._settings.deadline_seconds
        for job in self.running:
            if time.monotonic() - job.process.started > deadline:
                reason = f"killed after its deadline of {deadline:g} s"
                job.process.kill({"status": "timeout", "reason": reason})

    def receive(self, job: RunningJob) -> None:
        """Handle the next message of a job; when it has ended, record its outcome, or note that it
        has to run alone."""
        if job.process.receive():
            return
        self.running.remove(job)
        self._empty_since = time.monotonic()
        measurement = self._measurement(job)
        retries = measurement.allocator.get("alloc_retries", 0)
        if job.neighbours and (measurement.status != "ok" or retries):
            self.alone.append(job.planned)
            return
        if job.planned in self.alone:
            self.alone.remove(job.planned)
        self._record(job.planned, measurement)

    def _measurement(self, job: RunningJob) -> Measurement:
        planned, phases, meter = job.planned, job.process.phases, self._meter
        outcome: Document = dict(job.process.outcome or {})
        readings: Document = {}
        if outcome["status"] == "ok":
            last, idle_bytes = phases[-1], self._idle.used_bytes
            above_idle = max((phase.device_bytes or 0) - idle_bytes for phase in phases)
            read = [phase.process_bytes for phase in phases]
            steady = last.process_bytes
            if self._label_source == ONE_AT_A_TIME:
                steady = (last.device_bytes or 0) - idle_bytes
            if steady is None or steady < last.reserved_bytes:
                outcome["status"] = "error"
                outcome["reason"] = "the driver's reading of this process cannot be trusted"
            else:
                context_bytes = steady - last.reserved_bytes
                peak_reserved = max(phase.peak_reserved_bytes for phase in phases)
                stands_still = len({each.reserved_bytes for each in phases[-_STEADY_PHASES:]}) == 1
                readings = {
                    "label_state": "steady" if stands_still else None,
                    "steady_process_bytes": steady,
                    "peak_process_bytes": max((each for each in read if each), default=None),
                    "startup_peak_bytes": context_bytes + peak_reserved,
                    "peak_device_bytes": None if job.neighbours else above_idle,
                    "peak_reserved_bytes": peak_reserved,
                    "peak_allocated_bytes": max(phase.peak_allocated_bytes for phase in phases),
                    "context_bytes": context_bytes,
                }
        return Measurement(
            job=unextracted_job(planned),
            status=outcome["status"],
            reason=outcome.get("reason"),
            label_source=self._label_source,
            capacity_bytes=self._idle.free_bytes,
            provenance=meter.provenance,
            gpu=meter.gpu.name,
            driver=meter.gpu.driver,
            recipe=self._settings.recipe,
            architecture=planned.architecture_json,
            options=planned.options_json,
            phases=tuple(phases),
            allocator=outcome.get("allocator", {}),
            steps=outcome.get("steps"),
            seconds=round(time.monotonic() - job.process.started, 3),
            seed=self._settings.seed,
            neighbours=job.neighbours,
            protocol=PROTOCOL,
            **readings,
            **job.process.stack,
        )


def _admission_bytes(planned: PlannedJob) -> int:
    """Memory that must be free before a job starts."""
    return int(rough_bytes(planned) * ADMISSION_MARGIN)
