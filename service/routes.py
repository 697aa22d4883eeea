"""The routes: what the service answers to, and how a request reaches the :class:`~service.answers.Answerer`."""

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
from service.answers import Answerer
from service.endpoint import JSON, JsonEndpoint
from service.openapi import describe_answer
from service.plain import NegotiatedEndpoint

logger = logging.getLogger("gpumemnet.service")


def prediction_routes(answerer: Answerer) -> list[BaseRoute]:
    """The hot routes; :mod:`service.openapi` describes them."""
    return [
        Route("/v1/predict", NegotiatedEndpoint(answerer.predict), methods=["POST"]),
        Route("/v1/predict/batch", JsonEndpoint(answerer.predict_batch), methods=["POST"]),
        Route("/v1/batch-sizes", JsonEndpoint(answerer.batch_sizes, inline_bytes=0), methods=["POST"]),
        Route("/v1/smallest-gpu", JsonEndpoint(answerer.smallest_gpu, inline_bytes=0), methods=["POST"]),
    ]


def install_routes(app: FastAPI, answerer: Answerer) -> None:
    """Give ``app`` the other routes."""
    alive = {"status": "ok"}
    ready = {"status": "ready", "families": list(answerer.families)}

    @app.get(
        "/v1/models",
        tags=["models"],
        summary="The loaded models and their cards",
        **describe_answer("Models", "The models.", orjson.loads(answerer.models()), needs_key=True),
    )
    async def models(request: Request) -> Response:
        return Response(answerer.models(), media_type=JSON)

    @app.get(
        "/v1/gpus",
        tags=["models"],
        summary="The known GPUs and their MIG profiles",
        **describe_answer("Gpus", "The catalogue.", orjson.loads(answerer.gpus()), needs_key=True),
    )
    async def gpus(request: Request) -> Response:
        return Response(answerer.gpus(), media_type=JSON)

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
        try:
            answerer.check()
        except BundleError as error:
            logger.exception("not ready")
            raise HTTPException(503, "a model does not answer; the cause is in the log of the service") from error
        return _json(ready)


def _json(document: dict[str, Any]) -> Response:
    return Response(orjson.dumps(document), media_type=JSON)
