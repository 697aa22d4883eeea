"""The schemas of requests and responses.

They generate the OpenAPI description.  A request's schema checks types, ranges and names of members
(:func:`.handlers.read_request`); :mod:`gpumemnet.job.json_codec` reads the jobs.  Responses are not validated
when they are sent, because that costs more than making them; tests check them against these schemas.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal, get_type_hints

from annotated_types import GroupedMetadata
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    WithJsonSchema,
    WrapValidator,
    create_model,
)

from gpumemnet.job import layers, training_job
from gpumemnet.job.layers import MAX_ELEMENTS, MAX_LAYERS, check_choice
from gpumemnet.predict import gpu_fit, largest_batch, prediction
from gpumemnet.predict.bundle_card import ENCODERS
from gpumemnet.predict.distribution import DEFAULT_TOP_BYTES, MAX_BINS
from gpumemnet.predict.gpu_fit import MAX_DEVICE_NAME, MAX_FREE_MIB
from gpumemnet.predict.largest_batch import DEFAULT_MAX_BATCH
from gpumemnet.predict.prediction import DEFAULT_COVERAGE
from gpumemnet.units import MIB

MIN_BIN_WIDTH_MIB: Final = math.ceil(DEFAULT_TOP_BYTES / (MAX_BINS - 1) / MIB)
MAX_BIN_WIDTH_MIB: Final = DEFAULT_TOP_BYTES // MIB
MAX_JOBS: Final = 1000
"""Most jobs in one request."""
MAX_TARGETS: Final = 256
"""Most names in ``fits`` or ``gpus``, and most devices, in one request."""
MAX_ASKED_BATCH: Final = 2**20
"""Largest ``max_batch``: more would cost time, and no job has so large a batch."""


class Schema(BaseModel):
    """A JSON object of the interface; it forbids undeclared members and converts no value to
    another type."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


class OneOf(GroupedMetadata):
    """Annotation of a string that must be one of ``names``."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    def __iter__(self) -> Iterator[object]:
        """The check, and the schema: an enumeration of the names."""
        yield AfterValidator(lambda text: check_choice(text, self._names, ""))
        yield WithJsonSchema({"type": "string", "enum": list(self._names)})


def described(
    name: str,
    text: str,
    class_: type,
    without: Iterable[str] = (),
    *,
    is_request: bool = False,
    texts: Mapping[str, str] | None = None,
    **more: Any,
) -> Any:
    """The schema of a dataclass or a named tuple, with the texts of its docstring.

    Args:
        name, text: of the schema.
        class_: the dataclass or named tuple.
        without: its fields that the schema does not have.
        is_request: whether fields with a default may be left out.
        texts: those of fields that the docstring leaves out.
        more: other types of its fields; further fields as types with ``Field(…)``.
    """
    texts = dict(texts or {})
    for each in reversed(class_.__mro__):
        texts |= attribute_descriptions(each)
    defaults: dict[str, Any] = {
        each.name: each.default
        for each in inspect.signature(class_).parameters.values()
        if is_request and each.default is not each.empty
    }
    members: dict[str, Any] = {
        member: hint
        if isinstance(hint, tuple)
        else (hint, Field(default=defaults.get(member, ...), description=texts.get(member)))
        for member, hint in (get_type_hints(class_) | more).items()
        if member not in without
    }
    return create_model(name, __base__=Schema, __doc__=text, **members)


def attribute_descriptions(class_: type) -> dict[str, str]:
    """Field → text, from the ``Attributes:`` section of the docstring."""
    section = (
        inspect.cleandoc(class_.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    )
    entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {
        name: re.sub(r":\w+:`~?([^`]*)`", r"\1", re.sub(r"\s+", " ", text))
        .replace("``None``", "null")
        .replace("``", "")
        for names, text in entries
        for name in names.split(", ")
    }


_Elements = Annotated[int, Field(ge=0, le=MAX_ELEMENTS)]
_Trains = bool | None
_Block = Annotated[int, Field(ge=0, le=MAX_LAYERS)] | None
Layer: Any = described(
    "Layer",
    "One executed layer; it may also be a list of these values, with or without those that are not known.",
    layers.Layer,
    is_request=True,
    kind=Annotated[str, Field(pattern="^[a-z][a-z0-9_]{0,63}$", examples=["linear", "relu"])],
    activations=_Elements,
    parameters=_Elements,
    trains=_Trains,
    block=_Block,
)
_LIMITS: Final[Mapping[str, Any]] = {
    **{
        name: Annotated[str, OneOf(choices)] for name, choices in training_job.FIELD_CHOICES.items()
    },
    **{
        name: Annotated[int, Field(ge=low, le=high)]
        for name, low, high in training_job.FIELD_RANGES
    },
}
TrainingJob: Any = described(
    "TrainingJob",
    "One training process on one GPU: its `layers`, or else `total_activations` and "
    "`total_parameters`, and every option that moves memory.",
    training_job.TrainingJob,
    is_request=True,
    texts={name: option.description for name, option in training_job.TRAINING_OPTIONS.items()},
    layers=Annotated[
        list[
            Layer
            | tuple[str, _Elements, _Elements]
            | tuple[str, _Elements, _Elements, _Trains]
            | tuple[str, _Elements, _Elements, _Trains, _Block]
        ],
        Field(max_length=MAX_LAYERS),
    ]
    | None,
    schema_version=Literal[training_job.SCHEMA_VERSION],
    **{
        name: limit | None if name in training_job.NULLABLE_FIELDS else limit
        for name, limit in _LIMITS.items()
    },
)
Job = Annotated[TrainingJob, WrapValidator(lambda document, _: document)]
"""The JSON document of a job, which :mod:`gpumemnet.job.json_codec` reads."""


class Bin(Schema):
    """The most probable bin."""

    index: int = Field(ge=0)
    """number of the bin, from 0"""
    lower_bytes: int = Field(ge=0)
    """lower edge in bytes, inclusive"""
    upper_bytes: int | None
    """upper edge in bytes, exclusive; null for the last bin, which is open above"""
    probability: float = Field(ge=0, le=1)
    """probability that the job's memory lies in this bin"""


