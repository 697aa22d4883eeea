"""Reads jobs from Arrow columns into the columns of a :class:`~gpumemnet.job.job_table.JobTable`.

A null means that the job does not state the field, as in a dataset.  Counts may be floating-point
numbers without a fraction,
NaN where the job does not state one: pandas writes an optional count so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import DatasetError
from gpumemnet.job.job_table import Array, Indices, JobTable
from gpumemnet.job.json_codec import ReadJobs, merge_reads, read_jobs
from gpumemnet.job.layers import CODE_OF_KIND, KINDS, MAX_ELEMENTS, MAX_LAYERS, is_kind
from gpumemnet.job.training_job import (
    FIELD_CHOICES,
    FIELD_DEFAULTS,
    JOB_FIELDS,
    NULLABLE_FIELDS,
    NUMBER_FIELDS,
    OPTION_FIELDS,
    REQUIRED_FIELDS,
    SCHEMA_VERSION,
    settle_columns,
)

if TYPE_CHECKING:
    import pyarrow as pa

Flags = NDArray[np.bool_]

WORD_FIELDS: Final = tuple(FIELD_CHOICES)
SWITCH_FIELDS: Final = tuple(name for name in OPTION_FIELDS if name not in FIELD_CHOICES)
COUNT_FIELDS: Final = (*NUMBER_FIELDS, "schema_version")
LAYER_FIELDS: Final = ("kind", "activations", "parameters")

_CHOICES: Final[dict[str, tuple[Any, ...]]] = {
    name: (*choices, None) if name in NULLABLE_FIELDS else choices
    for name, choices in FIELD_CHOICES.items()
} | dict.fromkeys(SWITCH_FIELDS, (False, True))
"""Option field → its allowed values; the code of a value is its position."""
_NO_CODE: Final = -1


class _LayerColumns(NamedTuple):
    """The layers of all jobs; for the fields see the layer attributes of
    :class:`~gpumemnet.job.job_table.JobTable`."""

    counts: Indices
    kinds: Indices
    activations: Array
    parameters: Array
    unknown_kinds: tuple[str, ...]


_NO_LAYERS: Final = _LayerColumns(
    np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0), ()
)


def check_names(names: Sequence[str], where: str) -> None:
    """Checks that the columns of a table of jobs include the required ones, and none twice.

    Raises:
        DatasetError: names the column.
    """
    for name in REQUIRED_FIELDS:
        if name not in names:
            raise DatasetError(f"{where} holds no jobs: the column '{name}' is missing")
    for name in JOB_FIELDS:
        if names.count(name) > 1:
            raise DatasetError(f"{where}: there are two columns called '{name}'")


def check_columns(schema: pa.Schema, where: str) -> None:
    """Checks the column types of a table of jobs before any row is read.

    Raises:
        DatasetError: names the column that is missing or has the wrong type.
    """
    import pyarrow.types as types

    check_names(schema.names, where)
    for name in JOB_FIELDS:
        if name not in schema.names:
            continue
        kind = schema.field(name).type
        if types.is_null(kind):
            continue
        if name in COUNT_FIELDS:
            fits, expected = types.is_integer(kind) or types.is_floating(kind), "whole numbers"
        elif name in SWITCH_FIELDS:
            fits, expected = types.is_boolean(kind), "true or false"
        elif name in WORD_FIELDS:
            fits, expected = (
                _is_text(kind.value_type if types.is_dictionary(kind) else kind),
                "text",
            )
        else:
            fits, expected = (
                _is_layers(kind),
                "lists of structures of kind, activations and parameters",
            )
        if not fits:
            raise DatasetError(
                f"{where}: the column '{name}' is {str(kind)[:200]}, and must hold {expected}"
            )


def read_arrow_jobs(batch: pa.RecordBatch) -> ReadJobs:
    """Reads the rows of ``batch`` as jobs; its columns must have passed :func:`check_columns`.

    All checks run on whole columns.  Rows that fail a check are read again by
    :func:`gpumemnet.job.json_codec.read_jobs`, which reports what is wrong.
    """
    count = batch.num_rows
    is_invalid = np.zeros(count, dtype=np.bool_)
    columns = {
        name: batch.column(index)
        for index, name in enumerate(batch.schema.names)
        if name in FIELD_DEFAULTS and batch.column(index).null_count < count
    }
    layers = _read_layers(columns.get("layers"), count, is_invalid)
    numbers = np.empty((len(NUMBER_FIELDS), count))
    for index, name in enumerate(NUMBER_FIELDS):
        numbers[index] = _read_counts(columns.get(name), name, is_invalid)
    is_invalid |= (
        _read_counts(columns.get("schema_version"), "schema_version", is_invalid) != SCHEMA_VERSION
    )
    option_sets, option_codes = _read_options(columns, count, is_invalid)
    is_invalid |= settle_columns(numbers, layers.counts, layers.activations, layers.parameters)
    table = JobTable(
        numbers=numbers,
        option_sets=option_sets,
        option_codes=option_codes,
        layer_counts=layers.counts,
        layer_kinds=layers.kinds,
        layer_activations=layers.activations,
        layer_parameters=layers.parameters,
        unknown_kinds=layers.unknown_kinds,
    )
    if not is_invalid.any():
        return ReadJobs(table, np.arange(count), {})
    valid, invalid = (~is_invalid).nonzero()[0], is_invalid.nonzero()[0]
    return merge_reads(
        [
            (valid, ReadJobs(table.take(valid), np.arange(len(valid)), {})),
            (invalid, read_jobs(row_documents(batch, invalid))),
        ]
    )


def row_documents(batch: pa.RecordBatch, rows: Indices) -> list[dict[str, Any]]:
    """Converts rows to dictionaries for :func:`gpumemnet.job.json_codec.read_jobs`, without the
    fields that are not stated."""
    import pyarrow as pa

    names = [name for name in batch.schema.names if name in FIELD_DEFAULTS]
    rows_as_read = batch.select(names).take(pa.array(rows, pa.int64())).to_pylist()
    return [
        {name: _whole(value) for name, value in row.items() if value is not None and value == value}
        for row in rows_as_read
    ]


def _whole(value: Any) -> Any:
    """The value; a floating-point number without a fraction as a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _read_counts(column: pa.Array | None, name: str, is_invalid: Flags) -> Array | float:
    """The counts as floats, NaN where a job does not state one; sets ``is_invalid`` for rows with a
    fraction."""
    import pyarrow.types as types

    default = np.nan if FIELD_DEFAULTS[name] is None else float(FIELD_DEFAULTS[name])
    if column is None:
        return default
    if types.is_floating(column.type):
        counts: Array = column.to_numpy(zero_copy_only=False).astype(np.float64)
        is_stated = ~np.isnan(counts)
        is_invalid |= is_stated & (counts != np.floor(counts))
        return np.where(is_stated, counts, default)
    values, is_null = _whole_numbers(column)
    if is_null is not None:
        values[is_null] = default
    return values


