"""The ASGI applications of the operations: they read a body, pass it on, and send the response.

They bypass FastAPI's dependencies, second validation and thread per request.  Each would add
between a tenth and a half to the cost of a response (benchmarks/http_latency.py).  Predictions that
are asked for together are made together (:class:`Microbatch`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, TypeVarTuple
from urllib.parse import parse_qsl

import orjson
from anyio import CapacityLimiter, to_thread
from starlette.types import Receive, Scope, Send

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.units import ceil_mib

from .predictions import JobRequest, read_job_request
from .problems import NO_JSON, OUTSIDE_SUPPORT, OVERLOADED, TOO_LARGE, Refusal

if TYPE_CHECKING:
    from ..served_release import ServedRelease

Arguments = TypeVarTuple("Arguments")
Request = TypeVar("Request")
Result = TypeVar("Result")

JSON: Final = "application/json"
TEXT: Final = "text/plain"

INLINE_BODY_BYTES: Final = 32 * 1024
"""Longer bodies are handled by :func:`run_in_turn`, so that one long batch does not delay
concurrent short requests."""
DISCARDED_BYTES: Final = 64 * 2**20
"""Most bytes of a body beyond its limit that are read and thrown away: urllib and others read no
response before they have sent everything."""
MAX_SEARCHES: Final = 8
"""Most searches at work and waiting; one takes about a second at most."""
TEXT_FIELDS: Final = (
    "limit_mib",
    "request_mib",
    "safe_bytes",
    "expected_bytes",
    "startup_peak_bytes",
    "prediction_id",
)
"""The fields that a script may request as plain text; the first is the default."""
MIB_FIELDS: Final = {"limit_mib": "safe_bytes", "request_mib": "expected_bytes"}
"""Fields for schedulers that count in MiB, and the amounts that they round up."""

_NOT_JSON: Final = f"the body must be sent with the header 'Content-Type: {JSON}'"
_ENCODED: Final = "the body must not be compressed: send it without Content-Encoding"
_TURN: Final = CapacityLimiter(1)
"""One thread for long bodies."""
_SEARCH_TURN: Final = CapacityLimiter(1)
_JSON_TYPES: Final = (JSON.encode(), b"application/*", b"*/*")

logger = logging.getLogger("gpumemnet.service")


class JsonHandler:
    """ASGI application that responds with JSON, and reads a JSON body unless it is a GET; long
    bodies are handled in a thread.

    Args:
        respond: makes the response from the body; from the query for GET.
    """

    def __init__(self, respond: Callable[[bytes], Any]) -> None:
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request.

        Raises:
            Refusal: 413 or 415 for a body that is too large or not declared as JSON.
            FieldError: when a field of the body is invalid.
        """
        is_post = scope["method"] == "POST"
        body = await read_json_body(scope, receive) if is_post else scope["query_string"]
        if body is not None:
            await send_response(send, 200, JSON, await handle_body(self._bytes, body))

    def _bytes(self, body: bytes) -> bytes:
        return orjson.dumps(self._respond(body))


class SearchHandler:
    """ASGI application of a search over many batch sizes or sequence lengths.  Searches wait for
    each other in a thread of their own, and too many are refused.

    Args:
        search: makes the response from the body.
    """

    def __init__(self, search: Callable[[bytes], Any]) -> None:
        self._search = search
        self._searches = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request.

        Raises:
            Refusal: as :class:`JsonHandler`; 503 when too many searches wait.
            FieldError: when a field of the body is invalid.
        """
        body = await read_json_body(scope, receive)
        if body is None:
            return
        if self._searches >= MAX_SEARCHES:
            detail = "too many searches are waiting: try again later"
            raise Refusal(OVERLOADED, detail, {"Retry-After": "1"})
        self._searches += 1
        try:
            content = await to_thread.run_sync(
                lambda: json.dumps(self._search(body)).encode(), limiter=_SEARCH_TURN
            )
        finally:
            self._searches -= 1
        await send_response(send, 200, JSON, content)


class Microbatch(Generic[Request, Result]):
    """Microbatching: requests that arrive in one iteration of the event loop are predicted together
    at the next.

    A model takes little longer for twenty jobs than for one.  A lone request is never delayed.

    Args:
        predict: takes several requests; returns a prediction or an exception for each.
    """

    def __init__(
        self, predict: Callable[[Sequence[Request]], Sequence[Result | Exception]]
    ) -> None:
        self._predict = predict
        self._waiting: list[tuple[Request, asyncio.Future[Result]]] = []

    async def predict(self, request: Request) -> Result:
        """The prediction for one request.

        Raises:
            Exception: the exception that ``predict`` returned for it.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._waiting.append((request, future))
        if len(self._waiting) == 1:
            loop.call_soon(self._predict_waiting)
        return await future

    def _predict_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        waiting = [
            (request, future) for request, future in waiting if not future.done()
        ]  # cancelled: client disconnected
        results = self._results([request for request, _ in waiting]) if waiting else []
        for (_, future), result in zip(waiting, results, strict=True):
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _results(self, requests: Sequence[Request]) -> Sequence[Any]:
        try:
            return self._predict(requests)
        except Exception as error:
            if len(requests) == 1:
                return [error]
            logger.exception(
                "%d requests could not be predicted together: each is predicted alone",
                len(requests),
            )
            return [
                self._results([request])[0] for request in requests
            ]  # one failure must not fail the others


