"""The command line ``gpumemnet``: one file per command, and what all commands share.

A command is a function with typer annotations; adding one is an import and an entry in :data:`COMMANDS`.  Whatever a user can get
wrong ends in one sentence on standard error and exit code 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Annotated, Any, Final, NoReturn

import typer

from gpumemnet.cli.calibrate import calibrate
from gpumemnet.cli.drift import drift
from gpumemnet.cli.extract import extract
from gpumemnet.cli.import_sacct import import_sacct
from gpumemnet.cli.models import models
from gpumemnet.cli.pack import pack
from gpumemnet.cli.predict import predict
from gpumemnet.cli.registry import registry
from gpumemnet.cli.serve import serve
from gpumemnet.cli.trace import trace
from gpumemnet.errors import GpumemnetError

COMMANDS: Final[tuple[Callable[..., Any], ...]] = (predict, serve, extract, trace, models, import_sacct, calibrate, drift, pack)

_USER_ERROR: Final = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, ``sys.argv`` unless given, and return the exit code: 0, 2 for a user's error, 130 for Ctrl-C."""
    try:
        _application()(args=None if arguments is None else list(arguments), prog_name="gpumemnet")
    except GpumemnetError as error:
        typer.echo(f"error: {error}", err=True)
        return _USER_ERROR
    except SystemExit as leaving:  # typer's own: help and usage errors, Ctrl-C, a reader that has gone
        return leaving.code if isinstance(leaving.code, int) else 0
    return 0


def _application() -> typer.Typer:
    application = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    application.callback()(_gpumemnet)
    for command in COMMANDS:
        application.command()(command)
    application.add_typer(registry, name="registry")
    return application


def _gpumemnet(
    show_version: Annotated[
        bool, typer.Option("--version", callback=lambda asked: _print_version() if asked else None, is_eager=True)
    ] = False,
) -> None:
    """Tells, before a deep-learning training job starts, how much GPU memory it will take."""


def _print_version() -> NoReturn:
    typer.echo(version("gpumemnet"))
    raise typer.Exit
