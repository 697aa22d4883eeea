"""Runs a command line: what a user did wrong becomes one sentence, and the exit code says what happened."""

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
    """The command that typer makes of a function with annotations, or of an application with several commands."""
    application = function
    if not isinstance(application, typer.Typer):
        application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        application.command()(function)
    command = typer.main.get_command(application)
    _hide_types_of_flags(command)
    return command


def run(application: Any, arguments: Sequence[str] | None, name: str) -> int:
    """Run ``arguments``, ``sys.argv`` unless given, and return the exit code.

    Args:
        application: a command, as :func:`command_of` makes it.
        arguments: without the program's name.
        name: of the program, for its help.
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
    except SystemExit as leaving:  # shell completion, a reader that has gone
        return leaving.code if isinstance(leaving.code, int) else 0
    return code if isinstance(code, int) else 0


def _usage_error(error: typer.TyperException) -> int:
    """Say what is wrong with the command line in one sentence; returns the exit code."""
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
    """``--json``, not ``--json <bool>``, in the help of ``command`` and of the commands under it."""
    options = [*command.params, command.get_help_option(typer.Context(command))]
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for one in getattr(command, "commands", {}).values():
        _hide_types_of_flags(one)
