"""What the service tells its operators: a log line for each event, and the metrics of requests and
processes.

*Logs* are one line of JSON per event on standard error, from every source.  Keys and bodies are never
logged.

*Metrics* are at ``GET /metrics`` in Prometheus' text format.  One worker counts in memory.  Several
workers count in shared files (``PROMETHEUS_MULTIPROC_DIR``), and the worker that handles the request
adds them up.
"""

from __future__ import annotations

import logging
import os
import struct
import time
import traceback
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, Final

import orjson
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

from gpumemnet.atomic_files import Document

from .problems import PROBLEM_KINDS

REQUEST_ID: Final[ContextVar[str]] = ContextVar("gpumemnet_request_id", default="")
"""Id of the current request, for every line that is logged meanwhile."""

_EVENT: Final = "gpumemnet_event"
"""The attribute of a log record with the fields of a request."""
_MAX_TEXT: Final = 2500
"""Characters of a message: a line of at most 4,096 bytes is not mixed with another worker's
(POSIX, ``PIPE_BUF``)."""
_requests = logging.getLogger("gpumemnet.requests")

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
"""Names the folder where several workers count; read by prometheus_client."""
_ATTEMPTS: Final = 20
_PAUSE_SECONDS: Final = 0.1
"""Between attempts: on a busy machine, a worker that starts may wait with half a file."""

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
    "gpumemnet_refusals",
    "Requests answered with a problem document, by the last part of its type.",
    ("problem",),
)
IN_WORK: Final = Gauge(
    "gpumemnet_requests_in_work", "Requests in progress.", multiprocess_mode="livesum"
)
PREDICTIONS: Final = Counter(
    "gpumemnet_predictions",
    "Predictions made, by family and whether the job was inside the model's support.",
    ("family", "in_support"),
)

for _kind in PROBLEM_KINDS:
    REFUSALS.labels(_kind.name)


@cache
def labelled(metric: Any, *labels: str) -> Any:
    """The child of a metric with these labels; finding one is slow."""
    return metric.labels(*labels)


def record_request(
    method: str, path: str, status: int, seconds: float, sent_bytes: int, **names: str
) -> None:
    """Log and count one finished request.

    Args:
        method: as the client sent it.
        path: the path's name, its variable parts in braces.
        status: of the response; 499 when the client disconnected before it.
        seconds: from the arrival of the request's head to the end of the response.
        sent_bytes: length of the response body.
        names: the names of its API key (``key``) and W3C trace (``trace_id``); left out of the log
            where empty.
    """
    labelled(REQUESTS, path, str(status)).inc()
    labelled(SECONDS, path).observe(seconds)
    level = logging.ERROR if status == 500 else logging.INFO
    if _requests.isEnabledFor(level):
        event: Document = {"method": method, "path": path, "status": status}
        event |= {"seconds": round(seconds, 6), "bytes": sent_bytes}
        event |= {name: value for name, value in names.items() if value}
        _requests.log(level, "request", extra={_EVENT: event})


def metrics_document() -> bytes:
    """All metrics, of all workers."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return generate_latest(REGISTRY)
    for file in Path(folder).glob("gauge_live*_*.db"):  # of a worker that has died
        if not _is_alive(int(file.stem.rpartition("_")[2])):
            file.unlink(missing_ok=True)
    for attempt in range(_ATTEMPTS):
        registry = CollectorRegistry()
        MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
        try:
            return generate_latest(registry)
        except (OSError, ValueError, struct.error):  # a worker starts or ends: half a file, or none
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(_PAUSE_SECONDS)
    raise AssertionError("unreachable")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class LineFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        event: Document = {
            "time": f"{stamp}.{int(record.created % 1 * 1000):03d}Z",
            "level": record.levelname.lower(),
            "message": _short(record.getMessage()),
            "process": record.process,
        }
        if request_id := REQUEST_ID.get():
            event["request_id"] = request_id
        event |= getattr(record, _EVENT, {})
        if record.exc_info and record.exc_info[0] is not None:
            kind, error, trace = record.exc_info
            event["error"] = _short("".join(traceback.format_exception_only(kind, error)).strip())
            event["where"] = [
                f"{frame.filename.rpartition('/site-packages/')[2][-80:]}:{frame.lineno} {frame.name[:60]}"
                for frame in reversed(traceback.extract_tb(trace)[-8:])
            ]
        return orjson.dumps(event).decode()


def log_configuration(level: str) -> dict[str, Any]:
    """The configuration of ``logging`` for every process of the service.

    Args:
        level: name of the lowest level that is written.
    """
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": LineFormatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"handlers": ["stderr"], "level": level.upper()},
        # It logs steps that the service logs itself.
        "loggers": {"uvicorn.error": {"level": "ERROR"}},
    }


def _short(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()  # lone surrogates, which UTF-8 cannot encode
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
