"""What the API's description says of observations: paths, schemas and examples."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from gpumemnet.job.training_job import FAMILIES
from gpumemnet.site.observation import MAX_BYTES, MAX_KEY_LENGTH, MAX_TEXT_LENGTH, MIN_BYTES, SOURCES
from gpumemnet.units import MIB

from ..api.examples import EXAMPLE_JOBS
from ..api.problems import MEDIA_TYPE
from ..api.schemas import Problem, reference
from .routes import DEFAULT_DAYS, MAX_DAYS, MAX_OBSERVATIONS

Schema = dict[str, Any]

_PREDICTION: Final = "01932f6c-5b1e-7c3a-9d2e-3f4a5b6c7d8e"


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StoredObservation(_Shape):
    """An observation that is on the disk."""

    observation_id: str
    created: bool = Field(description="whether this request stored it; false when the same had been stored before")
    prediction_id: str | None = Field(description="the prediction that it is compared with")
    job_sha256: str = Field(description="hash of the job")
    gpu: str = Field(description="the GPU that it was stored for")


class ObservedResult(_Shape):
    """An observation of a list that was stored."""

    observation: StoredObservation


class RefusedObservation(_Shape):
    """An observation of a list that was not stored; the others are all the same."""

    problem: Problem


class ObservationResults(_Shape):
    """One result per observation, in order."""

    failed: int = Field(ge=0, description="number of observations that were not stored")
    results: list[ObservedResult | RefusedObservation]


class Worth(_Shape):
    """What predictions were worth, against what the jobs used."""

    judged: int = Field(ge=0, description="jobs that put the safe bytes to the test")
    covered: int = Field(ge=0, description="of these, those that stayed within")
    coverage: float | None = Field(description="their share")
    coverage_interval: list[float] | None = Field(description="its 95 % interval (Wilson)")
    promised_coverage: float | None = Field(description="mean of the coverages that were asked for")
    median_error_mib: float | None = Field(description="median of expected less observed")
    median_error_percent: float | None = Field(description="the same in percent of the observed")
    median_absolute_error_percent: float | None
    under_prediction_rate: float | None = Field(description="share of the jobs that used more than expected")
    median_waste_mib: float | None = Field(description="median of safe less observed, of those covered")
    waste_share: float | None = Field(description="share of all safe bytes that were not used, of those covered")


class SideBySide(_Shape):
    """Champion and challenger on the jobs that both were asked about."""

    champion: Worth
    challenger: Worth


class ObservedGroup(_Shape):
    """Predictions of one release for one family and GPU."""

    family: str
    gpu: str
    release: str
    observations: int = Field(ge=0)
    oom: int = Field(ge=0, description="jobs that ran out of memory")
    champion: Worth
    challenger: SideBySide | None


class FamilyAlarm(_Shape):
    """Whether a family's coverage is too low to be chance."""

    family: str
    on: bool
    judged: int = Field(ge=0)
    covered: int = Field(ge=0)
    coverage: float | None
    promised_coverage: float | None
    probability: float = Field(ge=0, le=1, description="of as many misses or more, if every promise held")


class CoverageAlarm(_Shape):
    """The alarm's rule and its state."""

    rule: str
    threshold: float
    window: int = Field(description="observations of a family that it looks at")
    families: list[FamilyAlarm]


class ObservationSummary(_Shape):
    """What predictions were worth over the last days."""

    days: float
    observations: int = Field(ge=0)
    oom: int = Field(ge=0)
    without_prediction: int = Field(ge=0, description="reported with the job alone; kept for learning, compared with nothing")
    on_another_gpu: int = Field(ge=0, description="ran on another GPU than was predicted for; not compared")
    sources: dict[str, int] = Field(description="observations by the source of their peak")
    compared: int = Field(ge=0, description="observations in the groups below")
    complete: bool = Field(description="whether these are all, and not the newest alone")
    groups: list[ObservedGroup]
    alarm: CoverageAlarm


OBSERVATION_SHAPES: Final[tuple[type[BaseModel], ...]] = (StoredObservation, ObservationResults, ObservationSummary)
"""The answers' shapes."""


def observation_schemas() -> dict[str, Schema]:
    """The schemas of what is sent."""
    return {
        "Observation": _observation_schema(),
        "Observations": {
            "type": "object",
            "description": "Several observations; each may be refused alone.",
            "properties": {
                "observations": {"type": "array", "maxItems": MAX_OBSERVATIONS, "items": reference("Observation")},
            },
            "required": ["observations"],
            "additionalProperties": False,
        },
    }


def observation_paths() -> dict[str, Any]:
    """The OpenAPI paths."""
    return {
        "/v1/observations": {"post": _post()},
        "/v1/observations/summary": {"get": _summary()},
    }


