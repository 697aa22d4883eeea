"""Jobs in and out of JSON, JSON Lines and plain dictionaries, with errors that name the place.

:func:`read_jobs` is the one reader of JSON: the service, the command line and the files of jobs come through it, and
:func:`job_from_dict` reads a single document in the same way.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from operator import itemgetter
from types import NoneType
from typing import Any, Final, NamedTuple

import numpy as np

from gpumemnet.errors import FieldError, InvalidJobError
from gpumemnet.job.job_table import Indices, JobTable
from gpumemnet.job.layers import Layer, are_layers, describe
from gpumemnet.job.settle_columns import settle_columns
from gpumemnet.job.training_job import (
    FIELD_DEFAULTS,
    JOB_FIELDS,
    MAX_LAYERS,
    NUMBER_FIELDS,
    OPTION_FIELDS,
    REQUIRED_FIELDS,
    SCHEMA_VERSION,
    TrainingJob,
    check_options,
    check_schema_version,
    settle_numbers,
)
from gpumemnet.job.training_options import OPTION_SWITCHES

_JOB_FIELDS: Final = frozenset(JOB_FIELDS)
_REQUIRED_FIELDS: Final = frozenset(REQUIRED_FIELDS)
_SWITCHES: Final = tuple(map(OPTION_FIELDS.index, OPTION_SWITCHES))
_LAYER_FIELDS: Final = ("kind", "activations", "parameters")
_LAYER_FIELD_SET: Final = frozenset(_LAYER_FIELDS)
_LayerColumns = tuple[Sequence[str], Sequence[int], Sequence[int]]
_OPTION_DEFAULTS: Final = tuple(map(FIELD_DEFAULTS.get, OPTION_FIELDS))
_NUMBER_DEFAULTS: Final = tuple(map(FIELD_DEFAULTS.get, NUMBER_FIELDS))


class ReadJobs(NamedTuple):
    """What became of many documents or rows.

    Attributes:
        table: the valid jobs.
        rows: positions of the documents that they were read from, rising, shape ``[len(table)]``.
        errors: position of every other document → what is wrong with it.
    """

    table: JobTable
    rows: Indices
    errors: dict[int, FieldError]


class _Row(NamedTuple):
    """One job as a document states it: its counts, its set of options, and its layers."""

    numbers: Sequence[Any]
    options: tuple[Any, ...]
    layers: Sequence[Any]


def read_jobs(documents: Sequence[object], max_layers: int = MAX_LAYERS) -> ReadJobs:
    """The jobs of many JSON objects, as a table.

    Args:
        documents: each a mapping of field names to values; ``layers`` is a list of ``{"kind", "activations", "parameters"}``
            objects or of ``[kind, activations, parameters]`` lists.
        max_layers: the most layers that a job may have.
    """
    stated: dict[int, _Row] = {}
    errors: dict[int, FieldError] = {}
    for place, document in enumerate(documents):
        try:
            stated[place] = _row(document, max_layers)
        except InvalidJobError as error:
            errors[place] = error
    table = _table(list(stated.values()))
    if table is None:  # some of them break a rule
        checked: dict[int, _Row] = {}
        for place, row in stated.items():
            try:
                checked[place] = _checked(row)
            except InvalidJobError as error:
                errors[place] = error
        stated, table = checked, _table(list(checked.values()))
        assert table is not None
    return ReadJobs(table, np.array(list(stated), dtype=np.int64), errors)


def _table(rows: Sequence[_Row]) -> JobTable | None:
    """The table of the rows, checked as columns; ``None`` where one breaks a rule or holds numbers other than ``int``."""
    if not rows:
        return JobTable.from_jobs(())
    stated, options, layers = zip(*rows, strict=True)
    columns = _plain_columns([*chain.from_iterable(layers)])
    is_plain = set(map(type, chain.from_iterable(stated))) <= {int, NoneType} and all(
        set(map(type, map(itemgetter(place), options))) == {bool} for place in _SWITCHES
    )
    if columns is None or not is_plain:
        return None
    try:
        for option_set in set(options):
            check_options(option_set)
        numbers = np.array(stated, dtype=np.float64).T.copy()
    except (InvalidJobError, TypeError, OverflowError):  # TypeError: a value that cannot be hashed is no option
        return None
    counts = np.array(list(map(len, layers)), dtype=np.int64)
    table = JobTable.from_columns(numbers, options, counts, *columns)
    breaks = settle_columns(table.numbers, counts, table.layer_activations, table.layer_parameters)
    return None if breaks.any() else table


def merge_reads(parts: Sequence[tuple[Indices, ReadJobs]]) -> ReadJobs:
    """Readings of different documents of one file as one, each with the positions of its documents in the file."""
    rows = np.concatenate([positions[read.rows] for positions, read in parts])
    errors = {int(positions[at]): error for positions, read in parts for at, error in read.errors.items()}
    table = JobTable.concatenate([read.table for _, read in parts])
    order = rows.argsort()
    is_ordered = bool((order[1:] > order[:-1]).all())
    return ReadJobs(table, rows, errors) if is_ordered else ReadJobs(table.take(order), rows[order], errors)


def job_from_dict(document: object) -> TrainingJob:
    """A job from its JSON object, as :func:`read_jobs` takes it.

    Raises:
        InvalidJobError: names the field (``layers[3].parameters``) and says what it must be.
    """
    row = _checked(_row(document, MAX_LAYERS))
    values = dict(zip((*NUMBER_FIELDS, *OPTION_FIELDS), (*row.numbers, *row.options), strict=True))
    return TrainingJob(layers=tuple(row.layers), **values)


def _row(document: object, max_layers: int) -> _Row:
    """One job as the document states it."""
    if type(document) is not dict and not isinstance(document, Mapping):
        raise InvalidJobError(f"a job must be a JSON object, not {describe(document)}")
    get = document.get
    version = get("schema_version", SCHEMA_VERSION)
    if not _JOB_FIELDS.issuperset(document):
        check_schema_version(version)  # a newer schema explains unknown fields better
        _refuse_unknown(document, JOB_FIELDS, "")
    if not document.keys() >= _REQUIRED_FIELDS:
        missing = next(name for name in REQUIRED_FIELDS if name not in document)
        raise InvalidJobError("is missing: a job needs " + ", ".join(REQUIRED_FIELDS), missing)
    layers = get("layers")
    if layers is None:
        layers = ()
    elif not isinstance(layers, list | tuple):
        raise InvalidJobError(f"must be a list of layers, not {describe(layers)}", "layers")
    if len(layers) > max_layers:
        raise InvalidJobError(f"must hold at most {max_layers} layers, not {len(layers)}", "layers")
    check_schema_version(version)
    return _Row(tuple(map(get, NUMBER_FIELDS, _NUMBER_DEFAULTS)), tuple(map(get, OPTION_FIELDS, _OPTION_DEFAULTS)), layers)


def _checked(row: _Row) -> _Row:
    """The same job with its layers as :class:`~gpumemnet.job.layers.Layer` and its totals settled.

    Raises:
        InvalidJobError: names the field and says what it must be.
    """
    columns = _plain_columns(row.layers)
    layers = _checked_layers(row.layers) if columns is None else list(map(Layer, *columns))
    check_options(row.options)
    numbers = settle_numbers(row.numbers, [layer.activations for layer in layers], [layer.parameters for layer in layers])
    return _Row(numbers, row.options, layers)


def job_from_json(text: str | bytes) -> TrainingJob:
    """A job from JSON text.

    Raises:
        InvalidJobError: when the text is no JSON (with line and column), holds NaN or infinity, or is no valid job.
    """
    return job_from_dict(parse_json(text))


def parse_json(text: str | bytes) -> Any:
    """Parse strict JSON: no NaN, no infinity, no duplicate keys, no runaway nesting.

    Raises:
        InvalidJobError: says what is wrong and at which line and column.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise InvalidJobError(f"no valid JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except UnicodeDecodeError:
        raise InvalidJobError("no valid JSON: the text is not UTF-8") from None
    except RecursionError:
        raise InvalidJobError("no valid job: the JSON is nested too deeply") from None
    except InvalidJobError:
        raise
    except ValueError:  # Python's limit on the digits of an integer
        raise InvalidJobError("no valid job: the JSON holds a number with too many digits") from None


def job_to_dict(job: TrainingJob) -> dict[str, Any]:
    """The JSON object of ``job``; :func:`job_from_dict` gives the same job back."""
    document: dict[str, Any] = {"schema_version": job.schema_version}
    document |= {name: getattr(job, name) for name in JOB_FIELDS if name not in ("schema_version", "layers")}
    document["layers"] = [
        {"kind": layer.kind, "activations": layer.activations, "parameters": layer.parameters} for layer in job.layers
    ]
    return document


def job_to_json(job: TrainingJob) -> str:
    """``job`` as indented JSON text, one layer a line."""
    document = job_to_dict(job)
    layers = document.pop("layers")
    text = json.dumps(document, indent=2)
    if not layers:
        return text + "\n"
    rows = ",\n".join("    " + json.dumps(layer) for layer in layers)
    return text.removesuffix("\n}") + f',\n  "layers": [\n{rows}\n  ]\n}}\n'


def _plain_columns(layers: Sequence[Any]) -> _LayerColumns | None:
    """Kinds, activations and parameters of valid layers that are all written alike; else ``None``."""
    forms = set(map(type, layers))
    columns: Any = (), (), ()
    if forms == {dict} and all(map(_LAYER_FIELD_SET.issuperset, layers)):
        kinds, activations = (list(map(dict.get, layers, repeat(name))) for name in ("kind", "activations"))
        columns = kinds, activations, list(map(dict.get, layers, repeat("parameters"), repeat(0)))
    elif forms and forms <= {list, Layer} and set(map(len, layers)) == {len(_LAYER_FIELDS)}:
        columns = tuple(zip(*layers, strict=True))
    elif forms:
        return None
    return columns if are_layers(*columns) else None


def _checked_layers(entries: Sequence[object]) -> list[Layer]:
    """The layers, checked one by one, so that an error names the place."""
    layers = []
    for index, entry in enumerate(entries):
        try:
            layers.append(_layer(entry))
        except InvalidJobError as error:
            path = f"layers[{index}]" + (f".{error.field}" if error.field else "")
            raise InvalidJobError(error.reason, path) from None
    return layers


def _layer(entry: object) -> Layer:
    if isinstance(entry, Layer):
        return entry
    if isinstance(entry, list | tuple):
        if len(entry) != 3:
            raise InvalidJobError(f"must be [kind, activations, parameters], not a list of {len(entry)}")
        return Layer(*entry)
    if not isinstance(entry, Mapping):
        raise InvalidJobError(f"must be an object with kind, activations and parameters, not {describe(entry)}")
    if not set(_LAYER_FIELDS).issuperset(entry):
        _refuse_unknown(entry, tuple(sorted(_LAYER_FIELDS)), "")
    if "kind" not in entry or "activations" not in entry:
        raise InvalidJobError("is missing: a layer needs kind and activations", "kind" if "kind" not in entry else "activations")
    return Layer(entry["kind"], entry["activations"], entry.get("parameters", 0))


def _refuse_unknown(document: Mapping[Any, Any], known: tuple[str, ...], prefix: str) -> None:
    for name in document:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"known fields are {', '.join(known)}"
            raise InvalidJobError(f"is not a field: {hint}", f"{prefix}{_printable(name)}")


def _printable(name: object) -> str:
    """A key of a foreign document as it may stand in a message: short, and without control characters."""
    return ascii(str(name)[:64])[1:-1]


def _refuse_constant(name: str) -> None:
    raise InvalidJobError(f"no valid job: {name} is not a number that JSON allows")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidJobError("appears twice", _printable(twice))
    return document
