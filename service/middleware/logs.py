"""Structured logs: one line per event, as JSON or as text, from every source.

Request lines are written here without the ``logging`` package, which would cost more than the rest
of the middleware.  Everything else (uvicorn, warnings, errors in threads) comes through ``logging``
and gets the same format.  Keys and bodies are never logged, and control characters are escaped.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from contextvars import ContextVar
from typing import Any, Final

import orjson

from .log_sink import MAX_BLOCK_BYTES, LogSink

REQUEST_ID: Final[ContextVar[str]] = ContextVar("gpumemnet_request_id", default="")
"""Id of the current request, for every line that is logged meanwhile."""

_MAX_TEXT: Final = 2500
"""Characters of a message or a traceback: a line must fit into one block of the sink."""

_CONTROL: Final = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)
} | {
    10: "\\n",
    13: "\\r",
    9: "\\t",
}


class Timestamps:
    """Formats times in RFC 3339, UTC, to the millisecond; the part up to the second is cached for
    one second."""

    def __init__(self) -> None:
        self._second = -1
        self._start = ""

    def __call__(self, seconds: float) -> str:
        """``seconds`` since the epoch as text."""
        second = int(seconds)
        if second != self._second:
            self._second, self._start = (
                second,
                time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)),
            )
        return f"{self._start}.{int((seconds - second) * 1000):03d}Z"


class LogWriter:
    """Formats events and passes them to a sink.

    Args:
        sink: writes the lines.
        log_format: ``json`` or ``text``.
        level: lowest level of ``logging`` that is written.
        worker: number of this worker; ``None`` with a single worker.
    """

    def __init__(
        self, sink: LogSink, log_format: str, level: int, worker: int | None = None
    ) -> None:
        self.sink = sink
        self.level = level
        self._is_json = log_format == "json"
        self._worker = worker
        self._timestamp = Timestamps()

    def request(
        self,
        level: int,
        request_id: str,
        key: str,
        method: str,
        path: str,
        status: int,
        seconds: float,
        sent_bytes: int,
    ) -> None:
        """Log one finished request.

        Args:
            level: of the line; written only if it reaches that of the log.
            request_id: its id.
            key: name of its key; empty without a key.
            method: as the client sent it.
            path: the path's name, its variable parts in braces.
            status: of the response; 499 when the client disconnected before it.
            seconds: from the arrival of the request's head to the end of the response.
            sent_bytes: length of the response body.
        """
        if level < self.level:
            return
        event: dict[str, Any] = {
            "time": self._timestamp(time.time()),
            "level": _level_name(level),
            "message": "request",
        }
        if self._worker is not None:
            event["worker"] = self._worker
        event["request_id"] = request_id
        if key:
            event["key"] = key
        event["method"] = method
        event["path"] = path
        event["status"] = status
        event["seconds"] = round(seconds, 6)
        event["bytes"] = sent_bytes
        self.sink.write(orjson.dumps(event) + b"\n" if self._is_json else _text(event))

    def event(self, record: logging.LogRecord) -> None:
        """Log one record of ``logging``."""
        try:
            message = record.getMessage()
        except Exception:  # the arguments do not match the message: log that, and do not fail
            message = f"{record.msg} {record.args}"
        event: dict[str, Any] = {
            "time": self._timestamp(record.created),
            "level": _level_name(record.levelno),
            "message": _short(message),
            "logger": record.name,
        }
        if self._worker is not None:
            event["worker"] = self._worker
        request_id = REQUEST_ID.get()
        if request_id:
            event["request_id"] = request_id
        if record.exc_info and record.exc_info[0] is not None:
            event["error"] = _short(
                "".join(traceback.format_exception_only(*record.exc_info[:2])).strip()
            )
            event["where"] = _where(record.exc_info[2])
        self.sink.write(_json(event) if self._is_json else _text(event), is_urgent=True)


class LogHandler(logging.Handler):
    """Passes the records of ``logging`` to a writer."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self.writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        self.writer.event(record)


def configure_logs(
    log_format: str, level: str, worker: int | None = None, descriptor: int | None = None
) -> LogWriter:
    """Write all logs of this process to standard error in one format; replaces the previous
    configuration.

    Args:
        log_format: ``json`` or ``text``.
        level: name of the lowest level that is written.
        worker: number of this worker.
        descriptor: file to write to instead of standard error.
    """
    sink = LogSink(sys.stderr.fileno() if descriptor is None else descriptor)
    writer = LogWriter(sink, log_format, getattr(logging, level.upper()), worker)
    root = logging.getLogger()
    root.handlers[:] = [LogHandler(writer)]
    root.setLevel(writer.level)
    logging.getLogger("uvicorn.error").setLevel(
        max(writer.level, logging.WARNING)
    )  # it logs steps that the service logs once
    logging.captureWarnings(True)
    threading.excepthook = _log_failed_thread
    return writer


def current_log() -> LogWriter | None:
    """The writer of :func:`configure_logs` in this process; ``None`` before it was called."""
    return next(
        (
            handler.writer
            for handler in logging.getLogger().handlers
            if isinstance(handler, LogHandler)
        ),
        None,
    )


def _log_failed_thread(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_type is SystemExit or failure.exc_value is None:
        return
    name = failure.thread.name if failure.thread else "a thread"
    exc_info = (failure.exc_type, failure.exc_value, failure.exc_traceback)
    logging.getLogger("gpumemnet.service").error("%s failed", name, exc_info=exc_info)


def _level_name(level: int) -> str:
    return logging.getLevelName(level).lower()


def _where(trace: Any) -> list[str]:
    """The innermost calls of a traceback, the last one first."""
    frames = traceback.extract_tb(trace)[-8:]
    return [
        f"{frame.filename.rpartition('/site-packages/')[2][-80:]}:{frame.lineno} {frame.name[:60]}"
        for frame in reversed(frames)
    ]


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def _json(event: dict[str, Any]) -> bytes:
    try:
        line = orjson.dumps(event) + b"\n"
    except TypeError:  # lone surrogates, which UTF-8 cannot encode
        line = orjson.dumps({name: _encodable(value) for name, value in event.items()}) + b"\n"
    if len(line) > MAX_BLOCK_BYTES:  # characters that take several bytes
        cut = {
            name: value[:400] if isinstance(value, str) else value
            for name, value in event.items()
            if name != "where"
        }
        line = orjson.dumps({name: _encodable(value) for name, value in cut.items()}) + b"\n"
    return line


def _text(event: dict[str, Any]) -> bytes:
    fields = dict(event)
    start = f"{fields.pop('time')} {fields.pop('level'):<8} {fields.pop('message')}"
    rest = " ".join(f"{name}={value}" for name, value in fields.items())
    line = f"{start} {rest}".rstrip().translate(_CONTROL).encode("utf-8", "replace")
    if len(line) >= MAX_BLOCK_BYTES:  # cut between characters and not within one
        line = line[: MAX_BLOCK_BYTES - 1].decode("utf-8", "ignore").encode()
    return line + b"\n"


def _encodable(value: Any) -> Any:
    if isinstance(value, list):
        return [_encodable(each) for each in value]
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
