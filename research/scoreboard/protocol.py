"""The protocol: the figures by which all estimators are judged, on equal rows.

Median relative error, probability of estimation failure and memory saved are those of xMem
(Middleware 2025, arXiv 2510.21048). A run fails if the estimate says that it fits and it did not,
or the other way round, or if it runs out of memory with the estimate as its limit.  No GPU is at
hand to run it again, so the least limit of a run is its reading less what the simulated allocator
could spare.  That is the traced reserved bytes less the smallest limit under which the traced run
succeeds.

A run that failed saves nothing (the paper's own rule is not public).  Rows that ran out of memory
are censored: they may fail, and have no error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.predict.distribution import BinScheme
from gpumemnet.units import MIB
from models.training.data import folds

Array = NDArray[np.float64]
FOLDS: Final = 5
COVERAGE: Final = 0.99
SEED: Final = 0
_ROUNDS: Final = 60
_LEAST: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one estimator on the rows that all estimators of a table answered.

    Attributes:
        rows, measured: number of rows, and of those with a reading.
        median_error, p90_error: relative error of the rows with a reading.
        failures: probability of estimation failure; NaN where it is not known what a run could have
            spared.
        saved: share of the GPU that is left to others, in the mean; a failed run saves nothing.
        under: share of readings above the estimate.
        over: mean share by which estimates lie above the reading, 0 where they lie below.
        bins: share of readings in the same bin as the estimate.
        seconds: median of an estimate.
    """

    rows: int
    measured: int
    median_error: float
    p90_error: float
    failures: float
    saved: float
    under: float
    over: float
    bins: float
    seconds: float


def figures(
    labels: Array,
    estimates: Array,
    capacities: Array,
    spare: Array,
    seconds: Array,
    bins: BinScheme,
    run_again: Array | None = None,
) -> Figures:
    """Judge estimates.

    Args:
        labels: measured bytes, NaN where the run ran out of memory, shape ``[B]``.
        estimates: bytes, shape ``[B]``.
        capacities: memory of the GPU, shape ``[B]``.
        spare: bytes that the run could have done without, NaN where not known, shape ``[B]``.
        seconds: of each estimate, shape ``[B]``.
        bins: scheme of the bin accuracy.
        run_again: 1 where the run failed by xMem's own test on the GPU, 0 where not, NaN where not
            told; in place of ``spare``.
    """
    measured = ~np.isnan(labels)
    errors = np.abs(estimates / labels - 1.0)[measured]
    failed = failures(labels, estimates, capacities, spare) if run_again is None else run_again
    left = np.where(failed == 0, np.clip(1.0 - estimates / capacities, 0.0, 1.0), 0.0)
    is_judged = not np.isnan(failed).any()
    ratios = (estimates / labels)[measured]
    return Figures(
        rows=len(labels),
        measured=int(measured.sum()),
        median_error=float(np.median(errors)),
        p90_error=float(np.quantile(errors, 0.9)),
        failures=float(failed.mean()) if is_judged else np.nan,
        saved=float(left.mean()) if is_judged else np.nan,
        under=float((ratios < 1.0).mean()),
        over=float(np.maximum(ratios - 1.0, 0.0).mean()),
        bins=float((bins.index(estimates[measured]) == bins.index(labels[measured])).mean()),
        seconds=float(np.median(seconds)),
    )


def failures(
    labels: Array, estimates: Array, capacities: Array, spare: Array, limits: Array | None = None
) -> Array:
    """1 where an estimate fails, 0 where it does not, NaN where it is not known what the run could
    have spared; ``[B]``.

    Args:
        labels, estimates, capacities, spare: as in :func:`figures`.
        limits: bytes that a run may take where the estimate says that it fits, at most the
            capacity; the estimate by default.
    """
    ran_out, forecast = np.isnan(labels), estimates > capacities
    wrong = ran_out != forecast
    given = estimates if limits is None else np.minimum(limits, capacities)
    too_low = np.where(ran_out, 0.0, (given < labels - spare).astype(np.float64))
    too_low = np.where(~ran_out & np.isnan(spare), np.nan, too_low)
    failed: Array = np.where(wrong, 1.0, np.where(forecast, 0.0, too_low))
    return failed


