"""The baselines that the classifiers are compared with: the most frequent bin, and regressions.

A regression's bound is its prediction plus the conformal quantile of its errors on rows that it was
not fitted to.  ExtraTrees was the most accurate of scikit-learn's regressions on this data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor

from gpumemnet.predict.coverage import conformal_quantiles
from gpumemnet.predict.distribution import BinScheme

from ..answers import COVERAGE, Answers
from ..networks.physics_line import LAYER_TERMS, TOTALS_TERMS, fit_line
from ..training.data import LabelledJobs, folds

Array = NDArray[np.float64]
Fit = Callable[[LabelledJobs], Callable[[LabelledJobs], Array]]
"""Fits expected bytes on training jobs and gives the function that predicts them, shape ``[B]``."""

CALIBRATION_FOLDS: Final = 5
WEIGHT_AND_ACTIVATION_TERMS: Final = (("weight_bytes",), ("activation_bytes",), ("input_bytes",))


def commonest_bin(
    training: LabelledJobs, test: LabelledJobs, schemes: tuple[BinScheme, ...]
) -> Answers:
    """Always the bin that most training jobs fall into; expected is their median."""
    labels = training.label_bytes[~np.isnan(training.label_bytes)]
    bins = {
        scheme.name: np.full(len(test), np.bincount(scheme.index(labels)).argmax())
        for scheme in schemes
    }
    bound = _bound(labels)
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
        relative: whether the bound is a multiple of the expected bytes, as it must be over many
            octaves, and not an amount more.
        calibration_folds: folds of the training jobs whose held-out errors give the bound.
    """
    errors = []
    for rows, held_out in folds(training.groups, calibration_folds, seed=0):
        answers, labels = (
            fit(training.take(rows))(training.take(held_out)),
            training.label_bytes[held_out],
        )
        errors.append(labels / np.maximum(answers, 1.0) if relative else labels - answers)
    ordered = np.concatenate(errors)
    ordered = ordered[~np.isnan(ordered)]
    expected = fit(training)(test)
    bound = _bound(ordered)
    safe = expected * bound if relative else expected + bound
    return Answers(expected, safe, {scheme.name: scheme.index(expected) for scheme in schemes})


def _bound(scores: Array) -> float:
    """The conformal quantile; the largest score where they are too few for one."""
    [bound] = conformal_quantiles(scores, (COVERAGE,))
    return float(scores.max()) if bound is None else bound


def calibrated_physics(training: LabelledJobs) -> Callable[[LabelledJobs], Array]:
    """Least squares on weight bytes, activation bytes and input bytes: what a line on three numbers
    gives."""
    line = fit_line(
        training.features, training.label_bytes, WEIGHT_AND_ACTIVATION_TERMS, least_squares=True
    )
    return lambda jobs: line.predict_bytes(jobs.features)


def calibrated_closed_form(training: LabelledJobs) -> Callable[[LabelledJobs], Array]:
    """Median regression on the closed form, with and without fragmentation, where layers are known,
    else on the totals."""
    terms = LAYER_TERMS if training.jobs.layer_counts[0] else TOTALS_TERMS
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
