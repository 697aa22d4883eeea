"""Measures on all GPUs of a Ray cluster: one actor per GPU, each running the local engine on its
share of the jobs.

Measurements travel back as they are finished, and only the process that was started by the user
writes the campaign's folder; so the loss of a host loses no finished row, and the next run measures
the remaining jobs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from gpumemnet.batch.ray_engine import connect, load_ray, package_folders
from gpumemnet.errors import DatasetError, GpumemnetError, MeasurementError
from gpumemnet.job.measurement import Measurement, measurement_from_dict, measurement_to_dict

from ..recipe.planned_job import PlannedJob, parse_planned
from .campaign import Tally
from .engine import MeterSource, Show
from .fork_server import CHILD
from .local_engine import LocalEngine
from .nvml import visible_meters
from .pool import Record, RunSettings

_START_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.2
_GRACE_SECONDS: Final = 15.0
_LOG_BYTES: Final = 2**16


class RayEngine:
    """The free GPUs of the Ray cluster that ``RAY_ADDRESS`` names, of the one running here, or of a
    new one on this machine.

    Args:
        enable_accounting, meters, child: as for
            :class:`~dataset_builder.measure.local_engine.LocalEngine`, on every host.

    Raises:
        MissingExtraError: when Ray is not installed.
        MeasurementError: when the cluster has no free GPU, or the readings of one cannot be
            trusted.
    """

    def __init__(
        self,
        enable_accounting: bool = False,
        meters: MeterSource = visible_meters,
        child: str = CHILD,
    ) -> None:
        self._ray = load_ray()
        self._connected = not self._ray.is_initialized()
        if self._connected:
            connect(
                self._ray,
                {"py_modules": package_folders(__name__), "excludes": ["datasets"]},
                MeasurementError,
            )
        self._actors: list[Any] = []
        self._bytes: list[int] = []
        try:
            self._hold_gpus(enable_accounting, meters, child)
        except BaseException:
            self._release()
            raise

    def _hold_gpus(self, enable_accounting: bool, meters: MeterSource, child: str) -> None:
        count = int(self._ray.cluster_resources().get("GPU", 0))
        if count == 0:
            raise MeasurementError("nothing can be measured here: the Ray cluster has no GPU")
        worker = self._ray.remote(num_gpus=1, num_cpus=0)(_GpuWorker)
        self._actors = [worker.remote(enable_accounting, meters, child) for _ in range(count)]
        size_requests = {actor.total_bytes.remote(): actor for actor in self._actors}
        ready, late = self._ray.wait(list(size_requests), num_returns=count, timeout=_START_SECONDS)
        for request in late:  # another user of the cluster has this GPU
            self._ray.kill(size_requests[request])
        self._actors = [size_requests[request] for request in ready]
        answers = [self._answer(request) for request in ready]
        self._bytes = [answer for answer in answers if isinstance(answer, int)]
        if len(self._bytes) < len(answers):
            raise MeasurementError(
                str(next(answer for answer in answers if not isinstance(answer, int)))
            )
        if not self._bytes:
            raise MeasurementError(
                f"none of the Ray cluster's {count} GPUs became free in {_START_SECONDS:.0f} s"
            )

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()

    def _release(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)  # its fork server and children die with it
        if self._connected:
            self._ray.shutdown()

    def smallest_bytes(self) -> int:
        """Memory of the smallest GPU."""
        return min(self._bytes)

    def measure(
        self,
        planned: Sequence[PlannedJob],
        record: Record,
        settings: RunSettings,
        tally: Tally,
        show: Show,
    ) -> None:
        """Measure ``planned``; see :meth:`~dataset_builder.measure.engine.Engine.measure`.  The
        tally's running jobs are GPUs here."""
        from ray.util.queue import Queue

        results = Queue(actor_options={"num_cpus": 0})
        jobs = {job.key: job for job in planned}
        left = (
            None if tally.budget_seconds is None else tally.budget_seconds - tally.elapsed_seconds
        )
        end = None if left is None else time.time() + left
        shards = [
            [job.to_dict() for job in planned[index :: len(self._actors)]]
            for index in range(len(self._actors))
        ]
        pending = [
            actor.measure.remote(shard, settings, end, results)
            for actor, shard in zip(self._actors, shards, strict=True)
            if shard
        ]
        count = len(pending)
        failures: list[str] = []
        while pending and (end is None or time.time() < end + _GRACE_SECONDS):
            done, pending = self._ray.wait(pending, timeout=_POLL_SECONDS)
            while not results.empty():  # a worker's rows are all in here before its task is done
                key, row, history = results.get()
                measurement = measurement_from_dict(row)
                _keep_history(settings.folder, measurement, history)
                record(jobs[key], measurement)
                tally.statuses[measurement.status] += 1
            failures += [
                failure
                for reference in done
                if (failure := self._finish(reference, settings.folder)) is not None
            ]
            tally.running = len(pending)
            show(tally)
        if failures:
            raise MeasurementError(f"{len(failures)} of {count} GPUs stopped early: {failures[0]}")

    def _finish(self, task: Any, folder: Path) -> str | None:
        """Keep the log of an ended task; returns its error, if it had one."""
        answer = self._answer(task)
        if isinstance(answer, str):
            return f"{answer}; every finished measurement is kept: run the same command again"
        failure, log = answer
        if log:
            with (folder / "children.log").open("ab") as file:
                file.write(log)
        return None if failure is None else str(failure)

    def _answer(self, reference: Any) -> Any:
        """The result of a call, or a sentence when its host or process is lost."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return f"a process of the Ray cluster was lost ({type(error).__name__})"


class _GpuWorker:
    """The actor that holds one GPU; Ray sets ``CUDA_VISIBLE_DEVICES`` for it."""

    def __init__(self, enable_accounting: bool, meters: MeterSource, child: str) -> None:
        self._open_engine: Callable[[], LocalEngine] = lambda: LocalEngine(
            enable_accounting, meters, child
        )

    def total_bytes(self) -> int | str:
        """The GPU's memory, or the sentence that says why it cannot be used."""
        try:
            return self._open_engine().smallest_bytes()
        except GpumemnetError as error:
            return str(error)

    def measure(
        self, shard: list[dict[str, Any]], settings: RunSettings, end: float | None, results: Any
    ) -> tuple[str | None, bytes]:
        """Measure ``shard``, and put key, row and recorded history of every finished job into
        ``results``.

        Returns the sentence that says why it stopped early, if it did, and the end of its
        children's log.
        """
        planned = [parse_planned(document) for document in shard]
        budget = None if end is None else end - time.time()
        tally = Tally(len(planned), 0, time.monotonic(), budget)
        with tempfile.TemporaryDirectory(prefix="campaign-") as name:
            folder = Path(name)

            def record(job: PlannedJob, measurement: Measurement) -> None:
                history = (
                    None
                    if measurement.history is None
                    else (folder / measurement.history).read_bytes()
                )
                results.put((job.key, measurement_to_dict(measurement), history))

            failure = None
            try:
                with self._open_engine() as engine:
                    engine.measure(
                        planned, record, replace(settings, folder=folder), tally, lambda _: None
                    )
            except GpumemnetError as error:
                failure = str(error)
            log = folder / "children.log"
            return failure, log.read_bytes()[-_LOG_BYTES:] if log.exists() else b""


def _keep_history(folder: Path, measurement: Measurement, history: bytes | None) -> None:
    if measurement.history is None or history is None:
        return
    path = folder / measurement.history
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(history)
    except OSError as error:
        raise DatasetError(f"{path} cannot be written: {error.strerror}") from None
