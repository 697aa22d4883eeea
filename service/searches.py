"""Searches over many batch sizes, in a process of their own beside each worker.

A search computes for up to some seconds.  In a thread of the worker, every prediction would wait
again and again for Python's lock, and on a busy machine for a thread that holds the lock and does
not run.  The process is forked from the worker once its models are loaded, so that it shares their
memory, and has a lower priority.  It ends with its worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import astuple
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, NoReturn

import orjson
from anyio import CapacityLimiter, to_thread

from gpumemnet.errors import (
    BundleError,
    FieldError,
    InvalidJobError,
    InvalidRequestError,
    UnsupportedJobError,
)
from gpumemnet.site.releases import release_digest

from .api.problems import OVERLOADED, ProblemKind, Refusal
from .middleware.limits import handle_body

if TYPE_CHECKING:
    from .api.predictions import PredictionApi, Search
    from .serving.served_release import ServedRelease

NICENESS: Final = 10
"""Added to the worker's: at ten, a busy worker gets nine tenths of a core that it shares with its
searches."""
MAX_SEARCH_LAYERS: Final = 4_000_000
"""Most layers that the searches at work and waiting compute in all: some four seconds of one
core."""
SEARCH_LAYERS_PER_SECOND: Final = 1_000_000
"""Lower bound of a search's speed."""

_LENGTHS: Final = struct.Struct("<QQ")
"""A message: the lengths of its two parts, a JSON object, and the body of a request or a
response."""
_FIELD_ERRORS: Final = {
    each.__name__: each for each in (InvalidJobError, InvalidRequestError, UnsupportedJobError)
}
_STREAM_BYTES: Final = 2**20
_RETRY: Final = {"Retry-After": "1"}

Kind = Literal["batch_sizes", "smallest_gpu"]


class Question(NamedTuple):
    """One search: its number, what is searched, and the release that answers."""

    number: int
    kind: Kind
    release: str
    sha256: str


class SearchProcess:
    """A worker's end of the process that searches.

    Args:
        serving: the served release.
    """

    def __init__(self, serving: ServedRelease) -> None:
        self._serving = serving
        self._pid = 0
        self._socket: socket.socket | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}

    def start(self) -> None:
        """Fork the process; call it before this process has threads, connections and an event
        loop."""
        self._socket, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            _search(self._serving, theirs)
        theirs.close()

    def stop(self) -> None:
        """End the process, whether or not it has died; what it has not answered is lost."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    async def run(self) -> None:
        """Carry questions and answers; returns when the process has died."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=_STREAM_BYTES)
        while (message := await _receive(reader)) is not None:
            answer, body = message
            future = self._waiting.pop(answer["number"])
            if not future.done():  # its request has not been cancelled
                if "error" in answer:
                    future.set_exception(_error_from_dict(answer["error"]))
                else:
                    future.set_result(body)
        self._writer = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(_died())
        self._waiting.clear()

    async def answer(self, kind: Kind, body: bytes) -> bytes:
        """The response of a search, from the release that is served now.

        Raises:
            FieldError: when a field of the body is invalid.
            Refusal: 503 when too many searches wait, or the process has died.
        """
        if self._writer is None:
            raise _died()
        api = self._serving.api
        question = Question(
            next(self._numbers), kind, api.release, release_digest(api.predictor.bundles)
        )
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[question.number] = future
        _send(self._writer, question._asdict(), body)
        return await future


