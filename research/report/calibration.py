"""Calibration of a candidate: the probabilities of its bins against hits, and the coverage of its
bounds.

The expected calibration error is that of Guo et al. (ICML 2017): the mean distance of confidence
and accuracy over ten equal intervals of confidence, weighted by jobs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job.training_job import FAMILIES
from gpumemnet.units import GIB
from models.answers import COVERAGE, Answers
from research.report.section import Section

from .candidate_figures import architectures, judged_rows
from .interval import Interval, share_interval

INTERVALS: Final = 10


@dataclass(frozen=True, slots=True)
class Reliability:
    """Confidence in the most probable bin of 1 GiB against the share of hits, in ten intervals of
    confidence.

    Attributes:
        jobs: in each interval.
        confidence: mean in each, NaN where it is empty.
        accuracy: share of hits in each, NaN where it is empty.
        expected_calibration_error: mean of their distances, weighted by jobs; NaN without jobs.
    """

    jobs: tuple[int, ...]
    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]
    expected_calibration_error: float


@dataclass(frozen=True, slots=True)
class CoveragePoint:
    """Share of a family's jobs at or below the bound that promises ``nominal``, with its 95 %
    confidence interval."""

    family: str
    nominal: float
    empirical: float
    interval: Interval
    jobs: int


def reliability(section: Section, candidate: str) -> Reliability | None:
    """Reliability of a candidate's probabilities, shape ``[B, n_bins]``, or ``None`` where it has
    none."""
    probabilities = section.answers[candidate].probabilities
    if probabilities is None:
        return None
    rows = judged_rows(section)
    rows = rows[np.isfinite(probabilities[rows]).all(axis=1)]
    label_bins = np.minimum(section.label_bytes[rows] // GIB, probabilities.shape[1] - 1)
    hits = probabilities[rows].argmax(axis=1) == label_bins
    confidence = probabilities[rows].max(axis=1, initial=0.0)
    interval = np.minimum((confidence * INTERVALS).astype(np.int64), INTERVALS - 1)
    jobs = np.bincount(interval, minlength=INTERVALS)
    counts = np.maximum(jobs, 1)
    means = np.bincount(interval, weights=confidence, minlength=INTERVALS) / counts
    shares = np.bincount(interval, weights=hits, minlength=INTERVALS) / counts
    error = float((jobs * np.abs(means - shares)).sum() / len(rows)) if len(rows) else math.nan
    return Reliability(
        tuple(jobs.tolist()), _nan_where_empty(jobs, means), _nan_where_empty(jobs, shares), error
    )


def coverages(section: Section, candidate: str) -> list[CoveragePoint]:
    """Coverage of every bound of a candidate, family by family; of its safe bytes alone where it
    gives no others."""
    rows, clusters = judged_rows(section), architectures(section)
    families = np.array([job.family for job in section.jobs])
    points = []
    for family in FAMILIES:
        for nominal, bounds in sorted(_bounds(section.answers[candidate]).items()):
            selected = rows[(families[rows] == family) & np.isfinite(bounds[rows])]
            if len(selected):
                is_held = section.label_bytes[selected] <= bounds[selected]
                interval = share_interval(is_held, clusters[selected])
                points.append(
                    CoveragePoint(family, nominal, float(is_held.mean()), interval, len(selected))
                )
    return points


def _bounds(answers: Answers) -> dict[float, NDArray[np.float64]]:
    return dict(answers.bounds_bytes) or {COVERAGE: answers.safe_bytes}


def _nan_where_empty(jobs: NDArray[np.int64], values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(np.where(jobs > 0, values, math.nan).tolist())
