"""Reads jobs from Arrow columns into the columns of a :class:`~gpumemnet.job.job_table.JobTable`.

A null means that the job does not state the field, as in a dataset.  Counts may be floating-point
numbers without a fraction,
NaN where the job does not state one: pandas writes an optional count so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpumemnet.atomic_files import Document
from gpumemnet.errors import DatasetError
from gpumemnet.job.job_table import Array, Flags, Indices, JobTable, OptionSet, codes_with
from gpumemnet.job.json_codec import ReadJobs, merge_reads, read_jobs
from gpumemnet.job.layers import (
    CODE_OF_KIND,
    MAX_ELEMENTS,
    MAX_LAYERS,
    UNKNOWN,
    Layer,
    is_kind,
)
from gpumemnet.job.training_job import (
    FIELD_CHOICES,
    FIELD_DEFAULTS,
    JOB_FIELDS,
    NULLABLE_FIELDS,
    NUMBER_FIELDS,
    OPTION_FIELDS,
    REQUIRED_FIELDS,
    SCHEMA_VERSION,
)

if TYPE_CHECKING:
    import pyarrow as pa


WORD_FIELDS: Final = tuple(FIELD_CHOICES)
SWITCH_FIELDS: Final = tuple(name for name in OPTION_FIELDS if name not in FIELD_CHOICES)
COUNT_FIELDS: Final = (*NUMBER_FIELDS, "schema_version")

_CHOICES: Final[dict[str, tuple[Any, ...]]] = {
    name: (*choices, None) if name in NULLABLE_FIELDS else choices
    for name, choices in FIELD_CHOICES.items()
} | dict.fromkeys(SWITCH_FIELDS, (False, True))
"""Option field → its allowed values; the code of a value is its position."""
_NO_CODE: Final = -1


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
                _is_text(kind),
                "text",
            )
        else:
            fits, expected = (
                is_layers(kind),
                f"lists of structures of {', '.join(Layer._fields)}",
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
    counts = [_read_counts(columns.get(name), name, is_invalid) for name in COUNT_FIELDS]
    *numbers, versions = np.broadcast_arrays(*counts, np.empty(count))[:-1]
    option_sets, option_codes = _read_options(columns, count, is_invalid)
    table = JobTable(np.array(numbers), option_sets, option_codes, *layers)
    is_invalid |= versions != SCHEMA_VERSION
    is_invalid |= table.settle_numbers()
    if not is_invalid.any():
        return ReadJobs(table, np.arange(count), {})
    valid, invalid = (~is_invalid).nonzero()[0], is_invalid.nonzero()[0]
    return merge_reads(
        [
            (valid, ReadJobs(table.take(valid), np.arange(len(valid)), {})),
            (invalid, read_jobs(row_documents(batch, invalid))),
        ]
    )


def row_documents(batch: pa.RecordBatch, rows: Indices) -> list[Document]:
    """Converts rows to dictionaries for :func:`gpumemnet.job.json_codec.read_jobs`, without the
    fields that are not stated."""
    import pyarrow as pa

    names = [name for name in batch.schema.names if name in FIELD_DEFAULTS]
    rows_as_read = batch.select(names).take(pa.array(rows, pa.int64())).to_pylist()
    return [
        {name: whole(value) for name, value in row.items() if value is not None and value == value}
        for row in rows_as_read
    ]


def whole(value: Any) -> Any:
    """The value; a floating-point number without a fraction as a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _read_counts(column: pa.Array | None, name: str, is_invalid: Flags) -> Array | float:
    """The counts as floats, NaN where a job does not state one; sets ``is_invalid`` for rows with a
    fraction."""
    default = np.nan if FIELD_DEFAULTS[name] is None else float(FIELD_DEFAULTS[name])
    if column is None:
        return default
    counts = _numbers(column)
    is_invalid |= counts > np.floor(counts)
    return np.where(np.isnan(counts), default, counts)


def _numbers(column: pa.Array) -> Array:
    """The numbers as floats, exact within the allowed range; NaN for null."""
    floats = column.cast("float64", safe=False)
    return np.asarray(floats.to_numpy(zero_copy_only=False), dtype=np.float64)


