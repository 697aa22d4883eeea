"""The way of the hot paths past the framework: from the gate straight to the endpoint.

Starlette's and FastAPI's own layers (failures, exceptions, exit stacks, the search through all routes) cost some 30 µs a
request, a tenth of the whole.  The routes stay in the application too: for its description and for other methods.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gpumemnet.errors import FieldError

from .problems import problem_answer


class Shortcut:
    """ASGI application: POST requests to some paths go to an endpoint, all others to ``app``.

    Args:
        app: the whole application.
        endpoints: path → endpoint; refuses by raising before it answers.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        try:
            await endpoint(scope, receive, send)
        except (FieldError, HTTPException) as error:
            await problem_answer(Request(scope), error)(scope, receive, send)
