"""Builds the parts of the documentation that have a source elsewhere, so that no copy of them can
become outdated.

MkDocs calls this file as a hook (``mkdocs.yml``).  The reference of the command line comes from the
commands themselves, that of REST from the service's OpenAPI document, the settings and the feature
columns from their Python tables.  The guides of the schedulers come from the README files beside
their code, and the page for contributors from ``CONTRIBUTING.md``.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[1]
OPENAPI: Final = ROOT / "tests/service/api/openapi_snapshot.json"

READMES: Final = {
    "contributing/index.md": "CONTRIBUTING.md",
    "how-to/deploy.md": "deploy/README.md",
    "how-to/integrations.md": "integrations/README.md",
    "how-to/slurm.md": "integrations/slurm/README.md",
    "how-to/kubernetes.md": "integrations/kubernetes/README.md",
    "how-to/ray.md": "integrations/ray/README.md",
    "how-to/carma.md": "integrations/carma/README.md",
    "how-to/mlflow.md": "integrations/mlflow/README.md",
    "how-to/mlserver.md": "integrations/mlserver/README.md",
    "how-to/retraining-schedule.md": "integrations/retraining/README.md",
}
"""Page of the site → file of the repository that it shows."""

_LINK: Final = re.compile(r"(?<!\!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    pages = {
        "reference/command-line.md": command_line(),
        "reference/rest.md": rest(json.loads(OPENAPI.read_text("utf-8"))),
        "reference/settings.md": settings(),
        "reference/features.md": feature_columns(),
    }
    pages |= {page: (ROOT / source).read_text("utf-8") for page, source in READMES.items()}
    for page, text in pages.items():
        if (in_clone := files.get_file_from_path(page)) is not None:
            files.remove(in_clone)  # a few lines for readers of the repository
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links that leave ``docs/`` lead to the page that shows the file; where no page does, keep
    their text alone.

    In the repository the same links work as they are.

    Raises:
        PluginError: a link names a file that the repository does not have.
    """
    page_path = page.file.src_uri
    source = READMES.get(page_path, f"docs/{page_path}")
    page_of = {path: shown for shown, path in READMES.items()}

    def replace(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path.startswith("docs/") and not (ROOT / path).is_dir():
            shown = path.removeprefix("docs/")
        elif not (ROOT / path).exists():
            raise PluginError(f"{source}: the link to {target} leads to no file")
        else:
            shown = page_of.get(path) or page_of.get(f"{path}/README.md") or ""
        return (
            f"[{text}]({posixpath.relpath(shown, posixpath.dirname(page_path))}{anchor})"
            if shown
            else text
        )

    return _outside_of_code(markdown, lambda part: _LINK.sub(replace, part))


class PlainDocstrings(griffe.Extension):
    """Shows Sphinx's roles and double backticks as plain code, and gives each name of ``a, b:
    text`` an entry of its own."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring:
            text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", obj.docstring.value)
            text = re.sub(r"``(.+?)``", r"`\1`", text)
            obj.docstring.value = re.sub(
                r"^( +)(\w+(?:, \w+)+): ", _apart, text, flags=re.MULTILINE
            )


def _apart(entry: re.Match[str]) -> str:
    *others, last = entry[2].split(", ")
    return "".join(f"{entry[1]}{name}: see `{last}`.\n" for name in others) + f"{entry[1]}{last}: "


def _outside_of_code(markdown: str, change: Any) -> str:
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


# ---- command line
# -----------------------------------------------------------------------------------------------------------


def command_line() -> str:
    """Reference of ``gpumemnet``: every command with its arguments and options, from the commands
    themselves."""
    from gpumemnet.cli.commands import ENTRIES, load

    lines = [
        "# Command line\n",
        "This page is generated from the commands. `gpumemnet COMMAND --help` prints the same.\n",
        "Exit codes: 0 on success, 2 for a mistake of the user (one sentence on standard error), 130 after Ctrl-C. "
        "Commands with other codes list them.\n",
    ]
    for path, command in (
        found for name in ENTRIES for found in _walk(f"gpumemnet {name}", load(name))
    ):
        lines += [f"## {path}\n", _sentences(command.help or ""), *_parameters(path, command)]
    return "\n".join(lines)


def _walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            yield from _walk(f"{path} {name}", child)


def _sentences(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", text.replace("\b\n", "").replace("\f", "")).strip() + "\n"


def _parameters(path: str, command: Any) -> Iterator[str]:
    arguments = [parameter for parameter in command.params if not parameter.opts[0].startswith("-")]
    options = [
        parameter
        for parameter in command.params
        if parameter.opts[0].startswith("-") and not parameter.hidden
    ]
    if not getattr(command, "commands", None):
        names = " ".join(_argument(parameter) for parameter in arguments)
        yield f"```text\n{path}{' [OPTIONS]' if options else ''}{f' {names}' if names else ''}\n```\n"
    rows = [(_argument(parameter), "", _help(parameter)) for parameter in arguments]
    for option in options:
        names = ", ".join(option.opts) + (
            f" / {', '.join(option.secondary_opts)}" if option.secondary_opts else ""
        )
        rows.append((f"{names} {_value(option)}".rstrip(), _default(option), _help(option)))
    if rows:
        yield _table(
            ("argument or option", "default", "meaning"),
            [(f"`{name}`", default, text) for name, default, text in rows],
        )


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name.upper()).removesuffix("...")
    return f"{name}…" if parameter.nargs == -1 else str(name)


def _value(option: Any) -> str:
    if getattr(option, "is_flag", False) or getattr(option, "count", False):
        return ""
    annotation = getattr(getattr(option, "type_descriptor", None), "annotation", None)
    kind = getattr(annotation, "__name__", "value")
    return str(
        option.metavar
        or {"int": "N", "float": "NUMBER", "Path": "PATH", "list": "VALUE"}.get(kind, "TEXT")
    )


def _default(option: Any) -> str:
    value = option.default
    if value in (None, False, (), []) or callable(value):
        return "required" if option.required else ""
    return f"`{value}`"


def _help(parameter: Any) -> str:
    text = _sentences(getattr(parameter, "help", None) or "").strip()
    return text + (" May be given several times." if getattr(parameter, "multiple", False) else "")


# ---- REST
# -------------------------------------------------------------------------------------------------------------------


def rest(document: Mapping[str, Any]) -> str:
    """Reference of the REST interface, from its OpenAPI document."""
    lines = [
        "# REST\n",
        "This page is generated from the service's OpenAPI document. A running service shows the same, with forms to try it, "
        "at `/docs`.\n",
        document["info"]["description"] + "\n",
    ]
    tags: dict[str, list[tuple[str, str, Any]]] = {}
    for path, methods in document["paths"].items():
        shared = methods.get("parameters", [])
        for method, operation in methods.items():
            if method != "parameters":
                operation = {**operation, "parameters": [*shared, *operation.get("parameters", [])]}
                tags.setdefault(operation.get("tags", ["other"])[0], []).append(
                    (method.upper(), path, operation)
                )
    order = ["predict", "fit", "models", "observations", "admin", "health"]
    for tag in sorted(tags, key=lambda name: order.index(name) if name in order else len(order)):
        lines.append(f"## {tag[:1].upper()}{tag[1:]}\n")
        for method, path, operation in sorted(tags[tag], key=lambda each: each[1] != "/v1/predict"):
            lines += _operation(method, path, operation)
    lines.append("## Objects\n")
    for name, schema in document["components"]["schemas"].items():
        lines += _schema(name, schema)
    return "\n".join(lines)


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"### `{method} {path}`\n"
    yield operation["summary"] + ("" if operation["summary"][-1] in ".?" else ".") + "\n"
    if operation.get("description"):
        yield operation["description"] + "\n"
    rows = [
        (f"`{each['name']}`", each["in"], _type(each["schema"]), _cell(each.get("description", "")))
        for each in operation["parameters"]
        if "name" in each
    ]
    if rows:
        yield _table(("parameter", "in", "type", "meaning"), rows)
    body = operation.get("requestBody", {}).get("content", {})
    if body:
        yield (
            "Body: "
            + ", ".join(f"{_type(each['schema'])} as `{kind}`" for kind, each in body.items())
            + ".\n"
        )
    rows = []
    for status, answer in operation["responses"].items():
        kinds = [f"{_type(each.get('schema', {}))}" for each in answer.get("content", {}).values()]
        rows.append(
            (
                status,
                " or ".join(dict.fromkeys(kind for kind in kinds if kind)),
                _cell(answer["description"]),
            )
        )
    yield _table(("status", "answer", "meaning"), rows)


def _schema(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {name}\n"
    if schema.get("description"):
        yield _sentences(schema["description"])
    required = set(schema.get("required", ()))
    rows = [
        (f"`{field}`", _type(each), "yes" if field in required else "", _cell(_meaning(each)))
        for field, each in schema.get("properties", {}).items()
    ]
    if rows:
        yield _table(("field", "type", "required", "meaning"), rows)
    elif not schema.get("properties"):
        yield (
            _type({key: value for key, value in schema.items() if key != "description"})
            or "Any JSON object."
        ) + "\n"


def _meaning(schema: Mapping[str, Any]) -> str:
    parts = [schema.get("description", "")]
    if "default" in schema and schema["default"] is not None:
        parts.append(f"Default `{json.dumps(schema['default'])}`.")
    limits = [
        (sign, schema[key])
        for sign, key in ((">", "exclusiveMinimum"), ("≥", "minimum"), ("≤", "maximum"))
        if key in schema
    ]
    if limits:
        parts.append(", ".join(f"{sign} {value:,}" for sign, value in limits) + ".")
    return " ".join(part if part[-1:] in ".?" else f"{part}." for part in parts if part)


def _type(schema: Any) -> str:
    if not isinstance(schema, Mapping):
        return ""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(filter(None, map(_type, schema[key]))))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {})) or 'anything'}"
    kinds = schema.get("type", "")
    return " or ".join(kinds) if isinstance(kinds, list) else str(kinds)


# ---- settings and features
# --------------------------------------------------------------------------------------------------


def settings() -> str:
    """Reference of the service's settings, from their class."""
    from service.settings import PREFIX, Settings

    rows = []
    for name, field in Settings.model_fields.items():
        default = "" if field.default in ((), None, "") else str(field.default)
        shown = {"True": "true", "False": "false"}.get(default, default)
        rows.append(
            (
                f"`{PREFIX}{name.upper()}`",
                f"`{shown}`" if shown else "",
                _cell(field.description or ""),
            )
        )
    return "\n".join(
        (
            "# Settings\n",
            "This page is generated from the service's settings. Each is an environment variable, read once at the start. "
            "An option of `gpumemnet serve` takes precedence over its variable.\n",
            _table(("variable", "default", "meaning"), rows),
        )
    )


def feature_columns() -> str:
    """Reference of the feature vector, from its table of columns."""
    from gpumemnet.predict.features import FEATURE_COLUMNS, FEATURE_SCHEMA, TOTAL_COLUMNS

    head = ("#", "column", "meaning")
    rows = [
        (str(place), f"`{column.name}`", _cell(column.meaning))
        for place, column in enumerate(FEATURE_COLUMNS)
    ]
    return "\n".join(
        (
            "# Feature columns\n",
            f"This page is generated from `gpumemnet/predict/features.py`. The feature vector has {len(rows)} columns, under the "
            f"feature schema `{FEATURE_SCHEMA}`. A bundle states its schema, and is refused under another.\n",
            "## Known from totals\n",
            _table(head, rows[: len(TOTAL_COLUMNS)]),
            "## Known from the layer list\n",
            "Where a job states totals only, these are 0.\n",
            _table(head, rows[len(TOTAL_COLUMNS) :]),
        )
    )


def _cell(text: str) -> str:
    return " ".join(text.split())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_without_pipes, line))} |" for line in lines) + "\n"


def _without_pipes(cell: str) -> str:
    """Escape pipes, but not within code, where Markdown reads them as they are."""
    parts = cell.split("`")
    return "`".join(
        part if place % 2 else re.sub(r"(?<!\\)\|", r"\|", part) for place, part in enumerate(parts)
    )