def _read_options(
    columns: Mapping[str, pa.Array], count: int, is_invalid: Flags
) -> tuple[tuple[OptionSet, ...], Indices]:
    """The distinct sets of options, and the position of each row's set; sets ``is_invalid`` for
    rows with an invalid option."""
    codes = np.array([_option_codes(columns.get(name), name, count) for name in OPTION_FIELDS])
    is_invalid |= (codes == _NO_CODE).any(axis=0)
    sizes = tuple(len(_CHOICES[name]) for name in OPTION_FIELDS)
    numbers, positions = np.unique(
        np.ravel_multi_index(tuple(np.maximum(codes, 0)), sizes), return_inverse=True
    )
    places = zip(OPTION_FIELDS, np.unravel_index(numbers, sizes), strict=True)
    values = [[_CHOICES[name][place] for place in each.tolist()] for name, each in places]
    return tuple(zip(*values, strict=True)), positions


def _option_codes(column: pa.Array | None, name: str, count: int) -> Indices:
    """Positions of the values among the option's choices."""
    choices = _CHOICES[name]
    default = _NO_CODE if name in REQUIRED_FIELDS else choices.index(FIELD_DEFAULTS[name])
    if column is None:
        return np.full(count, default)
    values, indices = _dictionary(column)
    codes = [
        default if value is None else choices.index(value) if value in choices else _NO_CODE
        for value in values
    ]
    return np.array([*codes, default])[indices]


def _dictionary(column: pa.Array) -> tuple[list[Any], Indices]:
    """The distinct values of a column, and each row's position among them; for null, the position
    after the last."""
    import pyarrow as pa

    if not isinstance(column, pa.DictionaryArray):
        column = column.dictionary_encode()
    values = column.dictionary.to_pylist()
    return values, column.indices.cast("int64").fill_null(len(values)).to_numpy()


def _read_layers(column: pa.Array | None, count: int, is_invalid: Flags) -> tuple[Any, ...]:
    """The layers of all jobs, as the layer attributes of
    :class:`~gpumemnet.job.job_table.JobTable` in their order."""
    if column is None:
        none, no_codes = np.zeros(0), np.zeros(0, np.int64)
        return np.zeros(count, np.int64), no_codes, none, none, no_codes, no_codes, ()
    counts = column.value_lengths().fill_null(0).cast("int64").to_numpy()
    layers = column.flatten()  # flatten() respects the slice and leaves out null lists
    parts = dict(zip((field.name for field in layers.type), layers.flatten(), strict=True))
    words, indices = _dictionary(parts["kind"])
    unknown = tuple(sorted({word for word in words if word not in CODE_OF_KIND and is_kind(word)}))
    code_of = codes_with(unknown)
    kinds = np.array([*(code_of.get(word, _NO_CODE) for word in words), _NO_CODE])[indices]
    activations = _numbers(parts["activations"])
    parameters = _numbers(parts["parameters"]) if "parameters" in parts else 0 * activations
    is_wrong = kinds == _NO_CODE
    for amounts in (activations, parameters):
        is_wrong |= ~((amounts >= 0) & (amounts <= MAX_ELEMENTS))
    trains, blocks = (
        _numbers(parts[name]) if name in parts else np.full(len(kinds), np.nan)
        for name in ("trains", "block")
    )
    is_wrong |= (blocks < 0) | (blocks > MAX_LAYERS)
    is_invalid |= counts > MAX_LAYERS
    is_invalid[np.arange(count).repeat(counts)[is_wrong]] = True
    trains, blocks = (
        np.where(np.isnan(stated), UNKNOWN, stated).astype(np.int64) for stated in (trains, blocks)
    )
    return counts, kinds, activations, parameters, trains, blocks, unknown


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow.types as types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind))


def is_layers(kind: pa.DataType) -> bool:
    """Whether ``kind`` is that of a column of layers."""
    import pyarrow.types as types

    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    layer = kind.value_type
    if not types.is_struct(layer):
        return False
    parts = {field.name: field.type for field in layer}
    if len(parts) != layer.num_fields or not {"kind", "activations"} <= parts.keys() <= set(
        Layer._fields
    ):
        return False
    word, trains, block = parts.pop("kind"), parts.pop("trains", None), parts.pop("block", None)
    return (
        _is_text(word)
        and (trains is None or types.is_boolean(trains) or types.is_null(trains))
        and (block is None or types.is_integer(block) or types.is_null(block))
        and all(map(types.is_integer, parts.values()))
    )