def _whole_numbers(column: pa.Array) -> tuple[Array, Flags | None]:
    """The numbers as floats, exact within the allowed range, and which rows are null; ``None`` when
    no row is."""
    if not column.null_count:
        return column.to_numpy().astype(np.float64), None
    is_null = column.is_null().to_numpy(zero_copy_only=False)
    return column.fill_null(0).to_numpy().astype(np.float64), is_null


def _read_options(
    columns: Mapping[str, pa.Array], count: int, is_invalid: Flags
) -> tuple[tuple[tuple[Any, ...], ...], Indices]:
    """The distinct sets of options, and the position of each row's set; sets ``is_odd`` for rows
    with an invalid option."""
    index: int | Indices = 0
    size = 1
    for name in OPTION_FIELDS:
        choices = _CHOICES[name]
        codes = _option_codes(columns.get(name), name, choices)
        if isinstance(codes, int):
            if codes == _NO_CODE:
                is_invalid |= True
                codes = 0
        elif codes.min() == _NO_CODE:
            is_invalid |= codes == _NO_CODE
            codes = np.maximum(codes, 0)
        index = index * len(choices) + codes
        size *= len(choices)
    if isinstance(index, int):
        return (_option_set(index),), np.zeros(count, dtype=np.int64)
    is_there = np.zeros(size, dtype=np.bool_)
    is_there[index] = True
    places = np.flatnonzero(is_there)
    position = np.empty(size, dtype=np.int64)
    position[places] = np.arange(len(places))
    return tuple(map(_option_set, places.tolist())), position[index]


def _option_set(index: int) -> tuple[Any, ...]:
    values = []
    for name in reversed(OPTION_FIELDS):
        index, code = divmod(index, len(_CHOICES[name]))
        values.append(_CHOICES[name][code])
    return tuple(reversed(values))


