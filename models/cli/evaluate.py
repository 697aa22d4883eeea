"""``gpumemnet evaluate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gpumemnet.cli.options import AsJson
from gpumemnet.cli.output import progress_bar

from .datasets import load, split_errors
from .options import DEFAULT_DATASET, Dataset, Family, Folds, Seed


def evaluate(
    dataset: Dataset = DEFAULT_DATASET,
    family: Family = "mlp",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for evaluation.md, evaluation.json and confusion.png."),
    ] = None,
    folds: Folds = 3,
    seed: Seed = 0,
    epochs: Annotated[
        int, typer.Option("--epochs", min=1, max=10_000, help="Passes over the training jobs.")
    ] = 80,
    as_json: AsJson = False,
) -> None:
    """Evaluate every estimator on held-out architectures. Prints a table."""
    data = load(dataset, family)
    from ..evaluation.folds import evaluate as run_evaluation
    from ..evaluation.folds_report import heading, markdown_table, write_report
    from ..training.plans import mlp_plan

    with progress_bar("evaluating") as report, split_errors(dataset):
        evaluation = run_evaluation(
            data, plan=mlp_plan(data, seed, epochs), fold_count=folds, progress=report
        )
    paths = write_report(evaluation, out) if out else []
    if as_json:
        typer.echo(json.dumps(evaluation.rows(), indent=2))
    else:
        typer.echo(f"{heading(evaluation)}\n{markdown_table(evaluation)}", nl=False)
        for path in paths:
            typer.echo(f"wrote {path}", err=True)
