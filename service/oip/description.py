"""What the API's description (OpenAPI 3.1) says of the protocol's paths."""

from __future__ import annotations

import json
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from ..api.examples import EXAMPLE_JOBS
from ..api.requests import MAX_BIN_WIDTH_MIB, MIN_BIN_WIDTH_MIB
from ..api.schemas import reference
from .outputs import OUTPUTS
from .request import DEFAULT_BIN_WIDTH_MIB

Description = dict[str, Any]

_SPECIFICATION: Final = "https://github.com/kserve/open-inference-protocol"
_MODEL: Final = {
    "name": "model",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
    "description": "`gpumemnet` for the whole service, or the name of one bundle",
    "example": "gpumemnet",
}
_VERSION: Final = {"name": "version", "in": "path", "required": True, "schema": {"type": "string"}, "description": "its version"}
_OUTPUT_NAMES: Final[list[JsonValue]] = [output.name for output in OUTPUTS]
_OUTPUT_LIST: Final = "".join(f"\n* `{output.name}` ({output.datatype}): {output.meaning}" for output in OUTPUTS)


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OipError(_Shape):
    """An error of the Open Inference Protocol."""

    error: str = Field(description="what is wrong, where, and what to do")


class OipServer(_Shape):
    """What the server is."""

    name: str
    version: str
    extensions: list[str] = Field(description="extensions of the protocol that it knows")


class OipLive(_Shape):
    """The process is alive."""

    live: Literal[True]


class OipReady(_Shape):
    """Every model answers."""

    ready: Literal[True]


class OipModelReady(_Shape):
    """The model answers."""

    name: str
    ready: Literal[True]


class OipTensorMetadata(_Shape):
    """An input or an output of a model."""

    name: str
    datatype: str
    shape: list[int] = Field(description="-1 where the size varies")


