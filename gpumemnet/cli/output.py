"""What commands write: files, tables, facts, and how far they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_json(document: object) -> None:
    """Prints one JSON document for programs; paths in it are written as strings."""
    typer.echo(json.dumps(document, indent=2, default=str))


def print_result(document: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Prints what a command did: ``document`` as JSON for programs, or ``text`` for a person."""
    if as_json:
        print_json(document)
    else:
        typer.echo(text)


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


def print_columns(
    console: Console, first: str, columns: Sequence[str], rows: Sequence[Sequence[str | Text]]
) -> None:
    """Prints a table without a frame.  The first column wraps; the others, whole numbers and
    figures, are right-aligned, and never cut.

    Args:
        console: where to print it.
        first: heading of the first column.
        columns: headings of the others; those without a letter are left-aligned.
        rows: cells as many as headings.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right" if name.strip() else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


UNKNOWN_SEARCH: Final = (
    "cuDNN's search takes more of what is free and gives it back; how much is not known"
)
"""Shown of jobs whose start-up peak is not known."""


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


@contextmanager
def shown_steps(source: str, *, is_shown: bool = True) -> Iterator[Callable[[str], None] | None]:
    """Shows the current step on standard error while it runs, if standard error is a terminal."""
    console = Console(stderr=True)
    if not (is_shown and console.is_terminal):
        yield None
        return
    with console.status(f"{source}: starting") as status:
        yield lambda step: status.update(f"{source}: {step}")


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[str, float], None]]:
    """Yields what shows how far a command is, called with a step and the share that is done.

    It stands on standard error.  If that is not a terminal, each step is a line.
    """
    shown: list[str] = []
    with shown_steps(title) as show:

        def show_share(step: str, share: float) -> None:
            text = f"{share:4.0%} {step}"
            if show is not None:
                show(text)
            elif step not in shown[-1:]:
                shown.append(step)
                typer.echo(text, err=True)

        yield show_share
