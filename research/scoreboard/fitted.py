"""Estimators that learn: SchedTune, DNNPerf, our line over the closed form, our classifiers.

All answer by the same folds over architecture families (architectures, for sampled networks), so
none has seen the family that it answers for.  DNNPerf and ours learn from what the shipped bundles
learn from: for real networks sampled jobs with traced labels and runs of other real networks, for
the published sampled networks these alone.  SchedTune learns from readings of the same set.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gpumemnet.job.measurement import Measurement
from gpumemnet.job.training_job import totals_only
from gpumemnet.predict.bundle import GRAPH_OUTPUTS
from models.line_calibration import Fit, RealNetworks, fit, line_features, networks_of_runs
from models.networks.mlp import float_tensor
from models.training.data import (
    LabelledJobs,
    features_on,
    folds,
    labelled_jobs,
    load_labelled_jobs,
    with_real_networks,
)
from models.training.mlp import TrainedClassifier, mlp_plan, train_classifier
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
LINE: Final = "gpumemnet, line over the closed form"
CLASSIFIER: Final = "gpumemnet, classifier (layers)"
TOTALS: Final = "gpumemnet, classifier (totals)"
OURS: Final = (LINE, CLASSIFIER, TOTALS)
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


class _Features(NamedTuple):
    """Features of ``R`` rows, each on its own GPU: with layers, as the line reads them, and from
    totals only; ``[R, F]`` each."""

    layers: Array
    line: Array
    totals: Array


@dataclass(frozen=True, slots=True, eq=False)
class _Learned:
    """Estimators of one fold; line and classifier with the CUDA context of their labels taken off
    their answers."""

    line: Fit
    classifier: TrainedClassifier
    context_bytes: float
    graphs: PublishedEstimator

    def answers(self, features: _Features) -> dict[str, tuple[Array, Array]]:
        """Each of ours → expectation and bound above the context, shape ``[B]`` each."""
        centre, bounds = self.line.amounts(features.line)
        classified = {
            CLASSIFIER: self._classified(features.layers),
            TOTALS: self._classified(features.totals),
        }
        return {LINE: (centre, bounds[:, 0]), **classified}

    def _classified(self, features: Array) -> tuple[Array, Array]:
        level = min(
            bisect_left(self.classifier.coverages, COVERAGE), len(self.classifier.coverages) - 1
        )
        with torch.no_grad():
            amounts = (
                self.classifier.network(float_tensor(features))[GRAPH_OUTPUTS.index("amounts")]
                .double()
                .numpy()
            )
        return np.exp(amounts[:, 1]) - self.context_bytes, np.exp(
            amounts[:, 2 + level]
        ) - self.context_bytes


def sampled_answers(rows: RowSet, progress: Callable[[str, float], None]) -> Found:
    """DNNPerf and our estimators on a set of sampled networks of one family."""
    data = labelled_jobs(rows.rows, rows.recipe.file, rows.sha256)
    found: Found = {name: {} for name in LEARNED}
    pairs = folds(data.groups, FOLDS, SEED)
    for number, (training, testing) in enumerate(pairs):
        known = data.take(training)
        learned = _learned(known, fit(_networks(known), (COVERAGE,)))
        _add(found, rows, testing, learned)
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
    runs = sorted((datasets / "real_runs").glob("*.parquet"))
    networks = networks_of_runs(runs)
    names = np.unique(networks.families)
    found: dict[str, Found] = {rows.recipe.name: {name: {} for name in LEARNED} for rows in sets}
    whole = {
        family: with_real_networks(
            load_labelled_jobs(datasets / f"traced_{family}_h200.parquet", family), runs
        )
        for family in FAMILIES
    }
    families = [_families(rows, names.tolist()) for rows in sets]
    pairs = folds(np.arange(len(names)), FOLDS, SEED)
    for number, (_, held) in enumerate(pairs):
        left_out = names[held]
        line = fit(
            networks.take(np.flatnonzero(~np.isin(networks.families, left_out))), (COVERAGE,)
        )
        for position, family in enumerate(FAMILIES):
            learned = _learned(_without(whole[family], left_out.tolist()), line)
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


def _is_of_fold(family: str, left_out: NDArray[np.str_], number: int) -> bool:
    """Whether a row is answered by the fold ``number``; one of a family that no other row has, by
    the first."""
    return family in left_out if family else number == 0


def _learned(data: LabelledJobs, line: Fit) -> _Learned:
    context_bytes = float(data.context_bytes or 0)
    graphs = dnnperf.train_dnnperf(data.jobs, data.label_bytes - context_bytes, SEED)
    return _Learned(line, train_classifier(data, mlp_plan(data, SEED)), context_bytes, graphs)


def _networks(data: LabelledJobs) -> RealNetworks:
    """The sampled networks as the closed form's line is fitted on them, each a family of its
    own."""
    rows = np.flatnonzero(~np.isnan(data.label_bytes))
    own = data.take(rows)
    above = np.maximum(own.label_bytes - float(data.context_bytes or 0), 1.0)
    return RealNetworks(
        np.array([str(group) for group in own.groups]),
        own.jobs,
        line_features(own.gpu, own.jobs),
        above,
    )


def _without(data: LabelledJobs, families: Sequence[str]) -> LabelledJobs:
    """``data`` without the real networks of ``families``."""
    first = int(data.calibration_rows[0])
    names = np.array(data.real_families)[data.groups[first:] - data.groups[first:].min()]
    kept = np.concatenate((np.arange(first), first + np.flatnonzero(~np.isin(names, families))))
    return data.take(kept)


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


def _features(chosen: Sequence[Measurement]) -> _Features:
    parts = [
        (
            features_on(row.gpu, [row.job]),
            line_features(row.gpu, [row.job]),
            features_on(row.gpu, [totals_only(row.job)]),
        )
        for row in chosen
    ]
    return _Features(*map(np.concatenate, zip(*parts, strict=True)))


def _add(found: Found, rows: RowSet, testing: Rows, learned: _Learned) -> None:
    """Add the answers for the rows ``testing``, each with the context of its row."""
    chosen = [rows.rows[row] for row in testing.tolist()]
    contexts = np.array([subject_of(row, {}).context_bytes for row in chosen], dtype=np.float64)
    together = _seconds_each(lambda: learned.answers(_features(chosen[:1])))
    seconds = together / len(OURS)
    for name, (expected, bound) in learned.answers(_features(chosen)).items():
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
