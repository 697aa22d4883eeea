"""Estimators that learn: SchedTune, DNNPerf, our classifiers.

All answer by the same folds over architecture families (architectures, for sampled networks), so
none has seen the family that it answers for.  DNNPerf and ours learn from what the shipped bundles
learn from.  SchedTune learns from readings of the same set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from gpumemnet.job.job_table import JobTable
from gpumemnet.job.measurement import Measurement
from gpumemnet.predict.conformal import COVERAGES
from models.training.classifier import TrainedClassifier, float_tensor, plan_of, train
from models.training.data import SAMPLED, LabelledJobs, features_on, folds, load_labelled_jobs
from research.estimators import dnnperf
from research.estimators.estimator import PublishedEstimator, subject_of
from research.estimators.schedtune import fit_schedtune

from .answers import Answer, asked
from .protocol import COVERAGE, FOLDS, SEED
from .sets import RowSet

Array = NDArray[np.float64]
Rows = NDArray[np.int64]
Found = dict[str, dict[int, Answer]]
"""Estimator → row → answer."""

SCHEDTUNE: Final = "SchedTune"
DNNPERF: Final = dnnperf.NAME
CLASSIFIER: Final = "gpumemnet, classifier (layers)"
TOTALS: Final = "gpumemnet, classifier (totals)"
OURS: Final = (CLASSIFIER, TOTALS)
LEARNED: Final = (*OURS, DNNPERF)
"""Estimators that are trained together, on the same folds and the same jobs."""
FAMILIES: Final = ("cnn", "transformer")
"""Families of the real networks."""


def schedtune_answers(rows: RowSet) -> Found:
    """SchedTune's answers for all rows of a set."""
    found: dict[int, Answer] = {}
    labels, measured = rows.labels, ~np.isnan(rows.labels)
    for training, testing in folds(rows.groups, min(FOLDS, len(np.unique(rows.groups))), SEED):
        known = training[measured[training]]
        predict = fit_schedtune([rows.rows[row] for row in known.tolist()], labels[known])
        tested = [rows.rows[row] for row in testing.tolist()]
        expected, bounds = predict(tested)
        seconds = _seconds_each(lambda: predict(tested[:1]))  # noqa: B023
        for row, amount, bound in zip(
            testing.tolist(), expected.tolist(), bounds.tolist(), strict=True
        ):
            found[row] = Answer(round(amount), seconds, round(bound))
    return {SCHEDTUNE: found}


@dataclass(frozen=True, slots=True, eq=False)
class _Learned:
    """Estimators of one fold."""

    classifier: TrainedClassifier
    graphs: PublishedEstimator

    def answers(self, chosen: Sequence[Measurement]) -> dict[str, tuple[Array, Array]]:
        """Each of ours → expectation and bound above the context, shape ``[B]`` each."""
        gpus = np.array([row.gpu for row in chosen])
        jobs = JobTable.from_jobs([row.job for row in chosen])
        return {
            CLASSIFIER: self._classified(features_on(gpus, jobs)),
            TOTALS: self._classified(features_on(gpus, jobs.without_layers())),
        }

    def _classified(self, features: Array) -> tuple[Array, Array]:
        with torch.no_grad():
            amounts = self.classifier.network(float_tensor(features))[-1].double().exp().numpy()
        return amounts[:, 1], amounts[:, 2 + COVERAGES.index(COVERAGE)]


def sampled_answers(rows: RowSet, datasets: Path, progress: Callable[[str, float], None]) -> Found:
    """DNNPerf and our estimators on a set of sampled networks of one family."""
    whole = _training_data(datasets)
    found: Found = {name: {} for name in LEARNED}
    pairs = folds(rows.groups, FOLDS, SEED)
    keys = np.array([row.split_group for row in rows.rows])
    for number, (_, testing) in enumerate(pairs):
        known = whole.take(np.flatnonzero(~np.isin(whole.groups, keys[testing])))
        _add(found, rows, testing, _learned(known, rows.rows[0].job.family))
        progress(f"{rows.recipe.title}: estimators that learn", (number + 1) / len(pairs))
    return found


