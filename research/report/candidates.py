"""The candidates of the report: baselines, the paper's networks, our classifiers, and the traced
peak.

A candidate is a function of training jobs and test jobs that returns answers for the latter; it is
trained anew each time.  Our classifiers are judged as they are served: exported to a bundle and
called through :class:`gpumemnet.predict.predictor.Predictor`.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor, HistGradientBoostingRegressor
from sklearn.neural_network import MLPClassifier

from gpumemnet.job.job_table import JobTable
from gpumemnet.predict.bundle import Bundle
from gpumemnet.predict.distribution import PUBLISHED_BINS, BinScheme, bins_of_width
from gpumemnet.predict.features import FEATURE_NAMES
from gpumemnet.predict.model import BundleModel, ModelGpu
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import GIB, MIB
from models.evaluation import (
    COVERAGE,
    Answers,
    calibrated_closed_form,
    calibrated_physics,
    commonest_bin,
    regression_answers,
)
from models.networks.mlp import float_tensor
from models.training.bounds import COVERAGES
from models.training.card import fit_traced_peak
from models.training.classifier import save_classifier
from models.training.data import LabelledJobs, features_on, joined
from models.training.mlp import (
    TrainingPlan,
    fitted_transform,
    train_classifier,
)
from models.training.sequence import (
    SequencePlan,
    train_sequence_classifier,
)
from research.estimators.formulas import horus, naive
from research.estimators.gpumemnet_paper import fit_paper_mlp, fit_paper_transformer

Array = NDArray[np.float64]

ONE_GIB: Final = bins_of_width(GIB, 192 * GIB)
SCHEMES: Final[tuple[BinScheme, ...]] = (
    ONE_GIB,
    *(PUBLISHED_BINS[f"published-{width}mib"] for width in (1000, 2000, 8000)),
)
PAPER_SCHEMES: Final = SCHEMES[1:]
MLP_BASED: Final = "MLP-based classifier"
TOTALS_SUFFIX: Final = ", totals only"
TOTALS_ONLY: Final = f"{MLP_BASED}{TOTALS_SUFFIX}"
TRANSFORMER_BASED: Final = "transformer-based classifier"
TRACED_PEAK: Final = "traced peak, calibrated"
PAPER_MLP: Final = "GPUMemNet's MLP-based (softmax)"
TWO_MEMBERS: Final = f"{MLP_BASED}, two members"
SOFTMAX_HEAD: Final = "softmax head on the same inputs"
ALL_FAMILIES_NAME: Final = "one model for all families"
COMMON: Final = f"{MLP_BASED}, {ALL_FAMILIES_NAME}"
COMMON_TRANSFERRED: Final = f"{COMMON}, learned from traces on another GPU"
TRANSFERRED: Final = f"{MLP_BASED}, learned from traces on another GPU"
PAPER_EPOCHS: Final = 120
MONOTONE_ITERATIONS: Final = 200


@dataclass(frozen=True, slots=True)
class Plans:
    """How our classifiers are trained.

    Attributes:
        mlp, transformer: plans of the two encoders.
        paper_epochs: largest number of epochs of the paper's networks.
    """

    mlp: TrainingPlan
    transformer: SequencePlan
    paper_epochs: int = PAPER_EPOCHS


Candidate = Callable[[LabelledJobs, LabelledJobs, Plans], dict[str, Answers]]
"""Trains on the first, answers for the second; one training may give several rows of the table."""


def _commonest(training: LabelledJobs, test: LabelledJobs, plans: Plans) -> dict[str, Answers]:
    return {"commonest bin": commonest_bin(training, test, SCHEMES)}


def _formulas(training: LabelledJobs, test: LabelledJobs, plans: Plans) -> dict[str, Answers]:
    answers = {}
    for name, formula in (("naive formula", naive), ("Horus", horus)):
        expected = formula(test.jobs)
        answers[name] = Answers(
            expected,
            np.full(len(test), np.nan),
            {scheme.name: scheme.index(expected) for scheme in SCHEMES},
        )
    return answers


def _regressions(training: LabelledJobs, test: LabelledJobs, plans: Plans) -> dict[str, Answers]:
    return {
        name: regression_answers(fit, training, test, SCHEMES, relative=True, calibration_folds=3)
        for name, fit in (
            ("calibrated physics (3 numbers)", calibrated_physics),
            ("calibrated closed form", calibrated_closed_form),
            ("ExtraTrees on its ratio", extra_trees_ratio),
            ("gradient boosting, monotone", monotone_boosting),
        )
    }


def _paper_mlp(training: LabelledJobs, test: LabelledJobs, plans: Plans) -> dict[str, Answers]:
    answer = fit_paper_mlp(training, PAPER_SCHEMES, plans.mlp.seed, plans.paper_epochs)
    return {PAPER_MLP: answer(test)}


def _paper_transformer(
    training: LabelledJobs, test: LabelledJobs, plans: Plans
) -> dict[str, Answers]:
    answer = fit_paper_transformer(training, PAPER_SCHEMES, plans.mlp.seed, plans.paper_epochs // 6)
    return {"GPUMemNet's transformer-based (softmax)": answer(test)}


def _mlp_based(training: LabelledJobs, test: LabelledJobs, plans: Plans) -> dict[str, Answers]:
    with tempfile.TemporaryDirectory() as folder:
        trained = train_classifier(training, plans.mlp)
        bundle = save_classifier(
            Path(folder) / "fold", trained, training, plans.mlp, name="fold", version="0"
        )
    return {
        MLP_BASED: served_answers(bundle, test),
        TOTALS_ONLY: served_answers(bundle, test.without_layers()),
    }


def _transformer_based(
    training: LabelledJobs, test: LabelledJobs, plans: Plans
) -> dict[str, Answers]:
    with tempfile.TemporaryDirectory() as folder:
        trained = train_sequence_classifier(training, plans.transformer)
        bundle = save_classifier(
            Path(folder) / "fold", trained, training, plans.transformer, name="fold", version="0"
        )
    return {TRANSFORMER_BASED: served_answers(bundle, test)}


@dataclass(frozen=True, slots=True, eq=False)
class CommonNetwork:
    """A network that learns from several datasets together, and is a candidate on each of them.

    Attributes:
        name: the candidate's name.
        plan: its training plan.
        datasets: one for each family.
    """

    name: str
    plan: TrainingPlan
    datasets: tuple[LabelledJobs, ...]


def common_answers(
    plan: TrainingPlan, training: Sequence[LabelledJobs], tests: Sequence[LabelledJobs]
) -> list[tuple[Answers, Answers]]:
    """Train one network; return its answers for each of ``tests``, with layers and with totals
    only.

    Args:
        plan: the training plan.
        training: a dataset of each family.
        tests: jobs of one family each.
    """
    together = joined(training)
    trained = train_classifier(together, plan)
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        for number, test in enumerate(tests):
            own = together.take(together.rows_of(test.family))
            path = Path(folder) / str(number)
            bundle = save_classifier(path, trained, own, plan, name="fold", version="0")
            answers.append(
                (
                    served_answers(bundle, test, context_bytes=together.context_bytes),
                    served_answers(
                        bundle, test.without_layers(), context_bytes=together.context_bytes
                    ),
                )
            )
    return answers


def _ablations(training: LabelledJobs, test: LabelledJobs, plans: Plans) -> dict[str, Answers]:
    """Ours without its ensemble, and without its head."""
    with tempfile.TemporaryDirectory() as folder:
        plan = replace(plans.mlp, members=2)
        trained = train_classifier(training, plan)
        bundle = save_classifier(
            Path(folder) / "fold", trained, training, plan, name="fold", version="0"
        )
    return {
        TWO_MEMBERS: served_answers(bundle, test),
        SOFTMAX_HEAD: softmax_answers(training, test, plans.mlp.seed),
    }


def softmax_answers(training: LabelledJobs, test: LabelledJobs, seed: int) -> Answers:
    """A softmax over bins on the inputs of the MLP-based classifier, one network for each bin
    width.

    Expected is the middle of the predicted 1 GiB bin; a job that ran out of memory is of the class
    that begins at the capacity.
    """
    transform = fitted_transform(training, training.without_layers())
    with torch.no_grad():
        inputs, others = (
            transform(float_tensor(jobs.features))[0].numpy() for jobs in (training, test)
        )
    labels = np.where(np.isnan(training.label_bytes), training.lower_bytes, training.label_bytes)
    bins = {}
    for scheme in SCHEMES:
        classes = scheme.index(labels)
        network = MLPClassifier((64, 64), max_iter=60, random_state=seed)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # sixty passes are intended, even if the loss has not converged
            bins[scheme.name] = network.fit(inputs, classes).predict(others).astype(np.int64)
    expected = (bins[ONE_GIB.name] + 0.5) * ONE_GIB.width_bytes
    return Answers(expected, np.full(len(test), np.nan), bins)


def _traced_peak(training: LabelledJobs, test: LabelledJobs, plans: Plans) -> dict[str, Answers]:
    answers = traced_peak_answers(training, test)
    return {} if answers is None else {TRACED_PEAK: answers}


def traced_peak_answers(
    training: LabelledJobs, test: LabelledJobs, context_bytes: int | None = None
) -> Answers | None:
    """What the traced peaks of ``test`` give, calibrated on ``training``; ``None`` where either has
    none.

    Args:
        training: measured jobs with traced peaks.
        test: the jobs.
        context_bytes: CUDA context of the GPU of ``test``; that of the training jobs unless given.
    """
    fit = fit_traced_peak(training, COVERAGES)
    traced = np.array([job.traced_peak_bytes or np.nan for job in test.jobs], dtype=np.float64)
    if fit is None or np.isnan(traced).any():
        return None
    centre = traced + (fit.context_bytes if context_bytes is None else context_bytes)
    expected = centre * np.exp(fit.log_shift)
    levels = zip(COVERAGES, fit.log_bounds, strict=True)
    bounds = {level: np.maximum(centre * np.exp(bound), expected) for level, bound in levels}
    bins = {scheme.name: scheme.index(expected) for scheme in SCHEMES}
    return Answers(expected, bounds[COVERAGE], bins, bounds_bytes=bounds)


MEASURED_CANDIDATES: Final[tuple[Candidate, ...]] = (
    *(
        _commonest,
        _formulas,
        _regressions,
        _paper_mlp,
        _paper_transformer,
        _mlp_based,
        _ablations,
        _transformer_based,
        _traced_peak,
    ),
)
TRACED_CANDIDATES: Final[tuple[Candidate, ...]] = (
    _commonest,
    _formulas,
    _regressions,
    _mlp_based,
    _ablations,
    _transformer_based,
)


def served_answers(
    bundle: Bundle, test: LabelledJobs, gpu: str | None = None, context_bytes: int | None = None
) -> Answers:
    """The bundle's answers for the jobs of ``test``, which are of one family.

    Args:
        bundle: the bundle.
        test: the jobs.
        gpu: the GPU to answer for; the bundle's own unless given.
        context_bytes: CUDA context in the labels of ``test``, if it is known better than from the
            GPU's profile.
    """
    model = BundleModel(bundle, test.family)
    model_gpu = (
        model.label_gpu
        if gpu is None
        else Predictor([bundle], keeps_label_context=True).model_gpu(model, gpu)
    )
    if context_bytes is not None:
        shift = context_bytes - model.card.context_bytes
        model_gpu = ModelGpu(model_gpu.prediction_gpu, 0, shift, shift)
    table = JobTable.from_jobs([replace(job, traced_peak_bytes=None) for job in test.jobs])
    features = model.features(table, model_gpu)
    unseen = model.support.check(table, features)
    predictions = {
        scheme.name: model.predict(table, scheme, COVERAGE, model_gpu, features, unseen)
        for scheme in SCHEMES
    }
    first = predictions[ONE_GIB.name]
    answer = model.run(table, features)
    bounds = (
        answer.bounds_bytes
        if model_gpu.site is None
        else model_gpu.site.bounds(answer.expected_bytes, answer.bounds_bytes)
    )
    bounds = np.maximum(bounds + model_gpu.shift_bound_bytes, 0.0)
    bounds[unseen.counts > 0] = np.nan
    return Answers(
        expected_bytes=first.expected_bytes.astype(np.float64),
        safe_bytes=np.ma.filled(first.safe_bytes.astype(np.float64), np.nan),
        bins={name: answers.probabilities.argmax(axis=1) for name, answers in predictions.items()},
        probabilities=first.probabilities,
        bounds_bytes=dict(zip(model.card.coverages, bounds.T, strict=True)),
    )


def transferred(bundle: Bundle, training: LabelledJobs, test: LabelledJobs) -> Answers:
    """A bundle of one GPU on jobs of another; only the context of the latter is estimated, from the
    training jobs."""
    model = BundleModel(bundle, training.family)
    known = ~np.isnan(training.label_bytes)
    model_gpu = model.model_gpu(Predictor([bundle]).prediction_gpu(training.gpu))
    table = JobTable.from_jobs(training.jobs)
    reserved = (
        model.run(table, model.features(table, model_gpu)).expected_bytes - model.card.context_bytes
    )
    context_bytes = int(np.median((training.label_bytes - reserved)[known]))
    return served_answers(bundle, test, training.gpu, max(0, context_bytes))


def extra_trees_ratio(training: LabelledJobs) -> Callable[[LabelledJobs], Array]:
    """ExtraTrees on the whole feature vector, for the logarithm of what the calibrated closed form
    leaves."""
    return _ratio_regression(
        training,
        ExtraTreesRegressor(n_estimators=100, max_features=0.4, min_samples_leaf=2, random_state=0),
    )


def _ratio_regression(
    training: LabelledJobs, regression: ExtraTreesRegressor
) -> Callable[[LabelledJobs], Array]:
    closed_form = calibrated_closed_form(training)
    known = ~np.isnan(training.label_bytes)

    def feature_rows(jobs: LabelledJobs) -> Array:
        return np.concatenate(
            (_logarithms(jobs), jobs.features / closed_form(jobs)[:, None]), axis=1
        )

    regression.fit(
        feature_rows(training)[known], np.log(training.label_bytes / closed_form(training))[known]
    )

    def predict(jobs: LabelledJobs) -> Array:
        expected: Array = closed_form(jobs) * np.exp(regression.predict(feature_rows(jobs)))
        return expected

    return predict


def monotone_boosting(training: LabelledJobs) -> Callable[[LabelledJobs], Array]:
    """Gradient-boosted trees on the logarithm of memory that never falls when an amount of bytes
    grows."""
    known = ~np.isnan(training.label_bytes)
    rising = [int(name.endswith("_bytes") and "slack" not in name) for name in FEATURE_NAMES]
    trees = HistGradientBoostingRegressor(
        loss="absolute_error",
        max_iter=MONOTONE_ITERATIONS,
        learning_rate=0.1,
        monotonic_cst=rising,
        random_state=0,
    )
    trees.fit(_logarithms(training)[known], np.log(training.label_bytes[known]))
    return lambda jobs: np.exp(trees.predict(_logarithms(jobs)))


def _logarithms(jobs: LabelledJobs) -> Array:
    logarithms: Array = np.log1p(jobs.features / MIB)
    return logarithms


def on_gpu(data: LabelledJobs, gpu: str) -> LabelledJobs:
    """The same jobs with their features as on the GPU model ``gpu``."""
    return replace(data, features=features_on(gpu, data.jobs), gpu=gpu)
