"""The operations of this API: predictions, models, GPUs and health.

A model swap replaces ``serving.api``; every request reads it once and keeps the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import orjson
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from gpumemnet.errors import FieldError

from ..searches import SearchProcess
from ..serving.served_release import ServedRelease
from . import examples, requests, schemas
from .endpoint import JsonEndpoint, PredictEndpoint, SearchEndpoint, send_response
from .listings import gpus_document
from .operations import BODY_REFUSALS, JSON, Answer, Examples, Operation, Schemas
from .predictions import Document, PredictionApi
from .problems import field_problem
from .text_response import TEXT, TEXT_FIELDS, text_of

EXAMPLE_ID: Final = "01910c5e-8a40-7c3b-9f12-5d7e80a4b6c1"
"""The prediction id in all examples; real ids are never the same twice."""

NOT_READY: Final = (
    "The registry's champion cannot be served, and `GPUMEMNET_REQUIRE_CHAMPION` is set."
)
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
    "schema": {
        "type": "array",
        "items": {"type": "string", "enum": list(TEXT_FIELDS)},
        "minItems": 1,
    },
}


def prediction_operations(serving: ServedRelease, searches: SearchProcess) -> list[Operation]:
    """The operations that predict."""

    def predicting(
        path: str,
        *,
        name: str,
        summary: str,
        endpoint: ASGIApp,
        request: Schemas,
        response: Schemas,
        bodies: Callable[[str], Examples],
        respond: Callable[[PredictionApi, bytes], Document],
        **more: Any,
    ) -> Operation:
        """An operation with a job in its body.

        Args:
            path, name, summary, endpoint, request: of the operation.
            response: model of the response.
            bodies: makes examples of the body, for a family.
            respond: makes the response to an example.
            more: what only this operation has; ``others`` is that of its :class:`Answer`.
        """

        def requests_now() -> Examples:
            return bodies(serving.api.families[0])

        def responses_now() -> Examples:
            api = serving.api.unrecorded()
            return {
                example: _with_example_id(respond(api, orjson.dumps(body)))
                for example, body in requests_now().items()
            }

        return Operation(
            method="POST",
            path=path,
            name=name,
            tag="predict",
            summary=summary,
            endpoint=endpoint,
            request=request,
            request_examples=requests_now,
            answers={
                200: Answer(shape=response, examples=responses_now, others=more.pop("others", None))
            },
            refusals=BODY_REFUSALS,
            **more,
        )

    return [
        predicting(
            "/v1/predict",
            name="predict",
            summary="Predict one job",
            endpoint=PredictEndpoint(lambda: serving.api),
            request=requests.PredictRequest,
            response=schemas.Prediction,
            bodies=examples.predict_examples,
            respond=PredictionApi.predict,
            others=lambda: {
                TEXT: {
                    "schema": {"type": "string"},
                    "example": _text_example(serving.api.unrecorded()),
                }
            },
            refusal_examples={422: lambda: _refusal_example(serving.api.unrecorded())},
            description=_TEXT_DESCRIPTION,
            parameters=[_TEXT_PARAMETER],
        ),
        predicting(
            "/v1/predict/batch",
            name="predict_batch",
            summary="Predict many jobs",
            endpoint=JsonEndpoint(lambda body: serving.api.predict_batch(body)),
            request=requests.BatchRequest,
            response=schemas.BatchPrediction,
            bodies=examples.batch_examples,
            respond=PredictionApi.predict_batch,
        ),
        predicting(
            "/v1/batch-sizes",
            name="batch_sizes",
            summary="The largest batch that fits",
            endpoint=SearchEndpoint(partial(searches.answer, "batch_sizes")),
            request=requests.BatchSizesRequest,
            response=schemas.BatchSizes,
            bodies=examples.batch_sizes_examples,
            respond=PredictionApi.batch_sizes,
        ),
        predicting(
            "/v1/smallest-gpu",
            name="smallest_gpu",
            summary="The smallest GPU that holds a job",
            endpoint=SearchEndpoint(partial(searches.answer, "smallest_gpu")),
            request=requests.SmallestGpuRequest,
            response=schemas.SmallestGpu,
            bodies=examples.smallest_gpu_examples,
            respond=PredictionApi.smallest_gpu,
        ),
    ]


def other_operations(serving: ServedRelease) -> list[Operation]:
    """The operations for models, GPUs and health."""

    def reading(
        path: str,
        *,
        tag: str,
        summary: str,
        shape: Schemas,
        meaning: str,
        read: Callable[[], Document],
        **more: Any,
    ) -> Operation:
        return Operation(
            method="GET",
            path=path,
            name=path.rpartition("/")[2],
            tag=tag,
            summary=summary,
            endpoint=_Reading(read),
            answers={200: Answer(shape=shape, meaning=meaning, examples=lambda: {"now": read()})},
            **more,
        )

    return [
        reading(
            "/v1/models",
            tag="models",
            summary="The loaded models and their cards",
            shape=schemas.Models,
            meaning="The models.",
            read=lambda: _models(serving),
        ),
        reading(
            "/v1/gpus",
            tag="models",
            summary="The known GPUs and their MIG profiles",
            shape=schemas.Gpus,
            meaning="The GPUs.",
            read=gpus_document,
        ),
        reading(
            "/healthz",
            tag="health",
            summary="Liveness: is the process alive?",
            shape=schemas.Health,
            meaning="The process is alive.",
            read=lambda: _ALIVE,
        ),
        reading(
            "/readyz",
            tag="health",
            summary="Readiness: may requests be sent here?",
            shape=schemas.Readiness,
            meaning="Requests are answered.",
            read=lambda: _readiness(serving),
            refusals={503: NOT_READY},
        ),
    ]


class _Reading:
    """ASGI application for requests without a body."""

    def __init__(self, read: Callable[[], Document]) -> None:
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request."""
        await send_response(send, 200, JSON, orjson.dumps(self._read()))


def _models(serving: ServedRelease) -> Document:
    api = serving.api
    return {"release": api.release, "challenger": serving.challenger, "models": api.models()}


def _readiness(serving: ServedRelease) -> Document:
    """Runs no model: a release is served only after its self-test, and a probe must not delay
    predictions."""
    if not serving.is_ready:
        raise HTTPException(
            503,
            f"the registry's champion cannot be served, only {serving.release}; the cause is in the log",
        )
    return {"status": "ready", "families": list(serving.api.families)}


def _with_example_id(part: Any) -> Any:
    if isinstance(part, dict):
        return {
            name: EXAMPLE_ID if name == "prediction_id" else _with_example_id(value)
            for name, value in part.items()
        }
    return [_with_example_id(one) for one in part] if isinstance(part, list) else part


def _text_example(api: PredictionApi) -> str:
    """The plain-text response to the first example; ``request_mib`` where it has no limit."""
    body = next(iter(examples.predict_examples(api.families[0]).values()))
    prediction = _with_example_id(api.predict(orjson.dumps(body)))
    has_limit = prediction["limit_mib"] is not None
    return text_of(prediction, TEXT_FIELDS[:1] if has_limit else TEXT_FIELDS[1:2]).decode()


def _refusal_example(api: PredictionApi) -> Document | None:
    try:
        api.predict(orjson.dumps(examples.refused_example(api.families[0])))
    except FieldError as error:
        return field_problem(error)
    return None
