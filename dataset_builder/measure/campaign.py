"""A campaign: the jobs of a recipe measured on every visible GPU until all are done or the time
budget is used up.

One thread waits for messages of the children, reads NVML every 20 ms, and starts and ends jobs.
Finished jobs are in the journal.  Jobs that were running when a campaign stops are measured again
by the next run.
"""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TextIO

from gpumemnet.job.measurement import STATUSES, Measurement

from ..recipe.planned_job import PlannedJob
from .fork_server import CHILD, ForkServer
from .nvml import Meter
from .pool import HISTORY_FOLDER, Pool, Record, RunSettings
from .reading_probe import probe

SAMPLE_SECONDS: Final = 0.02
_MAX_GRACE_SECONDS: Final = 20.0
_TERMINAL_SECONDS: Final = 0.2
_LOG_SECONDS: Final = 10.0


@dataclass(slots=True)
class Tally:
    """Progress of a campaign.

    Attributes:
        total: jobs of the plan.
        before: jobs that earlier runs had finished.
        statuses: jobs that this run has finished, by status.
        running: jobs on the GPUs now.
        started: when this run began, on the monotonic clock.
        budget_seconds: time that this run may take.
    """

    total: int
    before: int
    started: float
    budget_seconds: float | None = None
    statuses: Counter[str] = field(default_factory=Counter)
    running: int = 0

    @property
    def finished(self) -> int:
        """Jobs that this run has finished."""
        return self.statuses.total()

    @property
    def elapsed_seconds(self) -> float:
        """Time since this run began."""
        return time.monotonic() - self.started

    @property
    def rate(self) -> float:
        """Jobs a second in this run."""
        return self.finished / max(self.elapsed_seconds, 1e-9)

    @property
    def remaining_seconds(self) -> float | None:
        """Time until the plan is done or the budget is used up; ``None`` before the first job is
        finished."""
        left = (self.total - self.before - self.finished) / self.rate if self.finished else None
        if self.budget_seconds is None:
            return left
        budget = max(0.0, self.budget_seconds - self.elapsed_seconds)
        return budget if left is None else min(left, budget)


def run_campaign(
    planned: Iterable[PlannedJob],
    record: Record,
    server: ForkServer,
    meters: Sequence[Meter],
    settings: RunSettings,
    tally: Tally,
    show: Callable[[Tally], None] = lambda tally: None,
) -> None:
    """Measure ``planned`` on the GPUs of this machine.

    Args:
        planned: the jobs that are left, in the order of measuring.
        record: takes every finished job before the next is begun.
        server: forks the children.
        meters: the GPUs.
        settings: how jobs are run.
        tally: is kept up to date; its budget ends the run.
        show: called with the tally about fifty times a second.

    Raises:
        MeasurementError: when a GPU cannot be used, its readings cannot be trusted, or it is lost.
        DatasetError: when a measurement cannot be recorded.
    """

    def count_and_record(job: PlannedJob, measurement: Measurement) -> None:
        record(job, measurement)
        tally.statuses[measurement.status] += 1

    if settings.with_history:
        (settings.folder / HISTORY_FOLDER).mkdir(parents=True, exist_ok=True)
    queue = deque(planned)
    pools = [
        Pool(server, meter, probe(server, meter), settings, count_and_record) for meter in meters
    ]
    admit_until, abandon_at = _end_times(tally)
    while time.monotonic() < abandon_at:
        for pool in pools:
            pool.kill_overdue()
            if time.monotonic() < admit_until:
                pool.admit(queue)
        tally.running = sum(len(pool.running) for pool in pools)
        show(tally)
        if not tally.running and (
            time.monotonic() >= admit_until or not (queue or any(pool.solo_jobs for pool in pools))
        ):
            return
        _handle_events(server, pools)


def _end_times(tally: Tally) -> tuple[float, float]:
    """Time of the last start of a job, and time at which running jobs are abandoned, on the
    monotonic clock."""
    if tally.budget_seconds is None:
        return float("inf"), float("inf")
    grace = min(_MAX_GRACE_SECONDS, tally.budget_seconds / 10)
    end = tally.started + tally.budget_seconds
    return end - grace, end - grace / 3


def _handle_events(server: ForkServer, pools: Sequence[Pool]) -> None:
    """Wait for events for at most one sampling period, then handle them."""
    senders = {
        each.end.fileno(): (pool, each)
        for pool in pools
        for each in pool.running
        if each.end.fileno() >= 0
    }
    readable, _, _ = select.select([server.fileno(), *senders], [], [], SAMPLE_SECONDS)
    for descriptor in readable:
        if descriptor in senders:
            pool, running = senders[descriptor]
            pool.receive(running)
    for pool in pools:
        if pool.running:
            pool.sample()
    if server.fileno() in readable:
        for pid, code in server.exits().items():
            any(pool.ended(pid, code) for pool in pools)


@contextlib.contextmanager
def fork_server(folder: Path, child: str = CHILD) -> Iterator[ForkServer]:
    """A running fork server whose children write their errors to ``children.log`` in ``folder``."""
    with (folder / "children.log").open("ab") as log:
        server = ForkServer(child, log)
        try:
            yield server
        finally:
            server.close()


@contextlib.contextmanager
def accounting(meters: Sequence[Meter]) -> Iterator[None]:
    """The driver's accounting on ``meters``, where it may be switched on; then left as found."""
    switched_on = [meter for meter in meters if meter.enable_accounting()]
    try:
        yield
    finally:
        for meter in switched_on:
            meter.disable_accounting()


def with_history(settings: RunSettings, planned: Sequence[PlannedJob], count: int) -> RunSettings:
    """``settings`` that record the allocator's history of the first ``count`` jobs."""
    return replace(settings, with_history=frozenset(job.key for job in planned[:count]))


class ProgressLine:
    """Shows a :class:`Tally` to a person: one line, rewritten on a terminal, repeated every ten
    seconds elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._last = time.monotonic()

    def __call__(self, tally: Tally) -> None:
        """Show ``tally`` if it is time to."""
        now = time.monotonic()
        if now - self._last < (_TERMINAL_SECONDS if self._terminal else _LOG_SECONDS):
            return
        self._last = now
        self._write(describe_tally(tally))

    def close(self, tally: Tally) -> None:
        """Show the last state and end the line."""
        self._write(describe_tally(tally))
        if self._terminal:
            self._stream.write("\n")

    def _write(self, line: str) -> None:
        self._stream.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        self._stream.flush()


def describe_tally(tally: Tally) -> str:
    """Jobs done, their rate, the time that is left, and the share of every status."""
    done = tally.before + tally.finished
    parts = [f"{done:,} of {tally.total:,} jobs", f"{tally.running} running"]
    if tally.finished:
        parts.append(f"{tally.rate:.2f} jobs/s")
    if tally.remaining_seconds is not None:
        parts.append(f"{_minutes(tally.remaining_seconds)} left")
    if tally.finished:
        parts.append(
            " ".join(
                f"{status} {tally.statuses[status] / tally.finished:.0%}" for status in STATUSES
            )
        )
    return ", ".join(parts)


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}"
