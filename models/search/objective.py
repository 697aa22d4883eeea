"""Evaluates a plan on one fold by error and waste, as the retraining's gate does, on held-out
architectures.

The holdout of a retraining is in no fold, neither for training nor for testing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch

from gpumemnet.errors import DatasetError
from gpumemnet.job.measurement import OBSERVED

from ..networks.mlp import float_tensor
from ..networks.served import SequenceClassifier
from ..retrain.gate import MOST_WASTE, losses
from ..retrain.holdout import is_held_out
from ..training.data import ZOO, LabelledJobs, labelled_jobs, load_training_rows
from ..training.mlp import TrainedClassifier, train_classifier
from ..training.plans import Plan
from ..training.sequence import SequencePlan, batch_of, train_sequence_classifier
from ..training.splits import folds

COVERAGE: Final = 0.99
FEWEST_ROWS: Final = 150
"""Fewest labelled training rows of a fold; a bound at 99 % needs 99."""
OBJECTIVE: Final = (
    "geometric mean of the mean error in log-bytes (each at most 0.2) and the mean waste of the safe bytes at 99 % (each at most "
    "the memory itself; all of it for a job above them), with layers and with totals only, averaged over the folds"
)


@dataclass(frozen=True, slots=True, eq=False)
class SearchTask:
    """The rows and folds on which plans are compared.

    Attributes:
        data: the rows of one family, without the holdout of a retraining.
        source: name of the dataset.
        sha256: hash of its file.
        encoder: ``mlp`` or ``transformer``.
        fold_count: number of folds, split by architecture.
        seed: seed of the split, the networks and the search.
    """

    data: LabelledJobs
    source: str
    sha256: str
    encoder: str
    fold_count: int
    seed: int


def load_task(path: Path, family: str, encoder: str, fold_count: int, seed: int) -> SearchTask:
    """Load the rows of one family in the dataset at ``path``, on which plans are compared.

    Raises:
        DatasetError: when there are too few rows or architectures, or the dataset cannot be read.
    """
    rows = [
        row for row in load_training_rows(path) if row.job.family == family and row.recipe != ZOO
    ]
    usable = [row for row in rows if row.job.has_layers and not is_held_out(row.architecture_key)]
    if not usable:
        raise DatasetError(
            f"{path} has no {family} job with layers to learn from: choose another family or dataset"
        )
    if any(row.provenance == OBSERVED for row in usable):
        raise DatasetError(
            f"{path} holds observations, of which a retraining judges by the newest: search on a dataset"
        )
    data = labelled_jobs(usable, str(path), hashlib.sha256(path.read_bytes()).hexdigest())
    labelled = int((~np.isnan(data.label_bytes)).sum())
    if labelled * (fold_count - 1) // fold_count < FEWEST_ROWS:
        raise DatasetError(
            f"{path}: {labelled} {family} jobs that no retraining holds out are too few for {fold_count} folds: each needs "
            f"{FEWEST_ROWS} to learn from"
        )
    try:
        folds(data.groups, fold_count, seed)
    except ValueError as error:
        raise DatasetError(f"{path}: {error}") from None
    return SearchTask(data, path.name, data.sha256, encoder, fold_count, seed)


def fold_loss(task: SearchTask, plan: Plan, fold: int) -> float:
    """Train a new network with ``plan`` and return its loss on one fold.

    Raises:
        ValueError: when the fold has too few architectures to train on.
    """
    torch.set_num_threads(1)  # the networks are too small to benefit from a second thread
    training_rows, test_rows = folds(task.data.groups, task.fold_count, task.seed)[fold]
    training = task.data.take(training_rows)
    test = task.data.take(test_rows[~np.isnan(task.data.label_bytes[test_rows])])
    plan = replace(plan, seed=task.seed + fold)
    if isinstance(plan, SequencePlan):
        trained = train_sequence_classifier(training, plan)
        tests = [test]
    else:
        trained = train_classifier(training, plan)
        tests = [test, test.without_layers()]
    losses_by_measure = losses(
        np.tile(test.label_bytes, len(tests)),
        np.concatenate([_answers(trained, jobs) for jobs in tests], axis=1),
    )
    waste = np.where(losses_by_measure["above safe"] > 0.0, MOST_WASTE, losses_by_measure["waste"])
    return float(np.sqrt(losses_by_measure["error"].mean() * waste.mean()))


def _answers(
    trained: TrainedClassifier, test: LabelledJobs
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return expected and safe bytes, shape ``[2, B]``; safe bytes are limited to the GPU's
    capacity."""
    column = 2 + trained.coverages.index(COVERAGE)
    parts = []
    for first in range(0, len(test), 256):
        some = test.take(np.arange(first, min(first + 256, len(test))))
        inputs: tuple[torch.Tensor, ...] = (float_tensor(some.features),)
        if isinstance(trained.network, SequenceClassifier):
            from gpumemnet.job.job_table import JobTable
            from gpumemnet.predict.features import layer_sequence

            inputs += batch_of(
                [layer_sequence(JobTable.from_jobs([job]))[0][0] for job in some.jobs]
            )
        with torch.no_grad():
            parts.append(trained.network(*inputs)[3].double().numpy())
    amounts = np.exp(np.concatenate(parts))
    return np.stack((amounts[:, 1], np.minimum(amounts[:, column], test.capacity_bytes)))
