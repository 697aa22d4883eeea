"""The operations of this API: predictions, models, GPUs and health.

A model swap replaces ``serving.api``; every request reads it once and keeps the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from gpumemnet.errors import FieldError

from ..serving.served_release import ServedRelease
from . import examples, requests, schemas
from .endpoint import JsonEndpoint, PredictEndpoint, SearchEndpoint, SearchQueue, send_response
from .listings import gpus_document
from .operations import BODY_REFUSALS, JSON, Answer, Operation, Schemas
from .predictions import Document, PredictionApi
from .problems import field_problem
from .text_response import TEXT, TEXT_FIELDS, text_of

EXAMPLE_ID: Final = "01910c5e-8a40-7c3b-9f12-5d7e80a4b6c1"
"""The prediction id in all examples; real ids are never the same twice."""

NOT_READY: Final = "The registry's champion cannot be served, and `GPUMEMNET_REQUIRE_CHAMPION` is set."
"""When readiness is refused; at every other time a tested release is served."""

_ALIVE: Final = {"status": "ok"}
_TEXT_DESCRIPTION: Final = (
    f"With `Accept: {TEXT}` the response is one line: `{TEXT_FIELDS[0]}`, or the fields named by `?field=`, separated by "
    "spaces. A field without a value is then a 422, so that `curl -f` fails and a script goes on with its own default."
)
_TEXT_PARAMETER: Final = {
    "name": "field",
    "in": "query",
    "description": f"fields of the plain-text response; ignored for JSON. By default {TEXT_FIELDS[0]}",
    "style": "form",
    "explode": False,
    "schema": {"type": "array", "items": {"type": "string", "enum": list(TEXT_FIELDS)}, "minItems": 1},
}


def prediction_operations(serving: ServedRelease) -> list[Operation]:
    """The operations that predict."""
    searches = SearchQueue()

    def questions(bodies: Callable[[str], Mapping[str, Any]]) -> Callable[[], Mapping[str, Any]]:
        return lambda: bodies(serving.api.families[0])

    def operation(
        path: str, name: str, summary: str, request: Schemas, answer: Schemas, endpoint: ASGIApp, **more: Any
    ) -> Operation:
        bodies: Callable[[str], Mapping[str, Any]] = more.pop("bodies")
        make: Callable[[PredictionApi], Callable[[bytes], Document]] = more.pop("make")
        others: Callable[[], Mapping[str, Any]] | None = more.pop("others", None)
        return Operation(
            method="POST",
            path=path,
            name=name,
            tag="predict",
            summary=summary,
            endpoint=endpoint,
            request=request,
            request_examples=questions(bodies),
            answers={
                200: Answer(
                    shape=answer,
                    examples=lambda: {
                        name: _answered(make(serving.api.unrecorded()), body) for name, body in questions(bodies)().items()
                    },
                    others=others,
                )
            },
            refusals=BODY_REFUSALS,
            **more,
        )

    return [
        operation(
            *("/v1/predict", "predict", "Predict one job", requests.PredictRequest, schemas.Prediction),
            PredictEndpoint(lambda: serving.api),
            bodies=examples.predict_examples,
            make=lambda api: api.predict,
            others=lambda: {TEXT: {"schema": {"type": "string"}, "example": _text_example(serving.api.unrecorded())}},
            refusal_examples={422: lambda: _refusal_example(serving.api.unrecorded())},
            description=_TEXT_DESCRIPTION,
            parameters=[_TEXT_PARAMETER],
        ),
        operation(
            *("/v1/predict/batch", "predict_batch", "Predict many jobs", requests.BatchRequest, schemas.BatchPrediction),
            JsonEndpoint(lambda body: serving.api.predict_batch(body)),
            bodies=examples.batch_examples,
            make=lambda api: api.predict_batch,
        ),
        operation(
            *("/v1/batch-sizes", "batch_sizes", "The largest batch that fits", requests.BatchSizesRequest, schemas.BatchSizes),
            SearchEndpoint(lambda body: serving.api.batch_sizes_search(body), searches),
            bodies=examples.batch_sizes_examples,
            make=lambda api: api.batch_sizes,
        ),
        operation(
            *("/v1/smallest-gpu", "smallest_gpu", "The smallest GPU that holds a job", requests.SmallestGpuRequest),
            schemas.SmallestGpu,
            SearchEndpoint(lambda body: serving.api.smallest_gpu_search(body), searches),
            bodies=examples.smallest_gpu_examples,
            make=lambda api: api.smallest_gpu,
        ),
    ]


def other_operations(serving: ServedRelease) -> list[Operation]:
    """The operations for models, GPUs and health."""

    def operation(
        path: str, name: str, tag: str, summary: str, shape: Schemas, meaning: str, answer: Callable[[], Document], **more: Any
    ) -> Operation:
        found = Answer(shape=shape, meaning=meaning, examples=lambda: {"now": answer()})
        return Operation(
            method="GET", path=path, name=name, tag=tag, summary=summary, endpoint=_Reading(answer), answers={200: found}, **more
        )

    return [
        operation(
            *("/v1/models", "models", "models", "The loaded models and their cards", schemas.Models, "The models."),
            lambda: _models(serving),
        ),
        operation(
            *("/v1/gpus", "gpus", "models", "The known GPUs and their MIG profiles", schemas.Gpus, "The GPUs."),
            gpus_document,
        ),
        operation(
            *("/healthz", "healthz", "health", "Liveness: is the process alive?", schemas.Health, "The process is alive."),
            lambda: _ALIVE,
        ),
        operation(
            *(
                "/readyz",
                "readyz",
                "health",
                "Readiness: may requests be sent here?",
                schemas.Readiness,
                "Requests are answered.",
            ),
            lambda: _readiness(serving),
            refusals={503: NOT_READY},
        ),
    ]


class _Reading:
    """ASGI application for requests without a body."""

    def __init__(self, answer: Callable[[], Document]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request."""
        await send_response(send, 200, JSON, orjson.dumps(self._answer()))


def _models(serving: ServedRelease) -> Document:
    api = serving.api
    return {"release": api.release, "challenger": serving.challenger, "models": api.models()}


def _readiness(serving: ServedRelease) -> Document:
    """Runs no model: a release is served only after its self-test, and a probe must not delay predictions."""
    if not serving.is_ready:
        raise HTTPException(503, f"the registry's champion cannot be served, only {serving.release}; the cause is in the log")
    return {"status": "ready", "families": list(serving.api.families)}


def _answered(answer: Callable[[bytes], Document], body: Any) -> Document:
    document: Document = _with_example_id(answer(orjson.dumps(body)))
    return document


def _with_example_id(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: EXAMPLE_ID if name == "prediction_id" else _with_example_id(value) for name, value in part.items()}
    return [_with_example_id(one) for one in part] if isinstance(part, list) else part


def _text_example(api: PredictionApi) -> str:
    """The plain-text response to the first example; ``request_mib`` where it has no limit."""
    body = next(iter(examples.predict_examples(api.families[0]).values()))
    prediction = _answered(api.predict, body)
    has_limit = prediction["limit_mib"] is not None
    return text_of(prediction, TEXT_FIELDS[:1] if has_limit else TEXT_FIELDS[1:2]).decode()


def _refusal_example(api: PredictionApi) -> Document | None:
    try:
        api.predict(orjson.dumps(examples.refused_example(api.families[0])))
    except FieldError as error:
        return field_problem(error)
    return None
