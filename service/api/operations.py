"""The operations of predictions, models, GPUs, health and metrics.

A model swap replaces ``serving.api``; every request reads it once and keeps the result.
"""

from __future__ import annotations

from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from gpumemnet.atomic_files import Document

from ..served_release import ServedRelease
from . import fits, schemas
from .handlers import TEXT, JsonHandler, SearchHandler, send_response
from .microbatching import TEXT_FIELDS, PredictHandler
from .monitoring import MEDIA_TYPE, metrics_document
from .openapi import Operation
from .predictions import gpus_document

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
_SEARCH_PARAMETER: Final = {
    "name": "search",
    "in": "query",
    "description": "words that the names must hold; all names without",
    "schema": {"type": "string", "maxLength": fits.MAX_TEXT},
}


def prediction_operations(serving: ServedRelease) -> list[Operation]:
    """The operations that predict."""
    return [
        Operation(
            path="/v1/predict",
            name="predict",
            tag="predict",
            summary="Predict one job",
            description=_TEXT_DESCRIPTION,
            handler=PredictHandler(serving),
            request=schemas.PredictRequest,
            parameters=[_TEXT_PARAMETER],
            shape=schemas.Prediction,
            has_text=True,
        ),
        Operation(
            path="/v1/predict/batch",
            name="predict_batch",
            tag="predict",
            summary="Predict many jobs",
            handler=JsonHandler(lambda body: serving.api.predict_batch(body)),
            request=schemas.BatchRequest,
            shape=schemas.BatchPrediction,
        ),
        Operation(
            path="/v1/batch-sizes",
            name="batch_sizes",
            tag="predict",
            summary="The largest batch that fits",
            handler=SearchHandler(lambda body: serving.api.batch_sizes(body)),
            request=schemas.BatchSizesRequest,
            shape=schemas.BatchSizes,
        ),
        Operation(
            path="/v1/fit",
            name="fit",
            tag="fit",
            summary="Will fine-tuning a model fit? Asked by its name",
            handler=SearchHandler(fits.fit_document),
            request=fits.FitRequest,
            shape=fits.FitAnswer,
        ),
        Operation(
            path="/v1/fit/models",
            name="fit_models",
            tag="fit",
            summary="The models that `/v1/fit` knows by name",
            handler=JsonHandler(fits.names_document),
            parameters=[_SEARCH_PARAMETER],
            shape=fits.CatalogueModels,
            refusals={422: "The query is invalid."},
        ),
    ]


def other_operations(serving: ServedRelease) -> list[Operation]:
    """The operations for models, GPUs, health and metrics."""

    def reading(path: str, tag: str, summary: str, shape: Any, read: Any, **more: Any) -> Operation:
        return Operation(
            path=path,
            name=path.rpartition("/")[2],
            tag=tag,
            summary=summary,
            handler=JsonHandler(lambda body: read()),
            shape=shape,
            **more,
        )

    return [
        reading(
            "/v1/models",
            "models",
            "The loaded models and their cards",
            schemas.Models,
            lambda: _models(serving),
        ),
        reading(
            "/v1/gpus",
            "models",
            "The known GPUs and their MIG profiles",
            schemas.Gpus,
            gpus_document,
        ),
        reading(
            "/healthz",
            "health",
            "Liveness: is the process alive?",
            schemas.Health,
            lambda: {"status": "ok"},
        ),
        reading(
            "/readyz",
            "health",
            "Readiness: may requests be sent here?",
            schemas.Readiness,
            # Runs no model: a release is served only after its self-test, and a probe must not
            # delay predictions.
            lambda: {"status": "ready", "families": list(serving.api.families)},
        ),
        Operation(
            path="/metrics",
            name="metrics",
            tag="health",
            summary="All metrics of all workers, in Prometheus' text format",
            handler=_MetricsHandler(),
            shape=None,
            meanings={200: "The metrics."},
        ),
    ]


class _MetricsHandler:
    """ASGI application of ``GET /metrics``; a thread adds up the files, because that takes
    milliseconds."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request."""
        await send_response(send, 200, MEDIA_TYPE, await run_in_threadpool(metrics_document))


def _models(serving: ServedRelease) -> Document:
    api = serving.api
    return {"release": api.release, "models": api.models()}
