"""Request and response models of the observation endpoints."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import ConfigDict, Field

from gpumemnet.site.observations import (
    MAX_BYTES,
    MAX_KEY_LENGTH,
    MAX_TEXT_LENGTH,
    MIN_BYTES,
    SOURCES,
)
from gpumemnet.units import MIB

from ..api.responses import Job, OneOf, Problem, Schema

MAX_OBSERVATIONS: Final = 1000
"""Most observations in one request."""

_Mib = Annotated[float, Field(ge=MIN_BYTES // MIB, le=MAX_BYTES // MIB)]
_Bytes = Annotated[int, Field(ge=MIN_BYTES, le=MAX_BYTES)]
_Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_LENGTH)]
_LIMIT: Final = "the memory that it could have had: its limit, or the whole GPU"


class Observation(Schema):
    """The memory that one run of a job used."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": ["prediction_id"]}, {"required": ["job", "gpu"]}]}
    )

    prediction_id: Annotated[str, Field(json_schema_extra={"format": "uuid"})] | None = Field(
        None, description="id of the prediction that the job was scheduled with"
    )
    job: Job | None = Field(
        None, description="the job, if there is no prediction or it may have been deleted"
    )
    gpu: _Text | None = Field(
        None,
        description="the GPU that it ran on; by default that of the prediction; required with a job",
    )
    peak_mib: _Mib | None = Field(
        None,
        description="the most GPU memory that it took, CUDA context included, in MiB (2**20 bytes)",
    )
    peak_bytes: _Bytes | None = Field(None, description="the same in bytes, instead")
    source: Annotated[str, OneOf(SOURCES)] = Field(
        description="where the peak comes from. "
        + "; ".join(f"`{name}`: {meaning}" for name, meaning in SOURCES.items())
    )
    oom: bool | None = Field(
        False, description="whether it ran out of GPU memory; then the peak may be left out"
    )
    limit_mib: _Mib | None = Field(None, description=_LIMIT)
    limit_bytes: _Bytes | None = Field(None, description="the same in bytes, instead")
    observed_at: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = Field(
        None, description="when it ended"
    )
    idempotency_key: Annotated[str, Field(min_length=1, max_length=MAX_KEY_LENGTH)] | None = Field(
        None,
        description="the client's key: an observation with the same key is stored once. By default, its content is the key",
    )
    driver: _Text | None = Field(None, description="version of the GPU's driver")
    cuda: _Text | None = Field(None, description="version of CUDA")
    torch: _Text | None = Field(None, description="version of PyTorch")


class Observations(Schema):
    """Several observations; an invalid one does not fail the others."""

    observations: list[Observation] = Field(max_length=MAX_OBSERVATIONS)


class StoredObservation(Schema):
    """An observation that is on the disk."""

    observation_id: str
    created: bool = Field(
        description="whether this request stored it; false when the same had been stored before"
    )
    prediction_id: str | None = Field(description="the prediction that it is compared with")
    job_sha256: str = Field(description="hash of the job")
    gpu: str = Field(description="the GPU that it was stored for")


class ObservedResult(Schema):
    """The result of a stored observation."""

    observation: StoredObservation


class RefusedObservation(Schema):
    """The result of an observation that was not stored; the others are."""

    problem: Problem


class ObservationResults(Schema):
    """One result per observation, in order."""

    failed: int = Field(ge=0, description="number of observations that were not stored")
    results: list[ObservedResult | RefusedObservation]


class Worth(Schema):
    """Coverage and error of predictions, compared with what the jobs used."""

    judged: int = Field(
        ge=0, description="jobs whose observation can confirm or contradict the safe bytes"
    )
    covered: int = Field(ge=0, description="of these, jobs within the safe bytes")
    coverage: float | None = Field(description="covered / judged")
    promised_coverage: float | None = Field(description="mean of the requested coverages")
    median_error_percent: float | None = Field(
        description="median of expected minus observed, in percent of the observed"
    )
    median_absolute_error_percent: float | None
    under_prediction_rate: float | None = Field(
        description="share of the jobs that used more than expected"
    )
    waste_share: float | None = Field(
        description="share of the safe bytes that was not used, over the covered jobs"
    )


class SideBySide(Schema):
    """Champion and challenger on the jobs that both predicted."""

    champion: Worth
    challenger: Worth


class ObservedGroup(Schema):
    """Predictions of one release for one family and GPU."""

    family: str
    gpu: str
    release: str
    observations: int = Field(ge=0)
    oom: int = Field(ge=0, description="jobs that ran out of memory")
    without_limit: dict[str, int] = Field(
        description="predictions without a limit, by the option or feature that the model does not know; what to measure next"
    )
    champion: Worth
    challenger: SideBySide | None


class FamilyAlarm(Schema):
    """Whether the coverage of a family is significantly too low."""

    family: str
    on: bool
    judged: int = Field(ge=0)
    covered: int = Field(ge=0)
    coverage: float | None
    promised_coverage: float | None
    probability: float = Field(
        ge=0,
        le=1,
        description="probability of at least as many misses if the coverage held (p-value)",
    )


class CoverageAlarm(Schema):
    """The alarm's rule and its state."""

    rule: str
    threshold: float
    window: int = Field(description="number of latest observations of a family that it tests")
    families: list[FamilyAlarm]


class ObservationSummary(Schema):
    """Coverage and error of the predictions of the last days."""

    days: float
    observations: int = Field(ge=0)
    oom: int = Field(ge=0)
    without_prediction: int = Field(
        ge=0,
        description="observations with a job and no prediction; kept for training, not compared",
    )
    on_another_gpu: int = Field(
        ge=0, description="observations from another GPU than predicted; not compared"
    )
    sources: dict[str, int] = Field(description="observations by the source of their peak")
    compared: int = Field(ge=0, description="observations in the groups below")
    complete: bool = Field(description="whether these are all observations and not only the newest")
    groups: list[ObservedGroup]
    alarm: CoverageAlarm
