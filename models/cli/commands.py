"""Lists all commands of ``python -m models``, in the order of its help."""

from __future__ import annotations

import typer

from .calibrate_closed_form import calibrate_closed_form
from .evaluate import evaluate
from .real_networks import real_networks
from .report import report
from .retrain import retrain
from .scoreboard import scoreboard
from .search import search
from .train import train

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
for command in (
    train,
    evaluate,
    report,
    real_networks,
    calibrate_closed_form,
    retrain,
    scoreboard,
    search,
):
    app.command(command.__name__.replace("_", "-"))(command)


@app.callback()
def _root() -> None:
    """Train, evaluate and export the classifiers."""
