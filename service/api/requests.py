"""The schemas of the requests, and how a body becomes one: JSON, then its schema, then the names in
it.

A schema checks types, ranges and names of members.  :func:`options_of` looks up the names of GPUs
and bin schemes. :mod:`gpumemnet.job.json_codec` reads the jobs, and :mod:`service.api.openapi`
describes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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
from gpumemnet.predict.fits import MAX_DEVICE_NAME, MAX_FREE_MIB, Target, catalogue_targets, target
from gpumemnet.predict.largest_batch import DEFAULT_MAX_BATCH
from gpumemnet.predict.prediction import DEFAULT_COVERAGE, PredictionOptions
from gpumemnet.units import MIB

from .responses import PREDICTION_FIELDS, Job, OneOf, Schema

S = TypeVar("S", bound=Schema)
JsonSchema = Mapping[str, Any]

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


# Why a request does not match its schema: the path of the first invalid member, and what was
# expected there.


def explained(errors: Sequence[ErrorDetails], schema: type[Schema]) -> InvalidRequestError:
    """The error for the errors that pydantic found in a request.

    Args:
        errors: the errors.
        schema: the schema of the request.
    """
    errors = sorted(
        errors, key=lambda error: error["type"] == "missing"
    )  # an invalid member explains a missing one
    first = errors[0]["loc"]
    # A value with alternative forms has an error for each form: report the form that matched the
    # furthest.
    error = max(
        (error for error in reversed(errors) if error["loc"][:1] == first[:1]),
        key=lambda error: len(error["loc"]),
    )
    root = _json_schema(schema)
    path, found, parent = "", root, root
    for part in error["loc"]:
        inner = _inner(found, part, root)
        if inner is None and error["type"] not in ("extra_forbidden", "missing"):
            continue  # the name of a form is not part of the path
        parent, found = found, inner or {}
        path += (
            f"[{part}]"
            if isinstance(part, int)
            else f".{_printable(part)}"
            if path
            else _printable(part)
        )
    return InvalidRequestError(_sentence(error, path, found, parent, root), path or "body")


def _sentence(
    error: ErrorDetails, path: str, schema: JsonSchema, parent: JsonSchema, root: JsonSchema
) -> str:
    value, kind = error["input"], error["type"]
    if kind == "missing":
        return (
            "is missing"
            if "." in path
            else f"is missing: the body must be {_expected(parent, path, root)}"
        )
    if kind == "extra_forbidden":
        return f"is not a field: {_hint(str(error['loc'][-1]), _members(parent, root))}"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind == "too_short" and isinstance(value, list):
        return f"must hold at least {error['ctx']['min_length']}, not {len(value)}"
    if kind == "too_long" and isinstance(value, list):
        return f"must hold at most {error['ctx']['max_length']}, not {len(value)}: send several requests"
    return f"must be {_expected(schema, path, root)}, not {describe(value)}"


def _expected(schema: JsonSchema, path: str, root: JsonSchema) -> str:
    """A description of the values that ``schema`` accepts."""
    forms = [form for form in _forms(schema, root) if form.get("type") != "null"]
    return " or ".join(dict.fromkeys(_form(form, path, root) for form in forms)) or "something else"


def _form(form: JsonSchema, path: str, root: JsonSchema) -> str:
    if "const" in form:
        return str(form["const"])
    if "enum" in form:
        return f"one of {', '.join(form['enum'])}"
    examples = f" such as {' or '.join(map(str, form['examples']))}" if "examples" in form else ""
    kind = form.get("type")
    if kind == "integer":
        unit = " of MiB" if path.endswith("_mib") else ""
        within = f" between {form['minimum']} and {form['maximum']}" if "maximum" in form else ""
        return f"a whole number{unit}{within}"
    if kind == "number":
        return "a number"
    if kind == "boolean":
        return "true or false"
    if kind == "array":
        items = form.get("items", {})
        several = {"string": "texts", "object": "objects"}
        named = next(
            (several[one["type"]] for one in _forms(items, root) if one.get("type") in several),
            "values",
        )
        inner = f" with {', '.join(_members(items, root))}" if _members(items, root) else ""
        examples = "".join(
            f" such as {' or '.join(one['examples'])}"
            for one in _forms(items, root)
            if "examples" in one
        )
        return f"a list of {named}{inner}{examples}"
    if kind == "object":
        return f"a JSON object with {', '.join(_members(form, root))}"
    if "maxLength" in form:
        return f"a text of {form.get('minLength', 0)} to {form['maxLength']} characters"
    return f"a text{examples}"


def _hint(name: str, members: Sequence[str]) -> str:
    content = next((member for member in ("job", "jobs") if member in members), None)
    if content is not None and name in JOB_FIELDS:
        return f"it belongs to a job, and jobs stand under '{content}'"
    return did_you_mean(name, members, f"known fields are {', '.join(members)}")


@cache
def _json_schema(schema: type[Schema]) -> JsonSchema:
    return schema.model_json_schema()


def _forms(schema: JsonSchema, root: JsonSchema) -> list[JsonSchema]:
    """The alternative forms of a value, with references resolved."""
    if "$ref" in schema:
        return _forms(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return [form for one in schema["anyOf"] for form in _forms(one, root)]
    return [schema]


def _inner(schema: JsonSchema, part: str | int, root: JsonSchema) -> JsonSchema | None:
    for form in _forms(schema, root):
        found: JsonSchema | None = (
            form.get("items") if isinstance(part, int) else form.get("properties", {}).get(part)
        )
        if found is not None:
            return found
    return None


def _members(schema: JsonSchema, root: JsonSchema) -> list[str]:
    """Names of the members of an object, the content first."""
    names = [name for form in _forms(schema, root) for name in form.get("properties", {})]
    return sorted(names, key=lambda name: name not in ("job", "jobs"))


def _printable(part: str | int) -> str:
    return str(part)[:_MAX_NAME]