class SearchQueue:
    """Searches wait for each other, and too many are refused.

    Args:
        max_layers: most layers that the searches at work and waiting may compute in all; a search
            beyond that is refused.
    """

    def __init__(self, max_layers: int = MAX_SEARCH_LAYERS) -> None:
        self._max_layers = max_layers
        self._layers = 0
        self._limiter: CapacityLimiter | None = None

    async def answer(self, search: Search) -> bytes:
        """The response of a search.

        Raises:
            Refusal: 503 when too many wait.
        """
        if self._layers and self._layers + search.layers > self._max_layers:
            retry_seconds = max(1, self._layers // SEARCH_LAYERS_PER_SECOND)
            raise Refusal(
                OVERLOADED,
                "too many searches are waiting: try again later",
                {"Retry-After": str(retry_seconds)},
            )
        self._limiter = self._limiter or CapacityLimiter(1)
        self._layers += search.layers
        try:
            return await to_thread.run_sync(
                lambda: orjson.dumps(search.answer()), limiter=self._limiter
            )
        finally:
            self._layers -= search.layers


class SearchFailedError(RuntimeError):
    """A search failed by a fault of the service; the text says where."""


def _search(serving: ServedRelease, connection: socket.socket) -> NoReturn:
    """Answer questions in the forked process until its worker ends; never returns."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(
                number, signal.SIG_IGN
            )  # sent to the group too; the worker may still wait for answers
        os.nice(NICENESS)
        _close_all_but(connection.fileno())
        asyncio.run(_answer_all(serving, connection))
    finally:
        os._exit(0)


def _close_all_but(descriptor: int) -> None:
    """Close the worker's files; above all the listening socket, which would accept connections
    after the worker's end."""
    for each in [int(path.name) for path in Path("/dev/fd").iterdir()]:
        if each > 2 and each != descriptor:
            with suppress(OSError):  # that of the listing
                os.close(each)


async def _answer_all(serving: ServedRelease, connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=_STREAM_BYTES)
    queue = SearchQueue()
    tasks = set()
    while (message := await _receive(reader)) is not None:
        question, body = message
        task = asyncio.create_task(_answer(serving, queue, Question(**question), body, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    os._exit(0)  # at once: a thread may be searching, and nobody waits for it


async def _answer(
    serving: ServedRelease,
    queue: SearchQueue,
    question: Question,
    body: bytes,
    writer: asyncio.StreamWriter,
) -> None:
    answer: dict[str, Any] = {"number": question.number}
    content = b""
    try:
        serving.take_over(question.release, question.sha256)
        search = await handle_body(_READERS[question.kind](serving.api), body)
        content = await queue.answer(search)
    except (FieldError, Refusal) as error:
        answer["error"] = _error_to_dict(error)
    except BundleError as error:
        answer["error"] = _error_to_dict(
            Refusal(OVERLOADED, f"searches cannot be answered: {error}", _RETRY)
        )
    except Exception:
        answer["error"] = {"fault": traceback.format_exc()}
    _send(writer, answer, content)


_READERS: Final[dict[Kind, Callable[[PredictionApi], Callable[[bytes], Search]]]] = {
    "batch_sizes": lambda api: api.batch_sizes_search,
    "smallest_gpu": lambda api: api.smallest_gpu_search,
}


def _died() -> Refusal:
    return Refusal(OVERLOADED, "the process for searches has ended: try again", _RETRY)


def _error_to_dict(error: FieldError | Refusal) -> dict[str, Any]:
    if isinstance(error, Refusal):
        return {"kind": astuple(error.kind), "detail": error.detail, "headers": error.headers}
    return {"type": type(error).__name__, "reason": error.reason, "field": error.field}


def _error_from_dict(document: Mapping[str, Any]) -> Exception:
    if "kind" in document:
        return Refusal(ProblemKind(*document["kind"]), document["detail"], document["headers"])
    if "type" in document:
        return _FIELD_ERRORS[document["type"]](document["reason"], document["field"])
    return SearchFailedError(document["fault"])


def _send(writer: asyncio.StreamWriter, document: Mapping[str, Any], body: bytes) -> None:
    head = json.dumps(document).encode()
    writer.write(_LENGTHS.pack(len(head), len(body)) + head + body)


async def _receive(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes] | None:
    """The next message, or ``None`` when the other process has ended."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        head_bytes, body_bytes = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
        head = json.loads(await reader.readexactly(head_bytes))
        return head, await reader.readexactly(body_bytes)
    return None
