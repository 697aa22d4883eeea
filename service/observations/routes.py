"""The operations of observations: they store observations, summarise them, and show a prediction with
its observation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

import orjson
from pydantic import Field
from starlette.types import Receive, Scope, Send

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.site.observations import (
    MAX_BYTES,
    MAX_KEY_LENGTH,
    MAX_TEXT_LENGTH,
    MIN_BYTES,
    SOURCES,
    observation_from_dict,
)
from gpumemnet.site.observations import Observation as ReadObservation
from gpumemnet.units import MIB

from ..api.examples import OBSERVATION_EXAMPLES
from ..api.handlers import JSON, handle_body, read_json, read_json_body, read_query, send_response
from ..api.openapi import Answer, Operation
from ..api.problems import UNKNOWN, Refusal
from ..api.schemas import Job, OneOf, Schema, described
from .inserts import Stored
from .store import ObservationStore

DEFAULT_DAYS: Final = 30
MAX_DAYS: Final = 3650
KEY_NAME: Final = "key_name"
"""The key of the API key's name in a request's state."""

_Mib = Annotated[float, Field(ge=MIN_BYTES // MIB, le=MAX_BYTES // MIB)]
_IN_MIB: Final[Any] = (
    _Mib | None,
    Field(default=None, description="the same in MiB (2**20 bytes), instead"),
)
_Bytes = Annotated[int, Field(ge=MIN_BYTES, le=MAX_BYTES)]
_Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_LENGTH)]


Observation: Any = described(
    "Observation",
    "The memory that one run of a job used: of a prediction's job, or of `job` on `gpu`.",
    ReadObservation,
    is_request=True,
    prediction_id=Annotated[str, Field(json_schema_extra={"format": "uuid"})] | None,
    job=Job | None,
    gpu=_Text | None,
    source=(
        Annotated[str, OneOf(SOURCES)],
        Field(
            description="where the peak comes from. "
            + "; ".join(f"`{name}`: {meaning}" for name, meaning in SOURCES.items())
        ),
    ),
    peak_bytes=_Bytes | None,
    limit_bytes=_Bytes | None,
    idempotency_key=Annotated[str, Field(min_length=1, max_length=MAX_KEY_LENGTH)] | None,
    peak_mib=_IN_MIB,
    limit_mib=_IN_MIB,
)


StoredObservation: Any = described(
    "StoredObservation", "An observation that is on the disk.", Stored
)


class Worth(Schema):
    """Coverage and error of predictions, compared with what the jobs used."""

    judged: int = Field(ge=0)
    """jobs whose observation can confirm or contradict the safe bytes"""
    covered: int = Field(ge=0)
    """of these, jobs within the safe bytes"""
    coverage: float | None
    """covered / judged"""
    promised_coverage: float | None
    """mean of the requested coverages"""
    median_error_percent: float | None
    """median of expected minus observed, in percent of the observed"""
    median_absolute_error_percent: float | None
    under_prediction_rate: float | None
    """share of the jobs that used more than expected"""
    waste_share: float | None
    """share of the safe bytes that was not used, over the covered jobs"""


class ObservedGroup(Schema):
    """Predictions of one release for one family and GPU."""

    family: str
    gpu: str
    release: str
    observations: int = Field(ge=0)
    oom: int = Field(ge=0)
    """jobs that ran out of memory"""
    without_limit: dict[str, int]
    """predictions without a limit, by the option or feature that the model does not know; what to measure next"""
    champion: Worth


class ObservationSummary(Schema):
    """Coverage and error of the predictions of the last days."""

    days: float
    observations: int = Field(ge=0)
    oom: int = Field(ge=0)
    without_prediction: int = Field(ge=0)
    """observations with a job and no prediction; kept for training, not compared"""
    on_another_gpu: int = Field(ge=0)
    """observations from another GPU than predicted; not compared"""
    sources: dict[str, int]
    """observations by the source of their peak"""
    compared: int = Field(ge=0)
    """observations in the groups below"""
    complete: bool
    """whether these are all observations and not only the newest"""
    groups: list[ObservedGroup]


def observation_operations(store: ObservationStore | None) -> list[Operation]:
    """The operations below ``/v1/observations``; without a store they respond that observations are
    disabled."""
    return [
        Operation(
            path="/v1/observations",
            name="observe",
            tag="observations",
            summary="Report the memory that finished jobs used",
            description="The response is sent once the observation is on the disk. Sending it again is safe: it is stored once.",
            handler=_Handler(store, _observe),
            request=Observation,
            examples=OBSERVATION_EXAMPLES,
            answers={
                201: Answer(shape=StoredObservation, meaning="The observation is stored."),
                200: Answer(
                    shape=StoredObservation, meaning="The observation had been stored before."
                ),
            },
            refusals={
                404: "The prediction is unknown, or this service stores no observations.",
                409: "The idempotency key was used for another observation.",
                503: "The service is busy, too many observations wait, or the database is unavailable: send it again later.",
            },
        ),
        Operation(
            path="/v1/observations/summary",
            name="observation_summary",
            tag="observations",
            summary="Coverage and error of the predictions",
            handler=_Handler(store, _summary),
            parameters=[
                {
                    "name": "days",
                    "in": "query",
                    "required": False,
                    "description": "the number of days, up to now",
                    "schema": {
                        "type": "integer",
                        "minimum": 1,
                        "maximum": MAX_DAYS,
                        "default": DEFAULT_DAYS,
                    },
                }
            ],
            answers={200: Answer(shape=ObservationSummary, meaning="The summary.")},
            refusals={
                404: "This service stores no observations.",
                422: "A parameter is invalid.",
                503: "The service is busy, or the database is unavailable.",
            },
        ),
    ]


@dataclass(frozen=True)
class _Handler:
    """ASGI application of an operation that needs a store: ``respond`` gives status and document."""

    store: ObservationStore | None
    respond: Callable[[ObservationStore, Scope, Receive], Awaitable[tuple[int, Any] | None]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.store is None:
            raise Refusal(
                UNKNOWN, "this service stores no observations: GPUMEMNET_DATABASE_URL is 'off'"
            )
        if (response := await self.respond(self.store, scope, receive)) is not None:
            await send_response(send, response[0], JSON, orjson.dumps(response[1]))


async def _observe(
    store: ObservationStore, scope: Scope, receive: Receive
) -> tuple[int, Any] | None:
    body = await read_json_body(scope, receive)
    if body is None:
        return None
    observation = await handle_body(lambda body: observation_from_dict(read_json(body)), body)
    key_name = str(scope.get("state", {}).get(KEY_NAME) or "")[:MAX_TEXT_LENGTH]
    stored = await store.add(observation, key_name)
    return 201 if stored.created else 200, stored


async def _summary(store: ObservationStore, scope: Scope, receive: Receive) -> tuple[int, Any]:
    return 200, await store.summary(_days(scope["query_string"]))


def _days(query: bytes) -> int:
    text = (read_query(query, "days") or [str(DEFAULT_DAYS)])[-1]
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= MAX_DAYS):
        raise InvalidRequestError(
            f"must be a whole number between 1 and {MAX_DAYS}, not {describe(text)}", "days"
        )
    return int(text)
