"""Options that several commands have, and the files that they read unless told otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from gpumemnet.job.training_job import FAMILIES

DATASETS: Final = Path("dataset_builder/datasets")
"""From the folder in which a command runs."""
COMMITTED_DATASETS: Final = Path(__file__).resolve().parents[2] / DATASETS
"""From any folder."""
DEFAULT_DATASET: Final = DATASETS / "published_mlp_a100.parquet"

Dataset = Annotated[
    Path,
    typer.Option(
        "--dataset", metavar="FILE", help="Parquet dataset, as gpumemnet build writes it."
    ),
]
Family = Annotated[str, typer.Option("--family", help=f"One of {', '.join(FAMILIES)}.")]
Folds = Annotated[int, typer.Option("--folds", min=2, max=20, help="Folds, split by architecture.")]
Seed = Annotated[
    int, typer.Option("--seed", min=0, help="Seed of folds, initialisation and order.")
]
RealRuns = Annotated[
    list[Path] | None,
    typer.Option(
        "--real-runs", metavar="FILE", help="Runs of real networks; the committed unless given."
    ),
]


def default_real_runs() -> list[Path]:
    """Returns the datasets that ``--real-runs`` stands for where it is not given."""
    return sorted((DATASETS / "real_runs").glob("*_*.parquet"))