def real_answers(
    sets: Sequence[RowSet], datasets: Path, progress: Callable[[str, float], None]
) -> dict[str, Found]:
    """DNNPerf and our estimators on sets of real networks; name of the set → their answers.

    Args:
        sets: the sets; an architecture family is left out of all of them at once.
        datasets: folder of the datasets that the shipped bundles learn from.
        progress: called with a step and its share.
    """
    whole = _training_data(datasets)
    names = np.unique(whole.groups[whole.families != SAMPLED])
    found: dict[str, Found] = {rows.recipe.name: {name: {} for name in LEARNED} for rows in sets}
    families = [_families(rows, names.tolist()) for rows in sets]
    pairs = folds(np.arange(len(names)), FOLDS, SEED)
    for number, (_, held) in enumerate(pairs):
        left_out = names[held]
        known = whole.take(np.flatnonzero(~np.isin(whole.groups, left_out)))
        for position, family in enumerate(FAMILIES):
            learned = _learned(known, family)
            for rows, own in zip(sets, families, strict=True):
                testing = np.flatnonzero(
                    [
                        row.job.family == family and _is_of_fold(name, left_out, number)
                        for row, name in zip(rows.rows, own, strict=True)
                    ]
                )
                if len(testing):
                    _add(found[rows.recipe.name], rows, testing, learned)
            progress(
                "real networks: estimators that learn",
                (number + (position + 1) / len(FAMILIES)) / len(pairs),
            )
    return found


@cache
def _training_data(datasets: Path) -> LabelledJobs:
    return load_labelled_jobs(sorted(datasets.rglob("*.parquet")))


def _is_of_fold(family: str, left_out: NDArray[np.str_], number: int) -> bool:
    """Whether a row is answered by the fold ``number``; one of a family that no other row has, by
    the first."""
    return family in left_out if family else number == 0


def _learned(data: LabelledJobs, family: str) -> _Learned:
    """Our classifier learns from jobs of all families, DNNPerf from those of one."""
    own = data.take(np.flatnonzero(data.jobs.option_column("family") == family))
    graphs = dnnperf.train_dnnperf(own.jobs, own.label_bytes, SEED)
    return _Learned(train(data, plan_of("mlp", SEED)), graphs)


def _families(rows: RowSet, names: Sequence[str]) -> list[str]:
    """Architecture family of each row; where the dataset names none, that with which the model's
    name begins; else empty."""
    found = []
    for number, row in enumerate(rows.rows):
        family = row.architecture_family
        if family is None:
            model = str(rows.architecture(number)["model"]).lower().replace("-", "")
            family = next((name for name in names if model.startswith(name)), "")
        found.append(family if family in names else "")
    return found


def _add(found: Found, rows: RowSet, testing: Rows, learned: _Learned) -> None:
    """Add the answers for the rows ``testing``, each with the context of its row."""
    chosen = [rows.rows[row] for row in testing.tolist()]
    contexts = np.array([subject_of(row, {}).context_bytes for row in chosen], dtype=np.float64)
    together = _seconds_each(lambda: learned.answers(chosen[:1]))
    seconds = together / len(OURS)
    for name, (expected, bound) in learned.answers(chosen).items():
        for row, amount, limit in zip(
            testing.tolist(),
            (expected + contexts).tolist(),
            (bound + contexts).tolist(),
            strict=True,
        ):
            found[name][row] = Answer(round(amount), seconds, round(limit))
    for row in testing.tolist():
        found[DNNPERF][row] = asked(
            learned.graphs, subject_of(rows.rows[row], rows.architecture(row))
        )


def _seconds_each(once: Callable[[], object], times: int = 5) -> float:
    """Seconds of one answer: the median of a few."""
    took = []
    for _ in range(times):
        start = time.perf_counter()
        once()
        took.append(time.perf_counter() - start)
    return float(np.median(took))
