"""OpenAPI links: which operation takes an id or a name from the result of another, and where it
stands in both.

``requestBody`` holds only the members that come from the result; the client adds the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .job_schema import JsonSchema


def _link(
    operation: str, description: str, parameters: Mapping[str, str] | None = None, body: Any = None
) -> JsonSchema:
    link: JsonSchema = {"operationId": operation, "description": description}
    if parameters is not None:
        link["parameters"] = dict(parameters)
    if body is not None:
        link["requestBody"] = body
    return link


def _of_model(name: str, version: str) -> Mapping[str, JsonSchema]:
    """Links to everything that can be asked of one model, from where its name and version stand in
    the result."""
    model = {"model": f"$response.body#{name}"}
    versioned = model | {"version": f"$response.body#{version}"}
    return {
        "metadata": _link("oip_model", "What the model takes and gives.", model),
        "ready": _link("oip_model_ready", "Whether it predicts.", model),
        "infer": _link("oip_infer", "Predict jobs with it.", model),
        "metadata_of_version": _link(
            "oip_model_version", "What this version takes and gives.", versioned
        ),
        "ready_of_version": _link(
            "oip_model_version_ready", "Whether this version predicts.", versioned
        ),
        "infer_by_version": _link(
            "oip_infer_version", "Predict jobs with this version.", versioned
        ),
    }


def _on_gpu(name: str) -> Mapping[str, JsonSchema]:
    """Links to the predictions for one GPU, from where its name stands in the result."""
    body = {"gpu": f"$response.body#{name}"}
    return {
        "predict": _link("predict", "Predict a job for this GPU.", body=body),
        "batch_sizes": _link("batch_sizes", "The largest batch that fits this GPU.", body=body),
    }


def _observed(prediction_id: str) -> Mapping[str, JsonSchema]:
    body = {"prediction_id": f"$response.body#{prediction_id}"}
    return {
        "observe": _link(
            "observe", "Report the memory that the job used, once it has run.", body=body
        )
    }


_RELEASE: Final = {"release": "$response.body#/releases/0/name"}
LINKS: Final[Mapping[str, Mapping[str, JsonSchema]]] = {
    "predict": _observed("/prediction_id"),
    "predict_batch": _observed("/results/0/prediction/prediction_id"),
    "gpus": _on_gpu("/gpus/0/name"),
    "smallest_gpu": _on_gpu("/likely/gpu"),
    "models": {
        "metadata": _link(
            "oip_model",
            "The same model by inference protocol.",
            {"model": "$response.body#/models/0/name"},
        )
    },
    "oip_index": _of_model("/0/name", "/0/version"),
    "oip_model": _of_model("/name", "/versions/0"),
    "admin_models": {
        "champion": _link(
            "set_champion", "Test this release and make it the champion.", body=_RELEASE
        ),
        "challenger": _link(
            "set_challenger", "Let this release predict beside the champion.", body=_RELEASE
        ),
    },
}
"""``operationId`` → name → link from its successful response."""
