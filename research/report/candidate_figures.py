"""The figures of one candidate on a section or on some of its rows: bins, expected bytes and safe
bytes.

A job without an answer (NaN) counts as a wrong bin and has no error in bytes; the number of such
jobs is a figure of its own. Rows without a label (jobs that ran out of memory) are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.predict.distribution import PUBLISHED_BINS, BinScheme, bins_of_width
from gpumemnet.units import GIB, MIB
from models.answers import Answers
from models.evaluation.metrics import bin_figures
from research.report.section import Section

from .interval import Interval, share_interval

Array = NDArray[np.float64]
Rows = NDArray[np.int64]

GIB_BINS: Final[BinScheme] = bins_of_width(GIB)
GIB_BINS_TOP_BYTES: Final = 40 * GIB
"""Largest job for which the targets for bins of 1 GiB are set."""
SCHEMES: Final[tuple[BinScheme, ...]] = (GIB_BINS, *PUBLISHED_BINS.values())
NO_ANSWER: Final = -1
CLOSE: Final = 0.10
UNDER_PREDICTED: Final = 0.01


@dataclass(frozen=True, slots=True)
class SchemeFigures:
    """Figures of predicted bins: shares of ``jobs``, NaN where there is none.

    Attributes:
        jobs: number of judged jobs.
        accuracy: share in the right bin.
        accuracy_interval: its 95 % confidence interval; see
            :mod:`research.report.interval`.
        macro_f1: F1 averaged over the bins that occur.
        too_low: share whose predicted bin lies below the right one.
    """

    jobs: int
    accuracy: float
    accuracy_interval: Interval
    macro_f1: float
    too_low: float


@dataclass(frozen=True, slots=True)
class CandidateFigures:
    """All figures of one candidate; NaN where there are no rows.

    Attributes:
        jobs: number of judged jobs, which have a label.
        bins: bin scheme's name → its figures; those of 1 GiB cover jobs up to 40 GiB.
        without_expected: share that the candidate gives no expected bytes for.
        median_error_mib: absolute error of the expected bytes.
        median_error, p95_error: absolute error of the expected bytes over the label.
        close: share within 10 % of the label.
        under_predicted: share expected below the label by more than 1 %.
        without_safe: share that the candidate gives no safe bytes for.
        above_safe: share above their safe bytes, of those that have any.
        above_safe_interval: its 95 % confidence interval.
        over_allocated: median of safe over label, minus one, over the same jobs.
    """

    jobs: int
    bins: Mapping[str, SchemeFigures]
    without_expected: float
    median_error_mib: float
    median_error: float
    p95_error: float
    close: float
    under_predicted: float
    without_safe: float
    above_safe: float
    above_safe_interval: Interval
    over_allocated: float


def judged_rows(section: Section) -> Rows:
    """The rows that have a label, shape ``[R]``."""
    return np.flatnonzero(np.isfinite(section.label_bytes))


def architectures(section: Section) -> NDArray[np.int64]:
    """A code of each job's architecture, shape ``[B]``; jobs alike in family, parameters and number
    of layers share one."""
    keys = [(job.family, job.total_parameters or 0, len(job.layers)) for job in section.jobs]
    codes = {key: code for code, key in enumerate(dict.fromkeys(keys))}
    return np.array([codes[key] for key in keys], dtype=np.int64)


def predicted_bins(answers: Answers, scheme: BinScheme) -> NDArray[np.int64]:
    """Bins of ``scheme``: the candidate's own, or those of its expected bytes, and −1 without an
    answer; shape ``[B]``."""
    if scheme.name in answers.bins:
        return answers.bins[scheme.name]
    known = np.isfinite(answers.expected_bytes)
    return np.where(known, scheme.index(np.where(known, answers.expected_bytes, 0.0)), NO_ANSWER)


def candidate_figures(
    section: Section, candidate: str, rows: Rows | None = None
) -> CandidateFigures:
    """Figures of ``candidate`` over all judged rows of ``section``, or over those of ``rows``,
    shape ``[R]``, that are judged."""
    rows = judged_rows(section) if rows is None else np.intersect1d(rows, judged_rows(section))
    answers, labels, clusters = (
        section.answers[candidate],
        section.label_bytes[rows],
        architectures(section)[rows],
    )
    expected, safe = answers.expected_bytes[rows], answers.safe_bytes[rows]
    answered, bounded = np.isfinite(expected), np.isfinite(safe)
    errors, measured = expected[answered] - labels[answered], labels[answered]
    relative = np.abs(errors) / measured
    missed = labels[bounded] > safe[bounded]
    return CandidateFigures(
        jobs=len(rows),
        bins={
            scheme.name: _scheme_figures(section, answers, scheme, rows, clusters)
            for scheme in SCHEMES
        },
        without_expected=_mean(~answered),
        median_error_mib=_quantile(np.abs(errors) / MIB, 0.5),
        median_error=_quantile(relative, 0.5),
        p95_error=_quantile(relative, 0.95),
        close=_mean(relative <= CLOSE),
        under_predicted=_mean(errors < -UNDER_PREDICTED * measured),
        without_safe=_mean(~bounded),
        above_safe=_mean(missed),
        above_safe_interval=share_interval(missed, clusters[bounded]),
        over_allocated=_quantile(safe[bounded] / labels[bounded] - 1.0, 0.5),
    )


def _scheme_figures(
    section: Section, answers: Answers, scheme: BinScheme, rows: Rows, clusters: NDArray[np.int64]
) -> SchemeFigures:
    labels, predicted = section.label_bytes[rows], predicted_bins(answers, scheme)[rows]
    if scheme is GIB_BINS:
        within = labels <= GIB_BINS_TOP_BYTES
        labels, predicted, clusters = labels[within], predicted[within], clusters[within]
    if not len(labels):
        return SchemeFigures(0, math.nan, (math.nan, math.nan), math.nan, math.nan)
    figures, right = bin_figures(labels, predicted, scheme), scheme.index(labels)
    return SchemeFigures(
        jobs=len(labels),
        accuracy=figures.accuracy,
        accuracy_interval=share_interval(predicted == right, clusters),
        macro_f1=figures.macro_f1,
        too_low=_mean((predicted < right) & (predicted != NO_ANSWER)),
    )


def _mean(values: NDArray[np.bool_]) -> float:
    return float(values.mean()) if len(values) else math.nan


def _quantile(values: Array, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else math.nan
