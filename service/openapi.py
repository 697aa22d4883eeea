"""What the API's description (OpenAPI 3.1) says of each route, with examples that the service has answered itself.

FastAPI writes the description of the routes; here are the parts that it cannot know, because the hot routes read their bodies by
themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from gpumemnet.errors import FieldError
from service.answers import Answerer
from service.examples import Document, batch_examples, predict_examples, refused_example
from service.problems import MEDIA_TYPE, field_problem
from service.schemas import component_schemas, reference

Description = dict[str, Any]

_REFUSALS: Final = {
    413: "The body is too large.",
    415: "The body is not declared as application/json.",
    422: "The body is no JSON, or a field in it is at fault.",
}


def describe_answer(schema: str, meaning: str, example: Any, *, not_ready: str | None = None) -> Description:
    """The arguments of a FastAPI route without a body that describe its answer; ``not_ready`` says what a 503 means."""
    return {
        "responses": {
            200: {"description": meaning, "content": _json(schema, example=example)},
            **({} if not_ready is None else {503: _problem(not_ready)}),
        }
    }


def install_description(app: FastAPI, answerer: Answerer, max_jobs: int) -> None:
    """Make ``app`` describe itself: FastAPI's routes as FastAPI does, the hot routes and all schemas as we know them."""
    predictions = {"/v1/predict": {"post": _describe_predict(answerer)}, "/v1/predict/batch": {"post": _describe_batch(answerer)}}

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
                if isinstance(route, APIRoute):
                    for method in route.methods or ():  # get_openapi drops every null from the examples
                        operation = document["paths"][route.path][method.lower()]
                        operation["responses"] = {str(status): response for status, response in route.responses.items()}
            document["paths"] = predictions | document["paths"]
            document["components"] = {"schemas": component_schemas(max_jobs)}
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = description  # type: ignore[method-assign]  # FastAPI documents this as the way to extend the description


def _describe_predict(answerer: Answerer) -> Description:
    family = answerer.families[0]
    examples = predict_examples(family)
    operation = _operation("predict", "Predict one job", "PredictRequest", "Prediction", examples, answerer.predict)
    try:
        answerer.predict(orjson.dumps(refused_example(family)))
    except FieldError as error:
        operation["responses"]["422"]["content"][MEDIA_TYPE]["example"] = field_problem(error)
    return operation


def _describe_batch(answerer: Answerer) -> Description:
    examples = batch_examples(answerer.families[0])
    return _operation("predict_batch", "Predict many jobs", "BatchRequest", "BatchPrediction", examples, answerer.predict_batch)


def _operation(
    name: str, summary: str, request: str, answer: str, examples: Mapping[str, Document], predict: Callable[[bytes], bytes]
) -> Description:
    asked = {example: {"value": body} for example, body in examples.items()}
    answered = {example: {"value": orjson.loads(predict(orjson.dumps(body)))} for example, body in examples.items()}
    return {
        "tags": ["predict"],
        "summary": summary,
        "operationId": name,
        "requestBody": {"required": True, "content": _json(request, examples=asked)},
        "responses": {
            "200": {"description": "The answer.", "content": _json(answer, examples=answered)},
            **{str(status): _problem(text) for status, text in _REFUSALS.items()},
        },
    }


def _json(schema: str, **examples: Any) -> Description:
    return {"application/json": {"schema": reference(schema), **examples}}


def _problem(meaning: str) -> dict[str, Any]:
    return {"description": meaning, "content": {MEDIA_TYPE: {"schema": reference("Problem")}}}