class Bins(Schema):
    """All bins: number k reaches from k times the width to (k + 1) times the width, and the last is
    open above."""

    name: str
    """name of the bin scheme"""
    width_bytes: int = Field(gt=0)
    count: int = Field(gt=0)
    """number of bins, the open one included"""
    probabilities: list[float]
    """probability of every bin, in order; they add up to 1"""


class TrainingData(Schema):
    """What a model was trained on; the model's card says more."""

    description: str | None
    provenance: str | None
    label_source: str | None
    licence: str | None


class Model(Schema):
    """The model that made the prediction."""

    name: str
    version: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """hash over the model's files: changes with any of them"""
    family: str
    """the family of jobs that it predicts; all where it predicts several"""
    encoder: str
    """mlp: feature vector; transformer: layer sequence and feature vector"""
    training_data: TrainingData


class ModelDetails(Model):
    """A loaded model with its card."""

    gpu: str
    """the GPU model whose memory it predicts"""
    coverages: list[float]
    """the calibrated coverages; a coverage in between uses the next higher"""
    card: dict[str, Any]
    """the model card"""


class Models(Schema):
    """The loaded models."""

    release: str
    """the served release (the champion)"""
    models: list[ModelDetails]


Fit: Any = described(
    "Fit",
    "Whether the job fits one GPU, MIG profile or device.",
    gpu_fit.Fit,
    verdict=Literal["yes", "no", "unsure", "unknown"],
)
_ORIGIN: Final[Mapping[str, Any]] = {
    "release": (str, Field(description="the release that the model belongs to")),
    "feature_schema": (str, Field(description="version of the model's features")),
}
"""Members of every answer of a model."""
BatchSizes: Any = described(
    "BatchSizes",
    "The largest batches that fit, and memory against batch size.",
    largest_batch.BatchSizes,
    without=("device",),
    curve=list[  # type: ignore[misc]
        described(
            "BatchPoint",
            "Memory at one batch size: the largest predicted for this and any smaller one.",
            largest_batch.BatchPoint,
        )
    ],
    **_ORIGIN,
)


class Mig(Schema):
    """A MIG profile."""

    name: str
    """such as 3g.20gb"""
    memory_mib: int = Field(gt=0)
    """memory of an instance"""
    available_mib: int = Field(gt=0)
    """what a job can use of an empty one"""
    source: str
    """where this number comes from"""


class Gpu(Schema):
    """A GPU of the catalogue."""

    name: str
    """product name, as NVML reports it"""
    aliases: list[str]
    """other names that requests may use"""
    capacity_mib: int = Field(gt=0)
    """total memory"""
    reserved_mib: int = Field(ge=0)
    """what the driver keeps for itself"""
    reserved_source: str
    """where this number comes from"""
    available_mib: int = Field(gt=0)
    """what a job can use of an empty one"""
    mig: list[Mig]
    """its MIG profiles, as far as they are known"""


class Gpus(Schema):
    """The GPUs that requests may name; a MIG profile follows a slash, as in A100/3g.20gb."""

    gpus: list[Gpu]


Prediction: Any = described(
    "Prediction",
    "The memory that one job is expected to take on one GPU, in nvidia-smi's terms (CUDA context included).",
    prediction.Prediction,
    without=("probabilities", "estimator", "version"),
    prediction_id=(
        Annotated[
            str,
            Field(pattern="^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"),
        ],
        Field(
            description="id of this prediction (UUID of version 7): observations of the job refer to it"
        ),
    ),
    bin=Bin,
    bins=Bins,
    fits=(
        list[Fit] | None,
        Field(
            default=None,
            description="what the job fits, in the order of the request; only if the request asks for it",
        ),
    ),
    gpu_source=Literal["request", "setting", "default"],
    model=Model,
    **_ORIGIN,
)


PREDICTION_FIELDS: Final = tuple(Prediction.model_fields)

