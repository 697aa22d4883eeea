"""The command line of training and evaluation: :mod:`~models.cli.commands` lists the commands, and
each has a file here.

A user's mistake ends in one sentence on standard error and exit code 2.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line, by default ``sys.argv``; returns the exit code: 0, 2 for a user's
    mistake, 130 for Ctrl-C."""
    import typer

    from gpumemnet.cli.commands import run

    from .commands import app

    return run(typer.main.get_command(app), arguments, f"python -m {__name__.removesuffix('.cli')}")
