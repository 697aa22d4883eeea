"""Jobs in and out of JSON, JSON Lines and plain dictionaries, with errors that name the place.

:func:`job_from_dict` says what a job may be: the service, the command line and the batch reader come through it, or through
quicker readers that leave to it whatever is odd.  So a job that one accepts the others accept, and they refuse with the same
sentence.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Final

from gpumemnet.errors import InvalidJobError
from gpumemnet.job.layers import Layer, describe, plain_layers
from gpumemnet.job.training_job import JOB_FIELDS, REQUIRED_FIELDS, TrainingJob, check_schema_version

try:
    from orjson import loads as _quick_loads
except ImportError:  # it comes with the service, and saves three quarters of the time of reading
    _quick_loads = None  # type: ignore[assignment]

_JOB_FIELDS: Final = frozenset(JOB_FIELDS)
_LAYER_FIELDS: Final = ("kind", "activations", "parameters")
_LAYER_ROW: Final = itemgetter(*_LAYER_FIELDS)
_DIGITS_TO_ZERO: Final = bytes.maketrans(b"123456789", 9 * b"0")
_LONG_NUMBER: Final = b"0" * 19
"""So many digits may not fit 64 bits."""
_DEPTH: Final = 6
"""Objects nested deeper than a request's are left to the careful reader."""


def job_from_dict(document: object) -> TrainingJob:
    """A job from its JSON object.

    Args:
        document: mapping of field names to values; ``layers`` is a list of ``{"kind", "activations", "parameters"}`` objects
            or of ``[kind, activations, parameters]`` lists.

    Raises:
        InvalidJobError: names the field (``layers[3].parameters``) and says what it must be.
    """
    if not isinstance(document, Mapping):
        raise InvalidJobError(f"a job must be a JSON object, not {describe(document)}")
    if not _JOB_FIELDS.issuperset(document):
        check_schema_version(document.get("schema_version", 1))  # a newer schema explains unknown fields better
        _refuse_unknown(document, JOB_FIELDS, "")
    for name in REQUIRED_FIELDS:
        if name not in document:
            raise InvalidJobError("is missing: a job needs " + ", ".join(REQUIRED_FIELDS), name)
    values: dict[str, Any] = dict(document)
    layers = values.get("layers")
    values["layers"] = () if layers is None else _layers(layers)
    return TrainingJob(**values)


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


def _layers(document: object) -> tuple[Layer, ...]:
    if not isinstance(document, list | tuple):
        raise InvalidJobError(f"must be a list of layers, not {describe(document)}", "layers")
    rows = _rows(document)
    plain = None if rows is None else plain_layers(rows)
    if plain is not None:
        return plain
    layers = []
    for index, entry in enumerate(document):
        try:
            layers.append(_layer(entry))
        except InvalidJobError as error:
            path = f"layers[{index}]" + (f".{error.field}" if error.field else "")
            raise InvalidJobError(error.reason, path) from None
    return tuple(layers)


def _rows(document: Sequence[Any]) -> Sequence[Sequence[object]] | None:
    """The layers as rows of three values, where all of them are objects with these three fields; else ``None``."""
    if set(map(type, document)) != {dict}:
        return None
    try:
        rows = list(map(_LAYER_ROW, document))
    except KeyError:
        return None
    return rows if set(map(len, document)) == {len(_LAYER_FIELDS)} else None


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
