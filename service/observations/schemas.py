"""Request and response models of the observation endpoints."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import ConfigDict, Field

from gpumemnet.site.observation import MAX_BYTES, MAX_KEY_LENGTH, MAX_TEXT_LENGTH, MIN_BYTES, SOURCES
from gpumemnet.units import MIB

from ..api.schemas import Job, OneOf, Problem, Schema

MAX_OBSERVATIONS: Final = 1000
"""Most observations in one request."""

_Mib = Annotated[float, Field(ge=MIN_BYTES // MIB, le=MAX_BYTES // MIB)]
_Bytes = Annotated[int, Field(ge=MIN_BYTES, le=MAX_BYTES)]
_Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_LENGTH)]
_LIMIT: Final = "the memory that it could have had: its limit, or the whole GPU"


class Observation(Schema):
    """What one run of a job used; :func:`gpumemnet.site.observation.observation_from_dict` reads it."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["prediction_id"]}, {"required": ["job", "gpu"]}]})

    prediction_id: Annotated[str, Field(json_schema_extra={"format": "uuid"})] | None = Field(
        None, description="id of the prediction that the job was scheduled with"
    )
    job: Job | None = Field(None, description="the job, where there is no prediction or it may be forgotten")
    gpu: _Text | None = Field(
        None, description="the GPU that it ran on; that of the prediction unless given, and required with a job"
    )
    peak_mib: _Mib | None = Field(
        None, description="the most GPU memory that it took, CUDA context included, in MiB (2**20 bytes)"
    )
    peak_bytes: _Bytes | None = Field(None, description="the same in bytes, instead")
    source: Annotated[str, OneOf(SOURCES)] = Field(
        description="where the peak comes from. " + "; ".join(f"`{name}`: {meaning}" for name, meaning in SOURCES.items())
    )
    oom: bool | None = Field(False, description="whether it ran out of GPU memory; then the peak may be left out")
    limit_mib: _Mib | None = Field(None, description=_LIMIT)
    limit_bytes: _Bytes | None = Field(None, description="the same in bytes, instead")
    observed_at: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = Field(
        None, description="when it ended"
    )
    idempotency_key: Annotated[str, Field(min_length=1, max_length=MAX_KEY_LENGTH)] | None = Field(
        None,
        description="the reporter's own name for this observation: sent again, it is stored once. Otherwise the content decides",
    )
    driver: _Text | None = Field(None, description="version of the GPU's driver")
    cuda: _Text | None = Field(None, description="version of CUDA")
    torch: _Text | None = Field(None, description="version of PyTorch")


class Observations(Schema):
    """Several observations; each may be refused alone."""

    observations: list[Observation] = Field(max_length=MAX_OBSERVATIONS)


class StoredObservation(Schema):
    """An observation that is on the disk."""

    observation_id: str
    created: bool = Field(description="whether this request stored it; false when the same had been stored before")
    prediction_id: str | None = Field(description="the prediction that it is compared with")
    job_sha256: str = Field(description="hash of the job")
    gpu: str = Field(description="the GPU that it was stored for")


class ObservedResult(Schema):
    """An observation of a list that was stored."""

    observation: StoredObservation


class RefusedObservation(Schema):
    """An observation of a list that was not stored; the others are all the same."""

    problem: Problem


class ObservationResults(Schema):
    """One result per observation, in order."""

    failed: int = Field(ge=0, description="number of observations that were not stored")
    results: list[ObservedResult | RefusedObservation]


class Worth(Schema):
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


class SideBySide(Schema):
    """Champion and challenger on the jobs that both were asked about."""

    champion: Worth
    challenger: Worth


class ObservedGroup(Schema):
    """Predictions of one release for one family and GPU."""

    family: str
    gpu: str
    release: str
    observations: int = Field(ge=0)
    oom: int = Field(ge=0, description="jobs that ran out of memory")
    champion: Worth
    challenger: SideBySide | None


class FamilyAlarm(Schema):
    """Whether a family's coverage is too low to be chance."""

    family: str
    on: bool
    judged: int = Field(ge=0)
    covered: int = Field(ge=0)
    coverage: float | None
    promised_coverage: float | None
    probability: float = Field(ge=0, le=1, description="of as many misses or more, if every promise held")


class CoverageAlarm(Schema):
    """The alarm's rule and its state."""

    rule: str
    threshold: float
    window: int = Field(description="observations of a family that it looks at")
    families: list[FamilyAlarm]


class ObservationSummary(Schema):
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
