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
from operator import itemgetter
from types import NoneType
from typing import Any, Final, NamedTuple

import numpy as np

from gpumemnet.atomic_files import Document
from gpumemnet.errors import FieldError, InvalidJobError, did_you_mean
from gpumemnet.job.job_table import Indices, JobTable
from gpumemnet.job.layers import (
    KINDS,
    MAX_ELEMENTS,
    MAX_LAYERS,
    Layer,
    describe,
    is_kind,
    unchecked_layers,
)
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
)

_NUMBERS_OF: Final = itemgetter(*NUMBER_FIELDS)
_OPTIONS_OF: Final = itemgetter(*OPTION_FIELDS)
_SWITCHES_OF: Final = itemgetter(*OPTION_SWITCHES)
_LAYER_FIELDS: Final = Layer._fields
_LAYER_FIELD_SET: Final = frozenset(_LAYER_FIELDS)
_LAYER_DEFAULTS: Final[dict[str, Any]] = dict.fromkeys(_LAYER_FIELDS) | Layer._field_defaults
"""Field of a layer → its value where a document does not state it; ``None`` where it must."""
_SHORT_LAYER: Final = 3
"""Length of a layer's list without what may be unknown."""
_BLOCK_NUMBERS: Final = frozenset(range(MAX_LAYERS + 1))
_KNOWN_KINDS: Final = frozenset(KINDS)
_LayerColumns = tuple[Sequence[Any], ...]


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


def read_jobs(documents: Sequence[object]) -> ReadJobs:
    """Reads several JSON objects as a table of jobs.

    Args:
        documents: each a mapping of field names to values; ``layers`` is a list of objects with the
            fields of a :class:`~gpumemnet.job.layers.Layer`, or of lists of the first three or of
            all of them.
    """
    table = _table(documents)
    if table is not None:
        return ReadJobs(table, np.arange(len(documents)), {})
    jobs: dict[int, TrainingJob] = {}
    errors: dict[int, FieldError] = {}
    for index, document in enumerate(documents):
        try:
            jobs[index] = job_from_dict(document)
        except InvalidJobError as error:
            errors[index] = error
    return ReadJobs(
        JobTable.from_jobs(list(jobs.values())), np.array(list(jobs), dtype=np.int64), errors
    )


def _table(documents: Sequence[Any]) -> JobTable | None:
    """Reads valid documents as a table, column by column.

    Returns ``None`` if :func:`job_from_dict` would refuse one of them, or if the documents do not
    all write layers in the same form.
    """
    if set(map(type, documents)) - {dict}:
        return None
    rows = [{**FIELD_DEFAULTS, **document} for document in documents]
    numbers, options = (list(map(values_of, rows)) for values_of in (_NUMBERS_OF, _OPTIONS_OF))
    layers = [row["layers"] or () for row in rows]
    if (
        set(map(len, rows)) - {len(FIELD_DEFAULTS)}  # a field that no job has
        or set(map(type, chain.from_iterable(numbers))) - {int, NoneType}
        or set(map(type, chain.from_iterable(map(_SWITCHES_OF, rows)))) - {bool}
        or {type(row["schema_version"]) for row in rows} - {int}
        or {row["schema_version"] for row in rows} - {SCHEMA_VERSION}
        or {type(row["layers"]) for row in rows} - {list, tuple, NoneType}
        or max(map(len, layers), default=0) > MAX_LAYERS
    ):
        return None
    columns = _layer_columns([*chain.from_iterable(layers)])
    if columns is None:
        return None
    try:
        for option_set in set(options):
            check_options(*option_set)
        table = JobTable.from_columns(
            np.array(numbers, dtype=np.float64).reshape(-1, len(NUMBER_FIELDS)).T.copy(),
            options,
            np.array(list(map(len, layers)), dtype=np.int64),
            *columns,
        )
    except (InvalidJobError, OverflowError, TypeError):  # an unhashable value is a TypeError
        return None
    return None if table.settle_numbers().any() else table


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


