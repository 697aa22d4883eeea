"""The metrics of requests and processes, and ``GET /metrics`` in Prometheus' text format.

One worker counts in memory.  Several workers count in shared files (``PROMETHEUS_MULTIPROC_DIR``),
and the worker that handles the request adds them up.
"""

from __future__ import annotations

import os
import platform
import struct
import time
from collections import Counter as Counted
from importlib.metadata import version
from pathlib import Path
from typing import Final

from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from gpumemnet.predict.support import reason_code

from .predictions import RecordBatch, Recorder

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
"""Names the folder where several workers count; read by prometheus_client."""
_ATTEMPTS: Final = 3

for _collector in (GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR):
    REGISTRY.unregister(_collector)  # they cover only one process
disable_created_metrics()  # type: ignore[no-untyped-call]

REQUESTS: Final = Counter(
    "gpumemnet_requests",
    "Finished requests by path and status; 499 when the client disconnected first.",
    ("path", "status"),
)
SECONDS: Final = Histogram(
    "gpumemnet_request_seconds",
    "Time from the arrival of a request's head to the end of its response.",
    ("path",),
    buckets=(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
)
REFUSALS: Final = Counter(
    "gpumemnet_refusals", "Requests rejected before they were handled, by reason.", ("reason",)
)
IN_WORK: Final = Gauge(
    "gpumemnet_requests_in_work", "Requests in progress.", multiprocess_mode="livesum"
)
PREDICTIONS: Final = Counter(
    "gpumemnet_predictions",
    "Predictions made, by family and whether the job was inside the model's support.",
    ("family", "in_support"),
)
WITHOUT_LIMIT: Final = Counter(
    "gpumemnet_predictions_without_limit",
    "Predictions without a limit, by the option or feature of the job that the model does not know; a job may have several.",
    ("reason",),
)
RESIDENT: Final = Gauge(
    "gpumemnet_worker_resident_bytes",
    "Resident memory of a worker, by its process id.",
    ("worker",),
    multiprocess_mode="livesum",
)
CPU: Final = Counter(
    "gpumemnet_worker_cpu_seconds", "Processor time of a worker, user and system.", ("worker",)
)
STARTED: Final = Gauge(
    "gpumemnet_worker_start_time_seconds",
    "When a worker was started, since the epoch.",
    ("worker",),
    multiprocess_mode="livesum",
)
BUILD: Final = Gauge(
    "gpumemnet_build_info",
    "Always 1; the labels name the versions.",
    ("version", "python", "onnxruntime"),
    multiprocess_mode="max",
)

REFUSAL_REASONS: Final = (
    *("host", "key", "scope", "overload", "large_body"),
    *("connections", "invalid", "large_head", "slow_head", "slow_body"),
)
"""421, 401, 403, 503 and 413; before a request is read: 503, 400, 431 and 408."""

REFUSED: Final = {reason: REFUSALS.labels(reason) for reason in REFUSAL_REASONS}

BUILD.labels(version("gpumemnet"), platform.python_version(), version("onnxruntime")).set(1)


class RequestMetrics:
    """Counts requests; caches the children of a metric, because finding one by its labels is
    slow."""

    def __init__(self) -> None:
        self._seconds: dict[str, Histogram] = {}
        self._requests: dict[tuple[str, int], Counter] = {}

    def count(self, path: str, status: int, seconds: float) -> None:
        """Count one finished request."""
        try:
            self._requests[path, status].inc()
            self._seconds[path].observe(seconds)
        except KeyError:
            self._requests[path, status] = REQUESTS.labels(path, str(status))
            self._seconds[path] = SECONDS.labels(path)
            self.count(path, status, seconds)


class CountingRecorder:
    """A :class:`~service.api.predictions.Recorder` that counts predictions and passes them on.

    Args:
        recorder: receives the predictions; ``None`` only counts them.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._recorder = recorder
        self._children: dict[tuple[str, bool], Counter] = {}

    def record(self, records: RecordBatch) -> None:
        """Count the predictions, and pass them on."""
        families, in_support = records.jobs.options("family"), records.estimates.in_support.tolist()
        for (code, is_inside), count in Counted(
            zip(records.jobs.option_codes.tolist(), in_support, strict=True)
        ).items():
            self._child(families[code], is_inside).inc(count)
        for row, is_inside in enumerate(in_support):
            if not is_inside:
                for reason in {
                    reason_code(sentence) for sentence in records.estimates.reasons(row)
                }:
                    WITHOUT_LIMIT.labels(reason).inc()
        if self._recorder is not None:
            self._recorder.record(records)

    def _child(self, family: str, in_support: bool) -> Counter:
        child = self._children.get((family, in_support))
        if child is None:
            child = self._children[family, in_support] = PREDICTIONS.labels(
                family, str(in_support).lower()
            )
        return child


class Vitals:
    """Gauges of this process's memory and processor time, as of the last :meth:`update`."""

    def __init__(self) -> None:
        worker = str(os.getpid())
        STARTED.labels(worker).set(time.time())
        self._resident = RESIDENT.labels(worker)
        self._cpu = CPU.labels(worker)
        self._cpu_seconds = 0.0

    def update(self) -> None:
        """Update the gauges."""
        times = os.times()
        used_seconds = times.user + times.system
        self._cpu.inc(max(0.0, used_seconds - self._cpu_seconds))
        self._cpu_seconds = used_seconds
        if (resident_bytes := resident_memory_bytes()) is not None:
            self._resident.set(resident_bytes)


def metrics_document() -> bytes:
    """All metrics, of all workers."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return generate_latest(REGISTRY)
    for file in Path(folder).glob("gauge_live*_*.db"):  # of a worker that has died
        if not is_alive(int(file.stem.rpartition("_")[2])):
            file.unlink(missing_ok=True)
    for attempt in range(_ATTEMPTS):
        registry = CollectorRegistry()
        MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
        try:
            return generate_latest(registry)
        except (OSError, struct.error):  # a worker that starts or ends now adds or removes files
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def is_alive(pid: int) -> bool:
    """Whether there is a process with this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def resident_memory_bytes() -> int | None:
    """Resident memory of this process, in bytes; ``None`` when the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except OSError:  # only Linux has it
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
