"""Learning curves and feature importances of the MLP-based classifier, on one split of a
dataset."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from gpumemnet.predict.features import FEATURE_NAMES
from models.networks.mlp import float_tensor
from models.training.data import LabelledJobs
from models.training.mlp import TrainedClassifier, TrainingPlan, train_classifier
from models.training.splits import folds

SHARES: Final = (0.125, 0.25, 0.5, 1.0)
MIN_ROWS: Final = 120
FEATURE_GROUPS: Final[dict[str, tuple[str, ...]]] = {
    "batch size and input": ("batch_size", "input_elements", "input_bytes"),
    "totals": ("total_parameters", "trainable_share", "total_activations", "activation_bytes"),
    "options": tuple(name for name in FEATURE_NAMES if name.startswith("is_")),
    "model state": (
        "weight_bytes",
        "gradient_bytes",
        "optimizer_state_bytes",
        "optimizer_temporary_bytes",
    ),
    "counts of layers": tuple(name for name in FEATURE_NAMES if name.endswith("_count")),
    "closed form by size class": tuple(
        name for name in FEATURE_NAMES if name.startswith(("weights_", "peak_", "kept_"))
    ),
    "moments of the step": (
        "resident_bytes",
        "loss_bytes",
        "backward_bytes",
        "step_bytes",
        "unfragmented_bytes",
    ),
    "largest tensors": tuple(
        name for name in FEATURE_NAMES if name.startswith("largest_") or name == "logits_bytes"
    ),
    "closed form in whole segments": (
        "segment_bytes",
        "small_slack_bytes",
        "medium_slack_bytes",
        "spare_medium_segments",
    ),
}
"""Groups of columns that are permuted together, because they are strongly correlated."""


@dataclass(frozen=True, slots=True)
class LearningPoint:
    """Trained on ``rows``: median relative error and share within 10 % on the jobs held out."""

    rows: int
    median_error: float
    within_10_percent: float


@dataclass(frozen=True, slots=True)
class Importance:
    """How much the median relative error grows when a group of columns is permuted among the
    held-out jobs."""

    group: str
    added_error: float


@dataclass(frozen=True, slots=True)
class Learning:
    """Curve and importances of one dataset."""

    slug: str
    curve: tuple[LearningPoint, ...]
    importances: tuple[Importance, ...]


def learn(slug: str, data: LabelledJobs, plan: TrainingPlan, fold_count: int) -> Learning:
    """Train on rising shares of the first fold's training jobs, and permute columns for the last of
    these models."""
    training_rows, test_rows = folds(data.groups, fold_count, plan.seed)[0]
    test = data.take(test_rows[~np.isnan(data.label_bytes[test_rows])])
    shuffled = np.random.default_rng(plan.seed).permutation(training_rows)
    curve: list[LearningPoint] = []
    classifier: TrainedClassifier | None = None
    for share in SHARES:
        rows = np.sort(shuffled[: int(share * len(shuffled))])
        if len(rows) < MIN_ROWS and share < 1.0:
            continue
        # with fewer rows, the same number of steps
        classifier = train_classifier(
            data.take(rows), replace(plan, epochs=min(4 * plan.epochs, round(plan.epochs / share)))
        )
        errors = _errors(classifier, test)
        curve.append(
            LearningPoint(len(rows), float(np.median(errors)), float((errors <= 0.1).mean()))
        )
    assert classifier is not None
    return Learning(slug, tuple(curve), _importances(classifier, test, plan.seed))


def _errors(
    classifier: TrainedClassifier, test: LabelledJobs
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    with torch.no_grad():
        amounts = classifier.network(float_tensor(test.features))[3].double().numpy()
    errors: np.ndarray[tuple[int], np.dtype[np.float64]] = np.abs(
        np.exp(amounts[:, 1]) / test.label_bytes - 1.0
    )
    return errors


def _importances(
    classifier: TrainedClassifier, test: LabelledJobs, seed: int
) -> tuple[Importance, ...]:
    generator = np.random.default_rng(seed)
    baseline = float(np.median(_errors(classifier, test)))
    importances = []
    for group, names in FEATURE_GROUPS.items():
        columns = [FEATURE_NAMES.index(name) for name in names]
        features = test.features.copy()
        features[:, columns] = features[generator.permutation(len(test))][:, columns]
        importances.append(
            Importance(
                group,
                float(np.median(_errors(classifier, replace(test, features=features)))) - baseline,
            )
        )
    return tuple(sorted(importances, key=lambda importance: -importance.added_error))
