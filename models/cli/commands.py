"""Lists all commands of ``python -m models``, in the order of its help."""

from __future__ import annotations

import typer

from .calibrate_closed_form import calibrate_closed_form
from .evaluate import evaluate
from .retrain import retrain
from .train import train

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
for command in (
    train,
    evaluate,
    calibrate_closed_form,
    retrain,
):
    app.command(command.__name__.replace("_", "-"))(command)


@app.callback()
def _root() -> None:
    """Train, evaluate and export the classifiers."""
