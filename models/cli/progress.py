"""Shows how far a command is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[str, float], None]]:
    """Yields what draws a progress bar, called with a step and the share that is done.

    The bar stands on standard error.  If that is not a terminal, each step is a line.
    """
    from rich.console import Console
    from rich.progress import Progress

    if not sys.stderr.isatty():
        shown: list[str] = []

        def show_line(step: str, share: float) -> None:
            if step not in shown[-1:]:
                shown.append(step)
                typer.echo(f"{share:4.0%} {step}", err=True)

        yield show_line
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda step, share: bar.update(task, description=step, completed=share)
