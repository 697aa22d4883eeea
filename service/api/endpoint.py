"""The ASGI applications of the JSON endpoints: they read a body, pass it on, and send the response.

They bypass FastAPI's dependencies, second validation and thread per request.  Each would add
between a tenth and a half to the cost of a response (benchmarks/http_latency.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import orjson
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from ..middleware.limits import INLINE_BODY_BYTES, handle_body, run_in_turn
from .operations import JSON
from .requests import JobRequest, read_job_request
from .text_response import TEXT_FIELDS, TEXT_UTF8, text_fields, text_of, wants_text

if TYPE_CHECKING:
    from .predictions import PredictionApi

Request = TypeVar("Request")
Result = TypeVar("Result")

_NOT_JSON: Final = f"the body must be sent with the header 'Content-Type: {JSON}'"

logger = logging.getLogger("gpumemnet.service")


class JsonEndpoint:
    """ASGI application that reads a JSON body and responds with JSON; long bodies are handled in a
    thread.

    Args:
        respond: makes the response from the body.
    """

    def __init__(self, respond: Callable[[bytes], Any]) -> None:
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request.

        Raises:
            HTTPException: 415 when the body is not declared as JSON.
            FieldError: when a field of the body is invalid.
        """
        body = await read_json_body(scope, receive)
        if body is not None:
            await send_response(send, 200, JSON, await handle_body(self._bytes, body))

    def _bytes(self, body: bytes) -> bytes:
        return orjson.dumps(self._respond(body))


class SearchEndpoint:
    """ASGI application of a search over many batch sizes, which another process answers.

    Args:
        answer: takes the body; returns the response.
    """

    def __init__(self, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request.

        Raises:
            HTTPException: 415 when the body is not declared as JSON; 503 when too many searches
                wait.
            FieldError: when a field of the body is invalid.
        """
        body = await read_json_body(scope, receive)
        if body is not None:
            await send_response(send, 200, JSON, await self._answer(body))


class DescriptionEndpoint:
    """ASGI application of the OpenAPI document, which is made once: its examples are predictions.

    Args:
        make: makes the document.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._content = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request."""
        if not self._content:
            self._content = await run_in_turn(self._made)
        await send_response(send, 200, JSON, self._content)

    def _made(self) -> bytes:
        return self._content or orjson.dumps(self._make())


class PredictEndpoint:
    """ASGI application of ``POST /v1/predict``, in JSON or plain text.

    Args:
        current: returns the prediction API; a model swap replaces it.
    """

    def __init__(self, current: Callable[[], PredictionApi]) -> None:
        self._current = current
        self._microbatch = Microbatch[JobRequest, Any](
            lambda requests: current().predict_requests(requests)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request.

        Raises:
            HTTPException: 415 when the body is not declared as JSON; 422 when a requested field has
                no value.
            FieldError: when a field of the body or a query parameter is invalid.
        """
        names = text_fields(query) if (query := scope["query_string"]) else TEXT_FIELDS[:1]
        body = await read_json_body(scope, receive)
        if body is None:
            return
        if len(body) > INLINE_BODY_BYTES:
            document = await run_in_turn(self._current().predict, body)
        else:
            document = await self._microbatch.predict(read_job_request(body))
        if wants_text(scope):
            await send_response(send, 200, TEXT_UTF8, text_of(document, names))
        else:
            await send_response(send, 200, JSON, orjson.dumps(document))


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


async def read_json_body(
    scope: Scope, receive: Receive, *, is_required: bool = True
) -> bytes | None:
    """The whole body, or ``None`` when the client disconnected before it was sent.

    Args:
        scope, receive: of the request.
        is_required: whether a body must be declared as JSON even if it is empty.

    Raises:
        HTTPException: 415 when the body is not declared as JSON.
    """
    is_json = _is_json(scope)
    if is_required and not is_json:
        raise HTTPException(415, _NOT_JSON)
    body = await read_body(receive)
    if body and not is_json:
        raise HTTPException(415, _NOT_JSON)
    return body


async def read_body(receive: Receive) -> bytes | None:
    """The whole body of any media type, or ``None`` when the client disconnected before it was
    sent."""
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


async def send_response(send: Send, status: int, media_type: str, content: bytes) -> None:
    """Send one whole response."""
    headers = [(b"content-type", media_type.encode()), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _is_json(scope: Scope) -> bool:
    for name, value in scope["headers"]:
        if name == b"content-type":
            media_type: bytes = value.partition(b";")[0].strip().lower()
            return media_type == JSON.encode()
    return False
