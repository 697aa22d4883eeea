"""The shapes of requests and answers, for the API's description and for nothing else.

The hot path reads and writes JSON by itself (validating an answer that we have just made costs more than making it); tests hold
these shapes against what is really accepted and answered.  The job's schema is derived from the dataclass.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from gpumemnet.bins import PUBLISHED_BINS
from gpumemnet.estimate import DEFAULT_COVERAGE
from gpumemnet.job import FIELD_CHOICES, FIELD_RANGES, MAX_LAYERS, NULLABLE_FIELDS, REQUIRED_FIELDS, SCHEMA_VERSION, TrainingJob
from gpumemnet.layers import MAX_ELEMENTS, Layer
from service.questions import MAX_BIN_WIDTH_MIB, MIN_BIN_WIDTH_MIB

Schema = dict[str, Any]

_REFERENCE: Final = "#/components/schemas/{model}"


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Bin(_Shape):
    """The most probable bin."""

    index: int = Field(ge=0, description="number of the bin, from 0")
    lower_bytes: int = Field(ge=0, description="lower edge, inclusive")
    upper_bytes: int | None = Field(description="upper edge, exclusive; null for the last bin, which is open above")
    lower_mib: int = Field(ge=0, description="lower edge in MiB (2**20 bytes)")
    upper_mib: int | None = Field(description="upper edge in MiB")
    probability: float = Field(ge=0, le=1, description="probability that the job's memory lies in this bin")


class Bins(_Shape):
    """All bins: number k reaches from k times the width to (k + 1) times the width, and the last is open above."""

    name: str = Field(description="name of the bin scheme")
    width_bytes: int = Field(gt=0)
    width_mib: int = Field(gt=0)
    count: int = Field(gt=0, description="number of bins, the open one included")
    probabilities: list[float] = Field(description="probability of every bin, in order; they add up to 1")


class TrainingData(_Shape):
    """What a model was trained on; the model's card says more."""

    description: str | None
    provenance: str | None
    label_source: str | None
    licence: str | None


class Model(_Shape):
    """The model that answered."""

    name: str
    version: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="hash over the model's files: changes with any of them")
    family: str = Field(description="the family of jobs that it answers for")
    encoder: str = Field(description="what it looks at: mlp for the feature vector, transformer for the layer sequence with it")
    training_data: TrainingData


class ModelDetails(Model):
    """A loaded model with its card."""

    gpu: str = Field(description="the GPU model whose memory it predicts")
    coverages: list[float] = Field(description="the coverages it is calibrated for; one in between gets the next higher")
    card: dict[str, Any] = Field(description="the whole card as it was written in training")


class Models(_Shape):
    """The loaded models, by family, the most trusted first."""

    models: list[ModelDetails]


class Prediction(_Shape):
    """The memory that one job is expected to take on one GPU, in nvidia-smi's terms (CUDA context included)."""

    bin: Bin
    expected_bytes: int = Field(ge=0, description="centre of the prediction: about as often too low as too high")
    expected_mib: int = Field(ge=0, description="the same in MiB, rounded up")
    safe_bytes: int | None = Field(description="upper bound that holds with the coverage; null outside the model's support")
    safe_mib: int | None = Field(description="the same in MiB, rounded up")
    coverage: float = Field(gt=0, lt=1, description="the share of jobs that stay below the safe bytes")
    in_support: bool = Field(description="whether the job resembles those that the model was trained on")
    reasons: list[str] = Field(description="why it does not, one sentence each")
    bins: Bins
    gpu: str = Field(description="the GPU model that the amounts are for")
    label_source: str = Field(
        description="what the model learnt from: readings of a GPU, or traced where no GPU has run the jobs"
    )
    model: Model


class FieldProblem(_Shape):
    """One field that is at fault."""

    field: str = Field(description="path from the body, such as job.layers[3].parameters; body for the whole of it")
    message: str = Field(description="what is wrong and what the field may hold")


class Problem(_Shape):
    """An error (RFC 9457)."""

    type: str = Field(description="URI of the type of problem; programs look at this")
    title: str = Field(description="the type in words")
    status: int = Field(ge=400, le=599, description="HTTP status")
    detail: str = Field(description="this problem in one sentence")
    errors: list[FieldProblem] | None = Field(default=None, description="the fields at fault, where there are any")


class Predicted(_Shape):
    """A job of a batch that was answered."""

    prediction: Prediction


class Refused(_Shape):
    """A job of a batch that was refused; the others are answered all the same."""

    problem: Problem


class BatchPrediction(_Shape):
    """One result per job, in the order of the jobs."""

    failed: int = Field(ge=0, description="number of jobs that were refused")
    results: list[Predicted | Refused]


class Health(_Shape):
    """The process is alive."""

    status: Literal["ok"]


class Readiness(_Shape):
    """Every loaded model answers."""

    status: Literal["ready"]
    families: list[str] = Field(description="the families of jobs that a model is loaded for")


