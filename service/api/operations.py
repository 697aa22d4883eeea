"""The operations of the service: one declaration of each gives its route and its description
(OpenAPI 3.1).

An operation names its request and response models (:mod:`service.api.schemas`) and the ASGI
application that handles it. Examples are computed when the description is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from ..middleware.paths import rule_of
from .job_schema import JsonSchema, job_schema, layer_schema
from .problems import MEDIA_TYPE
from .schemas import Problem

JSON: Final = "application/json"
KEY_REFUSALS: Final = {
    401: "The API key is missing or unknown.",
    403: "The API key lacks the scope of this operation.",
}
"""The errors of every operation that needs a key, where keys are set."""
LIMIT_REFUSALS: Final = {
    421: "The `Host` or `Origin` is not allowed.",
    429: "The client sends too many requests; `Retry-After` says when to try again.",
    503: "The service is busy; `Retry-After` says when to try again.",
}
"""The errors of every operation but health and metrics."""
BODY_REFUSALS: Final = {
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The `Content-Type` is not `application/json`.",
    422: "The body is not valid JSON, or one of its fields is invalid.",
}
"""The further errors of an operation with a body."""

_KEY_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "`Authorization: Bearer KEY`"},
    "header": {
        "type": "apiKey",
        "in": "header",
        "name": "X-API-Key",
        "description": "the same key in a header of its own",
    },
}
"""Both ways to send a key."""
_REFERENCE: Final = "#/components/schemas/{model}"

Schemas = type[BaseModel] | tuple[type[BaseModel], ...] | list[type[BaseModel]]
"""A model; a tuple of alternative models; or, in a list, the model of each element."""
Examples = Mapping[str, Any]
"""Name → JSON value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A successful response.

    Attributes:
        shape: model of the JSON.
        meaning: description of the response.
        examples: makes its examples.
        others: media type → the OpenAPI description of the response in that type.
    """

    shape: Schemas
    meaning: str = "The result."
    examples: Callable[[], Examples] | None = None
    others: Callable[[], Mapping[str, JsonSchema]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method at one path.

    Attributes:
        method, path: the HTTP method and the path.
        name: its ``operationId``.
        tag, summary, description: texts of the documentation.
        endpoint: the ASGI application.
        request: model of the JSON body; ``None`` without a body.
        is_body_required: whether the body is required.
        request_examples: makes examples of the body.
        answers: status → successful response.
        refusals: status → when this error is sent, beside those of keys and limits.
        refusal_examples: status → makes an example of the error.
        refusal_schema, refusal_type: model and media type of the errors.
        parameters: as OpenAPI has them.
    """

    method: str
    path: str
    name: str
    tag: str
    summary: str
    endpoint: ASGIApp
    answers: Mapping[int, Answer]
    request: Schemas | None = None
    is_body_required: bool = True
    request_examples: Callable[[], Examples] | None = None
    refusals: Mapping[int, str] = field(default_factory=dict)
    refusal_examples: Mapping[int, Callable[[], Any]] = field(default_factory=dict)
    refusal_schema: type[BaseModel] = Problem
    refusal_type: str = MEDIA_TYPE
    description: str = ""
    parameters: Sequence[JsonSchema] = ()

    @property
    def all_refusals(self) -> Mapping[int, str]:
        """Status → when this error is sent: those of the operation, and those of keys and limits
        where its path has them."""
        rule = rule_of(self.path)
        keys = KEY_REFUSALS if rule.scope is not None else {}
        limits = LIMIT_REFUSALS if rule.is_limited else {}
        return dict(sorted({**keys, **limits, **self.refusals}.items()))

    def described(self, *, has_keys: bool = False) -> JsonSchema:
        """The OpenAPI description of the operation; ``has_keys`` says whether keys are set."""
        operation: JsonSchema = {
            "tags": [self.tag],
            "summary": self.summary,
            "operationId": self.name,
        }
        if has_keys and rule_of(self.path).scope is not None:
            operation["security"] = [{name: []} for name in _KEY_SCHEMES]
        if self.description:
            operation["description"] = self.description
        if self.parameters:
            operation["parameters"] = list(self.parameters)
        if self.request is not None:
            content = _content(self.request, self.request_examples)
            operation["requestBody"] = {
                "required": self.is_body_required,
                "content": {JSON: content},
            }
        responses = operation["responses"] = {}
        for status, answer in self.answers.items():
            content = {
                JSON: _content(answer.shape, answer.examples),
                **(answer.others() if answer.others else {}),
            }
            responses[str(status)] = {"description": answer.meaning, "content": content}
        for status, meaning in self.all_refusals.items():
            refused: JsonSchema = {"schema": _schema(self.refusal_schema)}
            if status in self.refusal_examples:
                refused["example"] = self.refusal_examples[status]()
            responses[str(status)] = {
                "description": meaning,
                "content": {self.refusal_type: refused},
            }
        return operation


def routes(operations: Iterable[Operation]) -> list[BaseRoute]:
    """The routes of the operations."""
    return [
        Route(one.path, one.endpoint, methods=[one.method], name=one.name) for one in operations
    ]


def openapi_document(
    info: JsonSchema,
    operations: Iterable[Operation],
    others: Sequence[type[BaseModel]] = (),
    *,
    max_jobs: int,
    max_layers: int,
    has_keys: bool = False,
) -> JsonSchema:
    """The OpenAPI document.

    Args:
        info: OpenAPI's ``info``.
        operations: all operations.
        others: models that no operation names.
        max_jobs, max_layers: most jobs of a request, and most layers of a job.
        has_keys: whether keys are set.
    """
    paths: dict[str, JsonSchema] = {}
    shapes: dict[tuple[type[BaseModel], str], None] = {
        (shape, "serialization"): None for shape in others
    }
    for one in operations:
        paths.setdefault(one.path, {})[one.method.lower()] = one.described(has_keys=has_keys)
        shapes |= dict.fromkeys((shape, "validation") for shape in _each(one.request))
        answered = (shape for answer in one.answers.values() for shape in _each(answer.shape))
        refused = (one.refusal_schema,) if one.all_refusals else ()
        shapes |= dict.fromkeys((shape, "serialization") for shape in (*answered, *refused))
    _, found = models_json_schema(list(shapes), ref_template=_REFERENCE)  # type: ignore[arg-type]
    schemas = found["$defs"] | {"TrainingJob": job_schema(max_layers), "Layer": layer_schema()}
    if "BatchRequest" in schemas:
        schemas["BatchRequest"]["properties"]["jobs"]["maxItems"] = max_jobs
    components = {"schemas": schemas} | (
        {"securitySchemes": dict(_KEY_SCHEMES)} if has_keys else {}
    )
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _each(shapes: Schemas | None) -> Sequence[type[BaseModel]]:
    return () if shapes is None else (shapes,) if isinstance(shapes, type) else shapes


def _content(shape: Schemas, examples: Callable[[], Examples] | None) -> JsonSchema:
    content: JsonSchema = {"schema": _schema(shape)}
    if examples is not None:
        content["examples"] = {name: {"value": value} for name, value in examples().items()}
    return content


def _schema(shape: Schemas) -> JsonSchema:
    if isinstance(shape, list):
        return {"type": "array", "items": _schema(shape[0])}
    if isinstance(shape, tuple):
        return {"anyOf": [_schema(one) for one in shape]}
    return {"$ref": _REFERENCE.format(model=shape.__name__)}
