"""What the API's description (OpenAPI 3.1) says of each route, with examples that the service has answered itself.

FastAPI writes the description of the routes; here are the parts that it cannot know, because the hot routes read their bodies by
themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import orjson
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel

from gpumemnet.errors import FieldError

from .answers import Answerer
from .examples import (
    Document,
    batch_examples,
    batch_sizes_examples,
    predict_examples,
    refused_example,
    smallest_gpu_examples,
)
from .problems import MEDIA_TYPE, field_problem
from .schemas import component_schemas, reference
from .text_response import PLAIN, PLAIN_FIELDS, plain_text

Description = dict[str, Any]

EXAMPLE_ID: Final = "01910c5e-8a40-7c3b-9f12-5d7e80a4b6c1"
"""Stands in all examples for the prediction ids, which are never the same twice."""

_ID: Final = re.compile(rb'"prediction_id":"[^"]*"')

ACCESS_REFUSALS: Final = {
    401: "An API key is needed, and none or a wrong one was given.",
    403: "The API key does not allow this.",
    429: "Too many requests; Retry-After says when to come again.",
    503: "The service is busy; Retry-After says when to come again.",
}
"""What any operation may be refused with where keys and limits are set."""
BODY_REFUSALS: Final = {
    413: "The body is too large.",
    415: "The body is not declared as application/json.",
    422: "The body is no JSON, or a field in it is at fault.",
}
"""What an operation with a body may be refused with beside."""


class Limits(Protocol):
    """What the description says of the service's settings."""

    @property
    def max_jobs(self) -> int:
        """Most jobs of a request."""


def refusals(*kinds: Mapping[int, str]) -> Description:
    """The ``responses`` of an operation for the problems in ``kinds``: status → what it means."""
    return {str(status): problem(meaning) for kind in kinds for status, meaning in kind.items()}


def problem(meaning: str) -> Description:
    """One response that is a problem document."""
    return {"description": meaning, "content": {MEDIA_TYPE: {"schema": reference("Problem")}}}


def json_content(schema: str, **examples: Any) -> Description:
    """The ``content`` of a body or an answer in JSON; ``examples`` or ``example`` go into it."""
    return {"application/json": {"schema": reference(schema), **examples}}


def describe_answer(
    schema: str, meaning: str, example: Any, *, not_ready: str | None = None, needs_key: bool = False
) -> Description:
    """The arguments of a FastAPI route without a body that describe its answer.

    Args:
        schema: name of the answer's schema.
        meaning: what the answer is.
        example: one, as the service gives it.
        not_ready: what a 503 means, where there is one.
        needs_key: whether keys and limits apply to it.
    """
    return {
        "responses": {
            200: {"description": meaning, "content": json_content(schema, example=example)},
            **({} if not_ready is None else {503: problem(not_ready)}),
            **({status: problem(meaning) for status, meaning in ACCESS_REFUSALS.items()} if needs_key else {}),
        }
    }


def install_description(
    app: FastAPI,
    answerer: Answerer,
    settings: Limits,
    extra_paths: Iterable[Description] = (),
    extra_shapes: Sequence[type[BaseModel]] = (),
    extra_schemas: Mapping[str, Any] | None = None,
) -> None:
    """Make ``app`` describe itself: FastAPI's routes as FastAPI does, the others and all schemas as we know them.

    Args:
        app: the application.
        answerer: answers the examples; nobody takes note of them.
        settings: where the limits stand.
        extra_paths: OpenAPI ``paths`` of the other parts.
        extra_shapes: the shapes that these refer to.
        extra_schemas: schemas that they refer to, by name.
    """
    paths = prediction_paths(answerer.unrecorded())
    for part in extra_paths:
        for path, operations in part.items():
            paths.setdefault(path, {}).update(operations)
    max_layers = answerer.max_layers

    def description() -> Description:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                summary=app.summary,
                description=app.description,
                license_info=app.license_info,
                routes=app.routes,
            )
            for route in app.routes:
                if isinstance(route, APIRoute) and route.include_in_schema:
                    for method in route.methods or ():  # get_openapi drops every null from the examples
                        operation = document["paths"][route.path][method.lower()]
                        operation["responses"] = {str(status): response for status, response in route.responses.items()}
            for path, operations in paths.items():
                document["paths"].setdefault(path, {}).update(operations)
            document["components"] = {
                "schemas": component_schemas(settings.max_jobs, max_layers, extra_shapes) | dict(extra_schemas or {})
            }
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = description  # type: ignore[method-assign]  # FastAPI documents this as the way to extend the description


