"""``python -m models real-networks``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from gpumemnet.cli.output import progress_bar
from gpumemnet.errors import InvalidRequestError

from .options import DATASETS, RealRuns, Seed, default_real_runs

_REAL_FAMILIES: Final = ("cnn", "transformer")
"""Families whose sampled jobs have real networks beside them."""


def real_networks(
    out: Annotated[Path, typer.Option("--out", help="Folder for report.md.")] = Path("report"),
    families: Annotated[
        list[str] | None, typer.Option("--family", help="cnn or transformer; both unless given.")
    ] = None,
    real_runs: RealRuns = None,
    seed: Seed = 0,
) -> None:
    """Evaluate the estimators on real networks, each on architecture families that it has not
    seen."""
    chosen = families or list(_REAL_FAMILIES)
    if unknown := [name for name in chosen if name not in _REAL_FAMILIES]:
        raise InvalidRequestError(
            f"must be of {', '.join(_REAL_FAMILIES)}, not '{unknown[0]}'", "family"
        )
    import torch

    from ..evaluation.real_networks import write_report

    torch.set_num_threads(1)
    datasets = {family: DATASETS / f"traced_{family}_h200.parquet" for family in chosen}
    runs = real_runs or default_real_runs()
    with progress_bar("evaluating") as progress:
        typer.echo(f"wrote {write_report(datasets, runs, out, seed, progress)}")