def _observation_schema() -> Schema:
    mib = {"type": "number", "minimum": MIN_BYTES // MIB, "maximum": MAX_BYTES // MIB}
    in_bytes = {"type": "integer", "minimum": MIN_BYTES, "maximum": MAX_BYTES}
    text = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT_LENGTH}
    limit = "the memory that it could have had: its limit, or the whole GPU"
    properties: dict[str, tuple[Schema, str]] = {
        "prediction_id": (
            {"type": "string", "format": "uuid"},
            "id of the prediction that the job was scheduled with",
        ),
        "job": (reference("TrainingJob"), "the job, where there is no prediction or it may be forgotten"),
        "gpu": (text, "the GPU that it ran on; that of the prediction unless given, and required with a job"),
        "peak_mib": (mib, "the most GPU memory that it took, CUDA context included, in MiB (2**20 bytes)"),
        "peak_bytes": (in_bytes, "the same in bytes, instead"),
        "source": (
            {"type": "string", "enum": list(SOURCES)},
            "where the peak comes from. " + "; ".join(f"`{name}`: {meaning}" for name, meaning in SOURCES.items()),
        ),
        "oom": ({"type": "boolean", "default": False}, "whether it ran out of GPU memory; then the peak may be left out"),
        "limit_mib": (mib, limit),
        "limit_bytes": (in_bytes, "the same in bytes, instead"),
        "observed_at": ({"type": "string", "format": "date-time"}, "when it ended"),
        "idempotency_key": (
            {"type": "string", "minLength": 1, "maxLength": MAX_KEY_LENGTH},
            "the reporter's own name for this observation: sent again, it is stored once. Without one the content decides",
        ),
        "driver": (text, "version of the GPU's driver"),
        "cuda": (text, "version of CUDA"),
        "torch": (text, "version of PyTorch"),
    }
    return {
        "type": "object",
        "description": "What one run of a job used.",
        "properties": {name: _described(schema, meaning) for name, (schema, meaning) in properties.items()},
        "required": ["source"],
        "anyOf": [{"required": ["prediction_id"]}, {"required": ["job", "gpu"]}],
        "additionalProperties": False,
    }


def _described(schema: Schema, meaning: str) -> Schema:
    nullable = {"anyOf": [{name: value for name, value in schema.items() if name != "default"}, {"type": "null"}]}
    return {**nullable, **({"default": schema["default"]} if "default" in schema else {}), "description": meaning}


def _post() -> dict[str, Any]:
    stored = {
        "observation_id": "01932f6d-0c2b-7e11-8a4f-5b6c7d8e9f0a",
        "created": True,
        "prediction_id": _PREDICTION,
        "job_sha256": "9" * 64,
        "gpu": "NVIDIA A100-SXM4-40GB",
    }
    examples = {
        "by_prediction": {"value": {"prediction_id": _PREDICTION, "peak_mib": 6543, "source": "slurm_gpumem"}},
        "out_of_memory": {"value": {"prediction_id": _PREDICTION, "oom": True, "limit_mib": 8192, "source": "nvml_process"}},
        "by_job": {
            "value": {
                "job": EXAMPLE_JOBS[FAMILIES[0]],
                "gpu": "A100",
                "peak_mib": 1789,
                "source": "nvml_accounting",
                "idempotency_key": "cluster-1/job-4711",
            }
        },
        "several": {
            "value": {"observations": [{"prediction_id": _PREDICTION, "peak_bytes": 6_860_832_768, "source": "dcgm"}]},
        },
    }
    one_or_many = {"anyOf": [reference("StoredObservation"), reference("ObservationResults")]}
    return {
        "tags": ["observations"],
        "summary": "Report what finished jobs used",
        "description": "Answered when the observation is on the disk. Sending it again is safe: it is stored once.",
        "operationId": "observe",
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {"anyOf": [reference("Observation"), reference("Observations")]},
                    "examples": examples,
                }
            },
        },
        "responses": {
            "201": {
                "description": "It is stored.",
                "content": {"application/json": {"schema": reference("StoredObservation"), "example": stored}},
            },
            "200": {
                "description": "It had been stored before; or the results of several.",
                "content": {"application/json": {"schema": one_or_many, "example": {**stored, "created": False}}},
            },
            "404": _problem("There is no such prediction, or this service stores no observations."),
            "409": _problem("The idempotency key was used for another observation."),
            "413": _problem("The body is too large."),
            "415": _problem("The body is not declared as application/json."),
            "422": _problem("The body is no JSON, or a field in it is at fault."),
            "503": _problem("Too many observations wait, or the database is away: send it again later."),
        },
    }


def _summary() -> dict[str, Any]:
    return {
        "tags": ["observations"],
        "summary": "What predictions were worth, against what jobs used",
        "operationId": "observation_summary",
        "parameters": [
            {
                "name": "days",
                "in": "query",
                "required": False,
                "description": "how far back to look, in days",
                "schema": {"type": "integer", "minimum": 1, "maximum": MAX_DAYS, "default": DEFAULT_DAYS},
            }
        ],
        "responses": {
            "200": {
                "description": "The summary.",
                "content": {"application/json": {"schema": reference("ObservationSummary")}},
            },
            "404": _problem("This service stores no observations."),
            "422": _problem("A parameter is at fault."),
            "503": _problem("The database is away."),
        },
    }


def _problem(meaning: str) -> dict[str, Any]:
    return {"description": meaning, "content": {MEDIA_TYPE: {"schema": reference("Problem")}}}
