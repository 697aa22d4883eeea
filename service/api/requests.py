"""Validates request bodies: checks them against their models, explains errors, and looks up the names in them.

It reads the members beside the jobs; :mod:`gpumemnet.job.json_codec` reads the jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gpumemnet.errors import InvalidJobError, InvalidRequestError, did_you_mean
from gpumemnet.job.json_codec import parse_json
from gpumemnet.job.layers import describe
from gpumemnet.job.training_job import JOB_FIELDS
from gpumemnet.predict.bins import bins_of_width, named_bins
from gpumemnet.predict.fits import Target, catalogue_targets, target
from gpumemnet.predict.prediction import DEFAULT_COVERAGE, PredictionOptions
from gpumemnet.units import MIB

from .models import Device, PredictOptions, Shape, SmallestGpuRequest

S = TypeVar("S", bound=Shape)
Schema = Mapping[str, Any]

_MAX_NAME: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(PredictionOptions):
    """The options of a request; requests with equal options are predicted together.

    Attributes:
        targets: the GPUs, MIG profiles or devices of ``fits``; ``None`` without ``fits``.
    """

    targets: tuple[Target, ...] | None = None


def read_request(body: bytes, shape: type[S]) -> S:
    """The request in a body.

    Args:
        body: JSON.
        shape: the request model.

    Raises:
        InvalidRequestError: when the body is not JSON, or does not match the model.
    """
    try:
        document = parse_json(body)
    except InvalidJobError as error:
        raise InvalidRequestError(error.reason, error.field or "body") from None
    return checked(document, shape)


def checked(document: Any, shape: type[S]) -> S:
    """``document`` validated as a ``shape``.

    Raises:
        InvalidRequestError: names the first invalid member, and what was expected.
    """
    try:
        return shape.model_validate(document)
    except ValidationError as error:
        raise _explained(error.errors(include_url=False), shape) from None


def options_of(request: PredictOptions) -> Options:
    """The options of ``request``.

    Raises:
        InvalidRequestError: for an unknown GPU or bin scheme.
    """
    bins = None
    if request.bins is not None:
        if request.bin_width_mib is not None:
            raise InvalidRequestError("must not stand beside bin_width_mib: give one of them", "bins")
        bins = named_bins(request.bins)
    elif request.bin_width_mib is not None:
        bins = bins_of_width(request.bin_width_mib * MIB)
    targets = None
    if request.devices is not None or (request.fits is not None and request.fits is not False):
        named = catalogue_targets() if request.fits is True else _named_targets(request.fits or (), "fits")
        targets = named + _device_targets(request.devices or ())
    return Options(coverage=_coverage(request.coverage), bins=bins, gpu=request.gpu, encoder=request.encoder, targets=targets)


def smallest_gpu_options(request: SmallestGpuRequest) -> Options:
    """The options of ``request``, with its candidate GPUs.

    Raises:
        InvalidRequestError: for an unknown GPU.
    """
    targets = None
    if request.gpus is not None or request.devices is not None:
        targets = _named_targets(request.gpus or (), "gpus") + _device_targets(request.devices or ())
    return Options(coverage=_coverage(request.coverage), encoder=request.encoder, targets=targets)


def _coverage(asked: float | None) -> float:
    return DEFAULT_COVERAGE if asked is None else asked


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
            targets.append(target(device.gpu, mig=device.mig, free_mib=device.free_mib, device=device.id))
        except InvalidRequestError as error:
            raise InvalidRequestError(error.reason, f"devices[{index}].{error.field}") from None
    return tuple(targets)


# Error messages for invalid requests


def _explained(errors: Sequence[ErrorDetails], shape: type[Shape]) -> InvalidRequestError:
    errors = sorted(errors, key=lambda error: error["type"] == "missing")  # an invalid member explains a missing one
    first = errors[0]["loc"]
    # A value with alternative forms has an error for each form: report the form that matched the furthest.
    error = max((error for error in reversed(errors) if error["loc"][:1] == first[:1]), key=lambda error: len(error["loc"]))
    root = _schema(shape)
    place, schema, parent = "", root, root
    for part in error["loc"]:
        inner = _inner(schema, part, root)
        if inner is None and error["type"] not in ("extra_forbidden", "missing"):
            continue  # the name of a form is not part of the path
        parent, schema = schema, inner or {}
        place += f"[{part}]" if isinstance(part, int) else f".{_printable(part)}" if place else _printable(part)
    return InvalidRequestError(_sentence(error, place, schema, parent, root), place or "body")


def _sentence(error: ErrorDetails, place: str, schema: Schema, parent: Schema, root: Schema) -> str:
    value, kind = error["input"], error["type"]
    if kind == "missing":
        return "is missing" if "." in place else f"is missing: the body must be {_wanted(parent, place, root)}"
    if kind == "extra_forbidden":
        return f"is not a field: {_hint(str(error['loc'][-1]), _members(parent, root))}"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind == "too_short" and isinstance(value, list):
        return f"must hold at least {error['ctx']['min_length']}, not {len(value)}"
    if kind == "too_long" and isinstance(value, list):
        return f"must hold at most {error['ctx']['max_length']}, not {len(value)}: send several requests"
    return f"must be {_wanted(schema, place, root)}, not {describe(value)}"


def _wanted(schema: Schema, place: str, root: Schema) -> str:
    """A description of the values that ``schema`` accepts."""
    forms = [form for form in _forms(schema, root) if form.get("type") != "null"]
    return " or ".join(dict.fromkeys(_form(form, place, root) for form in forms)) or "something else"


def _form(form: Schema, place: str, root: Schema) -> str:
    if "const" in form:
        return str(form["const"])
    if "enum" in form:
        return f"one of {', '.join(form['enum'])}"
    examples = f" such as {' or '.join(map(str, form['examples']))}" if "examples" in form else ""
    kind = form.get("type")
    if kind == "integer":
        unit = " of MiB" if place.endswith("_mib") else ""
        within = f" between {form['minimum']} and {form['maximum']}" if "maximum" in form else ""
        return f"a whole number{unit}{within}"
    if kind == "number":
        return "a number"
    if kind == "boolean":
        return "true or false"
    if kind == "array":
        items = form.get("items", {})
        several = {"string": "texts", "object": "objects"}
        named = next((several[one["type"]] for one in _forms(items, root) if one.get("type") in several), "values")
        inner = f" with {', '.join(_members(items, root))}" if _members(items, root) else ""
        examples = "".join(f" such as {' or '.join(one['examples'])}" for one in _forms(items, root) if "examples" in one)
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
def _schema(shape: type[Shape]) -> Schema:
    return shape.model_json_schema()


def _forms(schema: Schema, root: Schema) -> list[Schema]:
    """The alternative forms of a value, with references resolved."""
    if "$ref" in schema:
        return _forms(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return [form for one in schema["anyOf"] for form in _forms(one, root)]
    return [schema]


def _inner(schema: Schema, part: str | int, root: Schema) -> Schema | None:
    for form in _forms(schema, root):
        found: Schema | None = form.get("items") if isinstance(part, int) else form.get("properties", {}).get(part)
        if found is not None:
            return found
    return None


def _members(schema: Schema, root: Schema) -> list[str]:
    """Names of the members of an object, the content first."""
    names = [name for form in _forms(schema, root) for name in form.get("properties", {})]
    return sorted(names, key=lambda name: name not in ("job", "jobs"))


def _printable(part: str | int) -> str:
    return str(part)[:_MAX_NAME]
