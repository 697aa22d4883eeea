"""The shapes of requests and answers, for the API's description and for nothing else.

The hot path reads and writes JSON by itself (validating an answer that we have just made costs more than making it); tests hold
these shapes against what is really accepted and answered.  The job's schema is derived from the dataclass.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from gpumemnet.gpu.fits import MAX_DEVICE_NAME, MAX_FREE_MIB
from gpumemnet.job.layers import MAX_ELEMENTS, Layer
from gpumemnet.job.training_job import (
    FIELD_CHOICES,
    FIELD_RANGES,
    MAX_LAYERS,
    NULLABLE_FIELDS,
    REQUIRED_FIELDS,
    SCHEMA_VERSION,
    TrainingJob,
)
from gpumemnet.job.training_options import TRAINING_OPTIONS
from gpumemnet.predict.bins import PUBLISHED_BINS
from gpumemnet.predict.bundle import ENCODERS
from gpumemnet.predict.largest_batch import DEFAULT_MAX_BATCH
from gpumemnet.predict.prediction import DEFAULT_COVERAGE

from .requests import MAX_ASKED_BATCH, MAX_BIN_WIDTH_MIB, MAX_TARGETS, MIN_BIN_WIDTH_MIB

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
    family: str = Field(description="the family of jobs that it answers for; all for a model of several")
    encoder: str = Field(
        description="what it looks at: mlp for the feature vector, transformer for the layer sequence with it, common for the "
        "feature vector by one model of all families"
    )
    training_data: TrainingData


class ModelDetails(Model):
    """A loaded model with its card."""

    gpu: str = Field(description="the GPU model whose memory it predicts")
    coverages: list[float] = Field(description="the coverages it is calibrated for; one in between gets the next higher")
    card: dict[str, Any] = Field(description="the whole card as it was written in training")


class Models(_Shape):
    """The loaded models, by family, the most trusted first."""

    release: str = Field(description="the release that they belong to, the champion")
    challenger: str | None = Field(description="the release that is asked beside it in the background, if there is one")
    models: list[ModelDetails]


class Margin(_Shape):
    """What the limit has over the request."""

    name: str = Field(description="how the margin was found: conformal is split conformal prediction")
    coverage: float = Field(gt=0, lt=1, description="the share of jobs that stay below the limit")
    mib: int = Field(ge=0, description="limit less request, in MiB")


class Fit(_Shape):
    """Whether the job fits one GPU, MIG profile or device."""

    gpu: str = Field(description="the GPU model")
    mig: str | None = Field(description="the MIG profile, where it is a partition")
    device: str | None = Field(description="the id that the device was given in the request")
    available_mib: int = Field(ge=0, description="free memory by the request, else what the driver leaves of an empty one")
    request_mib: int = Field(ge=0, description="expected memory on this GPU, rounded up")
    limit_mib: int | None = Field(description="safe memory on this GPU, rounded up; null outside the model's support")
    verdict: Literal["yes", "no", "unsure", "unknown"] = Field(
        description="yes: the limit is available; no: not even the request is; unsure: between the two; unknown: no limit"
    )
    probability: float = Field(ge=0, le=1, description="probability that the job takes no more than what is available")


class BatchPoint(_Shape):
    """Memory at one batch size: the largest predicted for this and any smaller one."""

    batch_size: int = Field(ge=1)
    request_mib: int = Field(ge=0, description="expected memory, rounded up")
    limit_mib: int | None = Field(description="safe memory, rounded up; null outside the model's support")


class BatchSizes(_Shape):
    """The largest batches that fit, and memory against batch size."""

    gpu: str = Field(description="the GPU model")
    mig: str | None = Field(description="the MIG profile, where it is a partition")
    available_mib: int = Field(ge=0, description="free memory by the request, else what the driver leaves of an empty one")
    coverage: float = Field(gt=0, lt=1, description="the share of jobs that stay below a limit")
    max_batch: int = Field(ge=1, description="no batch above this was looked at")
    safe_batch: int | None = Field(description="the largest whose limit is available; null where there is none")
    likely_batch: int | None = Field(description="the largest whose request is available; null where there is none")
    reasons: list[str] = Field(description="why there is no limit at any batch size")
    curve: list[BatchPoint] = Field(description="from batch 1 to max_batch; it never falls")
    release: str = Field(description="the release that answered")
    feature_schema: str = Field(description="version of the features that the models look at")


class SmallestGpu(_Shape):
    """The smallest places that hold a job, by the memory available there."""

    coverage: float = Field(gt=0, lt=1, description="the share of jobs that stay below the limit")
    safe: Fit | None = Field(description="the smallest that holds the limit; null where none does, or there is no limit")
    likely: Fit | None = Field(description="the smallest that holds the request; null where none does")
    reasons: list[str] = Field(description="why there is no limit")
    release: str = Field(description="the release that answered")
    feature_schema: str = Field(description="version of the features that the models look at")


class Mig(_Shape):
    """A MIG profile."""

    name: str = Field(description="such as 3g.20gb")
    memory_mib: int = Field(gt=0, description="memory of an instance")
    available_mib: int = Field(gt=0, description="what a job can use of an empty one")
    source: str = Field(description="who read it")


class Gpu(_Shape):
    """A GPU of the catalogue."""

    name: str = Field(description="product name, as NVML reports it")
    aliases: list[str] = Field(description="shorter names that are understood as well")
    capacity_mib: int = Field(gt=0, description="total memory")
    reserved_mib: int = Field(ge=0, description="what the driver keeps for itself")
    reserved_source: str = Field(description="who read that, or that it is assumed")
    available_mib: int = Field(gt=0, description="what a job can use of an empty one")
    mig: list[Mig] = Field(description="its MIG profiles, as far as they are known")


class Gpus(_Shape):
    """The GPUs that questions may name; a MIG profile is named behind a slash, as in A100/3g.20gb."""

    gpus: list[Gpu]


class Prediction(_Shape):
    """The memory that one job is expected to take on one GPU, in nvidia-smi's terms (CUDA context included)."""

    prediction_id: str = Field(
        pattern="^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$",
        description="id of this prediction (UUID of version 7): observations of the job refer to it",
    )
    bin: Bin
    request_mib: int = Field(
        ge=0, description="what to pack by: the expected memory in MiB, rounded up; as a hard cap it kills jobs"
    )
    limit_mib: int | None = Field(
        description="what to cap at: the safe memory in MiB, rounded up; null outside the model's support"
    )
    margin: Margin | None = Field(description="what the limit has over the request; null without a limit")
    expected_bytes: int = Field(ge=0, description="centre of the prediction: about as often too low as too high")
    expected_mib: int = Field(ge=0, description="the same in MiB, rounded up")
    safe_bytes: int | None = Field(description="upper bound that holds with the coverage; null outside the model's support")
    safe_mib: int | None = Field(description="the same in MiB, rounded up")
    coverage: float = Field(gt=0, lt=1, description="the share of jobs that stay below the safe bytes")
    in_support: bool = Field(description="whether the job resembles those that the model was trained on")
    reasons: list[str] = Field(description="why it does not, one sentence each")
    bins: Bins
    fits: list[Fit] | None = Field(default=None, description="what the job fits, where that was asked, in the order asked")
    gpu: str = Field(description="the GPU model that the amounts are for")
    label_source: str = Field(
        description="what the model learnt from: readings of a GPU, or traced where no GPU has run the jobs"
    )
    release: str = Field(description="the release that the model belongs to")
    feature_schema: str = Field(description="version of the features that the model looks at")
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


