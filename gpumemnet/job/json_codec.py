"""Reads and writes jobs as JSON and as dictionaries, with errors that name the field.

The service, the command line and the file reader all use :func:`read_jobs`.  :func:`job_from_dict`
reads a single document by the same rules.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from types import NoneType
from typing import Any, Final, NamedTuple

import jiter
import numpy as np

from gpumemnet.errors import FieldError, InvalidJobError, did_you_mean
from gpumemnet.job.job_table import Indices, JobTable
from gpumemnet.job.layers import MAX_LAYERS, Layer, are_layers, describe
from gpumemnet.job.training_job import (
    FIELD_DEFAULTS,
    JOB_FIELDS,
    NUMBER_FIELDS,
    OPTION_FIELDS,
    OPTION_SWITCHES,
    REQUIRED_FIELDS,
    SCHEMA_VERSION,
    TrainingJob,
    check_options,
    check_schema_version,
    settle_columns,
)

_JOB_FIELDS: Final = frozenset(JOB_FIELDS)
_REQUIRED_FIELDS: Final = frozenset(REQUIRED_FIELDS)
_LAYER_FIELDS: Final = ("kind", "activations", "parameters")
_LAYER_FIELD_SET: Final = frozenset(_LAYER_FIELDS)
_PARSER_MESSAGE: Final = re.compile(
    r'(?P<reason>(Detected duplicate key "(?P<key>.*)"|.*)) at line (?P<line>\d+) column (?P<column>\d+)',
    re.DOTALL,
)
"""How jiter words an error."""
_PLAIN_WORDS: Final = {
    "recursion limit exceeded": "it is nested too deeply",
    "number out of range": "a number has too many digits",
}
"""Words of jiter → ours."""
_LayerColumns = tuple[Sequence[str], Sequence[int], Sequence[int]]
_DEFAULTS: Final[dict[str, Any]] = {
    name: None if name in REQUIRED_FIELDS else value for name, value in FIELD_DEFAULTS.items()
}
"""Field → value when a document does not state it; for required fields, ``None``, which every check
refuses."""
_FEW: Final = 8
"""Up to about twice this many documents are read one by one when any of them is invalid."""


class ReadJobs(NamedTuple):
    """Result of reading several documents or rows.

    Attributes:
        table: the valid jobs.
        rows: positions of the documents that they were read from, increasing, shape
            ``[len(table)]``.
        errors: position of each invalid document → its error.
    """

    table: JobTable
    rows: Indices
    errors: dict[int, FieldError]


def read_jobs(documents: Sequence[object], max_layers: int = MAX_LAYERS) -> ReadJobs:
    """Reads several JSON objects as a table of jobs.

    Args:
        documents: each a mapping of field names to values; ``layers`` is a list of ``{"kind",
            "activations", "parameters"}`` objects or of ``[kind, activations, parameters]`` lists.
        max_layers: the largest number of layers that a job may have.
    """
    table = _table(documents, max_layers)
    if table is not None:
        return ReadJobs(table, np.arange(len(documents)), {})
    half = len(documents) // 2
    if half > _FEW:  # most documents are valid: halve the list to isolate the others
        first, second = (
            read_jobs(some, max_layers) for some in (documents[:half], documents[half:])
        )
        return merge_reads([(np.arange(half), first), (np.arange(half, len(documents)), second)])
    jobs: dict[int, TrainingJob] = {}
    errors: dict[int, FieldError] = {}
    for index, document in enumerate(documents):
        try:
            jobs[index] = job_from_dict(document, max_layers)
        except InvalidJobError as error:
            errors[index] = error
    return ReadJobs(
        JobTable.from_jobs(list(jobs.values())), np.array(list(jobs), dtype=np.int64), errors
    )


def _table(documents: Sequence[Any], max_layers: int) -> JobTable | None:
    """Reads valid documents as a table, column by column.

    Returns ``None`` if :func:`job_from_dict` would refuse one of them, or if the documents do not
    all write layers in the same form.
    """
    if not documents:
        return JobTable.from_jobs(())
    names = set().union(*documents) if set(map(type, documents)) == {dict} else set()
    if not _REQUIRED_FIELDS <= names <= _JOB_FIELDS:
        return None
    values = {
        name: list(map(dict.get, documents, repeat(name), repeat(_DEFAULTS[name])))
        for name in names
    }
    count, lists = len(documents), [layers or () for layers in values.get("layers", ())]
    has_valid_types = (
        all(
            set(map(type, values[name])) <= {int, NoneType}
            for name in NUMBER_FIELDS
            if name in names
        )
        and all(set(map(type, values[name])) == {bool} for name in OPTION_SWITCHES if name in names)
        and set(map(type, values.get("schema_version", ()))) <= {int}
        and set(values.get("schema_version", ())) <= {SCHEMA_VERSION}
        and set(map(type, values.get("layers", ()))) <= {list, tuple, NoneType}
        and max(map(len, lists), default=0) <= max_layers
    )
    columns = _layer_columns([*chain.from_iterable(lists)]) if has_valid_types else None
    if columns is None:
        return None
    options = list(
        zip(
            *(values.get(name) or repeat(_DEFAULTS[name], count) for name in OPTION_FIELDS),
            strict=True,
        )
    )
    try:
        for option_set in set(options):
            check_options(option_set)
        numbers = np.array(
            [values.get(name) or [_DEFAULTS[name]] * count for name in NUMBER_FIELDS],
            dtype=np.float64,
        )
    except (
        InvalidJobError,
        TypeError,
        OverflowError,
    ):  # TypeError: an unhashable value is never a valid option
        return None
    counts = np.array(list(map(len, lists)) or [0] * count, dtype=np.int64)
    table = JobTable.from_columns(numbers, options, counts, *columns)
    breaks = settle_columns(table.numbers, counts, table.layer_activations, table.layer_parameters)
    return None if breaks.any() else table


def merge_reads(parts: Sequence[tuple[Indices, ReadJobs]]) -> ReadJobs:
    """Merges the results of reading different documents of one file; each part starts with its
    documents' positions."""
    rows = np.concatenate([positions[read.rows] for positions, read in parts])
    errors = {
        int(positions[at]): error for positions, read in parts for at, error in read.errors.items()
    }
    table = JobTable.concatenate([read.table for _, read in parts])
    order = rows.argsort()
    is_ordered = bool((order[1:] > order[:-1]).all())
    return (
        ReadJobs(table, rows, errors)
        if is_ordered
        else ReadJobs(table.take(order), rows[order], errors)
    )


