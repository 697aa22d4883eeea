"""Fits the line over the closed form by median regression, bounds its error in each group, and
tests the bounds.

The bounds are cross-conformal in each group (Vovk, Cross-conformal predictors, Annals of
Mathematics and Artificial Intelligence 74, 2015).  A bound is the error that a share of the rows,
plus one row, stays below.  The line of each row was fitted without its architecture family.  Five
more folds say how well the bounds hold for a family that was in none of the fits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog

from gpumemnet.predict.closed_form import (
    GROUPS,
    TERMS,
    group_codes,
    has_benchmark,
    line_bytes,
    line_terms,
    log_errors,
    with_log_errors,
)
from gpumemnet.predict.features import FEATURE_NAMES

from ...training.bounds import FEWEST_SCORES, conformal_bounds
from ...training.data import folds
from .rows import RealNetworks

FOLDS: Final = 5
"""Of every fit, and of the test of its bounds."""
_FIT_SEED: Final = 1
"""Seed of the folds of a fit; those that test its bounds have another."""
_TEST_SEED: Final = 0
SLOPE_BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "constant": (-math.inf, math.inf),
    "kept_by_norm_bytes, cnn": (-1.0, 0.0),
}
"""Term → its least and largest slope, where these are not :data:`USUAL_SLOPES`."""
USUAL_SLOPES: Final = (0.0, 8.0)
"""Least and largest slope of all other terms.

At least 0, so that the line grows with the batch as its terms do.  At most 8, as no tensor has more
copies at one time: with a larger slope the few bytes of a classifier's output would stand in for
    the batch size.
"""
LEAST_LOG_SCALE: Final = 1e-3
"""Smallest scale of a group's errors, in log-bytes, for groups whose errors are all equal."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Centre:
    """The line, moved to the median of each group.

    Attributes:
        slopes: of the line's terms.
        shifts: median error of each group, without and with ``cudnn.benchmark``, shape ``[G, 2]``.
    """

    slopes: Array
    shifts: Array

    def log_errors(self, networks: RealNetworks) -> Array:
        """Returns the errors of ``B`` networks less the shift, shape ``[B]``."""
        features = networks.features
        errors = log_errors(networks.above_context_bytes, line_bytes(features, self.slopes))
        moved: Array = errors - self.shifts[group_codes(features), has_benchmark(features)]
        return moved


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """The line and its error in each group.

    Attributes:
        centre: the line.
        scales: scale of a logistic with the quartiles of the errors, shape ``[G]``.
        bounds: conformal bounds of the errors, shape ``[G, C]`` for ``C`` coverages.
    """

    centre: Centre
    scales: Array
    bounds: Array

    def amounts(self, features: Array) -> tuple[Array, Array]:
        """Returns expected memory above the context of ``B`` jobs, shape ``[B]``, and its bounds,
        shape ``[B, C]``."""
        line, groups = line_bytes(features, self.centre.slopes), group_codes(features)
        shifts = self.centre.shifts[groups, has_benchmark(features)]
        return with_log_errors(line, shifts), with_log_errors(
            line[:, None], shifts[:, None] + self.bounds[groups]
        )


def fit(networks: RealNetworks, coverages: Sequence[float]) -> Fit:
    """Fits the line, and the errors of each group; a group of fewer than :data:`FEWEST_SCORES` rows
    takes those of all.

    The error of a row is that of a line fitted without the fold of its architecture family, of
    which there must be two.
    """
    errors, codes = np.empty(len(networks)), _family_codes(networks)
    for training, testing in folds(codes, min(FOLDS, int(codes.max()) + 1), _FIT_SEED):
        errors[testing] = fit_centre(networks.take(training)).log_errors(networks.take(testing))
    groups = group_codes(networks.features)
    parts = [
        own if len(own := errors[groups == group]) >= FEWEST_SCORES else errors
        for group in range(len(GROUPS))
    ]
    quartiles = np.array([np.quantile(own, (0.25, 0.5, 0.75)) for own in parts])
    return Fit(
        centre=fit_centre(networks),
        scales=np.maximum(
            (quartiles[:, 2] - quartiles[:, 0]) / (2.0 * math.log(3.0)), LEAST_LOG_SCALE
        ),
        bounds=np.array(
            [conformal_bounds(own, coverages, least=np.abs(own).max()) for own in parts]
        ),
    )


