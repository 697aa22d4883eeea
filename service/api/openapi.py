"""Operations and their description (OpenAPI 3.1): one declaration of an operation gives its route
and its part of the document.

An operation names its request and response models and the ASGI application that handles it.
FastAPI's own typed routes would validate every body twice and cost as much as a prediction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.types import ASGIApp

from gpumemnet.atomic_files import Document

from .admission import rule_of
from .examples import EXAMPLES
from .handlers import JSON, TEXT
from .problems import MEDIA_TYPE
from .schemas import Problem

KEY_REFUSALS: Final = {
    401: "The API key is missing or unknown.",
    403: "The API key lacks the scope of this operation.",
}
"""The errors of every operation that needs a key, where keys are set."""
LIMIT_REFUSALS: Final = {
    421: "The `Host` or `Origin` is not allowed.",
    503: "The service is busy; `Retry-After` says when to try again.",
}
"""The errors of every operation but health and metrics."""
BODY_REFUSALS: Final = {
    413: "The body is too large.",
    415: "The `Content-Type` is not `application/json`.",
    422: "The body is not valid JSON, or one of its fields is invalid.",
}
"""The further errors of an operation with a body."""

_KEY_SCHEME: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "`Authorization: Bearer KEY`"}
}
_REFERENCE: Final = "#/components/schemas/{model}"


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method at one path.

    Attributes:
        path: the path.
        name: its ``operationId``.
        tag, summary, description: texts of the documentation.
        handler: the ASGI application.
        request: model of the JSON body of a POST; ``None`` for a GET, which has none.
        shape: model of a successful response's JSON; ``None`` for plain text alone.
        has_text: whether that response may also be plain text.
        meanings: status → description of a successful response.
        refusals: status → when this error is sent, beside those of keys, limits and bodies.
        parameters: as OpenAPI has them.
    """

    path: str
    name: str
    tag: str
    summary: str
    handler: ASGIApp
    shape: type[BaseModel] | None
    has_text: bool = False
    meanings: Mapping[int, str] = field(default_factory=lambda: {200: "The result."})
    request: type[BaseModel] | None = None
    refusals: Mapping[int, str] = field(default_factory=dict)
    description: str = ""
    parameters: Sequence[Document] = ()

    @property
    def method(self) -> str:
        """The HTTP method."""
        return "GET" if self.request is None else "POST"

    @property
    def all_refusals(self) -> Mapping[int, str]:
        """Status → when this error is sent: those of the operation, and those of keys, limits and
        bodies where it has them."""
        rule = rule_of(self.path)
        keys = KEY_REFUSALS if rule.scope is not None else {}
        limits = LIMIT_REFUSALS if rule.is_limited else {}
        body = {} if self.request is None else BODY_REFUSALS
        return dict(sorted({**keys, **limits, **body, **self.refusals}.items()))

    def described(self, *, has_keys: bool) -> Document:
        """The OpenAPI description of the operation; ``has_keys`` says whether keys are set."""
        operation: Document = {
            "tags": [self.tag],
            "summary": self.summary,
            "operationId": self.name,
        }
        if has_keys and rule_of(self.path).scope is not None:
            operation["security"] = [{name: [] for name in _KEY_SCHEME}]
        if self.description:
            operation["description"] = self.description
        if self.parameters:
            operation["parameters"] = list(self.parameters)
        if self.request is not None:
            examples = {name: {"value": body} for name, body in EXAMPLES[self.name].items()}
            content = {"schema": _schema(self.request), "examples": examples}
            operation["requestBody"] = {"required": True, "content": {JSON: content}}
        types: Document = {}
        if self.shape is not None:
            types[JSON] = {"schema": _schema(self.shape)}
        if self.has_text or self.shape is None:
            types[TEXT] = {"schema": {"type": "string"}}
        responses = operation["responses"] = {
            str(status): {"description": meaning, "content": types}
            for status, meaning in self.meanings.items()
        }
        for status, meaning in self.all_refusals.items():
            responses[str(status)] = {
                "description": meaning,
                "content": {MEDIA_TYPE: {"schema": _schema(Problem)}},
            }
        return operation


def openapi_document(
    info: Document, operations: Iterable[Operation], *, has_keys: bool
) -> Document:
    """The OpenAPI document.

    Args:
        info: OpenAPI's ``info``.
        operations: all operations.
        has_keys: whether keys are set.
    """
    paths: dict[str, Document] = {}
    shapes: dict[tuple[type[BaseModel], str], None] = {(Problem, "serialization"): None}
    for one in operations:
        paths.setdefault(one.path, {})[one.method.lower()] = one.described(has_keys=has_keys)
        if one.request is not None:
            shapes[one.request, "validation"] = None
        if one.shape is not None:
            shapes[one.shape, "serialization"] = None
    _, found = models_json_schema(list(shapes), ref_template=_REFERENCE)  # type: ignore[arg-type]
    components = {"schemas": found["$defs"]} | (
        {"securitySchemes": _KEY_SCHEME} if has_keys else {}
    )
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _schema(shape: type[BaseModel]) -> Document:
    return {"$ref": _REFERENCE.format(model=shape.__name__)}
