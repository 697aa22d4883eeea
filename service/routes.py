"""The routes: what the service answers to, and how a request reaches the :class:`~service.answers.Answerer`.

The two hot routes are ASGI applications by themselves: FastAPI's dependencies, a second validation and a thread for every request
would each add between a tenth and a half to the cost of an answer (benchmarks/http_latency.py).  The others are FastAPI's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import orjson
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from gpumemnet.errors import BundleError
from service.answers import Answerer
from service.limits import INLINE_BODY_BYTES
from service.openapi import describe_answer

JSON: Final = "application/json"

logger = logging.getLogger("gpumemnet.service")


class JsonEndpoint:
    """ASGI application that turns a JSON body into a JSON body."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            HTTPException: 415 when the body is not declared as JSON.
            FieldError: when something in the body is at fault.
        """
        if not _declared_as_json(scope):
            raise HTTPException(415, f"the body must be sent with the header 'Content-Type: {JSON}'")
        body = await _read_body(receive)
        if body is None:
            return
        content = self.answer(body) if len(body) <= INLINE_BODY_BYTES else await run_in_threadpool(self.answer, body)
        headers = [(b"content-type", JSON.encode()), (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})


def prediction_routes(answerer: Answerer) -> list[BaseRoute]:
    """The hot routes; :mod:`service.openapi` describes them."""
    return [
        Route("/v1/predict", JsonEndpoint(answerer.predict), methods=["POST"]),
        Route("/v1/predict/batch", JsonEndpoint(answerer.predict_batch), methods=["POST"]),
    ]


def install_routes(app: FastAPI, answerer: Answerer) -> None:
    """Give ``app`` the other routes."""
    alive = {"status": "ok"}
    ready = {"status": "ready", "families": list(answerer.families)}

    @app.get(
        "/v1/models",
        tags=["models"],
        summary="The loaded models and their cards",
        **describe_answer("Models", "The models.", orjson.loads(answerer.models())),
    )
    async def models(request: Request) -> Response:
        return Response(answerer.models(), media_type=JSON)

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


def _declared_as_json(scope: Scope) -> bool:
    for name, value in scope["headers"]:
        if name == b"content-type":
            media_type: bytes = value.partition(b";")[0].strip().lower()
            return media_type == JSON.encode()
    return False


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body, or ``None`` when the client left before it was sent."""
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


def _json(document: dict[str, Any]) -> Response:
    return Response(orjson.dumps(document), media_type=JSON)
