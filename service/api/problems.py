"""Problem documents: the format of every error response (RFC 9457).

A document holds ``type``, ``title``, ``status`` and ``detail``.  For invalid fields it also holds
``errors``: each field's path and its fault.  The texts are those of the exceptions, so the command
line and the service report the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from starlette.exceptions import HTTPException

from gpumemnet.atomic_files import Document
from gpumemnet.errors import FieldError, InvalidJobError, InvalidRequestError, UnsupportedJobError

MEDIA_TYPE: Final = "application/problem+json"


@dataclass(frozen=True)
class ProblemKind:
    """One type of problem: the last part of its ``type`` URI, and the members and headers that all
    problems of the type share."""

    name: str
    status: int
    title: str
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def uri(self) -> str:
        """The ``type`` member."""
        return f"urn:gpumemnet:problem:{self.name}"


INVALID_REQUEST: Final = ProblemKind("invalid-request", 422, "The request is not valid")
INVALID_JOB: Final = ProblemKind("invalid-job", 422, "The job is not valid")
UNSUPPORTED_JOB: Final = ProblemKind("unsupported-job", 422, "No model is loaded for the job")
OUTSIDE_SUPPORT: Final = ProblemKind("outside-support", 422, "The job has no such number")
INTERNAL_ERROR: Final = ProblemKind("internal-error", 500, "The service failed")
OVERLOADED: Final = ProblemKind("overloaded", 503, "The service is busy", (("Retry-After", "1"),))
UNAUTHORIZED: Final = ProblemKind(
    "unauthorized", 401, "An API key is required", (("WWW-Authenticate", "Bearer"),)
)
FORBIDDEN: Final = ProblemKind("forbidden", 403, "The API key does not allow this")
MISDIRECTED: Final = ProblemKind("misdirected", 421, "The host is not allowed")
CONFLICT: Final = ProblemKind("conflict", 409, "The request conflicts with the stored state")
UNKNOWN: Final = ProblemKind("unknown", 404, "Not found")
INVALID_HTTP: Final = ProblemKind("invalid-http", 400, "The request is not valid HTTP")
TOO_LARGE: Final = ProblemKind(
    "body-too-large", 413, "The body is too large", (("Connection", "close"),)
)
NO_JSON: Final = ProblemKind("unsupported-media-type", 415, "The body must be JSON")
NOT_FOUND: Final = ProblemKind("not-found", 404, "There is nothing at this path")
WRONG_METHOD: Final = ProblemKind(
    "method-not-allowed", 405, "The path does not support this method"
)

_KIND_OF_ERROR: Final = {
    InvalidJobError: INVALID_JOB,
    InvalidRequestError: INVALID_REQUEST,
    UnsupportedJobError: UNSUPPORTED_JOB,
}
PROBLEM_KINDS: Final = [kind for kind in vars().values() if isinstance(kind, ProblemKind)]
"""Every problem type of the service."""


class Refusal(HTTPException):
    """A request that the service rejects for a reason other than a field of its body.

    Attributes:
        kind: the problem type, which gives the status.
    """

    def __init__(self, kind: ProblemKind, detail: str) -> None:
        super().__init__(kind.status, detail, dict(kind.headers))
        self.kind = kind


def problem_document(
    error: FieldError | HTTPException, method: str = "", path: str = ""
) -> Document:
    """The problem document of an error in a request with this method and path."""
    if isinstance(error, FieldError):
        document = _document(_KIND_OF_ERROR[type(error)], str(error))
        return document | {"errors": [{"field": error.field, "message": error.reason}]}
    if isinstance(error, Refusal):
        return _document(error.kind, error.detail)
    if error.status_code == 405:  # this and the rest are from the router
        allowed = (error.headers or {}).get("Allow", "another method")
        return _document(WRONG_METHOD, f"{path} answers to {allowed}, not to {method}")
    detail = f"there is nothing at {path[:200]}: the paths are listed at /docs"
    return _document(NOT_FOUND, detail)


def _document(kind: ProblemKind, detail: str) -> Document:
    return {"type": kind.uri, "title": kind.title, "status": kind.status, "detail": detail}
