"""The schemas of the responses, and what the schemas of requests and responses have in common.

They generate the OpenAPI description.  Responses are not validated when they are sent, because that costs more than making
them; tests check them against these schemas.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, RootModel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from gpumemnet.job.layers import describe


class Schema(BaseModel):
    """A JSON object of the interface; it forbids undeclared members and converts no value to another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DescribedBy:
    """Annotation of a value that another reader validates: its schema is that of ``shape``."""

    def __init__(self, shape: type[BaseModel]) -> None:
        self._shape = shape

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """A reference to the schema of ``shape``."""
        return handler(self._shape.__pydantic_core_schema__)


class TrainingJob(RootModel[Any]):
    """One training process on one GPU; :mod:`service.api.job_schema` describes its fields."""

    model_config = ConfigDict(json_schema_extra={"type": "object"})


Job = Annotated[Any, DescribedBy(TrainingJob)]
"""The JSON document of a job, not parsed yet."""


class OneOf:
    """Annotation of a string that must be one of ``names``."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate the string."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema: an enumeration of the names."""
        return {"type": "string", "enum": list(self._names)}

    def _check(self, text: str) -> str:
        if text not in self._names:
            raise ValueError(f"must be one of {', '.join(self._names)}, not {describe(text)}")
        return text


class Bin(Schema):
    """The most probable bin."""

    index: int = Field(ge=0, description="number of the bin, from 0")
    lower_bytes: int = Field(ge=0, description="lower edge, inclusive")
    upper_bytes: int | None = Field(description="upper edge, exclusive; null for the last bin, which is open above")
    probability: float = Field(ge=0, le=1, description="probability that the job's memory lies in this bin")


class Bins(Schema):
    """All bins: number k reaches from k times the width to (k + 1) times the width, and the last is open above."""

    name: str = Field(description="name of the bin scheme")
    width_bytes: int = Field(gt=0)
    count: int = Field(gt=0, description="number of bins, the open one included")
    probabilities: list[float] = Field(description="probability of every bin, in order; they add up to 1")


class TrainingData(Schema):
    """What a model was trained on; the model's card says more."""

    description: str | None
    provenance: str | None
    label_source: str | None
    licence: str | None


class Model(Schema):
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


class Models(Schema):
    """The loaded models, by family, the most trusted first."""

    release: str = Field(description="the release that they belong to, the champion")
    challenger: str | None = Field(description="the release that is asked beside it in the background, if there is one")
    models: list[ModelDetails]


class Fit(Schema):
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


class BatchPoint(Schema):
    """Memory at one batch size: the largest predicted for this and any smaller one."""

    batch_size: int = Field(ge=1)
    request_mib: int = Field(ge=0, description="expected memory, rounded up")
    limit_mib: int | None = Field(description="safe memory, rounded up; null outside the model's support")


class BatchSizes(Schema):
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


class SmallestGpu(Schema):
    """The smallest places that hold a job, by the memory available there."""

    coverage: float = Field(gt=0, lt=1, description="the share of jobs that stay below the limit")
    safe: Fit | None = Field(description="the smallest that holds the limit; null where none does, or there is no limit")
    likely: Fit | None = Field(description="the smallest that holds the request; null where none does")
    reasons: list[str] = Field(description="why there is no limit")
    release: str = Field(description="the release that answered")
    feature_schema: str = Field(description="version of the features that the models look at")


class Mig(Schema):
    """A MIG profile."""

    name: str = Field(description="such as 3g.20gb")
    memory_mib: int = Field(gt=0, description="memory of an instance")
    available_mib: int = Field(gt=0, description="what a job can use of an empty one")
    source: str = Field(description="who read it")


class Gpu(Schema):
    """A GPU of the catalogue."""

    name: str = Field(description="product name, as NVML reports it")
    aliases: list[str] = Field(description="shorter names that are understood as well")
    capacity_mib: int = Field(gt=0, description="total memory")
    reserved_mib: int = Field(ge=0, description="what the driver keeps for itself")
    reserved_source: str = Field(description="who read that, or that it is assumed")
    available_mib: int = Field(gt=0, description="what a job can use of an empty one")
    mig: list[Mig] = Field(description="its MIG profiles, as far as they are known")


class Gpus(Schema):
    """The GPUs that questions may name; a MIG profile is named behind a slash, as in A100/3g.20gb."""

    gpus: list[Gpu]


class Prediction(Schema):
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
    expected_bytes: int = Field(ge=0, description="centre of the prediction: about as often too low as too high")
    safe_bytes: int | None = Field(description="upper bound that holds with the coverage; null outside the model's support")
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


class FieldProblem(Schema):
    """One field that is at fault."""

    field: str = Field(description="path from the body, such as job.layers[3].parameters; body for the whole of it")
    message: str = Field(description="what is wrong and what the field may hold")


class Problem(Schema):
    """An error (RFC 9457)."""

    type: str = Field(description="URI of the type of problem; programs look at this")
    title: str = Field(description="the type in words")
    status: int = Field(ge=400, le=599, description="HTTP status")
    detail: str = Field(description="this problem in one sentence")
    errors: list[FieldProblem] | None = Field(default=None, description="the fields at fault, where there are any")


class Predicted(Schema):
    """A job of a batch that was answered."""

    prediction: Prediction


class Refused(Schema):
    """A job of a batch that was refused; the others are answered all the same."""

    problem: Problem


class BatchPrediction(Schema):
    """One result per job, in the order of the jobs."""

    failed: int = Field(ge=0, description="number of jobs that were refused")
    results: list[Predicted | Refused]


class Health(Schema):
    """The process is alive."""

    status: Literal["ok"]


class Readiness(Schema):
    """Every loaded model answers."""

    status: Literal["ready"]
    families: list[str] = Field(description="the families of jobs that a model is loaded for")
