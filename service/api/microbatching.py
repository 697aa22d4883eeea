"""``POST /v1/predict``: puts requests together that arrive at once, and sends JSON or plain text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson
from starlette.types import Receive, Scope, Send

from gpumemnet.job.layers import check_choice
from gpumemnet.units import ceil_mib

from .handlers import (
    INLINE_BODY_BYTES,
    JSON,
    TEXT,
    read_json_body,
    read_query,
    run_in_turn,
    send_response,
)
from .predictions import read_job_request
from .problems import OUTSIDE_SUPPORT, Refusal

if TYPE_CHECKING:
    from ..served_release import ServedRelease


TEXT_FIELDS: Final = (
    "limit_mib",
    "request_mib",
    "safe_bytes",
    "expected_bytes",
    "prediction_id",
)
"""The fields that a script may request as plain text; the first is the default."""
MIB_FIELDS: Final = {"limit_mib": "safe_bytes", "request_mib": "expected_bytes"}
"""Fields for schedulers that count in MiB, and the amounts that they round up."""

_JSON_TYPES: Final = (JSON.encode(), b"application/*", b"*/*")

logger = logging.getLogger("gpumemnet.service")


class Microbatch:
    """Microbatching: requests that arrive in one iteration of the event loop are predicted together
    at the next.

    A model takes little longer for twenty jobs than for one.  A lone request is never delayed.

    Args:
        predict: takes several requests; returns a prediction or an exception for each.
    """

    def __init__(self, predict: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self._predict = predict
        self._waiting: list[tuple[Any, asyncio.Future[Any]]] = []

    async def predict(self, request: Any) -> Any:
        """The prediction for one request.

        Raises:
            Exception: the exception that ``predict`` returned for it.
        """
        loop = asyncio.get_running_loop()
        future = loop.create_future()
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

    def _results(self, requests: Sequence[Any]) -> Sequence[Any]:
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
        self._microbatch = Microbatch(lambda requests: serving.api.predict_requests(requests))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request.

        Raises:
            Refusal: as :class:`JsonHandler`; 422 when a requested field has no value.
            FieldError: when a field of the body or a query parameter is invalid.
        """
        names = text_fields(scope["query_string"])
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
    names = [name for value in read_query(query, "field") for name in value.split(",")]
    for name in names:
        check_choice(name, TEXT_FIELDS, "field")
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