def job_from_dict(document: object, max_layers: int = MAX_LAYERS) -> TrainingJob:
    """Reads a job from its JSON object; for the form see :func:`read_jobs`.

    Raises:
        InvalidJobError: names the field (such as ``layers[3].parameters``) and what was expected.
    """
    if not isinstance(document, Mapping):
        raise InvalidJobError(f"a job must be a JSON object, not {describe(document)}")
    if not _JOB_FIELDS.issuperset(document):
        check_schema_version(
            document.get("schema_version", SCHEMA_VERSION)
        )  # a newer schema explains unknown fields better
        _refuse_unknown(document, JOB_FIELDS, "")
    for name in REQUIRED_FIELDS:
        if name not in document:
            raise InvalidJobError("is missing: a job needs " + ", ".join(REQUIRED_FIELDS), name)
    layers = document.get("layers")
    if layers is None:
        layers = ()
    if not isinstance(layers, list | tuple):
        raise InvalidJobError(f"must be a list of layers, not {describe(layers)}", "layers")
    if len(layers) > max_layers:
        raise InvalidJobError(f"must hold at most {max_layers} layers, not {len(layers)}", "layers")
    columns = _layer_columns(layers)
    checked = _checked_layers(layers) if columns is None else map(Layer, *columns)
    return TrainingJob(**{**document, "layers": tuple(checked)})


def job_from_json(text: str | bytes) -> TrainingJob:
    """Reads a job from JSON text.

    Raises:
        InvalidJobError: when the text is not JSON (with line and column), contains NaN or infinity,
            or is not a valid job.
    """
    return job_from_dict(parse_json(text))


