"""Evaluates estimators on jobs that they were not trained on: answers, figures, baselines, folds.

Every candidate is judged on the same folds, split by architecture, and trained anew in each.  The
classifier is judged as it is served: each fold's model is exported to a bundle and called through
:class:`gpumemnet.predict.predictor.Predictor`.  Figures are pooled over the folds' held-out jobs.

The published tables have accuracy only (arXiv 2602.17817, tables 2–4).  The other figures matter to
a scheduler: an under-predicted job runs out of memory, an over-predicted one wastes it.

A regression's bound is its prediction plus the conformal quantile of its errors on rows that it was
not fitted to.  ExtraTrees was the most accurate of scikit-learn's regressions on this data.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.metrics import f1_score

from gpumemnet.predict.conformal import conformal_quantiles
from gpumemnet.predict.distribution import PUBLISHED_BINS, BinScheme
from gpumemnet.predict.features import FEATURE_SCHEMA
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import MIB

from .networks.physics_line import LAYER_TERMS, TOTALS_TERMS, fit_line
from .training.classifier import save_classifier
from .training.data import LabelledJobs, folds
from .training.mlp import TrainingPlan, train_classifier

Array = NDArray[np.float64]

COVERAGE: Final = 0.99
"""Coverage of :attr:`Answers.safe_bytes`."""


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """A candidate's answers for ``B`` jobs.

    Attributes:
        expected_bytes: shape ``[B]``.
        safe_bytes: bound at 99 % coverage, NaN where the candidate gives none, shape ``[B]``.
        bins: bin scheme's name → predicted bins, shape ``[B]``.
        probabilities: of the bins of 1 GiB, shape ``[B, n_bins]``; ``None`` where the candidate has
            none.
        bounds_bytes: coverage → bound, shape ``[B]``, where the candidate gives more than the one.
    """

    expected_bytes: Array
    safe_bytes: Array
    bins: dict[str, NDArray[np.int64]]
    probabilities: Array | None = None
    bounds_bytes: Mapping[float, Array] = field(default_factory=dict)


def concatenated(parts: Sequence[Answers]) -> Answers:
    """Concatenate the answers of several folds; coverages and probabilities that some folds lack
    are left out."""
    levels = set.intersection(*(set(part.bounds_bytes) for part in parts))
    probabilities = [part.probabilities for part in parts]
    return Answers(
        np.concatenate([part.expected_bytes for part in parts]),
        np.concatenate([part.safe_bytes for part in parts]),
        {name: np.concatenate([part.bins[name] for part in parts]) for name in parts[0].bins},
        None
        if any(part is None for part in probabilities)
        else np.concatenate([p for p in probabilities if p is not None]),
        {
            level: np.concatenate([part.bounds_bytes[level] for part in parts])
            for level in sorted(levels)
        },
    )


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


FOLDS: Final = 3
SCHEMES: Final[tuple[BinScheme, ...]] = (
    PUBLISHED_BINS["published-1000mib"],
    PUBLISHED_BINS["published-2000mib"],
)
MIN_TRAINING_JOBS: Final = 150
"""A bound at 99 % needs 99 rows to be calibrated on; folds are not exactly even."""
CLASSIFIER: Final = "MLP-based classifier"
TOTALS_SUFFIX: Final = ", totals only"


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """All candidates on all folds.

    Attributes:
        label_bytes: measured bytes of the held-out jobs, fold after fold, shape ``[B]``.
        answers: candidate → its answers for these jobs.
        plan: training plan of the classifier; its seed is also that of the folds.
        folds: number of folds.
        data: the dataset.
    """

    label_bytes: np.ndarray[Any, np.dtype[np.float64]]
    answers: dict[str, Answers]
    plan: TrainingPlan
    folds: int
    data: LabelledJobs

    def bin_figures(self, candidate: str, scheme: BinScheme) -> BinFigures:
        """Figures of a candidate's bins."""
        return bin_figures(self.label_bytes, self.answers[candidate].bins[scheme.name], scheme)

    def amount_figures(self, candidate: str) -> AmountFigures:
        """Figures of a candidate's expected and safe bytes."""
        return amount_figures(self.label_bytes, self.answers[candidate])

    def rows(self) -> list[dict[str, Any]]:
        """One JSON-ready row per candidate."""
        return [
            {
                "candidate": candidate,
                "bins": {
                    scheme.name: asdict(self.bin_figures(candidate, scheme)) for scheme in SCHEMES
                },
                **asdict(self.amount_figures(candidate)),
            }
            for candidate in self.answers
        ]


