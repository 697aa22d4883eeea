"""Coverage of bounds: conformal quantiles, whether a bound was kept, and what is too much to be
chance; and a robust centre with its confidence interval.

The bound at a coverage is the score of rank ``ceil((n + 1) coverage)`` among ``n`` scores that were
not fitted to (Vovk et al., *Algorithmic Learning in a Random World*, 2005; Lei et al., JASA 2018).
Where that rank is above ``n`` there is no bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpumemnet.job.job_table import Array, Flags

COVERAGES: Final = (0.5, 0.8, 0.9, 0.95, 0.975, 0.98, 0.99, 0.995, 0.999)
"""Coverages that models are calibrated for."""
FEWEST_SCORES: Final = 60
"""Fewest scores with which a group is calibrated separately."""
CONFIDENCE: Final = 0.95
_NORMAL_95: Final = 1.959964
_ROUNDING: Final = 1e-9
"""``(n + 1) coverage`` is a whole number for many pairs, and floating point may put it just
above."""


def conformal_rank(count: int, coverage: float) -> int | None:
    """Rank, from 1, of the score that bounds the next one with probability ``coverage``; ``None``
    where ``count`` are too few."""
    rank = max(1, math.ceil((count + 1) * coverage - _ROUNDING))
    return rank if rank <= count else None


def rows_needed(coverage: float) -> int:
    """The smallest number of scores for a bound at ``coverage``."""
    return math.ceil(coverage / (1.0 - coverage) - _ROUNDING)


def conformal_quantiles(scores: Array, coverages: Sequence[float]) -> tuple[float | None, ...]:
    """The bound at each coverage, from scores of shape ``[n]``; ``None`` with too few scores, or an
    infinite one."""
    ordered = np.sort(scores)
    ranks = [conformal_rank(len(ordered), coverage) for coverage in coverages]
    found = [math.inf if rank is None else float(ordered[rank - 1]) for rank in ranks]
    return tuple(score if math.isfinite(score) else None for score in found)


def conformal_bounds(
    errors: Array, coverages: Sequence[float], least: float = -math.inf
) -> tuple[float, ...]:
    """The smallest of ``errors`` that covers each share of future rows; twice the largest where
    there are too few errors.

    A model's errors are log-errors divided by a job's spread and a constant.  This is normalised
    nonconformity with a constant added to the spread (Papadopoulos et al., IJCAI 2011, section 4;
    Lei et al., JASA 113, 2018).  The constant is the typical error of the calibration jobs.  Without
    it, one job with a far too small spread would set the bounds of all others: at 99 % of 167 jobs
    the bound is the largest score.

    Args:
        errors: of rows that were not fitted to, shape ``[B]``.
        coverages: shares below 1.
        least: what is doubled where all errors are below it.
    """
    doubled = 2.0 * max(float(errors.max()), least)
    return tuple(
        doubled if bound is None else bound for bound in conformal_quantiles(errors, coverages)
    )


def bounds_kept(label: Array, is_oom: Flags, limit: Array, bound: Array) -> Array:
    """Whether each of ``B`` jobs stayed within its bound: 1, 0, or NaN where that is not known.

    A job that ran out of memory needed more than its limit.  With a limit below the bound, the bound
    was not tested; with another limit, or an unknown one, it counts as missed.

    Args:
        label: what each job took, NaN where that is not known, shape ``[B]``.
        is_oom: whether it ran out of memory.
        limit: what it could have had, NaN where that is not known.
        bound: NaN where there is none.
    """
    missed = np.where(is_oom & ~(limit < bound), 0.0, math.nan)
    kept = np.where(is_oom | np.isnan(label), missed, label <= bound)
    return np.where(np.isnan(bound), math.nan, kept)


def binomial_tail(count: int, trials: int, probability: float) -> float:
    """Probability of ``count`` or more successes in ``trials``."""
    from scipy.stats import binom  # not needed to predict

    return float(binom.sf(count - 1, trials, probability))


@dataclass(frozen=True)
class Centre:
    """A weighted median.

    Attributes:
        value: the median.
        low, high: an interval for it, which assumes of the values no more than that they lie about
            it independently.
        confidence: of the interval: 0.95, or what so few values give.
        count: of the values.
    """

    value: float
    low: float
    high: float
    confidence: float
    count: int


def weighted_quantile(values: Array, weights: Array, share: float) -> float:
    """The smallest of ``values`` that has this share of the weight at or below it."""
    within = np.clip(share - _ROUNDING, 0.0, 1.0)
    return float(np.quantile(values, within, weights=weights, method="inverted_cdf"))


def weighted_centre(values: Array, weights: Array) -> Centre:
    """The weighted median of ``values``, shape ``[n]``, ``n`` above 0, with the interval that
    inverts the weighted sign test.

    A value's weight is one over its spread: the median is then the most likely centre of values
    with Laplace errors.
    """
    half = 0.5 * _NORMAL_95 * math.sqrt(float((weights**2).sum())) / float(weights.sum())
    confidence = min(CONFIDENCE, 1.0 - 2.0 ** (1 - len(values)))
    value, low, high = (
        weighted_quantile(values, weights, 0.5 + part) for part in (0.0, -half, half)
    )
    return Centre(value, low, high, confidence, len(values))