def job_from_dict(document: object) -> TrainingJob:
    """Reads a job from its JSON object; for the form see :func:`read_jobs`.

    Raises:
        InvalidJobError: names the field (such as ``layers[3].parameters``) and what was expected.
    """
    if not isinstance(document, Mapping):
        raise InvalidJobError(f"a job must be a JSON object, not {describe(document)}")
    # A newer schema explains unknown fields better.
    check_schema_version(document.get("schema_version", SCHEMA_VERSION))
    refuse_unknown(document, JOB_FIELDS)
    for name in REQUIRED_FIELDS:
        if name not in document:
            raise InvalidJobError("is missing: a job needs " + ", ".join(REQUIRED_FIELDS), name)
    layers = document.get("layers", ())
    if layers is None:
        layers = ()
    if not isinstance(layers, list | tuple):
        raise InvalidJobError(f"must be a list of layers, not {describe(layers)}", "layers")
    columns = _layer_columns(layers)
    checked = _checked_layers(layers) if columns is None else unchecked_layers(*columns)
    return TrainingJob(**{**document, "layers": checked})


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
    import jiter  # not installed on hosts that only measure, which parse no JSON of others

    if isinstance(text, str):
        text = text.encode("utf-8", "surrogatepass")
    text = text.removeprefix(codecs.BOM_UTF8)
    try:
        return jiter.from_json(text, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        duplicate = re.match(r'Detected duplicate key "(.*)" at line', str(error), re.DOTALL)
        if duplicate is not None:
            raise InvalidJobError("appears twice", _printable(duplicate[1])) from None
        raise InvalidJobError(f"no valid JSON: {error}") from None


def job_to_dict(job: TrainingJob) -> Document:
    """Converts ``job`` to its JSON object; :func:`job_from_dict` returns an equal job."""
    names = ("schema_version", *(name for name in JOB_FIELDS if name != "schema_version"))
    document = {name: getattr(job, name) for name in names}
    layers = (layer._asdict().items() for layer in job.layers)
    known = [{name: value for name, value in items if value is not None} for items in layers]
    return document | {"layers": known}


def observed_document(observed: Mapping[str, Any]) -> Document:
    """The JSON object of what was observed of a job, without fields that are ``None``; ``job`` and
    ``observed_at`` in their JSON forms."""
    document = {name: value for name, value in observed.items() if value is not None}
    if "job" in document:
        document["job"] = job_to_dict(document["job"])
    if "observed_at" in document:
        document["observed_at"] = document["observed_at"].isoformat()
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
    """The fields of valid layers that are all written in the same form; else ``None``."""
    forms = set(map(type, layers))
    columns: Any = [()] * len(_LAYER_FIELDS)
    if forms == {dict} and set().union(*layers) <= _LAYER_FIELD_SET:
        columns = tuple(
            list(map(dict.get, layers, repeat(name), repeat(default)))
            for name, default in _LAYER_DEFAULTS.items()
        )
    elif forms == {list} and set(map(len, layers)) in ({_SHORT_LAYER}, {len(_LAYER_FIELDS)}):
        columns = [*zip(*layers, strict=True)]
        columns += [(None,) * len(layers)] * (len(_LAYER_FIELDS) - len(columns))
    elif forms:
        return None
    return columns if _are_layers(*columns) else None


def _are_layers(
    kinds: Sequence[object],
    activations: Sequence[object],
    parameters: Sequence[object],
    trains: Sequence[object],
    blocks: Sequence[object],
) -> bool:
    """Whether the columns are valid layers; false also for counts that :class:`Layer` would have to
    convert to ``int``."""
    try:
        unknown = set(kinds) - _KNOWN_KINDS
        numbers: set[Any] = set(blocks) - {None}
    except TypeError:  # an unhashable value is not a string
        return False
    counts: list[Any] = [*activations, *parameters]
    return (
        all(map(is_kind, unknown))
        and set(map(type, counts)) <= {int}
        and min(counts, default=0) >= 0
        and max(counts, default=0) <= MAX_ELEMENTS
        and set(map(type, trains)) <= {bool, NoneType}
        and set(map(type, blocks)) <= {int, NoneType}
        and numbers <= _BLOCK_NUMBERS
    )


def _checked_layers(entries: Sequence[object]) -> tuple[Layer, ...]:
    """Checks the layers one by one, so that an error names the layer."""
    layers = []
    for index, entry in enumerate(entries):
        try:
            layers.append(_layer(entry))
        except InvalidJobError as error:
            path = f"layers[{index}]" + (f".{error.field}" if error.field else "")
            raise InvalidJobError(error.reason, path) from None
    return tuple(layers)


def _layer(entry: object) -> Layer:
    if isinstance(entry, list | tuple):
        if not _SHORT_LAYER <= len(entry) <= len(_LAYER_FIELDS):
            raise InvalidJobError(
                f"must be [kind, activations, parameters], not a list of {len(entry)}"
            )
        return Layer(*entry)
    if not isinstance(entry, Mapping):
        raise InvalidJobError(
            f"must be an object with kind, activations and parameters, not {describe(entry)}"
        )
    refuse_unknown(entry, _LAYER_FIELDS)
    for name in ("kind", "activations"):
        if name not in entry:
            raise InvalidJobError("is missing: a layer needs kind and activations", name)
    return Layer(**entry)


def refuse_unknown(
    document: Mapping[Any, Any],
    known: tuple[str, ...],
    error: type[FieldError] = InvalidJobError,
) -> None:
    """Refuses a member that is no field.

    Raises:
        FieldError: the ``error``; suggests a similar field.
    """
    for name in document:
        if name not in known:
            hint = did_you_mean(name, known, f"known fields are {', '.join(known)}")
            raise error(f"is not a field: {hint}", _printable(name))


def _printable(name: object) -> str:
    """A key of a user's document in a form that is safe in a message: short, and without control
    characters."""
    return ascii(str(name)[:64])[1:-1]