def parse_json(text: str | bytes) -> Any:
    """Parses strict JSON in UTF-8: without NaN, infinity, duplicate keys or more than 200 levels of
    nesting.

    Raises:
        InvalidJobError: says what is wrong, with line and column; for a duplicate key, its field is
            that key.
    """
    if isinstance(text, str):
        text = text.encode("utf-8", "surrogatepass")
    text = text.removeprefix(codecs.BOM_UTF8)
    try:
        return jiter.from_json(text, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        raise _syntax_error(text, str(error)) from None


def _syntax_error(text: bytes, message: str) -> InvalidJobError:
    """What is wrong with ``text``, from the parser's ``message``, which ends with line and
    column."""
    found = _PARSER_MESSAGE.fullmatch(message)
    try:
        text.decode()
    except UnicodeDecodeError:
        found = None
    if found is None:
        return InvalidJobError("no valid JSON: the text is not UTF-8")
    reason, key, line, column = (
        found["reason"],
        found["key"],
        int(found["line"]),
        max(int(found["column"]), 1),
    )
    if key is not None:
        return InvalidJobError("appears twice", _printable(key))
    reason = _PLAIN_WORDS.get(reason, reason)
    if reason == "expected value":
        rest = text.split(b"\n")[line - 1][column - 1 :].decode(errors="replace")
        reason += f", found {_printable(rest[:16])}"
    return InvalidJobError(f"no valid JSON at line {line}, column {column}: {reason}")


def job_to_dict(job: TrainingJob) -> dict[str, Any]:
    """Converts ``job`` to its JSON object; :func:`job_from_dict` returns an equal job."""
    document: dict[str, Any] = {"schema_version": job.schema_version}
    document |= {
        name: getattr(job, name) for name in JOB_FIELDS if name not in ("schema_version", "layers")
    }
    document["layers"] = [
        {"kind": layer.kind, "activations": layer.activations, "parameters": layer.parameters}
        for layer in job.layers
    ]
    return document


def job_to_json(job: TrainingJob) -> str:
    """Writes ``job`` as indented JSON text, one layer per line."""
    document = job_to_dict(job)
    layers = document.pop("layers")
    text = json.dumps(document, indent=2)
    if not layers:
        return text + "\n"
    rows = ",\n".join("    " + json.dumps(layer) for layer in layers)
    return text.removesuffix("\n}") + f',\n  "layers": [\n{rows}\n  ]\n}}\n'


def _layer_columns(layers: Sequence[Any]) -> _LayerColumns | None:
    """Kinds, activations and parameters of valid layers that are all written in the same form; else
    ``None``."""
    forms = set(map(type, layers))
    columns: Any = (), (), ()
    if forms == {dict} and all(map(_LAYER_FIELD_SET.issuperset, layers)):
        kinds, activations = (
            list(map(dict.get, layers, repeat(name))) for name in ("kind", "activations")
        )
        columns = kinds, activations, list(map(dict.get, layers, repeat("parameters"), repeat(0)))
    elif forms and forms <= {list, Layer} and set(map(len, layers)) == {len(_LAYER_FIELDS)}:
        columns = tuple(zip(*layers, strict=True))
    elif forms:
        return None
    return columns if are_layers(*columns) else None


def _checked_layers(entries: Sequence[object]) -> list[Layer]:
    """Checks the layers one by one, so that an error names the layer."""
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
            raise InvalidJobError(
                f"must be [kind, activations, parameters], not a list of {len(entry)}"
            )
        return Layer(*entry)
    if not isinstance(entry, Mapping):
        raise InvalidJobError(
            f"must be an object with kind, activations and parameters, not {describe(entry)}"
        )
    if not set(_LAYER_FIELDS).issuperset(entry):
        _refuse_unknown(entry, tuple(sorted(_LAYER_FIELDS)), "")
    if "kind" not in entry or "activations" not in entry:
        raise InvalidJobError(
            "is missing: a layer needs kind and activations",
            "kind" if "kind" not in entry else "activations",
        )
    return Layer(entry["kind"], entry["activations"], entry.get("parameters", 0))


def _refuse_unknown(document: Mapping[Any, Any], known: tuple[str, ...], prefix: str) -> None:
    for name in document:
        if name not in known:
            hint = did_you_mean(name, known, f"known fields are {', '.join(known)}")
            raise InvalidJobError(f"is not a field: {hint}", f"{prefix}{_printable(name)}")


def _printable(name: object) -> str:
    """A key of a user's document in a form that is safe in a message: short, and without control
    characters."""
    return ascii(str(name)[:64])[1:-1]
