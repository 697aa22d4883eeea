"""Evaluates every candidate on the same folds, split by architecture; candidates are trained anew
in each fold.

The classifier is judged as it is served: each fold's model is exported to a bundle and called
    through
:class:`gpumemnet.predict.predictor.Predictor`.  Figures are pooled over the folds' held-out jobs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from gpumemnet.predict.distribution import PUBLISHED_BINS, BinScheme
from gpumemnet.predict.predictor import Predictor

from ..answers import COVERAGE, Answers, concatenated
from ..training.data import LabelledJobs, folds
from ..training.export import save_classifier
from ..training.mlp import TrainingPlan, train_classifier
from .baselines import REGRESSIONS, commonest_bin, regression_answers
from .metrics import AmountFigures, BinFigures, amount_figures, bin_figures

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
