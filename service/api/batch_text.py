"""Reads the usual batch of jobs from its text straight into columns, without a dictionary for any of them.

Every value is checked while it is decoded.  A request in which anything is out of the ordinary (a job that is not valid, layers
as lists, an option that is an object) is left to :mod:`service.api.requests` and :mod:`gpumemnet.job.json_columns`, which read
it job by job and say what is wrong; what is read here, those read alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from gpumemnet.job.job_batch import NUMBER_FIELDS, OPTION_FIELDS, OPTIONS_OF, Array, Indices, JobBatch
from gpumemnet.job.json_columns import DEFAULTS, LayerColumns, job_batch, kind_codes, settle_totals
from gpumemnet.job.layers import CODE_OF_KIND, MAX_ELEMENTS, is_kind
from gpumemnet.job.training_job import (
    FIELD_CHOICES,
    FIELD_RANGES,
    JOB_FIELDS,
    MAX_LAYERS,
    NULLABLE_FIELDS,
    REQUIRED_FIELDS,
    SCHEMA_VERSION,
)

from .requests import OPTION_FIELDS as REQUEST_OPTIONS
from .requests import PLAIN_OPTIONS, Options, read_options

_RANGES: Final = {name: (minimum, maximum) for name, minimum, maximum in FIELD_RANGES}
_LAYERS: Final = attrgetter("layers")
_KIND, _ACTIVATIONS, _PARAMETERS = map(attrgetter, ("kind", "activations", "parameters"))
_NESTED_OPTIONS: Final = ("fits", "devices")


class _Layer(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    kind: str
    activations: Annotated[int, Meta(ge=0, le=MAX_ELEMENTS)]
    parameters: Annotated[int, Meta(ge=0, le=MAX_ELEMENTS)] | UnsetType = UNSET


def _job_type() -> Any:
    """A job's fields with what each may hold.  An optional one that is not stated stays unset, so that keys can be counted."""
    types: dict[str, Any] = {name: bool for name in OPTION_FIELDS if name not in FIELD_CHOICES}
    types |= {name: Annotated[int, Meta(ge=minimum, le=maximum)] for name, (minimum, maximum) in _RANGES.items()}
    types |= {name: Literal[choices] for name, choices in FIELD_CHOICES.items()}
    types |= {"layers": list[_Layer], "schema_version": Literal[SCHEMA_VERSION]}
    types |= {name: types[name] | None for name in (*NULLABLE_FIELDS, "layers")}
    fields: list[Any] = [(name, types[name]) for name in REQUIRED_FIELDS]
    fields += [(name, types[name] | UnsetType, UNSET) for name in JOB_FIELDS if name not in REQUIRED_FIELDS]
    return msgspec.defstruct("_Job", fields, gc=False, forbid_unknown_fields=True)


def _request_type() -> Any:
    plain: Any = None | bool | int | float | str | UnsetType
    jobs: Any = list.__class_getitem__(_job_type())
    options = [(name, plain, UNSET) for name in REQUEST_OPTIONS if name not in _NESTED_OPTIONS]
    return msgspec.defstruct("_Request", [("jobs", jobs), *options], gc=False, forbid_unknown_fields=True)


_DECODER: Final = msgspec.json.Decoder(_request_type())


class PlainBatch(NamedTuple):
    """The jobs of a request, and how the answers are wanted."""

    jobs: JobBatch
    options: Options


def read_plain_batch(body: bytes, max_jobs: int, max_layers: int) -> PlainBatch | None:
    """What stands in the body of a batch request; ``None`` unless all of it is plain.

    Args:
        body: JSON.
        max_jobs, max_layers: most jobs, and most layers of one.

    Raises:
        InvalidRequestError: when an option beside the jobs is not what it may be.
    """
    try:
        request = _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not 0 < len(request.jobs) <= max_jobs:
        return None
    stated = {name: value for name in request.__struct_fields__[1:] if (value := getattr(request, name)) is not UNSET}
    read = _read(request.jobs, min(max_layers, MAX_LAYERS))
    if read is None:
        return None
    jobs, key_count = read
    # Of two equal keys the decoder keeps the last: there must be as many colons as there are keys.
    if body.count(b":") != 1 + len(stated) + key_count:
        return None
    return PlainBatch(jobs, read_options(stated) if stated else PLAIN_OPTIONS)


def _read(jobs: list[Any], max_layers: int) -> tuple[JobBatch, int] | None:
    """The jobs in columns, and how many keys were stated."""
    columns = {name: list(map(attrgetter(name), jobs)) for name in NUMBER_FIELDS}
    versions = [job.schema_version for job in jobs]
    layers = list(map(_LAYERS, jobs))
    unset = {name: column.count(UNSET) for name, column in columns.items()}
    unset_elsewhere = versions.count(UNSET) + layers.count(UNSET)
    read = _read_layers(layers, max_layers)
    if read is None:
        return None
    layer_columns, layer_keys = read
    option_sets, option_codes, unset_options = _read_options(map(OPTIONS_OF, jobs), len(jobs))
    numbers = {name: _as_numbers(name, column, unset[name]) for name, column in columns.items()}
    if settle_totals(numbers, layer_columns).any():
        return None
    key_count = len(jobs) * len(JOB_FIELDS) - sum(unset.values()) - unset_elsewhere - unset_options + layer_keys
    return job_batch(numbers, option_sets, option_codes, layer_columns), key_count


def _as_numbers(name: str, column: list[Any], unset: int) -> Array:
    """Counts as floats, the default where one is not stated, ``unset`` times; not a number for none."""
    default = DEFAULTS[name]
    if unset == len(column):
        return np.full(unset, np.nan if default is None else default, dtype=np.float64)
    return np.array([default if value is UNSET else value for value in column] if unset else column, dtype=np.float64)


def _read_layers(layers: list[Any], max_layers: int) -> tuple[LayerColumns, int] | None:
    """The layers in columns, and how many keys were stated."""
    counts = np.array([len(own) if own else 0 for own in layers], dtype=np.int64)
    if counts.max() > max_layers:
        return None
    flat = list(chain.from_iterable(own for own in layers if own))
    kinds, parameters = list(map(_KIND, flat)), list(map(_PARAMETERS, flat))
    strange = tuple(sorted(set(kinds) - CODE_OF_KIND.keys()))
    if not all(map(is_kind, strange)):
        return None
    unset = parameters.count(UNSET)
    if unset:
        parameters = [0 if amount is UNSET else amount for amount in parameters]
    activations = np.array(list(map(_ACTIVATIONS, flat)), dtype=np.float64)
    columns = LayerColumns(counts, kind_codes(kinds, strange), activations, np.array(parameters, dtype=np.float64), strange)
    return columns, 3 * len(flat) - unset


def _read_options(options: Iterable[tuple[Any, ...]], count: int) -> tuple[tuple[tuple[Any, ...], ...], Indices, int]:
    """The distinct sets of options, each job's among them, and how many options were not stated."""
    stated: dict[tuple[Any, ...], int] = {}
    codes = np.fromiter((stated.setdefault(own, len(stated)) for own in options), np.int64, count)
    unset = int(np.bincount(codes) @ [own.count(UNSET) for own in stated])
    if not unset:
        return tuple(stated), codes, 0
    settled: dict[tuple[Any, ...], int] = {}
    places = []
    for own in stated:
        full = tuple(DEFAULTS[name] if word is UNSET else word for name, word in zip(OPTION_FIELDS, own, strict=True))
        places.append(settled.setdefault(full, len(settled)))
    return tuple(settled), np.array(places)[codes], unset
