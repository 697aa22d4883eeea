"""Evaluates both encoders beside the line alone and boosted trees, on jobs that none of them was
trained on.

The table has two parts.  In the first, folds hold out architecture families: all ResNets together,
all plain vision transformers together.  In the second, every source is held out in turn: what is
learned of a source can be how it ran its jobs, and not what jobs take.  Every estimator is trained
anew for each fold, line and bounds included.

An under-predicted job runs out of memory, an over-predicted one wastes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor

from gpumemnet.job.job_table import Array
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.predict.conformal import COVERAGES, conformal_quantiles
from gpumemnet.predict.distribution import PUBLISHED_BINS
from gpumemnet.predict.prediction import DEFAULT_COVERAGE
from gpumemnet.predict.predictor import SLACK_BYTES

from .networks.mlp import Inputs
from .training.classifier import (
    TrainingPlan,
    batch_of,
    fitted_inputs,
    float_tensor,
    plan_of,
    sequences_of,
    train,
)
from .training.data import LabelledJobs, fold_numbers, folds, source_splits

FOLDS: Final = 5
LINE: Final = "line"
MLP: Final = "MLP-based"
TOTALS: Final = "MLP-based, totals only"
TRANSFORMER: Final = "transformer-based"
TREES: Final = "boosted trees"
TREES_GROWN: Final = 150
FEWEST_ROWS: Final = 20
"""Sources with fewer rows of a family have no row in the table."""


@dataclass(frozen=True)
class Figures:
    """Figures of one estimator for the rows of one source and family.

    Attributes:
        split: ``family`` or ``source``: what was held out.
        source, family, estimator: what the row is about.
        rows: number of jobs.
        median_error, p90_error: of the whole reading, CUDA context included, as shares.
        accuracy_1000, accuracy_2000, accuracy_8000: of bins of so many MiB.
        covered: share of the jobs below the 99 % limit.
        limit_over_request: in the median.
    """

    split: str
    source: str
    family: str
    estimator: str
    rows: int
    median_error: float
    p90_error: float
    accuracy_1000: float
    accuracy_2000: float
    accuracy_8000: float
    covered: float
    limit_over_request: float


def evaluate(
    data: LabelledJobs,
    encoders: Sequence[str],
    *,
    by_source: bool = True,
    progress: Callable[[str, float], None] = lambda step, share: None,
) -> list[Figures]:
    """Judge all estimators on ``data``.

    Args:
        data: jobs with labels.
        encoders: the encoders to judge.
        by_source: whether each source is held out, too.
        progress: called with the current step and the share that is finished.

    Raises:
        DatasetError: when there are too few architectures to split.
    """
    plans = [plan_of(encoder) for encoder in encoders]
    splits = [("family", pair) for pair in folds(data.groups, FOLDS, seed=0)]
    if by_source:
        splits += [("source", pair) for pair in source_splits(data)]
    found: dict[tuple[str, str], Array] = {}
    for number, (split, (training, test)) in enumerate(splits):
        progress(f"split {number + 1} of {len(splits)}", number / len(splits))
        test = test[data.is_measured[test]]
        for estimator, answers in _answers(data.take(training), data.take(test), plans):
            everywhere = np.full((2, len(data)), np.nan)
            found.setdefault((split, estimator), everywhere)[:, test] = answers
    return [
        figures
        for (split, estimator), answers in found.items()
        for figures in _figures(data, split, estimator, *answers)
    ]


def _answers(
    training: LabelledJobs, test: LabelledJobs, plans: Sequence[TrainingPlan]
) -> Iterator[tuple[str, Array]]:
    """Estimator, and the expectation and the 99 % limit of ``B`` jobs above the CUDA context, shape
    ``[2, B]``."""
    inputs = fitted_inputs(training, training.without_layers())
    yield from _line_and_trees(inputs, training, test)
    for plan in plans:
        trained = train(training, plan)
        if plan.encoder == "mlp":
            yield MLP, network_answers(trained.network, test, has_sequences=False)
            yield TOTALS, network_answers(trained.network, test.without_layers(), False)
        elif test.jobs.layer_counts.all():
            yield TRANSFORMER, network_answers(trained.network, test, has_sequences=True)


def network_answers(network: torch.nn.Module, jobs: LabelledJobs, has_sequences: bool) -> Array:
    """The answers of a trained network, as its graph gives them."""
    level, parts = 2 + COVERAGES.index(DEFAULT_COVERAGE), []
    for at in range(0, len(jobs), 256):
        own = jobs.take(np.arange(at, min(at + 256, len(jobs))))
        given: tuple[torch.Tensor, ...] = (float_tensor(own.features),)
        if has_sequences:
            given += batch_of(sequences_of(own))
        with torch.no_grad():
            amounts = network(*given)[-1].double().exp()
        parts.append(amounts[:, [1, level]].numpy())
    found: Array = np.maximum.accumulate(np.concatenate(parts).T)
    return found


def _line_and_trees(
    inputs: Inputs, training: LabelledJobs, test: LabelledJobs
) -> Iterator[tuple[str, Array]]:
    """The line with its groups' shifts, and gradient-boosted trees on what it leaves; both with
    one relative bound over all rows, from the training rows' errors."""
    sides = []
    for jobs in (training, test):
        with torch.no_grad():
            own, centre, _, _ = inputs(float_tensor(jobs.features))
        sides.append((own.numpy(), centre[:, 0].double().numpy()))
    (known, centre), (asked, asked_centre) = sides
    errors = np.log(training.label_bytes + SLACK_BYTES) - centre
    rows = np.flatnonzero(training.is_measured)

    def answers(correction: Array, left: Array) -> Array:
        [bound] = conformal_quantiles(left[training.calibrates[rows]], (DEFAULT_COVERAGE,))
        moved = asked_centre + correction
        highest = moved + (float(left.max()) if bound is None else bound)
        expected = np.maximum(np.exp(moved) - SLACK_BYTES, 1.0)
        return np.stack((expected, np.exp(highest) - SLACK_BYTES))

    yield LINE, answers(np.zeros(len(test)), errors[rows])

    def trees(own: NDArray[np.int64]) -> HistGradientBoostingRegressor:
        model = HistGradientBoostingRegressor(
            loss="absolute_error", max_iter=TREES_GROWN, max_leaf_nodes=8, random_state=0
        )
        return model.fit(known[own], errors[own], sample_weight=training.weights[own])

    left = np.empty(len(rows))
    halves = fold_numbers(training.groups[rows], 2, 0)
    for half in (0, 1):
        own = halves == half
        left[own] = errors[rows[own]] - trees(rows[~own]).predict(known[rows[own]])
    yield TREES, answers(trees(rows).predict(asked), left)


