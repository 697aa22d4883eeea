"""Runs a command line; a user's mistake becomes an error message of one sentence and a non-zero exit code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import typer
import typer.core
import typer.main

from gpumemnet.errors import GpumemnetError

USER_ERROR: Final = 2
_INTERRUPTED: Final = 130


def command_of(function: Callable[..., Any] | typer.Typer) -> Any:
    """Creates the typer command of an annotated function, or of an application with several commands."""
    application = function
    if not isinstance(application, typer.Typer):
        application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        application.command()(function)
    command = typer.main.get_command(application)
    _hide_types_of_flags(command)
    return command


def run(application: Any, arguments: Sequence[str] | None, name: str) -> int:
    """Runs a command line and returns the exit code.

    Args:
        application: a command from :func:`command_of`.
        arguments: arguments without the program's name; by default those in ``sys.argv``.
        name: name of the program, for its help.
    """
    try:
        code = application.main(args=None if arguments is None else list(arguments), prog_name=name, standalone_mode=False)
    except GpumemnetError as error:
        typer.echo(f"error: {error}", err=True)
        return USER_ERROR
    except typer.Abort:  # Ctrl-C
        return _INTERRUPTED
    except typer.TyperException as error:
        return _usage_error(error)
    except SystemExit as leaving:  # shell completion, or a closed pipe
        return leaving.code if isinstance(leaving.code, int) else 0
    return code if isinstance(code, int) else 0


def _usage_error(error: typer.TyperException) -> int:
    """Prints one sentence about the mistake in the command line; returns the exit code."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # whose text is the help, which typer has printed
        return error.exit_code
    sentence = error.format_message()
    if similar := getattr(error, "possibilities", None):
        sentence = f"no such option {getattr(error, 'option_name', '')}: did you mean {' or '.join(sorted(similar))}?"
    sentence = f"{sentence[:1].lower()}{sentence[1:]}".replace(". Did you mean", ": did you mean").rstrip(".")
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    typer.echo(f"error: {sentence}{hint}", err=True)
    return error.exit_code


def _hide_types_of_flags(command: Any) -> None:
    """Makes the help of ``command`` and its subcommands show ``--json``, not ``--json <bool>``."""
    options = [*command.params, command.get_help_option(typer.Context(command))]
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for one in getattr(command, "commands", {}).values():
        _hide_types_of_flags(one)