SomeFields = create_model(  # type: ignore[call-overload]
    "SomeFields",
    __base__=Schema,
    __doc__="The fields of a prediction that the request chooses.",
    **{
        name: (
            field.annotation | None,
            Field(default=None, description=field.description),
        )
        for name, field in Prediction.model_fields.items()
    },
)


class FieldProblem(Schema):
    """One invalid field."""

    field: str
    """path in the body, such as job.layers[3].parameters; 'body' for the whole body"""
    message: str
    """what is wrong and what the field may hold"""


class Problem(Schema):
    """An error (RFC 9457)."""

    type: str
    """URI that identifies the type of problem; for programs"""
    title: str
    """short name of the type"""
    status: int = Field(ge=400, le=599)
    """HTTP status"""
    detail: str
    """what is wrong, in one sentence"""
    errors: list[FieldProblem] | None = None
    """the invalid fields, if the body has any"""


class Predicted(Schema):
    """The result of a valid job of a batch."""

    prediction: Prediction | SomeFields  # type: ignore[valid-type]
    """the whole prediction, or the fields that the request chooses"""


class Refused(Schema):
    """The result of an invalid job of a batch; the other jobs are predicted."""

    problem: Problem


class BatchPrediction(Schema):
    """One result per job, in order."""

    failed: int = Field(ge=0)
    """number of invalid jobs"""
    results: list[Predicted | Refused]


class Health(Schema):
    """The process is alive."""

    status: Literal["ok"]


class Readiness(Schema):
    """A tested release is served."""

    status: Literal["ready"]
    families: list[str]
    """the families of jobs that a model is loaded for"""


# Requests

Coverage = Annotated[
    Annotated[int | float, WithJsonSchema({"type": "number"})] | None,
    Field(
        description="share of jobs that the safe bytes cover, within the calibrated coverages of the model",
        json_schema_extra={
            "exclusiveMinimum": 0,
            "exclusiveMaximum": 1,
            "default": DEFAULT_COVERAGE,
        },
    ),
]
Encoder = Annotated[
    Annotated[str, OneOf(ENCODERS)] | None,
    Field(description="the classifier: mlp or transformer; by default mlp where it is loaded"),
]
GpuName = Annotated[str, Field(examples=["A100"])]
GpuNames = Annotated[
    list[Annotated[str, Field(examples=["A100", "A100/3g.20gb"])]], Field(max_length=MAX_TARGETS)
]
FreeMib = Annotated[
    Annotated[int, Field(ge=0, le=MAX_FREE_MIB)] | None,
    Field(
        description="memory that is free now, as NVML reports it; by default that of an empty device"
    ),
]


class Device(Schema):
    """One device of a site, as it is now."""

    id: str = Field(min_length=1, max_length=MAX_DEVICE_NAME)
    """the caller's name for it, such as an index or a UUID"""
    gpu: str = Field(examples=["A100"])
    """its GPU model, by a name in /v1/gpus or such as A100/3g.20gb"""
    free_mib: FreeMib = None


Devices = Annotated[list[Device], Field(max_length=MAX_TARGETS)]


class PredictOptions(Schema):
    """The options of a prediction."""

    coverage: Coverage = None
    bin_width_mib: Annotated[int, Field(ge=MIN_BIN_WIDTH_MIB, le=MAX_BIN_WIDTH_MIB)] | None = None
    """width of the bins in MiB; by default 1,024, up to the capacity of the GPU"""
    gpu: GpuName | None = None
    """the GPU, by a name in /v1/gpus; by default the service's"""
    encoder: Encoder = None
    fits: bool | GpuNames | None = None
    """decide what the job fits: true for the whole catalogue, or names as in /v1/gpus or such as A100/3g.20gb"""
    devices: Devices | None = None
    """devices that the job may fit, with their free memory"""


class PredictRequest(PredictOptions):
    """One job, and the options of its prediction."""

    job: Job


class BatchRequest(PredictOptions):
    """Many jobs, and the options of their predictions."""

    jobs: list[Job] = Field(json_schema_extra={"maxItems": MAX_JOBS})
    """the jobs; an invalid one does not fail the others"""
    fields: (
        Annotated[list[Annotated[str, OneOf(PREDICTION_FIELDS)]], Field(min_length=1)] | None
    ) = None
    """the fields of each prediction to answer; all by default"""


class BatchSizesRequest(Schema):
    """A job whose largest batch size is to be found, and the GPU that it is to run on."""

    job: Job
    """the job; its own batch size and traced peak are ignored"""
    coverage: Coverage = None
    encoder: Encoder = None
    gpu: GpuName | None = None
    """the GPU, by a name in /v1/gpus or such as A100/3g.20gb; by default the service's"""
    free_mib: FreeMib = None
    max_batch: Annotated[int, Field(ge=1, le=MAX_ASKED_BATCH)] | None = Field(
        None, json_schema_extra={"default": DEFAULT_MAX_BATCH}
    )
    """the largest batch size to consider"""