class OipModelMetadata(_Shape):
    """What a model is, takes and gives."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[OipTensorMetadata]
    outputs: list[OipTensorMetadata]
    parameters: dict[str, str] = Field(description="what this service says of it beyond the protocol: its hash, family, GPU")


class OipIndexEntry(_Shape):
    """A model that is loaded."""

    name: str
    version: str
    state: Literal["READY"]
    reason: str


class OipInputParameters(_Shape):
    """How the elements are sent."""

    binary_data_size: int | None = Field(
        default=None, ge=0, description="bytes of the tensor in raw form behind the JSON object, instead of `data`"
    )
    content_type: Literal["str"] = Field(default="str", description="as MLServer's client sends it")


class OipInput(_Shape):
    """The jobs: each element is the JSON document of a job, as in `/v1`."""

    name: Literal["job"]
    datatype: Literal["BYTES"]
    shape: list[int] = Field(description="[n] or [n, 1] for n jobs", min_length=1, max_length=2)
    data: list[str | list[str]] | None = Field(
        default=None, description="JSON documents as texts, in rows or one after the other"
    )
    parameters: OipInputParameters | None = None


class OipOutputParameters(_Shape):
    """How an output is wanted."""

    binary_data: bool = Field(default=False, description="in raw form behind the JSON object")


class OipRequestedOutput(_Shape):
    """An output that is wanted."""

    name: str = Field(json_schema_extra={"enum": _OUTPUT_NAMES})
    parameters: OipOutputParameters | None = None


class OipParameters(BaseModel):
    """How the answer is wanted."""

    model_config = ConfigDict(frozen=True)

    coverage: float = Field(default=0.99, gt=0, lt=1, description="the share of jobs that the limits shall cover")
    bin_width_mib: int = Field(
        default=DEFAULT_BIN_WIDTH_MIB, ge=MIN_BIN_WIDTH_MIB, le=MAX_BIN_WIDTH_MIB, description="width of the bins in MiB"
    )
    gpu: str | None = Field(default=None, description="GPU that the amounts shall be for; the model's own unless given")
    encoder: Literal["mlp", "transformer", "common"] | None = Field(default=None, description="which encoder shall answer")
    binary_data_output: bool = Field(default=False, description="all outputs in raw form unless they say otherwise")


class OipRequest(_Shape):
    """An inference request."""

    id: str | None = Field(default=None, description="repeated in the answer")
    inputs: list[OipInput] = Field(min_length=1, max_length=1)
    outputs: list[OipRequestedOutput] | None = Field(default=None, description="all outputs unless given")
    parameters: OipParameters | None = None
    model_name: str | None = Field(default=None, description="passed over: the path decides")
    model_version: str | None = Field(default=None, description="passed over: the path decides")


class OipOutput(_Shape):
    """An output of a prediction."""

    name: str
    datatype: str
    shape: list[int]
    data: list[float | int | bool | str] | None = Field(default=None, description="elements row by row, unless sent in raw form")
    parameters: dict[str, int] | None = Field(default=None, description="binary_data_size, where it is sent in raw form")


class OipAnswer(_Shape):
    """The answer to an inference request."""

    model_name: str
    model_version: str
    id: str | None = Field(default=None, description="that of the request")
    parameters: dict[str, float | int] = Field(description="coverage and bin_width_mib as they were used")
    outputs: list[OipOutput]


OIP_SHAPES: Final[tuple[type[BaseModel], ...]] = (
    *(OipError, OipServer, OipLive, OipReady, OipModelReady, OipModelMetadata, OipIndexEntry, OipRequest, OipAnswer),
)
"""What the descriptions refer to; the shapes within them come along."""


def oip_paths() -> Description:
    """The protocol's paths, for the description's ``paths``."""
    paths: Description = {
        "/v2": {"get": _reading("oip_server", "What is this server?", "OipServer")},
        "/v2/health/live": {"get": _reading("oip_live", "Is the server alive?", "OipLive")},
        "/v2/health/ready": {"get": _reading("oip_ready", "Does every model answer?", "OipReady", not_ready=True)},
        "/v2/repository/index": {"post": _index()},
    }
    for ending, suffix, parameters in (
        ("", "", [_MODEL]),
        ("/versions/{version}", "_version", [_MODEL, _VERSION]),
    ):
        path = "/v2/models/{model}" + ending
        paths[path] = {
            "parameters": parameters,
            "get": _reading(f"oip_model{suffix}", "What does a model take and give?", "OipModelMetadata", unknown=True),
        }
        paths[f"{path}/ready"] = {
            "parameters": parameters,
            "get": _reading(f"oip_model{suffix}_ready", "Does the model answer?", "OipModelReady", unknown=True, not_ready=True),
        }
        paths[f"{path}/infer"] = {"parameters": parameters, "post": _infer(f"oip_infer{suffix}")}
    return paths


def _reading(name: str, summary: str, schema: str, *, unknown: bool = False, not_ready: bool = False) -> Description:
    refusals = {
        **({"404": "There is no such model or version."} if unknown else {}),
        **({"503": "A model does not answer."} if not_ready else {}),
    }
    return {
        "tags": ["open inference protocol"],
        "summary": summary,
        "operationId": name,
        "responses": {
            "200": {"description": "The answer.", "content": _json(reference(schema))},
            **{status: _refusal(meaning) for status, meaning in refusals.items()},
        },
    }


def _index() -> Description:
    operation = _reading("oip_index", "Which models are loaded?", "OipIndexEntry")
    operation["responses"]["200"]["content"] = _json({"type": "array", "items": reference("OipIndexEntry")})
    return operation


def _infer(name: str) -> Description:
    job = json.dumps(EXAMPLE_JOBS["mlp"])
    example = {
        "id": "42",
        "inputs": [{"name": "job", "datatype": "BYTES", "shape": [1], "data": [job]}],
        "outputs": [{"name": "request_bytes"}, {"name": "limit_bytes"}, {"name": "in_support"}],
        "parameters": {"coverage": 0.99},
    }
    refusals = {
        "400": "Something in the request is at fault; one bad job refuses them all.",
        "404": "There is no such model or version.",
        "413": "The body is too large.",
        "415": "The body is neither JSON nor JSON with raw tensors behind it, or it is compressed.",
    }
    return {
        "tags": ["open inference protocol"],
        "summary": "Predict jobs",
        "description": f"The Open Inference Protocol, version 2 ({_SPECIFICATION}). Outputs:{_OUTPUT_LIST}",
        "operationId": name,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": reference("OipRequest"), "examples": {"job": {"value": example}}}},
        },
        "responses": {
            "200": {
                "description": "The answer.",
                "content": {
                    **_json(reference("OipAnswer")),
                    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
                },
            },
            **{status: _refusal(meaning) for status, meaning in refusals.items()},
        },
    }


def _json(schema: Description) -> Description:
    return {"application/json": {"schema": schema}}


def _refusal(meaning: str) -> Description:
    return {"description": meaning, "content": _json(reference("OipError"))}
