"""The answers of candidates (expected bytes, a bound, bins), and the candidates that are not networks.

The bound of a regression is its answer plus the conformal quantile of its errors on rows that it was not fitted to.  Commonest
bin and calibrated physics are the baselines of the table; ExtraTrees is the strongest regression of scikit-learn on this data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor

from gpumemnet.predict.bins import BinScheme

from ..networks.physics_line import LAYER_TERMS, TOTALS_TERMS, fit_line
from ..training.data import LabelledJobs
from ..training.splits import folds

Array = NDArray[np.float64]
Fit = Callable[[LabelledJobs], Callable[[LabelledJobs], Array]]
"""Fits expected bytes on training jobs and gives the function that predicts them, shape ``[B]``."""

COVERAGE: Final = 0.99
CALIBRATION_FOLDS: Final = 5
WEIGHT_AND_ACTIVATION_TERMS: Final = (("weight_bytes",), ("activation_bytes",), ("input_bytes",))


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """A candidate's answers for ``B`` jobs.

    Attributes:
        expected_bytes: shape ``[B]``.
        safe_bytes: bound at 99 % coverage, NaN where the candidate gives none, shape ``[B]``.
        bins: bin scheme's name → predicted bins, shape ``[B]``.
        probabilities: of the bins of 1 GiB, shape ``[B, n_bins]``; ``None`` where the candidate has none.
        bounds_bytes: coverage → bound, shape ``[B]``, where the candidate gives more than the one.
    """

    expected_bytes: Array
    safe_bytes: Array
    bins: dict[str, NDArray[np.int64]]
    probabilities: Array | None = None
    bounds_bytes: Mapping[float, Array] = field(default_factory=dict)


def commonest_bin(training: LabelledJobs, test: LabelledJobs, schemes: tuple[BinScheme, ...]) -> Answers:
    """Always the bin that most training jobs fall into; expected is their median."""
    labels = training.label_bytes[~np.isnan(training.label_bytes)]
    bins = {scheme.name: np.full(len(test), np.bincount(scheme.index(labels)).argmax()) for scheme in schemes}
    bound = np.sort(labels)[min(math.ceil((len(labels) + 1) * COVERAGE), len(labels)) - 1]
    return Answers(np.full(len(test), np.median(labels)), np.full(len(test), bound), bins)


def regression_answers(
    fit: Fit,
    training: LabelledJobs,
    test: LabelledJobs,
    schemes: tuple[BinScheme, ...],
    *,
    relative: bool = False,
    calibration_folds: int = CALIBRATION_FOLDS,
) -> Answers:
    """Answers of a regression: the bin is the one that its expected bytes fall into.

    Args:
        fit: the regression.
        training, test: the jobs.
        schemes: of the bins.
        relative: whether the bound is a multiple of the expected bytes, as it must be over many octaves, and not an amount more.
        calibration_folds: folds of the training jobs whose held-out errors give the bound.
    """
    errors = []
    for rows, held_out in folds(training.groups, calibration_folds, seed=0):
        answers, labels = fit(training.take(rows))(training.take(held_out)), training.label_bytes[held_out]
        errors.append(labels / np.maximum(answers, 1.0) if relative else labels - answers)
    ordered = np.sort(np.concatenate(errors))
    ordered = ordered[~np.isnan(ordered)]
    expected = fit(training)(test)
    bound = ordered[min(math.ceil((len(ordered) + 1) * COVERAGE), len(ordered)) - 1]
    safe = expected * bound if relative else expected + bound
    return Answers(expected, safe, {scheme.name: scheme.index(expected) for scheme in schemes})


def calibrated_physics(training: LabelledJobs) -> Callable[[LabelledJobs], Array]:
    """Least squares on weight bytes, activation bytes and input bytes: what a line on three numbers gives."""
    line = fit_line(training.features, training.label_bytes, WEIGHT_AND_ACTIVATION_TERMS, least_squares=True)
    return lambda jobs: line.predict_bytes(jobs.features)


def calibrated_closed_form(training: LabelledJobs) -> Callable[[LabelledJobs], Array]:
    """Median regression on the closed form, with and without fragmentation, where layers are known, else on the totals."""
    terms = LAYER_TERMS if training.jobs[0].has_layers else TOTALS_TERMS
    line = fit_line(training.features, training.label_bytes, terms)
    return lambda jobs: line.predict_bytes(jobs.features)


def extra_trees(training: LabelledJobs) -> Callable[[LabelledJobs], Array]:
    """ExtraTrees on the whole feature vector, for what the calibrated closed form leaves."""
    closed_form = calibrated_closed_form(training)
    known = ~np.isnan(training.label_bytes)
    trees = ExtraTreesRegressor(n_estimators=300, min_samples_leaf=2, random_state=0)
    trees.fit(training.features[known], (training.label_bytes - closed_form(training))[known])
    return lambda jobs: closed_form(jobs) + trees.predict(jobs.features)


REGRESSIONS: Final[dict[str, Fit]] = {
    "calibrated physics (3 numbers)": calibrated_physics,
    "calibrated closed form": calibrated_closed_form,
    "ExtraTrees on its residual": extra_trees,
}