class PredictHandler:
    """ASGI application of ``POST /v1/predict``, in JSON or plain text.

    Args:
        serving: holds the prediction API; a model swap replaces it.
    """

    def __init__(self, serving: ServedRelease) -> None:
        self._serving = serving
        self._microbatch = Microbatch[JobRequest, Any](
            lambda requests: serving.api.predict_requests(requests)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request.

        Raises:
            Refusal: as :class:`JsonHandler`; 422 when a requested field has no value.
            FieldError: when a field of the body or a query parameter is invalid.
        """
        names = text_fields(query) if (query := scope["query_string"]) else TEXT_FIELDS[:1]
        body = await read_json_body(scope, receive)
        if body is None:
            return
        if len(body) > INLINE_BODY_BYTES:
            document = await run_in_turn(self._serving.api.predict, body)
        else:
            document = await self._microbatch.predict(read_job_request(body))
        if wants_text(scope):
            content = text_of(document, names)
            await send_response(send, 200, f"{TEXT}; charset=utf-8", content)
        else:
            await send_response(send, 200, JSON, orjson.dumps(document))


async def handle_body(handle: Callable[[bytes], Result], body: bytes) -> Result:
    """Handle a short body at once, and a long one by :func:`run_in_turn`."""
    return await run_in_turn(handle, body) if len(body) > INLINE_BODY_BYTES else handle(body)


async def run_in_turn(handle: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """Handle a long body in a thread, after all long bodies before it.

    Threads share Python's lock with the event loop: each more that computes makes every other
    request wait for one more turn, and none finishes earlier.
    """
    return await to_thread.run_sync(handle, *arguments, limiter=_TURN)


async def read_json_body(scope: Scope, receive: Receive) -> bytes | None:
    """The whole body, or ``None`` when the client disconnected before it was sent.

    Raises:
        Refusal: 415 when the body is compressed or not declared as JSON, 413 when it is
            larger than the settings allow.
    """
    is_json = expects_continue = False
    announced_bytes = received_bytes = 0
    for name, value in scope["headers"]:
        if name == b"content-type":
            is_json = value.partition(b";")[0].strip().lower() == JSON.encode()
        elif name == b"content-length":
            announced_bytes = int(value)  # digits only: the server has checked it
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise Refusal(NO_JSON, _ENCODED)
        elif name == b"expect":
            expects_continue = True
    if not is_json:
        raise Refusal(NO_JSON, _NOT_JSON)
    max_bytes: int = scope["app"].state.settings.max_body_bytes
    chunks: list[bytes] = []
    if expects_continue and announced_bytes > max_bytes:
        raise _too_large(max_bytes)  # the client waits for leave to send it
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk, is_last = message.get("body", b""), not message.get("more_body", False)
        received_bytes += len(chunk)
        if received_bytes <= max_bytes:
            chunks.append(chunk)
        elif is_last or received_bytes > max_bytes + DISCARDED_BYTES:
            raise _too_large(max_bytes)
        else:
            chunks.clear()
        if is_last:
            return b"".join(chunks)


def _too_large(max_bytes: int) -> Refusal:
    detail = f"the body is larger than the {max_bytes} bytes that this service reads: send fewer jobs at a time"
    return Refusal(TOO_LARGE, detail, {"Connection": "close"})


async def send_response(send: Send, status: int, media_type: str, content: bytes) -> None:
    """Send one whole response."""
    headers = [(b"content-type", media_type.encode()), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


# Predictions as plain text, for shell scripts that need a number and not a document: `limit_mib`
# and a newline, or the fields that `?field=` names, in their order on one line.  A field without a
# value is a 422: `curl -f` then prints nothing and fails, and the script uses its site's default.


def wants_text(scope: Scope) -> bool:
    """Whether the caller accepts plain text and no JSON."""
    for name, value in scope["headers"]:
        if name == b"accept":
            types = {part.partition(b";")[0].strip().lower() for part in value.split(b",")}
            return TEXT.encode() in types and types.isdisjoint(_JSON_TYPES)
    return False


def text_fields(query: bytes) -> tuple[str, ...]:
    """The fields that a query requests.

    Raises:
        InvalidRequestError: when it names another parameter or an unknown field.
    """
    names: list[str] = []
    for parameter, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if parameter != "field":
            raise InvalidRequestError(
                "is not a parameter: known is field", describe(parameter[:64])
            )
        names += value.split(",")
    for name in names:
        if name not in TEXT_FIELDS:
            raise InvalidRequestError(
                f"must be one of {', '.join(TEXT_FIELDS)}, not {describe(name)}", "field"
            )
    return tuple(names) or TEXT_FIELDS[:1]


def text_of(prediction: Mapping[str, Any], names: tuple[str, ...]) -> bytes:
    """The line with the requested fields of a prediction.

    Raises:
        Refusal: when one has no value.
    """
    words = []
    for name in names:
        value = prediction[MIB_FIELDS.get(name, name)]
        if value is None:
            raise Refusal(
                OUTSIDE_SUPPORT, f"there is no {name}: {'; '.join(prediction['reasons'])}"
            )
        words.append(str(ceil_mib(value) if name in MIB_FIELDS else value))
    return " ".join(words).encode() + b"\n"
