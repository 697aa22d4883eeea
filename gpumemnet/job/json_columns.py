"""Reads many job documents at once into columns, without an object for each of them.

Every check runs over a whole column at C speed.  A document in which anything at all is out of the ordinary is left to
:func:`gpumemnet.job.json_codec.job_from_dict`, the one reader that knows every form and says what is wrong; what is read here,
that one reads alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from operator import itemgetter
from types import NoneType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job.job_batch import NUMBER_FIELDS, OPTION_FIELDS, UNSTATED_AS_ZERO, Array, Indices, JobBatch
from gpumemnet.job.layers import CODE_OF_KIND, KINDS, MAX_ELEMENTS, is_kind
from gpumemnet.job.training_job import (
    FIELD_CHOICES,
    FIELD_DEFAULTS,
    FIELD_RANGES,
    MAX_LAYERS,
    NULLABLE_FIELDS,
    REQUIRED_FIELDS,
    SCHEMA_VERSION,
)

DEFAULTS: Final[dict[str, Any]] = {name: None if name in REQUIRED_FIELDS else default for name, default in FIELD_DEFAULTS.items()}
"""What stands where a document says nothing; of a field that it must state, what no check lets pass."""
_WORDS: Final = {
    name: frozenset((*choices, None) if name in NULLABLE_FIELDS else choices) for name, choices in FIELD_CHOICES.items()
}
_SWITCHES: Final = tuple(name for name in OPTION_FIELDS if name not in FIELD_CHOICES)
_LAYER_FIELDS: Final = ("kind", "activations", "parameters")
_MISSING: Final = object()

_Odd = set[int]
"""Positions of the documents that are to be read one by one."""


class ReadJobs(NamedTuple):
    """What became of many documents.

    Attributes:
        jobs: those that were read.
        rows: positions of the documents that they were read from, rising.
        odd_rows: positions of the documents that were left, rising.
    """

    jobs: JobBatch
    rows: Sequence[int]
    odd_rows: Sequence[int]


class LayerColumns(NamedTuple):
    """The layers of all jobs, with the attributes of :class:`~gpumemnet.job.job_batch.JobBatch`."""

    counts: Indices
    kinds: Indices
    activations: Array
    parameters: Array
    strange_kinds: tuple[str, ...]

    def sums(self, amounts: Array) -> Array:
        """Sums over the layers of each job, exact below 2**53."""
        owner = np.repeat(np.arange(len(self.counts)), self.counts)
        sums: Array = np.bincount(owner, amounts, minlength=len(self.counts)).astype(np.float64, copy=False)
        return sums


def read_jobs(documents: Sequence[object], max_layers: int = MAX_LAYERS) -> ReadJobs:
    """The ordinary ones among many job documents, in columns.

    Args:
        documents: each as :func:`gpumemnet.job.json_codec.job_from_dict` takes one.
        max_layers: a job of more is left.
    """
    rows: Sequence[int] = range(len(documents))
    left: list[Any] = list(documents)
    odd = _odd(left, dict)
    while True:
        if odd:
            rows = [row for at, row in enumerate(rows) if at not in odd]
            left = [documents[row] for row in rows]
        read = _read(left, min(max_layers, MAX_LAYERS))
        if isinstance(read, JobBatch):
            chosen = frozenset(rows)
            return ReadJobs(read, rows, [row for row in range(len(documents)) if row not in chosen])
        odd = read  # never empty, and all that lies behind us holds for the rest: a few rounds at most


def _read(documents: Sequence[dict[Any, Any]], max_layers: int) -> JobBatch | _Odd:
    names = set(REQUIRED_FIELDS).union(*set(map(tuple, documents)))
    if not names <= DEFAULTS.keys():
        return {row for row, document in enumerate(documents) if not document.keys() <= DEFAULTS.keys()}
    columns = {name: list(map(dict.get, documents, repeat(name), repeat(DEFAULTS[name]))) for name in names}
    layers = _read_layers(columns.get("layers") or [()] * len(documents), max_layers)
    if isinstance(layers, set):
        return layers
    numbers, odd = _read_numbers(columns, len(documents))
    odd |= _odd_options(columns)
    if not odd:
        odd = set(np.flatnonzero(settle_totals(numbers, layers)).tolist())
    if odd:
        return odd
    codes: dict[tuple[Any, ...], int] = {}
    option_sets = zip(
        *(columns[name] if name in columns else repeat(DEFAULTS[name], len(documents)) for name in OPTION_FIELDS), strict=True
    )
    option_codes = np.array([codes.setdefault(options, len(codes)) for options in option_sets], dtype=np.int64)
    return job_batch(numbers, tuple(codes), option_codes, layers)


def job_batch(
    numbers: Mapping[str, Array], option_sets: tuple[tuple[Any, ...], ...], option_codes: Indices, layers: LayerColumns
) -> JobBatch:
    """The batch of columns whose totals :func:`settle_totals` has settled."""
    return JobBatch(
        numbers=np.stack([numbers[name] for name in NUMBER_FIELDS]),
        option_sets=option_sets,
        option_codes=option_codes,
        layer_counts=layers.counts,
        layer_kinds=layers.kinds,
        layer_activations=layers.activations,
        layer_parameters=layers.parameters,
        strange_kinds=layers.strange_kinds,
    )


def _read_numbers(columns: Mapping[str, Sequence[Any]], count: int) -> tuple[dict[str, Array], _Odd]:
    """The counts, not a number where a job does not state one, and where they are odd."""
    numbers: dict[str, Array] = {}
    odd: _Odd = set()
    for name, minimum, maximum in FIELD_RANGES:
        values = columns.get(name)
        if values is None:
            default = DEFAULTS[name]
            numbers[name] = np.full(count, np.nan if default is None else default, dtype=np.float64)
            continue
        allowed: set[type] = {int, NoneType} if name in NULLABLE_FIELDS else {int}
        column = _as_floats(values, allowed)
        given = column if column is None or None not in values else column[~np.isnan(column)]
        if column is None or given is None or (len(given) and not minimum <= given.min() <= given.max() <= maximum):
            odd |= {
                row
                for row, value in enumerate(values)
                if type(value) not in allowed or (value is not None and not minimum <= value <= maximum)
            }
        else:
            numbers[name] = column
    return numbers, odd


def _odd_options(columns: Mapping[str, Sequence[Any]]) -> _Odd:
    odd: _Odd = set()
    for name in _SWITCHES:
        odd |= _odd(columns.get(name, ()), bool)
    versions = columns.get("schema_version", ())
    odd |= _odd(versions, int) or {row for row, version in enumerate(versions) if version != SCHEMA_VERSION}
    for name, words in _WORDS.items():
        values = columns.get(name, ())
        try:
            are_known = words.issuperset(values)
        except TypeError:  # unhashable, hence no text
            are_known = False
        if not are_known:
            odd |= {row for row, value in enumerate(values) if not (value is None or type(value) is str) or value not in words}
    return odd


def settle_totals(numbers: dict[str, Array], layers: LayerColumns) -> NDArray[np.bool_]:
    """Derive the totals that are not stated; returns which jobs state some that cannot be, shape ``[B]``.

    Args:
        numbers: field → counts, not a number where a job does not state one; the totals are filled in.
        layers: of the same jobs.
    """
    has_layers = layers.counts > 0
    is_odd = np.zeros(len(has_layers), dtype=np.bool_)
    for name, amounts in (("total_activations", layers.activations), ("total_parameters", layers.parameters)):
        derived, stated = layers.sums(amounts), numbers[name]
        is_stated = ~np.isnan(stated)
        is_odd |= np.where(has_layers, (is_stated & (stated != derived)) | (derived > MAX_ELEMENTS), ~is_stated)
        numbers[name] = np.where(is_stated, stated, derived)
    trainable, total = numbers["trainable_parameters"], numbers["total_parameters"]
    is_odd |= trainable > total
    numbers["trainable_parameters"] = np.where(np.isnan(trainable), total, trainable)
    for name in UNSTATED_AS_ZERO:
        numbers[name][np.isnan(numbers[name])] = 0.0
    return is_odd


def _read_layers(values: Sequence[Any], max_layers: int) -> LayerColumns | _Odd:
    """The layers in columns, or the positions of the jobs whose layers are odd."""
    if set(map(type, values)) != {list}:
        odd = {row for row, value in enumerate(values) if not (type(value) is list or value is None or value == ())}
        if odd:
            return odd
        values = [value or () for value in values]
    counts = np.array(list(map(len, values)), dtype=np.int64)
    if counts.max(initial=0) > max_layers:
        return set(np.flatnonzero(counts > max_layers).tolist())
    read = _layer_columns(list(chain.from_iterable(values)))
    if read is None:
        odd = {row for row, value in enumerate(values) if _layer_columns(value) is None}
        # Where none of them is, some jobs write layers as objects, and some as lists.
        return odd or {row for row, value in enumerate(values) if value and type(value[0]) is not dict}
    kinds, activations, parameters, strange = read
    return LayerColumns(counts, kind_codes(kinds, strange), activations, parameters, strange)


def kind_codes(kinds: Sequence[str], strange: Sequence[str]) -> Indices:
    """Position of each of the kinds in :data:`gpumemnet.job.layers.KINDS` followed by ``strange``."""
    codes = {**CODE_OF_KIND, **{kind: len(KINDS) + place for place, kind in enumerate(strange)}} if strange else CODE_OF_KIND
    return np.fromiter(map(codes.__getitem__, kinds), np.int64, len(kinds))


def _layer_columns(layers: Sequence[Any]) -> tuple[list[str], Array, Array, tuple[str, ...]] | None:
    """Kinds, output elements and parameters of the layers, and the unknown kinds; ``None`` unless all are plain."""
    if not layers:
        return [], np.zeros(0), np.zeros(0), ()
    forms = set(map(type, layers))
    sizes = set(map(len, layers)) if forms <= {dict, list} else set()
    if forms == {dict} and sizes <= {2, 3}:
        kinds, activations, parameters = (list(map(dict.get, layers, repeat(name), repeat(_MISSING))) for name in _LAYER_FIELDS)
        missing = parameters.count(_MISSING)
        if missing != (sum(len(layer) == 2 for layer in layers) if 2 in sizes else 0):
            return None
        if missing:
            parameters = [0 if amount is _MISSING else amount for amount in parameters]
    elif forms == {list} and sizes == {3}:
        kinds, activations, parameters = (list(map(itemgetter(place), layers)) for place in range(3))
    else:
        return None
    try:
        strange = tuple(sorted(set(kinds) - CODE_OF_KIND.keys()))
    except TypeError:  # unhashable, or not to be sorted: no text
        return None
    columns = _as_floats(activations, {int}), _as_floats(parameters, {int})
    if columns[0] is None or columns[1] is None or not all(map(is_kind, strange)):
        return None
    if not all(column.min() >= 0 and column.max() <= MAX_ELEMENTS for column in columns if column is not None):
        return None
    return kinds, columns[0], columns[1], strange


def _as_floats(values: Sequence[Any], allowed: set[type]) -> Array | None:
    """Counts as floats, ``None`` as not a number; nothing where there are values of other types, or beyond all bounds."""
    if not set(map(type, values)) <= allowed:
        return None
    try:
        return np.array(values, dtype=np.float64)
    except OverflowError:
        return None


def _odd(values: Sequence[object], *allowed: type) -> _Odd:
    """Positions of the values that are of none of the types."""
    if set(map(type, values)) <= set(allowed):
        return set()
    return {row for row, value in enumerate(values) if type(value) not in allowed}
