"""Problem documents: the format of every error response (RFC 9457).

A document holds ``type``, ``title``, ``status`` and ``detail``.  For invalid fields it also holds
``errors``: each field's path and its fault.  The texts are those of the exceptions, so the command
line and the service report the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gpumemnet.errors import FieldError, InvalidJobError, InvalidRequestError, UnsupportedJobError

MEDIA_TYPE: Final = "application/problem+json"


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """One type of problem: the last part of its ``type`` URI, and the members that all problems of
    the type share."""

    name: str
    status: int
    title: str

    @property
    def uri(self) -> str:
        """The ``type`` member."""
        return f"urn:gpumemnet:problem:{self.name}"


INVALID_REQUEST: Final = ProblemKind("invalid-request", 422, "The request is not valid")
INVALID_JOB: Final = ProblemKind("invalid-job", 422, "The job is not valid")
UNSUPPORTED_JOB: Final = ProblemKind("unsupported-job", 422, "No model is loaded for the job")
OUTSIDE_SUPPORT: Final = ProblemKind("outside-support", 422, "The job has no such number")
INTERNAL_ERROR: Final = ProblemKind("internal-error", 500, "The service failed")
NOT_READY: Final = ProblemKind("not-ready", 503, "The service is not ready")
OVERLOADED: Final = ProblemKind("overloaded", 503, "The service is busy")
UNAUTHORIZED: Final = ProblemKind("unauthorized", 401, "An API key is required")
FORBIDDEN: Final = ProblemKind("forbidden", 403, "The API key does not allow this")
MISDIRECTED: Final = ProblemKind("misdirected", 421, "The host is not allowed")
CONFLICT: Final = ProblemKind("conflict", 409, "The request conflicts with the stored state")
UNKNOWN: Final = ProblemKind("unknown", 404, "Not found")
REQUEST_TIMEOUT: Final = ProblemKind("request-timeout", 408, "The request did not arrive in time")
INVALID_HTTP: Final = ProblemKind("invalid-http", 400, "The request is not valid HTTP")
LARGE_HEAD: Final = ProblemKind("head-too-large", 431, "The head of the request is too large")

_KIND_OF_ERROR: Final[dict[type[FieldError], ProblemKind]] = {
    InvalidJobError: INVALID_JOB,
    InvalidRequestError: INVALID_REQUEST,
    UnsupportedJobError: UNSUPPORTED_JOB,
}
_KIND_OF_STATUS: Final = {
    kind.status: kind
    for kind in (
        ProblemKind("not-found", 404, "There is nothing at this path"),
        ProblemKind("method-not-allowed", 405, "The path does not support this method"),
        ProblemKind("body-too-large", 413, "The body is too large"),
        ProblemKind("unsupported-media-type", 415, "The body must be JSON"),
        NOT_READY,
    )
}

PROBLEM_KINDS: Final = (
    *_KIND_OF_ERROR.values(),
    *_KIND_OF_STATUS.values(),
    OUTSIDE_SUPPORT,
    *(
        OVERLOADED,
        MISDIRECTED,
        UNAUTHORIZED,
        FORBIDDEN,
        CONFLICT,
        UNKNOWN,
        REQUEST_TIMEOUT,
    ),
    *(INVALID_HTTP, LARGE_HEAD),
    INTERNAL_ERROR,
)
"""Every problem type of the service."""


class Refusal(HTTPException):
    """A request that the service rejects for a reason other than a field of its body.

    Attributes:
        kind: the problem type, which gives the status.
    """

    def __init__(
        self, kind: ProblemKind, detail: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(kind.status, detail, dict(headers or {}))
        self.kind = kind

    def document(self) -> dict[str, Any]:
        """The problem document."""
        return _document(self.kind, self.detail)


def located(error: FieldError, path: str) -> FieldError:
    """The same error with the field's path from the request's body: ``layers[3].kind`` at ``job``
    is ``job.layers[3].kind``."""
    return type(error)(error.reason, f"{path}.{error.field}" if error.field else path)


def field_problem(error: FieldError) -> dict[str, Any]:
    """The problem document of an error that names a field."""
    document = _document(_KIND_OF_ERROR[type(error)], str(error))
    document["errors"] = [{"field": error.field, "message": error.reason}]
    return document


class ProblemDocuments:
    """ASGI middleware that turns the exceptions of a request into problem documents."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        try:
            await self._app(scope, receive, send)
        except (FieldError, HTTPException) as error:
            await problem_answer(Request(scope), error)(scope, receive, send)


def problem_answer(request: Request, error: FieldError | HTTPException) -> Response:
    """The response to a request that raised ``error``."""
    if isinstance(error, FieldError):
        return _response(field_problem(error))
    if isinstance(error, Refusal):
        return _response(error.document(), error.headers)
    kind = _KIND_OF_STATUS.get(error.status_code)
    if kind is None:  # only the framework raises such a status; RFC 9457, section 4.2.1
        phrase = HTTPStatus(error.status_code).phrase
        return _response(
            {
                "type": "about:blank",
                "title": phrase,
                "status": error.status_code,
                "detail": error.detail,
            }
        )
    detail = error.detail
    if kind.status == 404:
        detail = f"there is nothing at {request.url.path[:200]}: the paths are listed at /docs"
    elif kind.status == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        detail = f"{request.url.path} answers to {allowed}, not to {request.method}"
    return _response(_document(kind, detail), error.headers)


def _document(kind: ProblemKind, detail: str) -> dict[str, Any]:
    return {"type": kind.uri, "title": kind.title, "status": kind.status, "detail": detail}


def _response(document: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(document), document["status"], headers, MEDIA_TYPE)
