"""Runs a command line; a user's mistake becomes an error message of one sentence and a non-zero
exit code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import typer
import typer.core
import typer.main

from gpumemnet.errors import FieldError, GpumemnetError

USER_ERROR: Final = 2
_INTERRUPTED: Final = 130
_VALUE_OF_OPTION: Final = {
    **dict.fromkeys(("--registry", "--work", "--datasets"), "FOLDER"),
    **dict.fromkeys(("--release", "--parent"), "RELEASE"),
    **dict.fromkeys(("--name", "--tracking-model", "--alias"), "NAME"),
    **dict.fromkeys(
        ("--deadline", "--time-budget", "--min-seconds", "--median-seconds", "--ramp-seconds"),
        "SECONDS",
    ),
    **dict.fromkeys(("--unknown-mib", "--headroom-mib"), "MIB"),
    **dict.fromkeys(("--coverage", "--alpha"), "SHARE"),
    **dict.fromkeys(("--url", "--database-url"), "URL"),
    "--gpu": "GPU",
    "--host": "ADDRESS",
    "--since": "TIME",
    "--family": "FAMILY",
}
"""Option → how its help names the value, unless the command says otherwise."""
_VALUE_OF_TYPE: Final[dict[Any, str]] = {int: "N", float: "NUMBER", Path: "PATH"}
"""The same for other options, by their type."""


def command_of(function: Callable[..., Any] | typer.Typer) -> Any:
    """Creates the typer command of an annotated function, or of an application with several
    commands."""
    application = function
    if not isinstance(application, typer.Typer):
        application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        application.command()(function)
    command = typer.main.get_command(application)
    _prepare(command)
    return command


def run(application: Any, arguments: Sequence[str] | None, name: str) -> int:
    """Runs a command line and returns the exit code.

    Args:
        application: a command from :func:`command_of`.
        arguments: arguments without the program's name; by default those in ``sys.argv``.
        name: name of the program, for its help.
    """
    try:
        code = application.main(
            args=None if arguments is None else list(arguments),
            prog_name=name,
            standalone_mode=False,
        )
    except GpumemnetError as error:
        typer.echo(f"error: {error}", err=True)
        return USER_ERROR
    except typer.Abort:
        code = _INTERRUPTED
    except typer.TyperException as error:
        return _usage_error(error)
    except SystemExit as leaving:  # shell completion, or a closed pipe
        return leaving.code if isinstance(leaving.code, int) else 0
    if code == _INTERRUPTED:  # Ctrl-C
        typer.echo("interrupted", err=True)
    return code if isinstance(code, int) else 0


def _usage_error(error: typer.TyperException) -> int:
    """Prints one sentence about the mistake in the command line; returns the exit code."""
    context = getattr(error, "ctx", None)
    if (
        type(error).__name__ == "NoArgsIsHelpError"
    ):  # whose text is the help, which typer has printed
        return error.exit_code
    sentence = error.format_message()
    if similar := getattr(error, "possibilities", None):
        sentence = f"no such option {getattr(error, 'option_name', '')}: did you mean {' or '.join(sorted(similar))}?"
    sentence = f"{sentence[:1].lower()}{sentence[1:]}".replace(
        ". Did you mean", ": did you mean"
    ).rstrip(".")
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    typer.echo(f"error: {sentence}{hint}", err=True)
    return error.exit_code


def _prepare(command: Any) -> None:
    """Changes ``command`` and its subcommands: help names values in plain words, and errors name
    options as users write them."""
    for parameter in [*command.params, command.get_help_option(typer.Context(command))]:
        if isinstance(parameter, typer.core.TyperArgument):
            parameter.display_type_rich = _no_type  # type: ignore[method-assign]  # its name says what it is
            parameter.get_usage_pieces = partial(_usage_pieces, parameter)  # type: ignore[method-assign]
        elif getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif parameter.metavar is None:
            of_type = _VALUE_OF_TYPE.get(parameter.type_descriptor.annotation, "TEXT")
            parameter.metavar = _VALUE_OF_OPTION.get(parameter.opts[0], of_type)
    subcommands = getattr(command, "commands", {}).values()
    if not subcommands:
        _name_options_in_errors(command)
    for subcommand in subcommands:
        _prepare(subcommand)


def _no_type(ctx: Any) -> None:
    return None


def _usage_pieces(argument: typer.core.TyperArgument, ctx: Any) -> list[str]:
    """How the usage line names an argument: ``FILE``, ``FILE...`` where there may be several,
    ``[FILE]`` where it is optional."""
    name = argument.display_name_raw
    return [name if argument.required else f"[{name}]"]


def _name_options_in_errors(command: Any) -> None:
    """Makes an error about the parameter ``bin_width`` one about ``--bin-width``."""
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    names = {option.opts[0].lstrip("-").replace("-", "_"): option.opts[0] for option in options}
    names |= {option.name: option.opts[0] for option in options}
    run = command.invoke

    def invoke(context: Any) -> Any:
        try:
            return run(context)
        except FieldError as error:
            if error.field not in names:
                raise
            raise type(error)(error.reason, names[error.field]) from None

    command.invoke = invoke
