"""Compares networks that families or label sources have in common with each family's own, on the
same held-out jobs.

Differences have intervals of a paired bootstrap over architectures (Efron and Tibshirani, "An
Introduction to the Bootstrap", 1993, section 8): both networks are judged on the same redrawn
architectures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.answers import COVERAGE
from research.report.candidate_figures import (
    GIB_BINS,
    GIB_BINS_TOP_BYTES,
    architectures,
    judged_rows,
    predicted_bins,
)

from .section import Section

RESAMPLES: Final = 1_000

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a candidate.

    Attributes:
        name: heading of its column.
        of: the figure, from one value for each row; a value of NaN does not count.
        rising: 1 where more is better, -1 where less is.
        form: format of the figure.
        enough: a figure this good is never worse than another.
    """

    name: str
    of: Callable[[Array], float]
    rising: float
    form: str
    enough: float = np.inf


def _quantile(share: float) -> Callable[[Array], float]:
    return lambda values: float(np.nanquantile(values, share))


def _mean(values: Array) -> float:
    return float(np.nanmean(values))


FIGURES: Final = (
    Figure("1 GiB accuracy", _mean, 1.0, ".1%"),
    Figure("median error", _quantile(0.5), -1.0, ".2%"),
    Figure("90th percentile", _quantile(0.9), -1.0, ".1%"),
    Figure(f"below the {COVERAGE:.0%} bound", _mean, 1.0, ".1%", enough=COVERAGE),
    Figure("bound over answer", _quantile(0.5), -1.0, ".2f"),
)
LEGEND: Final = (
    "In parentheses: the 95 % interval of the difference to the family's own network, by a paired bootstrap over architectures "
    f"({RESAMPLES:,} resamples). Worse: the whole interval is a loss; a bound that holds for {COVERAGE:.0%} of the jobs is never "
    "worse for its coverage."
)


def comparison_parts(
    sections: Sequence[Section], compared: Sequence[tuple[str, Mapping[str, str]]]
) -> list[str]:
    """Return one table for each of ``compared``, as Markdown.

    Args:
        sections: the sections; a candidate that a section lacks is left out there.
        compared: the candidate of the families' own networks; what to compare with it, as the
            table's name → candidate.
    """
    parts = []
    for own, others in compared:
        headings = [
            "judged on",
            "rows",
            "network",
            *(figure.name for figure in FIGURES),
            "worse in",
        ]
        rows = [headings, ["---", "---:", "---", *["---:"] * len(FIGURES), "---"]]
        for section in sections:
            rows += _rows(
                section,
                own,
                {title: name for title, name in others.items() if name in section.answers},
            )
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
        parts.append(f"## Common networks beside the families' own: {own}\n\n{LEGEND}\n\n{table}")
    return parts


def _rows(section: Section, own: str, others: Mapping[str, str]) -> list[list[str]]:
    clusters = architectures(section)[judged_rows(section)]
    judged = f"{len(clusters):,}"
    values = _values(section, own)
    found = [figure.of(each) for figure, each in zip(FIGURES, values, strict=True)]
    cells = [format(number, figure.form) for figure, number in zip(FIGURES, found, strict=True)]
    rows = [[section.title, judged, "the family's own", *cells, ""]]
    for title, name in others.items():
        cells, worse = [], []
        for figure, before, after in zip(FIGURES, values, _values(section, name), strict=True):
            number = figure.of(after)
            low, high = difference_interval(figure.of, before, after, clusters)
            cells.append(f"{number:{figure.form}} ({low:+{figure.form}} to {high:+{figure.form}})")
            if (
                max(low * figure.rising, high * figure.rising) < 0
                and number * figure.rising < figure.enough
            ):
                worse.append(figure.name)
        rows.append([section.title, judged, title, *cells, ", ".join(worse) or "nothing"])
    return rows


def _values(section: Section, candidate: str) -> list[Array]:
    """Return one array for each of :data:`FIGURES`, over the judged rows."""
    rows = judged_rows(section)
    answers, labels = section.answers[candidate], section.label_bytes[rows]
    expected, safe = answers.expected_bytes[rows], answers.safe_bytes[rows]
    right = np.where(
        labels <= GIB_BINS_TOP_BYTES,
        predicted_bins(answers, GIB_BINS)[rows] == GIB_BINS.index(labels),
        np.nan,
    )
    error = np.abs(expected / labels - 1.0)
    below = np.where(np.isnan(safe), np.nan, labels <= safe)
    return [right, error, error, below, safe / expected]


def difference_interval(
    figure: Callable[[Array], float], before: Array, after: Array, clusters: NDArray[np.int64]
) -> tuple[float, float]:
    """Return the 95 % interval of ``figure(after) - figure(before)`` when whole clusters are drawn
    again.

    Args:
        figure: the figure.
        before, after: one value for each of ``B`` rows.
        clusters: the cluster of each row, shape ``[B]``.
    """
    _, members = np.unique(clusters, return_inverse=True)
    rows_of = [np.flatnonzero(members == code) for code in range(int(members.max()) + 1)]
    order = np.random.default_rng(0)
    differences = []
    for _ in range(RESAMPLES):
        rows = np.concatenate(
            [rows_of[code] for code in order.integers(len(rows_of), size=len(rows_of))]
        )
        differences.append(figure(after[rows]) - figure(before[rows]))
    low, high = np.quantile(differences, (0.025, 0.975)).tolist()
    return low, high
