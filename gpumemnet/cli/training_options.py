"""Declares the training options of the command line from :mod:`gpumemnet.job.training_options`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from gpumemnet.job.training_options import TRAINING_OPTIONS


def training_option(name: str, panel: str | None = None, help: str | None = None) -> Any:
    """Declares the option ``--name`` for typer.

    Args:
        name: name of a training option.
        panel: heading above it in the help text.
        help: sentence that replaces the option's description.
    """
    option = TRAINING_OPTIONS[name]
    flag = "--" + name.replace("_", "-")
    metavar = "|".join(option.choices) or (None if option.is_switch else "N")
    text = help or f"{option.description[0].upper()}{option.description[1:]}."
    return typer.Option(flag, metavar=metavar, help=text, rich_help_panel=panel)


def training_values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the training options among the parameters of a command."""
    return {name: parameters[name] for name in TRAINING_OPTIONS}