def _option_codes(column: pa.Array | None, name: str, choices: Sequence[Any]) -> int | Indices:
    """Positions of the values among ``choices``; a single ``int`` when all rows have the same
    value."""
    default = _NO_CODE if name in REQUIRED_FIELDS else choices.index(FIELD_DEFAULTS[name])
    if column is None:
        return default
    if name in SWITCH_FIELDS:
        if not column.null_count and column.true_count in (0, len(column)):
            return int(column.true_count > 0)
        filled = column.fill_null(FIELD_DEFAULTS[name]) if column.null_count else column
        return np.asarray(filled.to_numpy(zero_copy_only=False), dtype=np.int64)
    words, indices = _dictionary(column)
    codes = [
        default if word is None else choices.index(word) if word in choices else _NO_CODE
        for word in words
    ]
    if indices.null_count:
        codes.append(default)
        indices = indices.fill_null(len(words))
    if len(codes) == 1:
        return codes[0]
    positions: Indices = np.array(codes, dtype=np.int64)[indices.to_numpy()]
    return positions


def _dictionary(column: pa.Array) -> tuple[list[Any], pa.Array]:
    """The distinct strings of a column, and each row's position among them."""
    import pyarrow as pa

    if not isinstance(column, pa.DictionaryArray):
        column = column.dictionary_encode()
    return column.dictionary.to_pylist(), column.indices


def _read_layers(column: pa.Array | None, count: int, is_invalid: Flags) -> _LayerColumns:
    if column is None:
        return _NO_LAYERS._replace(counts=np.zeros(count, dtype=np.int64))
    counts = column.value_lengths()
    counts = np.asarray(
        (counts.fill_null(0) if counts.null_count else counts).to_numpy(), dtype=np.int64
    )
    layers = column.flatten()  # flatten() respects the slice and leaves out null lists
    if not len(layers):
        return _NO_LAYERS._replace(counts=counts)
    kinds, unknown, is_wrong = _read_kinds(layers.field(layers.type.get_field_index("kind")))
    amounts = []
    for name in LAYER_FIELDS[1:]:
        index = layers.type.get_field_index(name)
        if index < 0:  # only the field of the parameters is optional
            amounts.append(np.zeros(len(layers)))
            continue
        values, is_null = _whole_numbers(layers.field(index))
        if is_null is not None:
            is_wrong = is_null if is_wrong is None else is_wrong | is_null
        if not 0 <= values.min() <= values.max() <= MAX_ELEMENTS:
            is_beyond = (values < 0) | (values > MAX_ELEMENTS)
            is_wrong = is_beyond if is_wrong is None else is_wrong | is_beyond
        amounts.append(values)
    if layers.null_count:
        is_null = layers.is_null().to_numpy(zero_copy_only=False)
        is_wrong = is_null if is_wrong is None else is_wrong | is_null
    if is_wrong is not None:
        is_invalid[np.repeat(np.arange(count), counts)[is_wrong]] = True
    if counts.max(initial=0) > MAX_LAYERS:
        is_invalid |= counts > MAX_LAYERS
    return _LayerColumns(counts, kinds, amounts[0], amounts[1], unknown)


def _read_kinds(column: pa.Array) -> tuple[Indices, tuple[str, ...], Flags | None]:
    """Codes of the layers' kinds, the unknown kinds, and which layers have an invalid kind;
    ``None`` when none has."""
    words, indices = _dictionary(column)
    unknown = tuple(sorted({word for word in words if word not in CODE_OF_KIND and is_kind(word)}))
    codes_of = CODE_OF_KIND | {word: len(KINDS) + index for index, word in enumerate(unknown)}
    codes = np.array([*(codes_of.get(word, _NO_CODE) for word in words), _NO_CODE], dtype=np.int64)
    if indices.null_count:
        indices = indices.fill_null(len(words))
    kinds = codes[indices.to_numpy()]
    if codes[:-1].min(initial=0) >= 0 and not column.null_count:
        return kinds, unknown, None
    return kinds, unknown, kinds == _NO_CODE


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow.types as types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def _is_layers(kind: pa.DataType) -> bool:
    import pyarrow.types as types

    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    layer = kind.value_type
    if not types.is_struct(layer):
        return False
    parts = {field.name: field.type for field in layer}
    if len(parts) != layer.num_fields or not {"kind", "activations"} <= parts.keys() <= set(
        LAYER_FIELDS
    ):
        return False
    word = parts.pop("kind")
    return _is_text(word.value_type if types.is_dictionary(word) else word) and all(
        map(types.is_integer, parts.values())
    )