def prediction_paths(answerer: Answerer) -> Description:
    """The ``paths`` of the hot routes, with examples that ``answerer`` answers."""
    family = answerer.families[0]
    batch = _operation("predict_batch", "Predict many jobs", "BatchRequest", "BatchPrediction")
    batch_sizes = _operation("batch_sizes", "The largest batch that fits", "BatchSizesRequest", "BatchSizes")
    smallest = _operation("smallest_gpu", "The smallest GPU that holds a job", "SmallestGpuRequest", "SmallestGpu")
    return {
        "/v1/predict": {"post": _describe_predict(answerer, family)},
        "/v1/predict/batch": {"post": _with_examples(batch, batch_examples(family), answerer.predict_batch)},
        "/v1/batch-sizes": {"post": _with_examples(batch_sizes, batch_sizes_examples(family), answerer.batch_sizes)},
        "/v1/smallest-gpu": {"post": _with_examples(smallest, smallest_gpu_examples(family), answerer.smallest_gpu)},
    }


def _describe_predict(answerer: Answerer, family: str) -> Description:
    operation = _operation("predict", "Predict one job", "PredictRequest", "Prediction")
    examples = predict_examples(family)
    operation["description"] = (
        f"With `Accept: {PLAIN}` the answer is one line: `{PLAIN_FIELDS[0]}`, or the fields named by `?field=`, separated by "
        "spaces. A field without a value is then a 422, so that `curl -f` fails and a script goes on with its own default."
    )
    operation["parameters"] = [
        {
            "name": "field",
            "in": "query",
            "description": f"what to answer in plain text; without effect in JSON. {PLAIN_FIELDS[0]} unless given",
            "style": "form",
            "explode": False,
            "schema": {"type": "array", "items": {"type": "string", "enum": list(PLAIN_FIELDS)}, "minItems": 1},
        }
    ]
    _with_examples(operation, examples, answerer.predict)
    first = _answered(answerer.predict, next(iter(examples.values())))
    operation["responses"]["200"]["content"][PLAIN] = {"schema": {"type": "string"}, "example": _plain_example(first)}
    try:
        answerer.predict(orjson.dumps(refused_example(family)))
    except FieldError as error:
        operation["responses"]["422"]["content"][MEDIA_TYPE]["example"] = field_problem(error)
    return operation


def _plain_example(prediction: bytes) -> str:
    """What a script gets of ``prediction``; its request where it has no limit."""
    has_limit = orjson.loads(prediction)["limit_mib"] is not None
    return plain_text(prediction, PLAIN_FIELDS[:1] if has_limit else PLAIN_FIELDS[1:2]).decode()


def _operation(name: str, summary: str, request: str, answer: str) -> Description:
    return {
        "tags": ["predict"],
        "summary": summary,
        "operationId": name,
        "requestBody": {"required": True, "content": json_content(request)},
        "responses": {
            "200": {"description": "The answer.", "content": json_content(answer)},
            **refusals(ACCESS_REFUSALS, BODY_REFUSALS),
        },
    }


def _with_examples(operation: Description, examples: Mapping[str, Document], answer: Callable[[bytes], bytes]) -> Description:
    asked = operation["requestBody"]["content"]["application/json"]
    answered = operation["responses"]["200"]["content"]["application/json"]
    asked["examples"] = {name: {"value": body} for name, body in examples.items()}
    answered["examples"] = {name: {"value": orjson.loads(_answered(answer, body))} for name, body in examples.items()}
    return operation


def _answered(answer: Callable[[bytes], bytes], body: Document) -> bytes:
    return _ID.sub(b'"prediction_id":"%b"' % EXAMPLE_ID.encode(), answer(orjson.dumps(body)))
