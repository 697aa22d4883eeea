"""The routes: what the service answers to, and how a request reaches what answers now.

A swap of models replaces ``serving.answerer``; every request reads it once and keeps what it read.
"""

from __future__ import annotations

import logging
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gpumemnet.errors import BundleError

from ..admin.champion import Serving
from .endpoint import JSON, JsonEndpoint
from .microbatch import Together
from .openapi import describe_answer
from .text_response import NegotiatedEndpoint

logger = logging.getLogger("gpumemnet.service")


def prediction_routes(serving: Serving) -> list[BaseRoute]:
    """The hot routes; :mod:`service.api.openapi` describes them."""

    def predict(body: bytes) -> bytes:
        return serving.answerer.predict(body)

    together = Together(predict, lambda bodies: serving.answerer.predict_together(bodies))
    return [
        Route("/v1/predict", NegotiatedEndpoint(predict, together=together), methods=["POST"]),
        Route("/v1/predict/batch", JsonEndpoint(lambda body: serving.answerer.predict_batch(body)), methods=["POST"]),
        Route("/v1/batch-sizes", JsonEndpoint(lambda body: serving.answerer.batch_sizes(body), inline_bytes=0), methods=["POST"]),
        Route(
            "/v1/smallest-gpu", JsonEndpoint(lambda body: serving.answerer.smallest_gpu(body), inline_bytes=0), methods=["POST"]
        ),
    ]


def install_routes(app: FastAPI, serving: Serving) -> None:
    """Give ``app`` the routes that FastAPI describes by itself."""
    alive = {"status": "ok"}
    ready = {"status": "ready", "families": list(serving.answerer.families)}

    @app.get(
        "/v1/models",
        tags=["models"],
        summary="The loaded models and their cards",
        **describe_answer("Models", "The models.", _models(serving), needs_key=True),
    )
    async def models(request: Request) -> Response:
        return _json(_models(serving))

    @app.get(
        "/v1/gpus",
        tags=["models"],
        summary="The known GPUs and their MIG profiles",
        **describe_answer("Gpus", "The catalogue.", orjson.loads(serving.answerer.gpus()), needs_key=True),
    )
    async def gpus(request: Request) -> Response:
        return Response(serving.answerer.gpus(), media_type=JSON)

    @app.get("/healthz", tags=["health"], summary="Is the process alive?", **describe_answer("Health", "It is alive.", alive))
    async def healthz(request: Request) -> Response:
        return _json(alive)

    @app.get(
        "/readyz",
        tags=["health"],
        summary="Does every model answer?",
        **describe_answer("Readiness", "Every model answers.", ready, not_ready="A model does not answer."),
    )
    async def readyz(request: Request) -> Response:
        answerer = serving.answerer
        try:
            answerer.check()
        except BundleError as error:
            logger.exception("not ready")
            raise HTTPException(503, "a model does not answer; the cause is in the log of the service") from error
        return _json({"status": "ready", "families": list(answerer.families)})


def _models(serving: Serving) -> dict[str, Any]:
    answerer = serving.answerer
    aliases = {"release": answerer.release, "challenger": serving.challenger}
    return {**aliases, "models": orjson.loads(answerer.models())["models"]}


def _json(document: dict[str, Any]) -> Response:
    return Response(orjson.dumps(document), media_type=JSON)
