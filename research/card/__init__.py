"""The data card: contents, measurement and coverage of a dataset, from the file alone.

After Gebru et al., "Datasheets for Datasets" (arXiv 1803.09010).  Every number is computed from the
rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpumemnet.errors import DatasetError
from gpumemnet.job.measurement import Measurement
from gpumemnet.job.training_job import FAMILIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CARD_NAME = "README.md"
"""File name that code hosts display for a folder."""
_DPI = 110


def write_card(dataset: Path, out: Path) -> list[Path]:
    """Writes the card of ``dataset`` and its figures into the folder ``out``; returns their paths,
    the card first.

    Raises:
        DatasetError: when the dataset cannot be read or is empty, or the folder cannot be written.
    """
    from gpumemnet.job.dataset import read_dataset

    from . import coverage, figures, text

    measurements = read_dataset(dataset)
    if not measurements:
        raise DatasetError(f"{dataset} has no rows to describe")
    families = by_family(measurements)
    sampled = {
        family: sampled_rows
        for family, rows in families.items()
        if (sampled_rows := text.sampled_rows(rows))
    }
    spreads = {family: coverage.spreads(rows) for family, rows in sampled.items()}
    with_outcome = {
        family: rows
        for family, rows in families.items()
        if any(row.status in ("ok", "oom") for row in rows)
    }
    labelled = {
        family: rows for family, rows in families.items() if any(row.label_bytes for row in rows)
    }
    pictures: dict[str, Figure | None] = {
        "labels": figures.label_figure(with_outcome) if with_outcome else None,
        "growth": figures.growth_figure(labelled) if labelled else None,
        "context": figures.context_figure(labelled),
        **{
            f"coverage_{family}": figures.coverage_figure(family, each)
            for family, each in spreads.items()
            if each
        },
        **{f"map_{family}": figures.map_figure(family, rows) for family, rows in labelled.items()},
    }
    figures_by_name = {name: figure for name, figure in pictures.items() if figure is not None}
    digest = hashlib.sha256(dataset.read_bytes()).hexdigest()
    page = text.card_text(dataset.name, digest, families, spreads, set(figures_by_name))
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, figure in figures_by_name.items():
            figure.savefig(out / f"{name}.png", dpi=_DPI, metadata={"Software": None})
        (out / CARD_NAME).write_text(page, "utf-8")
    except OSError as error:
        raise DatasetError(f"{out} cannot be written: {error.strerror}") from None
    return [out / CARD_NAME, *(out / f"{name}.png" for name in figures_by_name)]


def by_family(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """Groups the rows by family, in the order of :data:`~gpumemnet.job.training_job.FAMILIES`;
    leaves out empty families."""
    families = {
        family: [measurement for measurement in measurements if measurement.job.family == family]
        for family in FAMILIES
    }
    return {family: rows for family, rows in families.items() if rows}