def evaluate(
    data: LabelledJobs,
    *,
    plan: TrainingPlan | None = None,
    fold_count: int = FOLDS,
    progress: Callable[[str, float], None] = lambda step, share: None,
) -> Evaluation:
    """Evaluate all candidates on ``data``.

    Args:
        data: jobs with layers and labels; jobs that ran out of memory train the classifier but are
            not tested on.
        plan: training plan of the classifier.
        fold_count: number of folds.
        progress: called with the current step and its finished share.

    Raises:
        ValueError: when there are too few architectures to split, or jobs to bound 99 % of them.
    """
    plan = plan or TrainingPlan()
    labelled = int((~np.isnan(data.label_bytes)).sum())
    if labelled * (fold_count - 1) // fold_count < MIN_TRAINING_JOBS:
        raise ValueError(
            f"{labelled} measured jobs are too few for {fold_count} folds: measure at least {2 * MIN_TRAINING_JOBS}"
        )
    parts: dict[str, list[Answers]] = {}
    labels = []
    for fold, (training_rows, test_rows) in enumerate(
        folds(data.groups, fold_count, plan.seed), start=1
    ):
        training, test = (
            data.take(training_rows),
            data.take(test_rows[~np.isnan(data.label_bytes[test_rows])]),
        )
        labels.append(test.label_bytes)
        parts.setdefault("commonest bin", []).append(commonest_bin(training, test, SCHEMES))
        for name, fit in REGRESSIONS.items():
            progress(f"fold {fold} of {fold_count}: {name}", 0.0)
            parts.setdefault(name, []).append(regression_answers(fit, training, test, SCHEMES))
        step = f"fold {fold} of {fold_count}: {CLASSIFIER}"
        served = _served(training, plan, lambda share, step=step: progress(step, share))  # type: ignore[misc]
        for suffix, jobs in (("", test), (TOTALS_SUFFIX, test.without_layers())):
            parts.setdefault(CLASSIFIER + suffix, []).append(_classifier_answers(served, jobs))
    pooled = {candidate: concatenated(answers) for candidate, answers in parts.items()}
    return Evaluation(np.concatenate(labels), pooled, plan, fold_count, data)


def _served(
    training: LabelledJobs, plan: TrainingPlan, progress: Callable[[float], None]
) -> Predictor:
    """A predictor with a bundle freshly trained on ``training``."""
    with tempfile.TemporaryDirectory() as folder:
        classifier = train_classifier(training, plan, progress)
        bundle = save_classifier(
            Path(folder) / "fold", classifier, training, plan, name="fold", version="0"
        )
    return Predictor([bundle], keeps_label_context=True)


def _classifier_answers(predictor: Predictor, test: LabelledJobs) -> Answers:
    # without traced peaks, so that the classifier itself answers
    table = test.jobs.with_numbers("traced_peak_bytes", np.zeros(len(test)))
    predictions = {
        scheme.name: predictor.predict_table(table, bins=scheme, coverage=COVERAGE)
        for scheme in SCHEMES
    }
    first = predictions[SCHEMES[0].name]
    return Answers(
        expected_bytes=first.expected_bytes.astype(np.float64),
        safe_bytes=np.ma.filled(first.safe_bytes.astype(np.float64), np.nan),
        bins={name: answers.probabilities.argmax(axis=1) for name, answers in predictions.items()},
    )


_HEADINGS: Final = (
    *("candidate", "accuracy 1,000 MiB", "accuracy 2,000 MiB", "macro F1 1,000", "macro F1 2,000"),
    *(
        "bin too low 1,000",
        "bin too low 2,000",
        "error median MiB",
        "error p90 MiB",
        "error p99 MiB",
    ),
    *("above safe", "wasted", "no safe bytes"),
)


def markdown_table(evaluation: Evaluation) -> str:
    """The table of all candidates, one row each."""
    rows = []
    for candidate in evaluation.answers:
        bins = [evaluation.bin_figures(candidate, scheme) for scheme in SCHEMES]
        amounts = evaluation.amount_figures(candidate)
        rows.append(
            [
                candidate,
                *(f"{figures.accuracy:.4f}" for figures in bins),
                *(f"{figures.macro_f1:.4f}" for figures in bins),
                *(f"{figures.under_predicted:.2%}" for figures in bins),
                *(
                    f"{error:.1f}"
                    for error in (
                        amounts.median_error_mib,
                        amounts.p90_error_mib,
                        amounts.p99_error_mib,
                    )
                ),
                f"{amounts.above_safe:.2%}",
                f"{amounts.wasted:.2%}",
                f"{amounts.without_safe:.2%}",
            ]
        )
    lines = [_HEADINGS, ("---", *["---:"] * (len(_HEADINGS) - 1)), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def heading(evaluation: Evaluation) -> str:
    """One paragraph that says on what, and how, the table was measured."""
    data = evaluation.data
    return (
        f"{len(evaluation.label_bytes):,} {data.jobs[0].family} jobs on {data.gpu} ({data.provenance}, {data.label_source}), "
        f"{evaluation.folds} folds split by architecture, seed {evaluation.plan.seed}. Every model is trained anew in each fold "
        "and judged on the jobs held out, pooled. 'Bin too low' is the share of jobs whose bin was under-predicted. 'Above safe' "
        "is the share above the safe bytes at 99 % coverage. 'Wasted' is the mean of safe over measured, less one. 'No safe "
        "bytes' is the share that a candidate refuses to bound, because it lies outside its training ranges. Jobs that ran out "
        f"of memory are trained on but not judged ({int(np.isnan(data.label_bytes).sum()):,} of {len(data):,}).\n"
    )


def write_report(evaluation: Evaluation, folder: str | Path) -> list[Path]:
    """Write ``evaluation.md`` and ``evaluation.json`` into ``folder``; return the paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "data_sha256": evaluation.data.sha256,
        "gpu": evaluation.data.gpu,
        "provenance": evaluation.data.provenance,
        "jobs": len(evaluation.label_bytes),
        "folds": evaluation.folds,
        "feature_schema": FEATURE_SCHEMA,
        "plan": asdict(evaluation.plan),
        "candidates": evaluation.rows(),
    }
    paths = [folder / name for name in ("evaluation.md", "evaluation.json")]
    paths[0].write_text(
        f"# Evaluation\n\n{heading(evaluation)}\n{markdown_table(evaluation)}", "utf-8"
    )
    paths[1].write_text(json.dumps(document, indent=2) + "\n", "utf-8")
    return paths