SHAPES: Final[tuple[type[BaseModel], ...]] = (
    *(Prediction, BatchPrediction, BatchSizes, SmallestGpu, Gpus, Models, Problem, Health, Readiness),
)
"""What the routes described here answer with."""


def component_schemas(max_jobs: int, max_layers: int, extra_shapes: Sequence[type[BaseModel]] = ()) -> dict[str, Schema]:
    """All schemas of the API by name.

    Args:
        max_jobs: most jobs of a request.
        max_layers: most layers of a job.
        extra_shapes: what other routes read and answer with.
    """
    shapes = [(shape, "serialization") for shape in dict.fromkeys((*SHAPES, *extra_shapes))]
    _, definitions = models_json_schema(shapes, ref_template=_REFERENCE)  # type: ignore[arg-type]
    return {
        "PredictRequest": _request_schema("One job, and how the answer is wanted.", "job", reference("TrainingJob"), _options()),
        "BatchRequest": _request_schema(
            "Many jobs, and how the answers are wanted.",
            "jobs",
            {
                "type": "array",
                "maxItems": max_jobs,
                "items": reference("TrainingJob"),
                "description": "the jobs; each may fail alone",
            },
            _options(),
        ),
        "BatchSizesRequest": _request_schema(
            "A job whose batch size is looked for, and where it is to run.",
            "job",
            {**reference("TrainingJob"), "description": "the job; its own batch size and traced peak do not matter"},
            _batch_sizes_options(),
        ),
        "SmallestGpuRequest": _request_schema(
            "A job that looks for a GPU.", "job", reference("TrainingJob"), _smallest_gpu_options()
        ),
        "Device": _device_schema(),
        "TrainingJob": job_schema(max_layers),
        "Layer": layer_schema(),
        **definitions["$defs"],
    }


