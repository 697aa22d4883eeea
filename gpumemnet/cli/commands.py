"""Lists all commands of ``gpumemnet``, and runs a command line.

A command is imported only when it runs or shows its help, so ``gpumemnet --help`` is fast and needs
no extra.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from gpumemnet.atomic_files import shipped_json
from gpumemnet.errors import FieldError, GpumemnetError, MissingExtraError

USER_ERROR: Final = 2
_EXTRAS: Final = {"dataset_builder": "build", "models": "train", "service": "service"}
"""Package of the project beside ``gpumemnet`` → the extra that its commands need, as in
``pip install -e '.[…]'``."""


@dataclass(frozen=True)
class Entry:
    """A command before it is imported.

    Attributes:
        name: name of the command.
        target: ``module:object``, where the object is a function or an :class:`App`.
        summary: the first sentence of its help.
        panel: heading under which ``gpumemnet --help`` lists it.
    """

    name: str
    target: str
    summary: str
    panel: str


_PANELS: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = shipped_json("cli/commands.json")
"""Heading under which ``gpumemnet --help`` lists commands → their names, targets and summaries."""
ENTRIES: Final = {
    name: Entry(name, *described, panel)
    for panel, commands in _PANELS.items()
    for name, described in commands.items()
}


class Command(TyperCommand):
    """A command whose errors name its options as users write them: ``--bin-width``, not
    ``bin_width``."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except FieldError as error:
            options = [each for each in self.params if each.param_type_name == "option"]
            names = {each.opts[0].lstrip("-").replace("-", "_"): each.opts[0] for each in options}
            names |= {str(each.name): each.opts[0] for each in options}
            if error.field not in names:
                raise
            raise type(error)(error.reason, names[error.field]) from None


class App(typer.Typer):
    """Commands under one name, such as ``gpumemnet build``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(no_args_is_help=True, pretty_exceptions_enable=False, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Registers a command; see :meth:`typer.Typer.command`."""
        return super().command(name, **{"cls": Command, **settings})


class _LazyCommand(TyperCommand):
    """Stands for a command that is not imported yet."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(
            entry.name,
            help=entry.summary,
            short_help=entry.summary,
            rich_help_panel=entry.panel,
        )

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Imports the command, and parses its arguments."""
        return load(str(self.name)).make_context(info_name, args, parent=parent, **extra)


class _Root(TyperGroup):
    """The command ``gpumemnet`` itself."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for entry in ENTRIES.values():
            self.add_command(_LazyCommand(entry))

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; a missing package becomes an error that names the extra to install."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            entry = ENTRIES.get(str(ctx.invoked_subcommand))
            package = (error.name or "").partition(".")[0]
            extra = entry and _EXTRAS.get(entry.target.partition(".")[0])
            if entry is None or not extra or package in ("", "gpumemnet", *_EXTRAS):
                raise
            raise MissingExtraError(package, extra, f"gpumemnet {entry.name}") from None


def load(name: str) -> Any:
    """Imports a command of :data:`ENTRIES`, and returns it as Typer's."""
    target = ENTRIES[name].target
    package, _, rest = target.partition(".")
    if package in _EXTRAS:
        target = f"{_sibling(package)}.{rest}"
    found = resolve_name(target)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        found.command(cls=Command)(function)
    return typer.main.get_command(found)


def _sibling(package: str) -> str:
    """Returns the name under which another package of the project is imported.

    A checkout keeps it beside ``gpumemnet``; a wheel installs it inside, so that nothing with a
    general name lands in ``site-packages``.  The root of a checkout becomes the first entry of the
    import path, because the current folder may hold another ``models``.
    """
    installed = Path(__file__).resolve().parents[1]
    if (installed / package).is_dir():
        return f"gpumemnet.{package}"
    if sys.path[0] != str(installed.parent):
        sys.path.insert(0, str(installed.parent))
    return package


def application() -> Any:
    """Returns the command ``gpumemnet`` with all its commands."""
    root = typer.Typer(cls=_Root, no_args_is_help=True, pretty_exceptions_enable=False)
    root.callback()(_gpumemnet)
    return typer.main.get_command(root)


def run(application: Any, arguments: Sequence[str] | None, name: str) -> int:
    """Runs a command line and returns the exit code: 0, 2 for a user's mistake, 130 for Ctrl-C.

    Args:
        application: a command of Typer.
        arguments: arguments without the program's name; by default those in ``sys.argv``.
        name: name of the program, for its help.
    """
    try:
        application.main(args=arguments, prog_name=name)
    except GpumemnetError as error:
        typer.echo(f"error: {error}", err=True)
        return USER_ERROR
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0
    return 0


def _gpumemnet(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=lambda is_given: _print_version() if is_given else None,
            is_eager=True,
            help="Show the version.",
        ),
    ] = False,
) -> None:
    """Tells, before a deep-learning training job starts, how much GPU memory it will take."""


def _print_version() -> NoReturn:
    from gpumemnet.compiled import is_compiled

    typer.echo(
        f"gpumemnet {version('gpumemnet')}, compiled modules: {'yes' if is_compiled() else 'no'}"
    )
    raise typer.Exit
