"""Figures that judge estimators: bins, error in MiB, under-prediction, waste, coverage.

The published tables have accuracy only (arXiv 2602.17817, tables 2–4).  The other figures matter to
a scheduler: an under-predicted job runs out of memory, an over-predicted one wastes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import f1_score

from gpumemnet.predict.distribution import BinScheme
from gpumemnet.units import MIB

from ..answers import Answers

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BinFigures:
    """Figures of predicted bins: shares of jobs, and F1 averaged over the bins that occur."""

    accuracy: float
    macro_f1: float
    under_predicted: float


@dataclass(frozen=True, slots=True)
class AmountFigures:
    """Figures of expected and safe bytes.

    Attributes:
        median_error_mib, p90_error_mib, p99_error_mib, mean_error_mib: absolute error of the
        expected bytes.
        above_safe: share of the jobs with safe bytes that need more than these.
        wasted: mean of safe over measured, minus one, over the same jobs.
        wasted_mib: mean of safe minus measured.
        without_safe: share of jobs without safe bytes.
    """

    median_error_mib: float
    p90_error_mib: float
    p99_error_mib: float
    mean_error_mib: float
    above_safe: float
    wasted: float
    wasted_mib: float
    without_safe: float


def bin_figures(label_bytes: Array, predicted: NDArray[np.int64], scheme: BinScheme) -> BinFigures:
    """Figures of ``predicted`` bins, shape ``[B]``, against measured bytes, shape ``[B]``."""
    measured = scheme.index(label_bytes)
    return BinFigures(
        accuracy=float((predicted == measured).mean()),
        macro_f1=float(f1_score(measured, predicted, labels=np.unique(measured), average="macro")),
        under_predicted=float((predicted < measured).mean()),
    )


def amount_figures(label_bytes: Array, answers: Answers) -> AmountFigures:
    """Figures of the expected and safe bytes against measured bytes, shape ``[B]``."""
    errors = np.abs(answers.expected_bytes - label_bytes) / MIB
    bounded = ~np.isnan(answers.safe_bytes)
    safe, measured = answers.safe_bytes[bounded], label_bytes[bounded]
    median, p90, p99 = np.percentile(errors, [50, 90, 99])
    return AmountFigures(
        median_error_mib=float(median),
        p90_error_mib=float(p90),
        p99_error_mib=float(p99),
        mean_error_mib=float(errors.mean()),
        above_safe=float((measured > safe).mean()),
        wasted=float((safe / measured - 1.0).mean()),
        wasted_mib=float((safe - measured).mean() / MIB),
        without_safe=float(1.0 - bounded.mean()),
    )


def confusion(
    label_bytes: Array, predicted: NDArray[np.int64], scheme: BinScheme
) -> NDArray[np.int64]:
    """Counts of measured (rows) against predicted (columns) bins, up to the highest that occurs;
    square."""
    measured = scheme.index(label_bytes)
    size = int(max(measured.max(), predicted.max())) + 1
    counts = np.zeros((size, size), dtype=np.int64)
    np.add.at(counts, (measured, predicted), 1)
    return counts