@dataclass(frozen=True, slots=True, eq=False)
class Calibrated:
    """An estimator with a line, ``slope · estimate + offset``, fitted on other architecture
    families.

    Attributes:
        expected_bytes: the line, shape ``[B]``.
        bound_bytes: the estimator's own bound on the same line; without one, the line times the
            ratio that covers 99 % of the rows it was fitted on, shape ``[B]``.
    """

    expected_bytes: Array
    bound_bytes: Array


def calibrated(
    labels: Array, estimates: Array, groups: NDArray[np.int64], bounds: Array | None = None
) -> Calibrated:
    """Fit one line and one ratio for each fold, on the other folds; rows without a reading are
    answered, never fitted on.

    Args:
        labels: measured bytes, NaN where the run ran out of memory, shape ``[B]``.
        estimates: bytes, shape ``[B]``.
        groups: architecture family of each row, shape ``[B]``.
        bounds: the estimator's own bound, shape ``[B]``; ``None`` where it gives none.
    """

    def fit(training: NDArray[np.int64]) -> Callable[[NDArray[np.int64]], tuple[Array, Array]]:
        known = training[~np.isnan(labels[training])]
        slope, offset = fitted_line(estimates[known], labels[known])
        if bounds is not None:
            return lambda rows: (
                line(estimates[rows], slope, offset),
                line(bounds[rows], slope, offset),
            )
        ratio = covering_ratio(labels[known], line(estimates[known], slope, offset))
        return lambda rows: (
            line(estimates[rows], slope, offset),
            line(estimates[rows], slope, offset) * ratio,
        )

    return held_out(len(labels), groups, fit)


def held_out(
    count: int,
    groups: NDArray[np.int64],
    fit: Callable[[NDArray[np.int64]], Callable[[NDArray[np.int64]], tuple[Array, Array]]],
) -> Calibrated:
    """Answers for each fold from a fit on the others.

    Args:
        count: number of rows.
        groups: of each row; a fold holds whole groups.  There are at most :data:`FOLDS` folds, one
            per group if there are fewer.
        fit: takes training rows, and returns the function from rows to expectation and bound.
    """
    expected, bound = np.full(count, np.nan), np.full(count, np.nan)
    for training, testing in folds(groups, min(FOLDS, len(np.unique(groups))), SEED):
        expected[testing], bound[testing] = fit(training)(testing)
    return Calibrated(expected, bound)


def line(estimates: Array, slope: float, offset: float) -> Array:
    """``slope · estimate + offset`` in bytes, at least one page of the driver."""
    values: Array = np.maximum(slope * estimates + offset, 2.0 * MIB)
    return values


def fitted_line(estimates: Array, labels: Array) -> tuple[float, float]:
    """Slope and offset of least sum of absolute relative errors; the slope is not negative.

    By iteratively reweighted least squares (Schlossmacher, JASA 68, 1973), as a few readings hold a
    search for algorithms.
    """
    terms = np.stack((estimates, np.ones(len(labels))), axis=1) / labels[:, None]
    scale = np.abs(terms).max(axis=0)
    terms = terms / np.where(scale > 0, scale, 1.0)
    weights = np.ones(len(labels))
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        found, *_ = np.linalg.lstsq(terms * root[:, None], root, rcond=None)
        weights = 1.0 / np.maximum(np.abs(terms @ found - 1.0), _LEAST)
    slope, offset = (found / np.where(scale > 0, scale, 1.0)).tolist()
    return (slope, offset) if slope > 0 else (0.0, float(np.median(labels)))


def covering_ratio(labels: Array, expected: Array) -> float:
    """The ratio of label to expectation that covers 99 % of the rows; the largest where there are
    fewer than a hundred."""
    ratios = np.sort(labels / expected)
    rank = min(len(ratios), int(np.ceil(COVERAGE * (len(ratios) + 1)))) - 1
    return float(ratios[rank])
