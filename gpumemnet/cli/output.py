"""Output of the commands: files written atomically, and tables on the console."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpumemnet.errors import InvalidRequestError


def check_writable(path: Path, field: str = "out") -> None:
    """Checks that a file can be written, before its content is computed.

    Raises:
        InvalidRequestError: when the folder does not exist or may not be written to, or ``path`` is
            a folder.
    """
    folder = path.parent
    if not folder.is_dir():
        raise InvalidRequestError(f"the folder {folder} does not exist", field)
    if path.is_dir():
        raise InvalidRequestError(f"{path} is a folder", field)
    if not os.access(folder, os.W_OK):
        raise InvalidRequestError(f"the folder {folder} may not be written to", field)


def write_atomically(path: Path, text: str, field: str = "out") -> None:
    """Writes ``text`` to ``path`` atomically and durably: a reader never sees part of it, even
    after a power failure.

    Raises:
        InvalidRequestError: when the file cannot be written.
    """
    temporary: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}", field) from None


def print_result(document: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Prints what a command did: ``document`` as one JSON document for programs, or ``text`` for a
    person.

    Paths in ``document`` are written as strings.
    """
    typer.echo(json.dumps(document, indent=2, default=str) if as_json else text)


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str | int]]
) -> None:
    """Prints a table; whole numbers are right-aligned with thousands separators."""
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        numeric = bool(rows) and isinstance(rows[0][index], int)
        table.add_column(name, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else cell) for cell in row))
    console.print(table)


def print_facts(console: Console, title: str, facts: Sequence[tuple[str, str]]) -> None:
    """Prints a heading, then names and values in two columns; long values wrap within their
    column."""
    grid = Table.grid(padding=(0, 2, 0, 1))
    grid.add_column(justify="right", style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(name, Text(value))
    console.print(Text(title, style="bold"))
    console.print(grid)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
