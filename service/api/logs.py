"""Structured logs: one line per event on standard error, as JSON or as text, from every source.

Keys and bodies are never logged, and control characters are escaped.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from contextvars import ContextVar
from typing import Any, Final

import orjson

REQUEST_ID: Final[ContextVar[str]] = ContextVar("gpumemnet_request_id", default="")
"""Id of the current request, for every line that is logged meanwhile."""

_EVENT: Final = "gpumemnet_event"
"""The attribute of a log record with the fields of a request."""
_MAX_TEXT: Final = 2500
"""Characters of a message: a line of at most 4,096 bytes is not mixed with another worker's
(POSIX, ``PIPE_BUF``)."""
_CONTROL: Final = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)
} | {
    10: "\\n",
    13: "\\r",
    9: "\\t",
}

_requests = logging.getLogger("gpumemnet.requests")


def log_request(
    *,
    key: str,
    method: str,
    path: str,
    status: int,
    seconds: float,
    sent_bytes: int,
    trace_id: str,
) -> None:
    """Log one finished request.

    Args:
        key: name of its key; empty without a key.
        method: as the client sent it.
        path: the path's name, its variable parts in braces.
        status: of the response; 499 when the client disconnected before it.
        seconds: from the arrival of the request's head to the end of the response.
        sent_bytes: length of the response body.
        trace_id: of the W3C trace that it belongs to; empty without one.
    """
    level = logging.ERROR if status == 500 else logging.INFO
    if _requests.isEnabledFor(level):
        event: dict[str, Any] = {"method": method, "path": path, "status": status}
        event |= {"seconds": round(seconds, 6), "bytes": sent_bytes}
        if key:
            event["key"] = key
        if trace_id:
            event["trace_id"] = trace_id
        _requests.log(level, "request", extra={_EVENT: event})


class LineFormatter(logging.Formatter):
    """Formats a record as one line.

    Args:
        log_format: ``json`` or ``text``.
    """

    def __init__(self, log_format: str) -> None:
        super().__init__()
        self._is_json = log_format == "json"

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        try:
            message = record.getMessage()
        except Exception:  # the arguments do not match the message: log that, and do not fail
            message = f"{record.msg} {record.args}"
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        event: dict[str, Any] = {
            "time": f"{stamp}.{int(record.created % 1 * 1000):03d}Z",
            "level": record.levelname.lower(),
            "message": _short(message),
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
        return _json(event) if self._is_json else _text(event)


def log_configuration(log_format: str, level: str) -> dict[str, Any]:
    """The configuration of ``logging`` for every process of the service.

    Args:
        log_format: ``json`` or ``text``.
        level: name of the lowest level that is written.
    """
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": LineFormatter, "log_format": log_format}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"handlers": ["stderr"], "level": level.upper()},
        # It logs steps that the service logs itself.
        "loggers": {"uvicorn.error": {"level": "ERROR"}},
    }


def log_other_failures() -> None:
    """Let warnings and errors in threads become lines of the log."""
    logging.captureWarnings(True)

    def log_failed_thread(failure: threading.ExceptHookArgs) -> None:
        if failure.exc_type is not SystemExit and failure.exc_value is not None:
            name = failure.thread.name if failure.thread else "a thread"
            exc_info = (failure.exc_type, failure.exc_value, failure.exc_traceback)
            logging.getLogger("gpumemnet.service").error("%s failed", name, exc_info=exc_info)

    threading.excepthook = log_failed_thread


def _short(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()  # lone surrogates, which UTF-8 cannot encode
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def _json(event: dict[str, Any]) -> str:
    return orjson.dumps(event).decode()


def _text(event: dict[str, Any]) -> str:
    fields = dict(event)
    start = f"{fields.pop('time')} {fields.pop('level'):<8} {fields.pop('message')}"
    rest = " ".join(f"{name}={value}" for name, value in fields.items())
    return f"{start} {rest}".rstrip().translate(_CONTROL)