def _figures(
    data: LabelledJobs, split: str, estimator: str, request: Array, limit: Array
) -> Iterator[Figures]:
    families = data.jobs.option_column("family")
    for source in dict.fromkeys(data.sources.tolist()):
        for family in FAMILIES:
            own = (data.sources == source) & (families == family) & ~np.isnan(request)
            if own.sum() < FEWEST_ROWS:
                continue
            context = data.context_bytes[own]
            label, answer, highest = (
                amount[own] + context for amount in (data.label_bytes, request, limit)
            )
            errors = np.abs(answer / label - 1.0)
            numbers = [
                *np.quantile(errors, (0.5, 0.9)).tolist(),
                *(
                    float((bins.index(answer) == bins.index(label)).mean())
                    for bins in PUBLISHED_BINS.values()
                ),
                float((label <= highest).mean()),
                float(np.median(highest / answer)),
            ]
            yield Figures(split, source, family, estimator, int(own.sum()), *numbers)


_HEADINGS: Final = (
    *("held out", "source", "family", "rows", "estimator", "median error", "90th percentile"),
    *("1,000 MiB", "2,000 MiB", "8,000 MiB", "below the 99 % limit", "limit over request"),
)


def markdown_table(figures: Sequence[Figures]) -> str:
    """The table of all estimators; source by source, so that estimators stand below each other."""
    rows = []
    for one in sorted(figures, key=lambda one: (one.split, one.source, one.family)):
        cells = (
            *(one.split, one.source, one.family, f"{one.rows:,}", one.estimator),
            *(f"{100 * share:.2f} %" for share in (one.median_error, one.p90_error)),
            *(
                f"{share:.3f}"
                for share in (one.accuracy_1000, one.accuracy_2000, one.accuracy_8000)
            ),
            *(f"{100 * one.covered:.1f} %", f"{one.limit_over_request:.2f}"),
        )
        rows.append(f"| {' | '.join(cells)} |")
    heading = f"| {' | '.join(_HEADINGS)} |\n|{'---|' * len(_HEADINGS)}"
    return "\n".join((heading, *rows)) + "\n"
