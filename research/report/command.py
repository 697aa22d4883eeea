"""``python -m research report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpumemnet.cli.options import AsJson
from gpumemnet.cli.output import print_result, progress_bar
from models.cli import DATASETS, Seed, split_errors


def report(
    out: Annotated[
        Path, typer.Option("--out", help="Folder for report.md, report.json and the pictures.")
    ] = Path("report"),
    datasets: Annotated[
        Path, typer.Option("--datasets", help="Folder of Parquet datasets, all of which are used.")
    ] = DATASETS,
    seed: Seed = 0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; one for each core unless given.")
    ] = None,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke",
            help="Few rows, folds and epochs: checks that the report runs; its figures say nothing.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate every estimator on every dataset, with tables and pictures."""
    from research.report.full_report import write_full_report

    with progress_bar("reporting") as progress, split_errors(datasets):
        paths = write_full_report(
            datasets, out, seed=seed, workers=workers, is_smoke=smoke, progress=progress
        )
    print_result(
        {"written": list(map(str, paths))},
        "\n".join(f"wrote {path}" for path in paths),
        as_json=as_json,
    )
