"""The schemas of the requests, and how a body becomes one: JSON, then its schema, then the names in
it.

A schema checks types, ranges and names of members.  :func:`options_of` looks up the names of GPUs
and bin schemes. :mod:`gpumemnet.job.json_codec` reads the jobs, and :mod:`service.api.openapi`
describes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple, TypeVar

from pydantic import Field, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails

from gpumemnet.errors import InvalidJobError, InvalidRequestError, did_you_mean
from gpumemnet.job.json_codec import parse_json
from gpumemnet.job.layers import describe
from gpumemnet.job.training_job import JOB_FIELDS
from gpumemnet.predict.bundle_card import ENCODERS
from gpumemnet.predict.distribution import (
    DEFAULT_TOP_BYTES,
    MAX_BINS,
    PUBLISHED_BINS,
    bins_of_width,
    named_bins,
)
from gpumemnet.predict.gpu_fit import (
    MAX_DEVICE_NAME,
    MAX_FREE_MIB,
    Target,
    catalogue_targets,
    target,
)
from gpumemnet.predict.largest_batch import DEFAULT_MAX_BATCH
from gpumemnet.predict.prediction import DEFAULT_COVERAGE, PredictionOptions
from gpumemnet.units import MIB

from .responses import PREDICTION_FIELDS, Job, OneOf, Schema

S = TypeVar("S", bound=Schema)

_MAX_NAME: Final = 64

MIN_BIN_WIDTH_MIB: Final = math.ceil(DEFAULT_TOP_BYTES / (MAX_BINS - 1) / MIB)
MAX_BIN_WIDTH_MIB: Final = DEFAULT_TOP_BYTES // MIB
MAX_TARGETS: Final = 256
"""Most names in ``fits`` or ``gpus``, and most devices, in one request."""
MAX_ASKED_BATCH: Final = 2**20
"""Largest ``max_batch``: more would cost time, and no job has so large a batch."""

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
    Field(
        description="the classifier: mlp, transformer, or common (one model for all families); by default mlp if the family has "
        "it"
    ),
]
GpuName = Annotated[str, Field(examples=["A100"])]
GpuNames = Annotated[
    list[Annotated[str, Field(examples=["A100", "A100/3g.20gb"])]], Field(max_length=MAX_TARGETS)
]
MigName = Annotated[
    Annotated[str, Field(examples=["3g.20gb"])] | None,
    Field(description="its MIG profile, for a partition"),
]
FreeMib = Annotated[
    Annotated[int, Field(ge=0, le=MAX_FREE_MIB)] | None,
    Field(
        description="memory that is free now, as NVML reports it; by default that of an empty device"
    ),
]


class Device(Schema):
    """One device of a site, as it is now."""

    id: str = Field(
        min_length=1,
        max_length=MAX_DEVICE_NAME,
        description="the caller's name for it, such as an index or a UUID",
    )
    gpu: str = Field(description="its GPU model, by a name in /v1/gpus", examples=["A100"])
    mig: MigName = None
    free_mib: FreeMib = None


Devices = Annotated[list[Device], Field(max_length=MAX_TARGETS)]


class PredictOptions(Schema):
    """The options of a prediction."""

    coverage: Coverage = None
    bin_width_mib: Annotated[int, Field(ge=MIN_BIN_WIDTH_MIB, le=MAX_BIN_WIDTH_MIB)] | None = Field(
        None,
        description="width of the bins in MiB; by default 1,024, up to the capacity of the GPU",
    )
    bins: Annotated[str, OneOf(PUBLISHED_BINS)] | None = Field(
        None, description="a published bin scheme by name, instead of a width"
    )
    gpu: GpuName | None = Field(
        None, description="the GPU, by a name in /v1/gpus; by default the service's"
    )
    encoder: Encoder = None
    fits: bool | GpuNames | None = Field(
        None,
        description="decide what the job fits: true for the whole catalogue, or names as in /v1/gpus or such as A100/3g.20gb",
    )
    devices: Devices | None = Field(
        None, description="devices that the job may fit, with their free memory"
    )


class PredictRequest(PredictOptions):
    """One job, and the options of its prediction."""

    job: Job


class BatchRequest(PredictOptions):
    """Many jobs, and the options of their predictions."""

    jobs: list[Job] = Field(description="the jobs; an invalid one does not fail the others")
    fields: (
        Annotated[list[Annotated[str, OneOf(PREDICTION_FIELDS)]], Field(min_length=1)] | None
    ) = Field(None, description="the fields of each prediction to answer; all by default")


class BatchSizesRequest(Schema):
    """A job whose largest batch size is to be found, and the GPU that it is to run on."""

    job: Job = Field(description="the job; its own batch size and traced peak are ignored")
    coverage: Coverage = None
    encoder: Encoder = None
    gpu: GpuName | None = Field(
        None,
        description="the GPU, by a name in /v1/gpus or such as A100/3g.20gb; by default the service's",
    )
    mig: MigName = None
    free_mib: FreeMib = None
    max_batch: Annotated[int, Field(ge=1, le=MAX_ASKED_BATCH)] | None = Field(
        None,
        description="the largest batch size to consider",
        json_schema_extra={"default": DEFAULT_MAX_BATCH},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(PredictionOptions):
    """The options of a request; requests with equal options are predicted together.

    Attributes:
        targets: the GPUs, MIG profiles or devices of ``fits``; ``None`` without ``fits``.
    """

    targets: tuple[Target, ...] | None = None


def read_request(body: bytes, schema: type[S]) -> S:
    """The request in a body.

    Args:
        body: JSON.
        schema: the schema of the request.

    Raises:
        InvalidRequestError: when the body is not JSON, or does not match the schema.
    """
    try:
        document = parse_json(body)
    except InvalidJobError as error:
        raise InvalidRequestError(error.reason, error.field or "body") from None
    return checked(document, schema)


def checked(document: Any, schema: type[S]) -> S:
    """``document`` validated by ``schema``.

    Raises:
        InvalidRequestError: names the first invalid member, and what was expected.
    """
    try:
        return schema.model_validate(document)
    except ValidationError as error:
        raise explained(error.errors(include_url=False), schema) from None


def options_of(request: PredictOptions) -> Options:
    """The options of ``request``.

    Raises:
        InvalidRequestError: for an unknown GPU or bin scheme.
    """
    bins = None
    if request.bins is not None:
        if request.bin_width_mib is not None:
            raise InvalidRequestError(
                "must not stand beside bin_width_mib: give one of them", "bins"
            )
        bins = named_bins(request.bins)
    elif request.bin_width_mib is not None:
        bins = bins_of_width(request.bin_width_mib * MIB)
    targets = None
    if request.devices is not None or (request.fits is not None and request.fits is not False):
        named = (
            catalogue_targets()
            if request.fits is True
            else _named_targets(request.fits or (), "fits")
        )
        targets = named + _device_targets(request.devices or ())
    return Options(
        coverage=_coverage(request.coverage),
        bins=bins,
        gpu=request.gpu,
        encoder=request.encoder,
        targets=targets,
    )


def _coverage(coverage: float | None) -> float:
    return DEFAULT_COVERAGE if coverage is None else coverage


def _named_targets(names: Sequence[str] | bool, field: str) -> tuple[Target, ...]:
    targets = []
    for index, name in enumerate(names or ()):  # type: ignore[arg-type]
        try:
            targets.append(target(name))
        except InvalidRequestError as error:
            raise InvalidRequestError(error.reason, f"{field}[{index}]") from None
    return tuple(targets)


def _device_targets(devices: Sequence[Device]) -> tuple[Target, ...]:
    targets = []
    for index, device in enumerate(devices):
        try:
            targets.append(
                target(device.gpu, mig=device.mig, free_mib=device.free_mib, device=device.id)
            )
        except InvalidRequestError as error:
            raise InvalidRequestError(error.reason, f"devices[{index}].{error.field}") from None
    return tuple(targets)


class JobRequest(NamedTuple):
    """The request of one prediction: the JSON document of the job, not read yet, and the
    options."""

    job: Any
    options: Options


def read_job_request(body: bytes) -> JobRequest:
    """The request in a body of ``POST /v1/predict``.

    Raises:
        InvalidRequestError: when the body is not JSON, or a member beside the job is invalid.
    """
    request = read_request(body, PredictRequest)
    return JobRequest(request.job, options_of(request))


def explained(errors: Sequence[ErrorDetails], schema: type[Schema]) -> InvalidRequestError:
    """The error for the errors that pydantic found in a request: the path of the first invalid
    member, and what was expected there.

    Args:
        errors: the errors.
        schema: the schema of the request.
    """
    # An invalid member explains a missing one.
    errors = sorted(errors, key=lambda error: error["type"] == "missing")
    member = errors[0]["loc"][:1]
    # A value with alternative forms has an error for each form: report the one that matched the
    # furthest.
    error = max(
        (error for error in reversed(errors) if error["loc"][:1] == member),
        key=lambda error: len(error["loc"]),
    )
    if not member:
        return InvalidRequestError(f"must be a JSON object, not {describe(error['input'])}", "body")
    members = schema.model_fields if len(error["loc"]) == 1 else Device.model_fields
    *inner, last = error["loc"][1:] or ("",)
    is_named = error["type"] in ("extra_forbidden", "missing")
    path = str(member[0])[:_MAX_NAME]
    for part in (*inner, last):
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in Device.model_fields or (is_named and part):  # else the name of a form
            path += f".{part[:_MAX_NAME]}"
    return InvalidRequestError(_sentence(error, list(members)), path)


def _sentence(error: ErrorDetails, members: Sequence[str]) -> str:
    kind, message = error["type"], error["msg"].replace("Input should", "must")
    if kind == "missing":
        return f"is missing: known fields are {', '.join(members)}"
    if kind == "extra_forbidden":
        name = str(error["loc"][-1])
        content = next((member for member in ("job", "jobs") if member in members), None)
        if content is not None and name in JOB_FIELDS:
            return f"is not a field: it belongs to a job, and jobs stand under '{content}'"
        hint = did_you_mean(name, members, f"known fields are {', '.join(members)}")
        return f"is not a field: {hint}"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind in ("too_short", "too_long") and isinstance(error["input"], list):
        return message.replace("List should", "must").replace(" after validation", "")
    return f"{message}, not {describe(error['input'])}"
