"""One GPU and the jobs that run side by side on it: admission, readings, deadlines and outcomes.

A job starts when its estimated memory fits into what is free, less what the running jobs may still
take.  Neighbours must not
influence a label: a job that ran out of memory or time, or made the allocator retry, while it had
neighbours is run again alone.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from gpumemnet.job.measurement import Measurement, Phase
from gpumemnet.units import MIB

from ..recipe.planned_job import PROTOCOL, PlannedJob, rough_bytes, unextracted_job
from . import channel
from .fork_server import ForkServer
from .nvml import Meter
from .reading_probe import ReadingSource, recognise

ADMISSION_MARGIN: Final = 1.25
"""Factor on the rough estimate of a job that is admitted."""
HISTORY_FOLDER: Final = "history"
_SOLO_JOBS_BEFORE_DRAIN: Final = 4
_SKIPS_BEFORE_DRAIN: Final = 64
_LOOK_AHEAD: Final = 32
_RELEASE_SECONDS: Final = 2.0
_RELEASE_TOLERANCE_BYTES: Final = 16 * MIB

Record = Callable[[PlannedJob, Measurement], None]


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings that all jobs of a campaign share.

    Attributes:
        recipe: name of the recipe, stored in each row.
        seed: seed of weights and inputs.
        workers: largest number of jobs at a time on one GPU.
        deadline_seconds: seconds after which a job is killed.
        folder: the campaign's folder.
        with_history: keys of the jobs whose allocator history is recorded.
    """

    recipe: str
    seed: int
    workers: int
    deadline_seconds: float
    folder: Path
    with_history: frozenset[str] = frozenset()

    def history_of(self, planned: PlannedJob) -> str | None:
        """File of the job's allocator history in the campaign's folder, if one is to be
        recorded."""
        return (
            f"{HISTORY_FOLDER}/{planned.key}.json.gz" if planned.key in self.with_history else None
        )


@dataclass(slots=True, eq=False)
class Running:
    """A job on the GPU."""

    planned: PlannedJob
    admission_bytes: int
    pid: int
    end: socket.socket
    started: float
    idle_used_bytes: int | None
    pids: list[int] = field(default_factory=list)
    stack: dict[str, Any] = field(default_factory=dict)
    before: set[int] = field(default_factory=set)
    driver_pid: int | None = None
    phases: list[Phase] = field(default_factory=list)
    process_bytes: int | None = None
    peak_process_bytes: int | None = None
    peak_device_bytes: int | None = None
    neighbours: int = 0
    timed_out: bool = False
    settled: bool = False


