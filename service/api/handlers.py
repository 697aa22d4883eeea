"""The ASGI applications of the operations: they read a body, pass it on, and send the response.

They bypass FastAPI's dependencies, second validation and thread per request.  Each would add
between a tenth and a half to the cost of a response (benchmarks/http_latency.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs

import orjson
from anyio import CapacityLimiter, to_thread
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.types import Receive, Scope, Send

from gpumemnet.errors import InvalidJobError, InvalidRequestError, did_you_mean
from gpumemnet.job.json_codec import parse_json
from gpumemnet.job.layers import describe
from gpumemnet.job.training_job import JOB_FIELDS

from .problems import NO_JSON, OVERLOADED, TOO_LARGE, Refusal
from .schemas import Device, Schema

Result = TypeVar("Result")
S = TypeVar("S", bound=Schema)

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
_MAX_NAME: Final = 64
_NOT_JSON: Final = f"the body must be sent with the header 'Content-Type: {JSON}'"
_ENCODED: Final = "the body must not be compressed: send it without Content-Encoding"
_TURN: Final = CapacityLimiter(1)
"""One thread for long bodies."""
_SEARCH_TURN: Final = CapacityLimiter(1)


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
            await send_response(send, 200, JSON, await self._content(body))

    async def _content(self, body: bytes) -> bytes:
        return await handle_body(self._bytes, body)

    def _bytes(self, body: bytes) -> bytes:
        return orjson.dumps(self._respond(body))


class SearchHandler(JsonHandler):
    """Responds with the result of a search over many batch sizes or sequence lengths.  Searches wait
    for each other in a thread of their own, and too many are refused (503).

    Args:
        search: makes the response from the body.
    """

    def __init__(self, search: Callable[[bytes], Any]) -> None:
        super().__init__(search)
        self._searches = 0

    async def _content(self, body: bytes) -> bytes:
        if self._searches >= MAX_SEARCHES:
            raise Refusal(OVERLOADED, "too many searches are waiting: try again later")
        self._searches += 1
        try:
            return await to_thread.run_sync(self._bytes, body, limiter=_SEARCH_TURN)
        finally:
            self._searches -= 1

    def _bytes(self, body: bytes) -> bytes:
        return json.dumps(self._respond(body)).encode()  # an amount may have more than 64 bits


async def handle_body(handle: Callable[[bytes], Result], body: bytes) -> Result:
    """Handle a short body at once, and a long one by :func:`run_in_turn`."""
    return await run_in_turn(handle, body) if len(body) > INLINE_BODY_BYTES else handle(body)


async def run_in_turn(handle: Callable[[bytes], Result], body: bytes) -> Result:
    """Handle a long body in a thread, after all long bodies before it.

    Threads share Python's lock with the event loop: each more that computes makes every other
    request wait for one more turn, and none finishes earlier.
    """
    return await to_thread.run_sync(handle, body, limiter=_TURN)


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
    return Refusal(TOO_LARGE, detail)


def read_query(query: bytes, name: str) -> list[str]:
    """The values of the only parameter that a query may have.

    Raises:
        InvalidRequestError: when it has another one.
    """
    given = parse_qs(query.decode("latin-1"), keep_blank_values=True)
    for other in given.keys() - {name}:
        raise InvalidRequestError(f"is not a parameter: known is {name}", describe(other[:64]))
    return given.get(name, [])


def read_json(body: bytes) -> Any:
    """The JSON in a body.

    Raises:
        InvalidRequestError: when it is not JSON.
    """
    try:
        return parse_json(body)
    except InvalidJobError as error:
        raise InvalidRequestError(error.reason, error.field or "body") from None


def read_request(body: bytes, schema: type[S]) -> S:
    """The request in a body.

    Args:
        body: JSON.
        schema: the schema of the request.

    Raises:
        InvalidRequestError: when the body is not JSON, or does not match the schema.
    """
    try:
        return schema.model_validate(read_json(body))
    except ValidationError as error:
        raise _explained(error.errors(include_url=False), schema) from None


def _explained(errors: Sequence[ErrorDetails], schema: type[Schema]) -> InvalidRequestError:
    """The error for the errors that pydantic found in a request: the path of the first invalid
    member, and what was expected there."""
    # An invalid member explains a missing one.
    errors = sorted(errors, key=lambda error: error["type"] == "missing")
    member = errors[0]["loc"][:1]
    # A value with alternative forms has an error for each form: report the one that matched the
    # furthest.
    error = max(
        (error for error in reversed(errors) if error["loc"][:1] == member),
        key=lambda error: len(error["loc"]),
    )
    if not member:
        return InvalidRequestError(f"must be a JSON object, not {describe(error['input'])}", "body")
    members = schema.model_fields if len(error["loc"]) == 1 else Device.model_fields
    *inner, last = error["loc"][1:] or ("",)
    is_named = error["type"] in ("extra_forbidden", "missing")
    path = str(member[0])[:_MAX_NAME]
    for part in (*inner, last):
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in Device.model_fields or (is_named and part):  # else the name of a form
            path += f".{part[:_MAX_NAME]}"
    return InvalidRequestError(_sentence(error, list(members)), path)


def _sentence(error: ErrorDetails, members: Sequence[str]) -> str:
    kind, message = error["type"], error["msg"].replace("Input should", "must")
    if kind == "missing":
        return f"is missing: known fields are {', '.join(members)}"
    if kind == "extra_forbidden":
        name = str(error["loc"][-1])
        if name in JOB_FIELDS and not {"job", "jobs"}.isdisjoint(members):
            return "is not a field of the request: it belongs to a job"
        hint = did_you_mean(name, members, f"known fields are {', '.join(members)}")
        return f"is not a field: {hint}"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    return f"{message}, not {describe(error['input'])}"


async def send_response(
    send: Send, status: int, media_type: str, content: bytes, *more: tuple[bytes, bytes]
) -> None:
    """Send one whole response, with ``more`` headers."""
    length = b"%d" % len(content)
    headers = [(b"content-type", media_type.encode()), (b"content-length", length), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