def fit_centre(networks: RealNetworks) -> Centre:
    """Fits the line, and its median error in each group.

    A row weighs less in the line the more rows its architecture family has, so that no family
    decides alone.
    """
    features, above_context_bytes = networks.features, networks.above_context_bytes
    closed_form = features[:, FEATURE_NAMES.index("segment_bytes")]
    _, codes, counts = np.unique(networks.families, return_inverse=True, return_counts=True)
    slopes = _median_slopes(
        line_terms(features) / closed_form[:, None],
        above_context_bytes / closed_form,
        1.0 / np.sqrt(counts[codes]),
    )
    errors, groups = (
        log_errors(above_context_bytes, line_bytes(features, slopes)),
        group_codes(features),
    )
    benchmark, numbers = has_benchmark(features), range(len(GROUPS))
    shifts = np.array(
        [
            [_median(errors, groups == group, benchmark == chosen) for chosen in (0, 1)]
            for group in numbers
        ]
    )
    return Centre(slopes, shifts)


def _family_codes(networks: RealNetworks) -> NDArray[np.int64]:
    """Returns the architecture family of each row as a number, shape ``[B]``."""
    codes: NDArray[np.int64] = np.unique(networks.families, return_inverse=True)[1]
    return codes


def _median_slopes(terms: Array, amounts: Array, weights: Array) -> Array:
    """Returns the slopes within :data:`SLOPE_BOUNDS` that give the least sum of weighted absolute
    errors, shape ``[T]``.

    As a linear programme (Koenker and Bassett, Econometrica 46, 1978): each error is the difference
    of two parts from 0 on.

    Args:
        terms: shape ``[B, T]``.
        amounts, weights: shape ``[B]``.
    """
    largest = np.abs(terms).max(axis=0)
    units = np.where(largest > 0, largest, 1.0)
    bounds = np.array([SLOPE_BOUNDS.get(name, USUAL_SLOPES) for name in TERMS]) * largest[:, None]
    count = len(amounts)
    found = linprog(
        np.concatenate((np.zeros(len(TERMS)), weights, weights)),
        A_eq=sparse.hstack(
            (sparse.csr_matrix(terms / units), sparse.eye(count), -sparse.eye(count))
        ),
        b_eq=amounts,
        bounds=[*bounds, *[(0.0, None)] * (2 * count)],
        method="highs",
    )
    slopes: Array = found.x[: len(TERMS)] / units
    return slopes


def _median(errors: Array, is_own: NDArray[np.bool_], is_chosen: NDArray[np.bool_]) -> float:
    """Returns the median of the chosen rows of a group, or of the group, or of all: the first with
    enough rows."""
    parts = (errors[is_own & is_chosen], errors[is_own], errors)
    return float(np.median(next((part for part in parts if len(part) >= FEWEST_SCORES), errors)))


def held_out_coverage(networks: RealNetworks, coverages: Sequence[float]) -> Array:
    """Returns the share of each group's rows below bounds that were fitted without their family's
    fold; ``[G, C]``.

    It is NaN for a group without rows.
    """
    is_below = np.zeros((len(networks), len(coverages)))
    for training, testing in folds(_family_codes(networks), FOLDS, _TEST_SEED):
        found = fit(networks.take(training), coverages)
        is_below[testing] = (
            networks.above_context_bytes[testing, None]
            <= found.amounts(networks.features[testing])[1]
        )
    groups = group_codes(networks.features)
    with np.errstate(invalid="ignore"):
        return np.array(
            [
                is_below[groups == group].sum(axis=0) / (groups == group).sum()
                for group in range(len(GROUPS))
            ]
        )
