"""Calibrated closed form: memory as a linear function of computed bytes, with the CUDA context as
its intercept.

Lines are fitted by median regression, so that a few faulty labels do not affect them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LinearRegression, QuantileRegressor

from gpumemnet.predict.features import FEATURE_NAMES
from gpumemnet.units import MIB

MODEL_STATE_COLUMNS: Final = (
    "weight_bytes",
    "gradient_bytes",
    "optimizer_state_bytes",
    "optimizer_temporary_bytes",
)
LAYER_TERMS: Final = (("segment_bytes",), ("unfragmented_bytes",))
"""Terms for a job with layers: the closed form with and without fragmentation.

The first counts whole segments, which only tensors of about the same size reuse.  Actual memory
lies between the two: a free segment of 200 MiB serves a tensor of 50 MiB if no smaller one is free.
"""
TOTALS_TERMS: Final = (MODEL_STATE_COLUMNS, ("activation_bytes",), ("input_bytes",))
"""Terms for a job with totals only; the first is a sum of columns."""


@dataclass(frozen=True, slots=True)
class PhysicsLine:
    """``intercept + Σ slope · term`` in MiB, never below ``floor``.

    Attributes:
        terms: the feature columns that each term sums.
        intercept_mib, slopes: the fitted coefficients.
        floor_mib: smallest value of the line.
    """

    terms: tuple[tuple[str, ...], ...]
    intercept_mib: float
    slopes: tuple[float, ...]
    floor_mib: float

    def predict_bytes(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the line's bytes for features of shape ``[B, F]``; shape ``[B]``."""
        line = self.intercept_mib + term_matrix_mib(features, self.terms) @ np.array(self.slopes)
        line_bytes: NDArray[np.float64] = np.maximum(line, self.floor_mib) * MIB
        return line_bytes


def fit_line(
    features: NDArray[np.float64],
    label_bytes: NDArray[np.float64],
    terms: Sequence[Sequence[str]],
    *,
    least_squares: bool = False,
) -> PhysicsLine:
    """Fit the line of ``terms`` to the rows with a label (no NaN), by median regression or by least
    squares.

    Slopes are not negative, because more bytes never reduce memory and the line must extrapolate.
    Terms whose slope would be negative are dropped, the most negative first.
    """
    known = ~np.isnan(label_bytes)
    inputs, labels_mib = term_matrix_mib(features[known], terms), label_bytes[known] / MIB
    slopes, left = np.zeros(len(terms)), np.arange(len(terms))
    while True:
        regression = (
            LinearRegression()
            if least_squares
            else QuantileRegressor(quantile=0.5, alpha=0.0, solver="highs")
        )
        regression.fit(inputs[:, left], labels_mib)
        lowest = int(np.argmin(regression.coef_))
        if regression.coef_[lowest] >= 0:
            slopes[left], intercept = regression.coef_, float(regression.intercept_)
            break
        left = np.delete(left, lowest)
        if not len(left):
            intercept = float(np.mean(labels_mib) if least_squares else np.median(labels_mib))
            break
    return PhysicsLine(
        terms=tuple(tuple(columns) for columns in terms),
        intercept_mib=intercept,
        slopes=tuple(slopes.tolist()),
        floor_mib=0.5 * float(labels_mib.min()),
    )


def term_matrix_mib(
    features: NDArray[np.float64], terms: Sequence[Sequence[str]]
) -> NDArray[np.float64]:
    """Return the terms in MiB, shape ``[B, len(terms)]``."""
    sums = [
        features[:, [FEATURE_NAMES.index(name) for name in columns]].sum(axis=1)
        for columns in terms
    ]
    return np.stack(sums, axis=1) / MIB
