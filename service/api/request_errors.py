"""Explains why a request does not match its schema: the path of the first invalid member, and what
was expected there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from pydantic_core import ErrorDetails

from gpumemnet.errors import InvalidRequestError, did_you_mean
from gpumemnet.job.layers import describe
from gpumemnet.job.training_job import JOB_FIELDS

from .schemas import Schema

JsonSchema = Mapping[str, Any]

_MAX_NAME: Final = 64


def explained(errors: Sequence[ErrorDetails], schema: type[Schema]) -> InvalidRequestError:
    """The error for the errors that pydantic found in a request.

    Args:
        errors: the errors.
        schema: the schema of the request.
    """
    errors = sorted(
        errors, key=lambda error: error["type"] == "missing"
    )  # an invalid member explains a missing one
    first = errors[0]["loc"]
    # A value with alternative forms has an error for each form: report the form that matched the
    # furthest.
    error = max(
        (error for error in reversed(errors) if error["loc"][:1] == first[:1]),
        key=lambda error: len(error["loc"]),
    )
    root = _json_schema(schema)
    path, found, parent = "", root, root
    for part in error["loc"]:
        inner = _inner(found, part, root)
        if inner is None and error["type"] not in ("extra_forbidden", "missing"):
            continue  # the name of a form is not part of the path
        parent, found = found, inner or {}
        path += (
            f"[{part}]"
            if isinstance(part, int)
            else f".{_printable(part)}"
            if path
            else _printable(part)
        )
    return InvalidRequestError(_sentence(error, path, found, parent, root), path or "body")


def _sentence(
    error: ErrorDetails, path: str, schema: JsonSchema, parent: JsonSchema, root: JsonSchema
) -> str:
    value, kind = error["input"], error["type"]
    if kind == "missing":
        return (
            "is missing"
            if "." in path
            else f"is missing: the body must be {_expected(parent, path, root)}"
        )
    if kind == "extra_forbidden":
        return f"is not a field: {_hint(str(error['loc'][-1]), _members(parent, root))}"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind == "too_short" and isinstance(value, list):
        return f"must hold at least {error['ctx']['min_length']}, not {len(value)}"
    if kind == "too_long" and isinstance(value, list):
        return f"must hold at most {error['ctx']['max_length']}, not {len(value)}: send several requests"
    return f"must be {_expected(schema, path, root)}, not {describe(value)}"


def _expected(schema: JsonSchema, path: str, root: JsonSchema) -> str:
    """A description of the values that ``schema`` accepts."""
    forms = [form for form in _forms(schema, root) if form.get("type") != "null"]
    return " or ".join(dict.fromkeys(_form(form, path, root) for form in forms)) or "something else"


def _form(form: JsonSchema, path: str, root: JsonSchema) -> str:
    if "const" in form:
        return str(form["const"])
    if "enum" in form:
        return f"one of {', '.join(form['enum'])}"
    examples = f" such as {' or '.join(map(str, form['examples']))}" if "examples" in form else ""
    kind = form.get("type")
    if kind == "integer":
        unit = " of MiB" if path.endswith("_mib") else ""
        within = f" between {form['minimum']} and {form['maximum']}" if "maximum" in form else ""
        return f"a whole number{unit}{within}"
    if kind == "number":
        return "a number"
    if kind == "boolean":
        return "true or false"
    if kind == "array":
        items = form.get("items", {})
        several = {"string": "texts", "object": "objects"}
        named = next(
            (several[one["type"]] for one in _forms(items, root) if one.get("type") in several),
            "values",
        )
        inner = f" with {', '.join(_members(items, root))}" if _members(items, root) else ""
        examples = "".join(
            f" such as {' or '.join(one['examples'])}"
            for one in _forms(items, root)
            if "examples" in one
        )
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
def _json_schema(schema: type[Schema]) -> JsonSchema:
    return schema.model_json_schema()


def _forms(schema: JsonSchema, root: JsonSchema) -> list[JsonSchema]:
    """The alternative forms of a value, with references resolved."""
    if "$ref" in schema:
        return _forms(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return [form for one in schema["anyOf"] for form in _forms(one, root)]
    return [schema]


def _inner(schema: JsonSchema, part: str | int, root: JsonSchema) -> JsonSchema | None:
    for form in _forms(schema, root):
        found: JsonSchema | None = (
            form.get("items") if isinstance(part, int) else form.get("properties", {}).get(part)
        )
        if found is not None:
            return found
    return None


def _members(schema: JsonSchema, root: JsonSchema) -> list[str]:
    """Names of the members of an object, the content first."""
    names = [name for form in _forms(schema, root) for name in form.get("properties", {})]
    return sorted(names, key=lambda name: name not in ("job", "jobs"))


def _printable(part: str | int) -> str:
    return str(part)[:_MAX_NAME]
