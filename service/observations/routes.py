"""The routes of observations: how a report reaches the store, and what the store says of the predictions so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import parse_qs

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from gpumemnet.errors import FieldError, InvalidJobError, InvalidRequestError
from gpumemnet.job.json_codec import parse_json
from gpumemnet.job.layers import describe
from gpumemnet.site.observation import MAX_TEXT_LENGTH, Observation, observation_from_dict

from ..api.endpoint import JSON, read_json_body, send_answer
from ..api.problems import OVERLOADED, UNKNOWN, Refusal, field_problem, located
from ..middleware.limits import INLINE_BODY_BYTES
from .store import Answer, ObservationStore
from .tables import Stored

MAX_OBSERVATIONS: Final = 1000
"""Most observations in one request."""
DEFAULT_DAYS: Final = 30
MAX_DAYS: Final = 3650
KEY_NAME: Final = "key_name"
"""Where in a request's state the name of its API key stands."""

_OFF: Final = "this service stores no observations: GPUMEMNET_DATABASE_URL is 'off'"


def observation_routes(store: ObservationStore | None) -> list[BaseRoute]:
    """The routes; without a store they say that there is none."""
    return [
        Route("/v1/observations", _Observations(store), methods=["POST"]),
        Route("/v1/observations/summary", _Summary(store), methods=["GET"]),
    ]


class _Observations:
    """ASGI application of ``POST /v1/observations``."""

    def __init__(self, store: ObservationStore | None) -> None:
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._store is None:
            raise Refusal(UNKNOWN, _OFF)
        body = await read_json_body(scope, receive)
        if body is None:
            return
        read = read_observations(body) if len(body) <= INLINE_BODY_BYTES else await run_in_threadpool(read_observations, body)
        key_name = str(scope.get("state", {}).get(KEY_NAME) or "")[:MAX_TEXT_LENGTH]
        if isinstance(read, Observation):
            stored = await self._store.add(read, key_name)
            await send_answer(send, 201 if stored.created else 200, JSON, orjson.dumps(_document(stored)))
            return
        valid = [one for one in read if isinstance(one, Observation)]
        answers = iter(await self._store.add_many(valid, key_name))
        results: list[Answer] = [next(answers) if isinstance(one, Observation) else one for one in read]
        await send_answer(send, 200, JSON, _batch(results))


class _Summary:
    """ASGI application of ``GET /v1/observations/summary``."""

    def __init__(self, store: ObservationStore | None) -> None:
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._store is None:
            raise Refusal(UNKNOWN, _OFF)
        summary = await self._store.summary(_days(scope["query_string"]))
        await send_answer(send, 200, JSON, orjson.dumps(summary))


def read_observations(body: bytes) -> Observation | list[Observation | FieldError]:
    """The observation in a body, or those of a list, each of which may be at fault alone.

    Raises:
        InvalidRequestError: when the body is no JSON, or its envelope is wrong.
        FieldError: when the only observation is at fault.
    """
    try:
        document = parse_json(body)
    except InvalidJobError as error:
        raise InvalidRequestError(error.reason, error.field or "body") from None
    if not isinstance(document, dict):
        raise InvalidRequestError(
            f"must be an observation or an object with 'observations', a list of them, not {describe(document)}", "body"
        )
    if "observations" not in document:
        return observation_from_dict(document)
    for name in document:
        if name != "observations":
            raise InvalidRequestError("must not stand beside observations: what belongs to one stands in it", name[:64])
    listed = document["observations"]
    if not isinstance(listed, list):
        raise InvalidRequestError(f"must be a list of observations, not {describe(listed)}", "observations")
    if len(listed) > MAX_OBSERVATIONS:
        raise InvalidRequestError(
            f"must hold at most {MAX_OBSERVATIONS}, not {len(listed)}: send them in several requests", "observations"
        )
    return [_read_one(entry, f"observations[{index}]") for index, entry in enumerate(listed)]


def _read_one(entry: Any, place: str) -> Observation | FieldError:
    try:
        return observation_from_dict(entry)
    except FieldError as error:
        return located(error, place)


def _document(stored: Stored) -> dict[str, Any]:
    return {
        "observation_id": stored.observation_id,
        "created": stored.created,
        "prediction_id": stored.prediction_id,
        "job_sha256": stored.job_hash,
        "gpu": stored.gpu,
    }


def _batch(results: Sequence[Answer]) -> bytes:
    stored = [result for result in results if isinstance(result, Stored)]
    if results and all(isinstance(result, Refusal) and result.kind == OVERLOADED for result in results):
        assert isinstance(results[0], Refusal)
        raise results[0]
    documents = [
        {"observation": _document(result)} if isinstance(result, Stored) else {"problem": _problem(result)} for result in results
    ]
    return orjson.dumps({"failed": len(results) - len(stored), "results": documents})


def _problem(error: FieldError | Refusal) -> dict[str, Any]:
    return error.document() if isinstance(error, Refusal) else field_problem(error)


def _days(query: bytes) -> int:
    given = parse_qs(query.decode("latin-1"), keep_blank_values=True, max_num_fields=20)
    for name in given:
        if name != "days":
            raise InvalidRequestError("is not a parameter: the summary takes days", name[:64])
    text = given.get("days", [str(DEFAULT_DAYS)])[-1]
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= MAX_DAYS):
        raise InvalidRequestError(f"must be a whole number between 1 and {MAX_DAYS}, not {describe(text)}", "days")
    return int(text)