def reference(name: str) -> Schema:
    """A reference to the schema ``name`` of :func:`component_schemas`."""
    return {"$ref": _REFERENCE.format(model=name)}


def component_schemas(max_jobs: int) -> dict[str, Schema]:
    """All schemas of the API by name."""
    answers = (Prediction, BatchPrediction, Models, Problem, Health, Readiness)
    _, definitions = models_json_schema([(shape, "serialization") for shape in answers], ref_template=_REFERENCE)
    return {
        "PredictRequest": _request_schema("One job, and how the answer is wanted.", "job", reference("TrainingJob")),
        "BatchRequest": _request_schema(
            "Many jobs, and how the answers are wanted.",
            "jobs",
            {
                "type": "array",
                "maxItems": max_jobs,
                "items": reference("TrainingJob"),
                "description": "the jobs; each may fail alone",
            },
        ),
        "TrainingJob": job_schema(),
        "Layer": layer_schema(),
        **definitions["$defs"],
    }


def job_schema() -> Schema:
    """The JSON schema of a :class:`~gpumemnet.job.TrainingJob`, from the dataclass, its docstring and its ranges."""
    descriptions = _attribute_descriptions(TrainingJob)
    ranges = {name: {"type": "integer", "minimum": low, "maximum": high} for name, low, high in FIELD_RANGES}
    properties: dict[str, Schema] = {}
    for field in fields(TrainingJob):
        if field.name == "layers":
            schema: Schema = {"type": "array", "maxItems": MAX_LAYERS, "items": reference("Layer")}
        elif field.name == "schema_version":
            schema = {"const": SCHEMA_VERSION}
        elif field.name in FIELD_CHOICES:
            schema = {"type": "string", "enum": list(FIELD_CHOICES[field.name])}
        else:
            schema = dict(ranges.get(field.name, {"type": "boolean"}))
        if field.name in NULLABLE_FIELDS or field.name == "layers":
            schema = {"anyOf": [schema, {"type": "null"}]}
        elif field.name not in REQUIRED_FIELDS:
            schema["default"] = field.default
        if field.name in descriptions:
            schema["description"] = descriptions[field.name]
        properties[field.name] = schema
    return {
        "type": "object",
        "description": "One training process on one GPU: its layers or their totals, and every option that moves memory.",
        "properties": properties,
        "required": list(REQUIRED_FIELDS),
        "anyOf": [
            {"required": ["layers"], "properties": {"layers": {"type": "array", "minItems": 1}}},
            {
                "required": ["total_activations", "total_parameters"],
                "properties": {"total_activations": {"type": "integer"}, "total_parameters": {"type": "integer"}},
            },
        ],
        "additionalProperties": False,
    }


def layer_schema() -> Schema:
    """The JSON schema of a :class:`~gpumemnet.layers.Layer`, as an object or as a list of three."""
    descriptions = _attribute_descriptions(Layer)
    count = {"type": "integer", "minimum": 0, "maximum": MAX_ELEMENTS}
    properties: dict[str, Schema] = {
        "kind": {"type": "string", "pattern": "^[a-z][a-z0-9_]{0,63}$", "examples": ["linear", "conv2d", "relu"]},
        "activations": dict(count),
        "parameters": {**count, "default": 0},
    }
    for name, description in descriptions.items():
        properties[name]["description"] = description
    return {
        "description": "One executed layer.",
        "anyOf": [
            {"type": "object", "properties": properties, "required": ["kind", "activations"], "additionalProperties": False},
            {
                "type": "array",
                "prefixItems": [properties["kind"], properties["activations"], count],
                "minItems": 3,
                "maxItems": 3,
            },
        ],
    }


def _request_schema(description: str, content: str, schema: Schema) -> Schema:
    return {
        "type": "object",
        "description": description,
        "properties": {
            content: schema,
            "coverage": {
                "anyOf": [{"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, {"type": "null"}],
                "default": DEFAULT_COVERAGE,
                "description": "the share of jobs that the safe bytes shall cover, within what the model is calibrated for",
            },
            "bin_width_mib": {
                "anyOf": [{"type": "integer", "minimum": MIN_BIN_WIDTH_MIB, "maximum": MAX_BIN_WIDTH_MIB}, {"type": "null"}],
                "description": "width of the bins in MiB; 1,024 up to the GPU's capacity unless asked for",
            },
            "bins": {
                "anyOf": [{"type": "string", "enum": list(PUBLISHED_BINS)}, {"type": "null"}],
                "description": "a published bin scheme by name, instead of a width",
            },
        },
        "required": [content],
        "additionalProperties": False,
    }


def _attribute_descriptions(class_: type) -> dict[str, str]:
    """Field → text, from the ``Attributes:`` section of the docstring."""
    section = inspect.cleandoc(class_.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {
        name: re.sub(r":\w+:`~?([^`]*)`", r"\1", re.sub(r"\s+", " ", text)).replace("``", "")
        for names, text in entries
        for name in names.split(", ")
    }
