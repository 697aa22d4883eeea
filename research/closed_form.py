"""``python -m research calibrate-closed-form``: the calibration of the closed form in the cards of
bundles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from models.cli import DATASETS

RealRuns = Annotated[
    list[Path] | None,
    typer.Option(
        "--real-runs", metavar="FILE", help="Runs of real networks; the committed by default."
    ),
]


def default_real_runs() -> list[Path]:
    """Returns the datasets that ``--real-runs`` stands for where it is not given."""
    return sorted((DATASETS / "real_runs").glob("*_*.parquet"))


_ORDINARY_NETWORKS: Final = DATASETS / "real_networks.jsonl.gz"
_SHIPPED_BUNDLES: Final = Path("gpumemnet/bundles")


def calibrate_closed_form(
    bundles: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER", help="Bundles whose cards get the calibration."),
    ],
    rows: Annotated[
        Path, typer.Option("--rows", metavar="FILE", help="Traced ordinary networks.")
    ] = _ORDINARY_NETWORKS,
    real_runs: RealRuns = None,
    union: Annotated[
        Path,
        typer.Option(
            "--union",
            metavar="FOLDER",
            help="Bundle of all families, whose options and ranges were tested.",
        ),
    ] = _SHIPPED_BUNDLES / "all-h200-traced",
) -> None:
    """Calibrate the closed form on real networks, in the cards of bundles, without training
    anything."""
    from gpumemnet.predict.bundle import load_bundle
    from models.evaluation.closed_form.card import calibration, extend_bundle
    from models.evaluation.closed_form.rows import (
        joined_networks,
        networks_of_runs,
        ordinary_networks,
        rows_like_labels,
    )

    real = joined_networks(
        [ordinary_networks(rows), networks_of_runs(real_runs or default_real_runs())]
    )
    support = load_bundle(union).card.document["support"]
    entries: dict[tuple[str, tuple[float, ...]], dict[str, Any]] = {}
    for folder in bundles:
        card = load_bundle(folder).card
        networks = rows_like_labels(card, real, DATASETS)
        key = (str(networks.families[0]), card.coverages)
        if key not in entries:
            entries[key] = calibration(networks, card.coverages)
            _print_calibration(folder.name, card.coverages, entries[key])
        extend_bundle(folder, entries[key], support)
        typer.echo(f"wrote {folder}: {len(networks):,} rows")


def _print_calibration(name: str, coverages: Sequence[float], entry: Mapping[str, Any]) -> None:
    slopes = ", ".join(f"{term} {slope:.3g}" for term, slope in entry["slopes"].items() if slope)
    typer.echo(
        f"{name}: {entry['rows']:,} rows of {entry['families']:,} families; slopes: {slopes}"
    )
    for group, part in entry["groups"].items():
        if not part["rows"]:
            continue
        typer.echo(f"{group}: {part['rows']:,} rows")
        for coverage, bound, held_out in zip(
            coverages, part["log_bounds"], part["held_out_coverage"], strict=True
        ):
            typer.echo(
                f"  coverage {coverage:g}: {math.exp(bound):.2f} times the centre; held out {held_out:.1%}"
            )
