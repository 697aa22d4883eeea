"""Lists all commands of ``gpumemnet``; a command is imported only when it runs or shows its help,
so ``--help`` is fast."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated, Any, Final, NoReturn, get_args

import typer
from typer.core import TyperCommand

from gpumemnet.cli.rooms import Room, room
from gpumemnet.cli.running import command_of
from gpumemnet.errors import MissingExtraError

_ASK: Final = "Ask how much memory a job takes"
_TRAIN: Final = "Measure jobs and train models"
_SITE: Final = "Run it at a site"


@dataclass(frozen=True, slots=True)
class Entry:
    """A command before it is imported.

    Attributes:
        name: name of the command.
        target: ``module:object``; a package other than ``gpumemnet`` is found by
            :func:`~gpumemnet.cli.rooms.room`.
        summary: the first sentence of its help.
        panel: heading under which ``gpumemnet --help`` lists it.
        extra: extra that the command needs, as in ``pip install 'gpumemnet[…]'``.
    """

    name: str
    target: str
    summary: str
    panel: str
    extra: str = ""


ENTRIES: Final = (
    Entry(
        "predict", "gpumemnet.cli.predict:predict", "Predict how much GPU memory jobs take.", _ASK
    ),
    Entry(
        "trace",
        "gpumemnet.cli.trace:trace",
        "Trace one training step of a model, and show what its GPU memory holds.",
        _ASK,
    ),
    Entry(
        "plan",
        "gpumemnet.cli.plan:plan",
        "Plan what a training step recomputes and swaps, so that it fits a GPU.",
        _ASK,
    ),
    Entry(
        "extract", "gpumemnet.cli.extract:extract", "Turn a model into a job, without a GPU.", _ASK
    ),
    Entry(
        "serve", "gpumemnet.cli.serve:serve", "Serve predictions over HTTP until interrupted.", _ASK
    ),
    Entry(
        "models",
        "gpumemnet.cli.models:models",
        "List the bundles that answer, and check their checksums.",
        _ASK,
    ),
    Entry(
        "build",
        "dataset_builder.cli:app",
        "Measure jobs on GPUs, and build datasets of them.",
        _TRAIN,
        "build",
    ),
    Entry(
        "train",
        "models.cli.train:train",
        "Train a classifier on a dataset, and write its bundle.",
        _TRAIN,
        "train",
    ),
    Entry(
        "evaluate",
        "models.cli.evaluate:evaluate",
        "Evaluate every estimator on held-out architectures.",
        _TRAIN,
        "train",
    ),
    Entry(
        "report",
        "models.cli.report:report",
        "Evaluate every estimator on every dataset, with tables and pictures.",
        _TRAIN,
        "train",
    ),
    Entry(
        "search",
        "models.cli.search:search",
        "Search for a training plan with Optuna.",
        _TRAIN,
        "train,search",
    ),
    Entry(
        "retrain",
        "models.cli.retrain:retrain",
        "Train on new data, and promote what is better than the champion.",
        _TRAIN,
        "train",
    ),
    Entry(
        "registry",
        "gpumemnet.cli.registry:registry",
        "Keep releases of bundles, and choose which one answers.",
        _SITE,
    ),
    Entry("keys", "service.cli:keys", "Make API keys for the service.", _SITE, "service"),
    Entry(
        "observations",
        "service.cli:observations",
        "Export what finished jobs used.",
        _SITE,
        "service",
    ),
    Entry(
        "import-sacct",
        "gpumemnet.cli.import_sacct:import_sacct",
        "Read what finished Slurm jobs used.",
        _SITE,
    ),
    Entry(
        "calibrate",
        "gpumemnet.cli.calibrate:calibrate",
        "Calibrate bundles to a site's own jobs.",
        _SITE,
    ),
    Entry(
        "drift",
        "gpumemnet.cli.drift:drift",
        "Test whether recent jobs call for a retraining.",
        _SITE,
    ),
    Entry(
        "pack",
        "gpumemnet.cli.pack:pack",
        "Simulate a cluster that places jobs by each estimator.",
        _SITE,
    ),
)


class LazyCommand(TyperCommand):
    """A command that is imported when it runs or shows its help."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(
            entry.name,
            callback=None,
            short_help=entry.summary,
            help=entry.summary,
            rich_help_panel=entry.panel,
        )
        self.entry = entry

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Imports the command and creates its context."""
        command = self.loaded()
        run = command.invoke

        def invoke(context: Any) -> Any:
            try:
                return run(context)
            except ModuleNotFoundError as error:
                raise self._missing(error) from None

        command.invoke = invoke
        return command.make_context(info_name, args, parent=parent, **extra)

    def loaded(self) -> Any:
        """Imports the command.

        Raises:
            MissingExtraError: when a package that it needs is not installed.
        """
        module, _, name = self.entry.target.partition(":")
        package = module.partition(".")[0]
        try:
            if package in get_args(Room):
                module = room(package) + module.removeprefix(package)  # type: ignore[arg-type]
            return command_of(getattr(importlib.import_module(module), name))
        except ModuleNotFoundError as error:
            raise self._missing(error) from None

    def _missing(self, error: ModuleNotFoundError) -> Exception:
        package = (error.name or "").partition(".")[0]
        if not self.entry.extra or package in ("", "gpumemnet", *get_args(Room)):
            return error
        return MissingExtraError(package, self.entry.extra, f"gpumemnet {self.entry.name}")


def application() -> Any:
    """The command ``gpumemnet`` with all its commands."""
    root = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
    root.callback()(_gpumemnet)
    group = command_of(root)
    for entry in ENTRIES:
        group.add_command(LazyCommand(entry), entry.name)
    return group


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