class Pool:
    """The jobs of one GPU.

    Attributes:
        meter: the GPU's readings.
        running: the jobs on it now.
        solo_jobs: jobs that have to run alone.
    """

    def __init__(
        self,
        server: ForkServer,
        meter: Meter,
        source: ReadingSource,
        settings: RunSettings,
        record: Record,
    ) -> None:
        self.meter = meter
        self.source = source
        self.running: list[Running] = []
        self.solo_jobs: deque[PlannedJob] = deque()
        self._server = server
        self._settings = settings
        self._record = record
        self._waiting_for_context: deque[Running] = deque()
        self._making_context: Running | None = None
        self._skips = 0
        self._empty_since = time.monotonic()
        idle = meter.device()
        self._idle_used_bytes = idle.used_bytes
        self._available_bytes = idle.free_bytes

    @property
    def provenance(self) -> str:
        """``measured`` only when children and readings are both real."""
        real = self._server.provenance == "measured" and self.meter.provenance == "measured"
        return "measured" if real else "stand_in"

    def admit(self, queue: deque[PlannedJob]) -> None:
        """Start as many jobs of ``queue`` as fit."""
        if not self.running and not self._settle_idle():
            return
        is_draining = len(self.solo_jobs) >= _SOLO_JOBS_BEFORE_DRAIN or (
            self.solo_jobs and not queue
        )
        if is_draining or any(
            running_job.planned in self.solo_jobs for running_job in self.running
        ):
            if not self.running:
                self._start(self.solo_jobs[0])
            return
        workers = 1 if self.source.one_at_a_time else self._settings.workers
        while queue and len(self.running) < workers:
            chosen = self._choose(queue)
            if chosen is None:
                return
            self._start(chosen)

    def _choose(self, queue: deque[PlannedJob]) -> PlannedJob | None:
        """The first job of the queue that fits; only the first one after it was skipped too
        often."""
        if not self.running:
            self._skips = 0
            return queue.popleft()
        reach = 1 if self._skips >= _SKIPS_BEFORE_DRAIN else _LOOK_AHEAD
        free = self._free_bytes()
        for index in range(min(reach, len(queue))):
            if _admission_bytes(queue[index]) <= free:
                chosen = queue[index]
                del queue[index]
                self._skips = 0 if index == 0 else self._skips + 1
                return chosen
        return None

    def _free_bytes(self) -> int:
        """Free memory, less what the running jobs may still take."""
        growth = sum(
            max(0, running_job.admission_bytes - (running_job.process_bytes or 0))
            for running_job in self.running
        )
        return self.meter.device().free_bytes - growth

    def _settle_idle(self) -> bool:
        """Take the idle readings; ``False`` while the driver still gives back an ended job's
        memory."""
        idle = self.meter.device()
        waited = time.monotonic() - self._empty_since
        if (
            idle.used_bytes > self._idle_used_bytes + _RELEASE_TOLERANCE_BYTES
            and waited < _RELEASE_SECONDS
        ):
            return False
        self._idle_used_bytes, self._available_bytes = idle.used_bytes, idle.free_bytes
        return True

    def _start(self, planned: PlannedJob) -> None:
        history = self._settings.history_of(planned)
        request = {
            "planned": planned.to_dict(),
            "seed": self._settings.seed,
            "visible": self.meter.gpu.uuid,
            "history": str(self._settings.folder / history) if history else None,
        }
        idle = None if self.running else self._idle_used_bytes
        pid, end = self._server.start(request)
        self.running.append(
            Running(planned, _admission_bytes(planned), pid, end, time.monotonic(), idle)
        )
        for running_job in self.running:
            running_job.neighbours = max(running_job.neighbours, len(self.running) - 1)

    def receive(self, running: Running) -> None:
        """Handle the next message of a child."""
        message = channel.receive(running.end)
        if message is None:
            running.end.close()  # the child's exit says how it ended
            return
        if message["event"] == "started":
            running.pids = [int(process_id) for process_id in message["pids"]]
            running.stack = message["stack"]
            self._waiting_for_context.append(running)
            self._grant_context()
            return
        if message["event"] == "phase":
            self._phase(running, message)
        else:
            self._result(running, message)
        _let_continue(running)

    def _grant_context(self) -> None:
        """Let waiting children create their CUDA contexts; one at a time where a child is
        recognised by the appearance of its context."""
        serial = not self.source.by_pid and not self.source.one_at_a_time
        while self._waiting_for_context and not (serial and self._making_context):
            running = self._waiting_for_context.popleft()
            running.before = set(self.meter.processes()) if serial else set()
            self._making_context = running if serial else None
            _let_continue(running)

    def _phase(self, running: Running, message: dict[str, Any]) -> None:
        if message["name"] == "context" and not self.source.one_at_a_time:
            appeared = set() if self.source.by_pid else set(self.meter.processes()) - running.before
            running.driver_pid = recognise(running.pids, appeared, self.source.by_pid)
            self._release_context(running)
        self.sample()
        numbers = {name: int(message[name]) for name in _ALLOCATOR_READINGS}
        device = self.meter.device().used_bytes
        running.phases.append(
            Phase(
                message["name"], **numbers, process_bytes=running.process_bytes, device_bytes=device
            )
        )

    def _release_context(self, running: Running) -> None:
        if self._making_context is running:
            self._making_context = None
            self._grant_context()

    def sample(self) -> None:
        """Read the memory of every job and keep its maximum."""
        if self.source.one_at_a_time:
            used = self.meter.device().used_bytes
            for running_job in self.running:
                running_job.peak_device_bytes = _maximum(
                    running_job.peak_device_bytes, used - (running_job.idle_used_bytes or 0)
                )
            return
        listed = self.meter.processes()
        for running_job in self.running:
            used_by = (
                listed.get(running_job.driver_pid) if running_job.driver_pid is not None else None
            )
            if used_by is not None:
                running_job.process_bytes = used_by
                running_job.peak_process_bytes = _maximum(running_job.peak_process_bytes, used_by)
        if (
            len(self.running) == 1
            and self.running[0].neighbours == 0
            and self.running[0].idle_used_bytes is not None
        ):
            alone = self.running[0]
            difference = self.meter.device().used_bytes - (alone.idle_used_bytes or 0)
            alone.peak_device_bytes = _maximum(alone.peak_device_bytes, difference)

    def kill_overdue(self) -> None:
        """Kill the jobs that have passed their deadline."""
        now = time.monotonic()
        for running_job in self.running:
            if (
                not running_job.timed_out
                and now - running_job.started > self._settings.deadline_seconds
            ):
                running_job.timed_out = True
                self._server.kill(running_job.pid)

    def ended(self, pid: int, code: int) -> bool:
        """Take a finished child off the GPU; ``False`` when it is not one of this pool's."""
        running = next(
            (running_job for running_job in self.running if running_job.pid == pid), None
        )
        if running is None:
            return False
        while (
            running.end.fileno() >= 0 and not running.settled
        ):  # messages that it sent before it ended
            self.receive(running)
        running.end.close()
        if not running.settled:
            if running.timed_out:
                reason = f"killed after its deadline of {self._settings.deadline_seconds:g} s"
                self._judge(running, {"status": "timeout", "reason": reason})
            else:
                self._judge(running, {"status": "error", "reason": _exit_reason(code)})
        self.running.remove(running)
        if running in self._waiting_for_context:
            self._waiting_for_context.remove(running)
        self._release_context(running)
        self._empty_since = time.monotonic()
        return True

    def _result(self, running: Running, message: dict[str, Any]) -> None:
        self.sample()
        if self.source.label_source == "nvml_accounting" and running.driver_pid is not None:
            accounted = self.meter.accounted_peak(running.driver_pid)
            if accounted is not None:
                running.peak_process_bytes = _maximum(running.peak_process_bytes, accounted)
        self._judge(running, message)

    def _judge(self, running: Running, outcome: dict[str, Any]) -> None:
        """Record the outcome, or run the job again alone where neighbours may have influenced
        it."""
        running.settled = True
        label = (
            running.peak_device_bytes if self.source.one_at_a_time else running.peak_process_bytes
        )
        reserved = running.phases[-1].reserved_bytes if running.phases else 0
        if outcome["status"] == "ok" and (label is None or label < reserved):
            outcome = outcome | {
                "status": "error",
                "reason": "the driver's reading of this process cannot be trusted",
            }
        is_influenced = (
            outcome["status"] != "ok"
            or int(outcome.get("allocator", {}).get("alloc_retries", 0)) > 0
        )
        if is_influenced and running.neighbours > 0:
            if running.planned not in self.solo_jobs:
                self.solo_jobs.append(running.planned)
            return
        if running.planned in self.solo_jobs:
            self.solo_jobs.remove(running.planned)
        self._record(running.planned, self._measurement(running, outcome))

    def _measurement(self, running: Running, outcome: dict[str, Any]) -> Measurement:
        settings, planned, phases = self._settings, running.planned, running.phases
        ok = outcome["status"] == "ok"
        last = phases[-1] if phases else None
        process_bytes = running.process_bytes
        if self.source.one_at_a_time and last is not None and last.device_bytes is not None:
            process_bytes = last.device_bytes - (running.idle_used_bytes or 0)
        history = settings.history_of(planned)
        return Measurement(
            job=unextracted_job(planned),
            status=outcome["status"],
            reason=outcome.get("reason"),
            label_source=self.source.label_source,
            capacity_bytes=self._available_bytes,
            provenance=self.provenance,
            gpu=self.meter.gpu.name,
            driver=self.meter.gpu.driver,
            recipe=settings.recipe,
            architecture=planned.architecture_json,
            options=planned.options_json,
            peak_process_bytes=running.peak_process_bytes if ok else None,
            peak_device_bytes=running.peak_device_bytes if ok and running.neighbours == 0 else None,
            peak_reserved_bytes=max((phase.peak_reserved_bytes for phase in phases), default=None)
            if ok
            else None,
            peak_allocated_bytes=max((phase.peak_allocated_bytes for phase in phases), default=None)
            if ok
            else None,
            context_bytes=process_bytes - last.reserved_bytes
            if ok and process_bytes is not None and last is not None
            else None,
            phases=tuple(phases),
            allocator=outcome.get("allocator", {}),
            steps=outcome.get("steps"),
            seconds=round(time.monotonic() - running.started, 3),
            seed=settings.seed,
            neighbours=running.neighbours,
            protocol=PROTOCOL,
            history=history if history and (settings.folder / history).exists() else None,
            **running.stack,
        )


_ALLOCATOR_READINGS: Final = (
    "allocated_bytes",
    "reserved_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
)


@lru_cache(maxsize=4096)
def _admission_bytes(planned: PlannedJob) -> int:
    """Memory that must be free before a job starts."""
    return int(rough_bytes(planned) * ADMISSION_MARGIN)


def _maximum(known: int | None, reading: int) -> int:
    return reading if known is None else max(known, reading)


def _let_continue(running: Running) -> None:
    """Let a child continue; the exit of a dead child is handled elsewhere."""
    with contextlib.suppress(OSError):
        channel.send(running.end, {"go": True})


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"the process ended with exit code {code} before its result"
    killer = ", perhaps by the kernel because host memory ran out" if code == -9 else ""
    return f"the process was killed by signal {-code}{killer}"
