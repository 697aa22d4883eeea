"""Statistical tests for drift: binomial, Fisher's, Kolmogorov-Smirnov, and Holm's correction.

They use numpy alone, because ``gpumemnet drift`` runs where SciPy is not installed.

All are exact or conservative: with ties, or with a distribution known at a few quantiles only, a
    probability may be too large but
never too small.  Kolmogorov's series with Stephens' correction is accurate to a per cent from 20
values on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_TERMS = np.arange(1, 101)


def binomial_tail(count: int, trials: int, probability: float) -> float:
    """Probability of ``count`` or more successes in ``trials``."""
    if count <= 0:
        return 1.0
    if count > trials or probability <= 0.0:
        return 0.0
    if probability >= 1.0:
        return 1.0
    numbers = np.arange(count, trials + 1)
    logs = (
        _log_choose(trials, numbers)
        + numbers * math.log(probability)
        + (trials - numbers) * math.log1p(-probability)
    )
    return min(1.0, float(np.exp(logs).sum()))


def sign_test(above: int, below: int) -> float:
    """Two-sided probability of at least so many values on one side of a median; values equal to it
    do not count."""
    return min(1.0, 2.0 * binomial_tail(max(above, below), above + below, 0.5))


def fisher_test(first: int, of_first: int, second: int, of_second: int) -> float:
    """Two-sided probability of two shares at least this far apart, if both are drawn from one
    population."""
    total, hits = of_first + of_second, first + second
    numbers = np.arange(max(0, hits - of_second), min(of_first, hits) + 1)
    logs = (
        _log_choose(of_first, numbers)
        + _log_choose(of_second, hits - numbers)
        - _log_choose(total, np.array([hits]))
    )
    shares = np.exp(logs)
    up, down = float(shares[numbers >= first].sum()), float(shares[numbers <= first].sum())
    return min(1.0, 2.0 * min(up, down))


def ks_distance(values: Array, quantiles: Array) -> float:
    """Smallest possible distance between the distribution of ``values`` and one with these evenly
    spaced quantiles.

    Args:
        values: shape ``[n]``.
        quantiles: rising, from the smallest to the largest value, shape ``[q]``.
    """
    ordered = np.sort(values)
    points = np.union1d(ordered, quantiles)
    steps = len(quantiles) - 1
    distance = 0.0
    for side in ("right", "left"):  # at a point, and just below it
        share = np.searchsorted(ordered, points, side=side) / len(ordered)
        reached = np.searchsorted(quantiles, points, side=side)
        # Between two quantiles the reference's share lies between theirs; the exact value is
        # unknown.
        low = np.maximum(reached - 1, 0) / steps
        high = np.where(reached == 0, 0.0, np.minimum(reached, steps) / steps)
        distance = max(distance, float(np.maximum(low - share, share - high).max()))
    return distance


def ks_probability(distance: float, count: int, reference_count: int) -> float:
    """Probability of at least this distance between two samples of one distribution."""
    root = math.sqrt(count * reference_count / (count + reference_count))
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.2:  # the series does not converge, and the probability is one to ten digits
        return 1.0
    signs = np.where(_TERMS % 2 == 1, 1.0, -1.0)
    return float(np.clip(2.0 * (signs * np.exp(-2.0 * (_TERMS * scaled) ** 2)).sum(), 0.0, 1.0))


def holm(probabilities: Sequence[float]) -> list[float]:
    """Probabilities corrected for their number: rejecting those below ``a`` errs at all with
    probability at most ``a``."""
    order = sorted(range(len(probabilities)), key=probabilities.__getitem__)
    corrected = [1.0] * len(probabilities)
    highest = 0.0
    for rank, at in enumerate(order):
        highest = max(highest, min(1.0, (len(probabilities) - rank) * probabilities[at]))
        corrected[at] = highest
    return corrected


def _log_choose(total: int, numbers: NDArray[np.int64]) -> Array:
    logs = np.array(
        [math.lgamma(int(number) + 1) + math.lgamma(total - int(number) + 1) for number in numbers]
    )
    log_choices: Array = math.lgamma(total + 1) - logs
    return log_choices
