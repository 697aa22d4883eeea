"""The command line ``gpumemnet``: :mod:`~gpumemnet.cli.commands` lists all commands.

A user's mistake ends in one sentence on standard error and exit code 2.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line, by default ``sys.argv``; returns the exit code: 0, 2 for a user's
    mistake, 130 for Ctrl-C."""
    from gpumemnet.cli.commands import application, run

    return run(application(), arguments, "gpumemnet")