def job_schema(max_layers: int = MAX_LAYERS) -> Schema:
    """The JSON schema of a :class:`~gpumemnet.job.training_job.TrainingJob`, from the dataclass, its docstring and its ranges."""
    descriptions = _attribute_descriptions(TrainingJob) | {name: option.description for name, option in TRAINING_OPTIONS.items()}
    ranges = {name: {"type": "integer", "minimum": low, "maximum": high} for name, low, high in FIELD_RANGES}
    properties: dict[str, Schema] = {}
    for field in fields(TrainingJob):
        if field.name == "layers":
            schema: Schema = {"type": "array", "maxItems": max_layers, "items": reference("Layer")}
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
    """The JSON schema of a :class:`~gpumemnet.job.layers.Layer`, as an object or as a list of three."""
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


def _request_schema(description: str, content: str, schema: Schema, options: dict[str, Schema]) -> Schema:
    return {
        "type": "object",
        "description": description,
        "properties": {content: schema, **options},
        "required": [content],
        "additionalProperties": False,
    }


def _options() -> dict[str, Schema]:
    return {
        "coverage": _COVERAGE,
        "bin_width_mib": _nullable(
            {"type": "integer", "minimum": MIN_BIN_WIDTH_MIB, "maximum": MAX_BIN_WIDTH_MIB},
            "width of the bins in MiB; 1,024 up to the GPU's capacity unless asked for",
        ),
        "bins": _nullable({"type": "string", "enum": list(PUBLISHED_BINS)}, "a published bin scheme by name, instead of a width"),
        "gpu": _nullable(
            {"type": "string", "examples": ["A100"]}, "GPU to answer for, by a name at /v1/gpus; the model's own unless given"
        ),
        "encoder": _ENCODER,
        "fits": {
            "anyOf": [{"type": "boolean"}, _names(), {"type": "null"}],
            "default": False,
            "description": "what the job may fit: true for the whole catalogue, or names as at /v1/gpus, also A100/3g.20gb",
        },
        "devices": _nullable(_device_list(), "devices that the job may fit, with their live free memory"),
    }


def _batch_sizes_options() -> dict[str, Schema]:
    device = _device_schema()["properties"]
    return {
        "coverage": _COVERAGE,
        "encoder": _ENCODER,
        "gpu": _nullable(
            {"type": "string", "examples": ["A100"]},
            "GPU, by a name at /v1/gpus, also A100/3g.20gb; the model's own unless given",
        ),
        "mig": device["mig"],
        "free_mib": device["free_mib"],
        "max_batch": {
            **_nullable({"type": "integer", "minimum": 1, "maximum": MAX_ASKED_BATCH}, "the largest batch size to look at"),
            "default": DEFAULT_MAX_BATCH,
        },
    }


def _smallest_gpu_options() -> dict[str, Schema]:
    return {
        "coverage": _COVERAGE,
        "encoder": _ENCODER,
        "gpus": _nullable(_names(), "GPUs to choose from, by a name at /v1/gpus, also A100/3g.20gb; all unless given"),
        "devices": _nullable(_device_list(), "devices to choose from, with their live free memory"),
    }


def _device_schema() -> Schema:
    return {
        "type": "object",
        "description": "One device of a site, as it is now.",
        "properties": {
            "id": {
                "type": "string",
                "minLength": 1,
                "maxLength": MAX_DEVICE_NAME,
                "description": "any name for it: index, UUID of GPU or MIG",
            },
            "gpu": {"type": "string", "description": "its GPU model, by a name at /v1/gpus", "examples": ["A100"]},
            "mig": _nullable({"type": "string", "examples": ["3g.20gb"]}, "its MIG profile, where it is a partition"),
            "free_mib": _nullable(
                {"type": "integer", "minimum": 0, "maximum": MAX_FREE_MIB},
                "memory free on it now, as NVML says; unless given it is taken to be empty",
            ),
        },
        "required": ["id", "gpu"],
        "additionalProperties": False,
    }


def _device_list() -> Schema:
    return {"type": "array", "maxItems": MAX_TARGETS, "items": reference("Device")}


def _names() -> Schema:
    return {"type": "array", "maxItems": MAX_TARGETS, "items": {"type": "string", "examples": ["A100", "A100/3g.20gb"]}}


def _nullable(schema: Schema, description: str) -> Schema:
    return {"anyOf": [schema, {"type": "null"}], "description": description}


_COVERAGE: Final[Schema] = {
    **_nullable(
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        "the share of jobs that the safe bytes shall cover, within what the model is calibrated for",
    ),
    "default": DEFAULT_COVERAGE,
}
_ENCODER: Final[Schema] = _nullable(
    {"type": "string", "enum": list(ENCODERS)},
    "which classifier: mlp or transformer, or common, one model for all families; mlp where there is one unless given",
)


def _attribute_descriptions(class_: type) -> dict[str, str]:
    """Field → text, from the ``Attributes:`` section of the docstring."""
    section = inspect.cleandoc(class_.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {
        name: re.sub(r":\w+:`~?([^`]*)`", r"\1", re.sub(r"\s+", " ", text)).replace("``", "")
        for names, text in entries
        for name in names.split(", ")
    }
