"""The operation that stores observations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

import orjson
from pydantic import Field
from starlette.types import Receive, Scope, Send

from gpumemnet.site.observations import (
    MAX_BYTES,
    MAX_KEY_LENGTH,
    MAX_TEXT_LENGTH,
    MIN_BYTES,
    SOURCES,
    observation_from_dict,
)
from gpumemnet.site.observations import Observation as ReadObservation

from ..api.handlers import JSON, handle_body, read_json, read_json_body, send_response
from ..api.openapi import Operation
from ..api.problems import UNKNOWN, Refusal
from ..api.schemas import Job, OneOf, described
from .inserts import Stored
from .store import ObservationStore

KEY_NAME: Final = "key_name"
"""The key of the API key's name in a request's state."""

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
)


StoredObservation: Any = described(
    "StoredObservation", "An observation that is on the disk.", Stored
)


def observation_operations(store: ObservationStore | None) -> list[Operation]:
    """The operation ``/v1/observations``; without a store it responds that observations are disabled."""
    return [
        Operation(
            path="/v1/observations",
            name="observe",
            tag="observations",
            summary="Report the memory that finished jobs used",
            description="The response is sent once the observation is on the disk. Sending it again is safe: it is stored once.",
            handler=_Handler(store),
            request=Observation,
            shape=StoredObservation,
            meanings={
                201: "The observation is stored.",
                200: "The observation had been stored before.",
            },
            refusals={
                404: "The prediction is unknown, or this service stores no observations.",
                409: "The idempotency key was used for another observation.",
                503: "The service is busy, too many observations wait, or the database is unavailable: send it again later.",
            },
        ),
    ]


@dataclass(frozen=True)
class _Handler:
    """ASGI application that stores an observation."""

    store: ObservationStore | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.store is None:
            raise Refusal(
                UNKNOWN, "this service stores no observations: GPUMEMNET_DATABASE_URL is 'off'"
            )
        body = await read_json_body(scope, receive)
        if body is None:
            return
        observation = await handle_body(lambda body: observation_from_dict(read_json(body)), body)
        key_name = str(scope.get("state", {}).get(KEY_NAME) or "")[:MAX_TEXT_LENGTH]
        stored = await self.store.add(observation, key_name)
        await send_response(send, 201 if stored.created else 200, JSON, orjson.dumps(stored))
