"""``python -m research report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpumemnet.cli.options import AsJson
from gpumemnet.cli.output import print_result, progress_bar
from gpumemnet.errors import InvalidRequestError
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
    common: Annotated[
        bool,
        typer.Option(
            "--common",
            help="Only networks of all families, and of both label sources, beside the families' own.",
        ),
    ] = False,
    encoder: Annotated[
        list[str] | None,
        typer.Option(
            metavar="mlp|transformer",
            help="Networks for --common, may be given twice; both unless given.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate every estimator on every dataset, with tables and pictures."""
    from research.report.candidates import OWN_CANDIDATES
    from research.report.full_report import write_common_report, write_full_report

    if smoke and common:
        raise InvalidRequestError("is a short run of its own: leave out --smoke", "common")
    if encoder and not common:
        raise InvalidRequestError("is for --common: the full report tries both", "encoder")
    if unknown := [name for name in encoder or () if name not in OWN_CANDIDATES]:
        raise InvalidRequestError(
            f"must be {' or '.join(OWN_CANDIDATES)}, not '{unknown[0]}'", "encoder"
        )
    with progress_bar("reporting") as progress, split_errors(datasets):
        if common:
            encoders = encoder or tuple(OWN_CANDIDATES)
            paths = write_common_report(
                datasets, out, seed=seed, workers=workers, encoders=encoders, progress=progress
            )
        else:
            paths = write_full_report(
                datasets, out, seed=seed, workers=workers, is_smoke=smoke, progress=progress
            )
    print_result(
        {"written": list(map(str, paths))},
        "\n".join(f"wrote {path}" for path in paths),
        as_json=as_json,
    )
