"""Jobs in and out of JSON, JSON Lines and plain dictionaries, with errors that name the place.

:func:`read_jobs` is the one reader of JSON: the service, the command line and the files of jobs come through it, and
:func:`job_from_dict` reads a single document in the same way.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any, Final, NamedTuple

import numpy as np

from gpumemnet.errors import FieldError, InvalidJobError
from gpumemnet.job.job_table import Indices, JobTable
from gpumemnet.job.layers import Layer, are_layers, describe
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

try:
    from orjson import loads as _quick_loads
except ImportError:  # it comes with the service, and saves three quarters of the time of reading
    _quick_loads = None  # type: ignore[assignment]

_JOB_FIELDS: Final = frozenset(JOB_FIELDS)
_LAYER_FIELDS: Final = ("kind", "activations", "parameters")
_LAYER_FIELD_SET: Final = frozenset(_LAYER_FIELDS)
_LayerColumns = tuple[Sequence[str], Sequence[int], Sequence[int]]
_OPTION_DEFAULTS: Final = tuple(map(FIELD_DEFAULTS.get, OPTION_FIELDS))
_NUMBER_DEFAULTS: Final = tuple(map(FIELD_DEFAULTS.get, NUMBER_FIELDS))
_DIGITS_TO_ZERO: Final = bytes.maketrans(b"123456789", 9 * b"0")
_LONG_NUMBER: Final = b"0" * 19
"""So many digits may not fit 64 bits."""
_DEPTH: Final = 6
"""Objects nested deeper than a request's are left to the careful reader."""


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
    """One job: its counts, its set of options, and its layers as three columns."""

    numbers: list[int | None]
    options: tuple[Any, ...]
    kinds: Sequence[str]
    activations: Sequence[int]
    parameters: Sequence[int]


def read_jobs(documents: Sequence[object], max_layers: int = MAX_LAYERS) -> ReadJobs:
    """The jobs of many JSON objects, as a table.

    Args:
        documents: each a mapping of field names to values; ``layers`` is a list of ``{"kind", "activations", "parameters"}``
            objects or of ``[kind, activations, parameters]`` lists.
        max_layers: the most layers that a job may have.
    """
    read: list[_Row] = []
    rows: list[int] = []
    errors: dict[int, FieldError] = {}
    for place, document in enumerate(documents):
        try:
            read.append(_read(document, max_layers))
            rows.append(place)
        except InvalidJobError as error:
            errors[place] = error
    numbers, options, kinds, activations, parameters = zip(*read, strict=True) if read else ((), (), (), (), ())
    table = JobTable.from_rows(
        numbers,
        options,
        list(map(len, kinds)),
        [*chain.from_iterable(kinds)],
        [*chain.from_iterable(activations)],
        [*chain.from_iterable(parameters)],
    )
    return ReadJobs(table, np.array(rows, dtype=np.int64), errors)


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
    row = _read(document, MAX_LAYERS)
    layers = tuple(map(Layer, row.kinds, row.activations, row.parameters))
    values = dict(zip((*NUMBER_FIELDS, *OPTION_FIELDS), (*row.numbers, *row.options), strict=True))
    return TrainingJob(layers=layers, **values)


def _read(document: object, max_layers: int) -> _Row:
    """One job, checked."""
    if not isinstance(document, Mapping):
        raise InvalidJobError(f"a job must be a JSON object, not {describe(document)}")
    if not _JOB_FIELDS.issuperset(document):
        check_schema_version(document.get("schema_version", 1))  # a newer schema explains unknown fields better
        _refuse_unknown(document, JOB_FIELDS, "")
    for name in REQUIRED_FIELDS:
        if name not in document:
            raise InvalidJobError("is missing: a job needs " + ", ".join(REQUIRED_FIELDS), name)
    layers = document.get("layers")
    kinds, activations, parameters = _layers(layers, max_layers) if layers else _no_layers(layers)
    check_schema_version(document.get("schema_version", SCHEMA_VERSION))
    options = tuple(map(document.get, OPTION_FIELDS, _OPTION_DEFAULTS))
    check_options(options)
    stated = list(map(document.get, NUMBER_FIELDS, _NUMBER_DEFAULTS))
    return _Row(settle_numbers(stated, activations, parameters, max_layers), options, kinds, activations, parameters)


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
    document = _plain_json(text)
    if document is not None:
        return document
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


def _plain_json(text: str | bytes) -> Any:
    """What the quick reader makes of ``text``, where the careful one would make the same of it; else ``None``.

    The quick reader keeps the last of two equal keys and makes floats of long integers.  So there may be as many colons as there
    are keys, and no long numbers; what stands in a text can only make a document look odd, never plain.
    """
    if _quick_loads is None:
        return None
    try:
        document = _quick_loads(text)
    except ValueError:
        return None
    content = text.encode() if isinstance(text, str) else text
    is_plain = _LONG_NUMBER not in content.translate(_DIGITS_TO_ZERO) and _has_keys(document, content.count(b":"))
    return document if is_plain else None


def _has_keys(document: Any, count: int) -> bool:
    """Whether the objects in ``document`` have ``count`` keys together, as far down as a request reaches."""
    level = [document]
    for _ in range(_DEPTH):
        if not count or not level:
            break
        kinds = list(map(type, level))
        objects, lists = _of_type(level, kinds, dict), _of_type(level, kinds, list)
        count -= sum(map(len, objects))
        level = [*chain.from_iterable(map(dict.values, objects)), *chain.from_iterable(lists)] if count else []
    return not count


def _of_type(values: list[Any], kinds: list[type], wanted: type) -> list[Any]:
    """The values of one type; most lists hold no others, or none of it."""
    count = kinds.count(wanted)
    if not count:
        return []
    return values if count == len(values) else [value for value in values if type(value) is wanted]


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


def _no_layers(document: object) -> _LayerColumns:
    if document is not None and not isinstance(document, list | tuple):
        raise InvalidJobError(f"must be a list of layers, not {describe(document)}", "layers")
    return (), (), ()


def _layers(document: object, max_layers: int) -> _LayerColumns:
    """Kinds, activations and parameters of a job's layers, checked."""
    if not isinstance(document, list | tuple):
        raise InvalidJobError(f"must be a list of layers, not {describe(document)}", "layers")
    if len(document) > max_layers:
        raise InvalidJobError(f"must hold at most {max_layers} layers, not {len(document)}", "layers")
    columns: Any = None
    forms = set(map(type, document))
    if forms == {dict} and all(map(_LAYER_FIELD_SET.issuperset, document)):
        kinds, activations = (list(map(dict.get, document, repeat(name))) for name in ("kind", "activations"))
        columns = kinds, activations, list(map(dict.get, document, repeat("parameters"), repeat(0)))
    elif forms == {list} and set(map(len, document)) == {len(_LAYER_FIELDS)}:
        columns = tuple(zip(*document, strict=True))
    if columns is None or not are_layers(*columns):
        columns = tuple(zip(*_checked_layers(document), strict=True))
    checked: _LayerColumns = columns
    return checked


def _checked_layers(document: Sequence[object]) -> list[Layer]:
    """The layers one by one, with an error that names the place."""
    layers = []
    for index, entry in enumerate(document):
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
