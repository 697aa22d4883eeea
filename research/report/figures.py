"""The figures of a section: bins, bytes, intervals, calibration, groups."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job.training_job import CHECKPOINTING, FAMILIES, OPTIMIZERS, PRECISIONS, TrainingJob
from gpumemnet.predict.distribution import PUBLISHED_BINS, BinScheme, bins_of_width
from gpumemnet.units import GIB, MIB
from models.evaluation import COVERAGE, Answers, bin_figures


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Section:
    """One table of the report.

    Attributes:
        slug: name of the section's files, such as ``measured-mlp``.
        title: heading.
        about: one or two sentences on the labels, the GPU and the split.
        is_measured: whether the labels are readings of a GPU, rather than traces.
        jobs: the ``B`` jobs.
        features: their feature vectors, shape ``[B, F]``.
        label_bytes: their labels, shape ``[B]``.
        folds: the fold in which each job was tested, shape ``[B]``.
        answers: candidate → its answers.
        candidate: the key of ``answers`` for pictures of one candidate.
        seconds: candidate → total training time.
        others_mib: name of a published estimator → its published values in MiB, NaN where there is
            none, shape ``[B]`` each.
        names: names of the models of the zoo; otherwise empty.
    """

    slug: str
    title: str
    about: str
    is_measured: bool
    jobs: Sequence[TrainingJob]
    features: NDArray[np.float64]
    label_bytes: NDArray[np.float64]
    folds: NDArray[np.int64]
    answers: Mapping[str, Answers]
    candidate: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    others_mib: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    names: tuple[str, ...] = ()


NORMAL_QUANTILE: Final = 1.959964
"""Of 97.5 %."""

Interval = tuple[float, float]


def share_interval(hits: NDArray[np.bool_], clusters: NDArray[np.int64]) -> Interval:
    """Lower and upper end of the share of ``hits``, shape ``[B]``, whose rows belong to
    ``clusters``, shape ``[B]``.

    NaN without rows.
    """
    if not len(hits):
        return math.nan, math.nan
    return wilson(float(hits.mean()), independent_rows(hits, clusters))


def independent_rows(hits: NDArray[np.bool_], clusters: NDArray[np.int64]) -> float:
    """The effective number of rows: how many independent rows would give the same variance, at most
    ``B``.

    Where all rows agree, or there is one cluster, the variance between clusters is unknown: then
    each counts as one row.
    """
    _, members = np.unique(clusters, return_inverse=True)
    count, share = int(members.max()) + 1, float(hits.mean())
    if count < 2 or share in (0.0, 1.0):
        return float(count)
    residuals = np.bincount(members, weights=hits - share)
    variance = count / (count - 1) * float((residuals**2).sum()) / len(hits) ** 2
    return (
        float(min(max(share * (1 - share) / variance, 1.0), len(hits)))
        if variance > 0
        else float(len(hits))
    )


def wilson(share: float, rows: float) -> Interval:
    """Wilson's score interval of a ``share`` seen in ``rows`` independent rows."""
    square = NORMAL_QUANTILE**2
    middle = (share + square / (2 * rows)) / (1 + square / rows)
    half = (
        NORMAL_QUANTILE
        / (1 + square / rows)
        * math.sqrt(share * (1 - share) / rows + square / (4 * rows**2))
    )
    return max(0.0, middle - half), min(1.0, middle + half)


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
            :func:`share_interval`.
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


INTERVALS: Final = 10


@dataclass(frozen=True, slots=True)
class Reliability:
    """Confidence in the most probable bin of 1 GiB against the share of hits, in ten intervals of
    confidence.

    Attributes:
        jobs: in each interval.
        confidence: mean in each, NaN where it is empty.
        accuracy: share of hits in each, NaN where it is empty.
        expected_calibration_error: mean of their distances, weighted by jobs; NaN without jobs.
    """

    jobs: tuple[int, ...]
    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]
    expected_calibration_error: float


@dataclass(frozen=True, slots=True)
class CoveragePoint:
    """Share of a family's jobs at or below the bound that promises ``nominal``, with its 95 %
    confidence interval."""

    family: str
    nominal: float
    empirical: float
    interval: Interval
    jobs: int


def reliability(section: Section, candidate: str) -> Reliability | None:
    """Reliability of a candidate's probabilities, shape ``[B, n_bins]``, or ``None`` where it has
    none."""
    probabilities = section.answers[candidate].probabilities
    if probabilities is None:
        return None
    rows = judged_rows(section)
    rows = rows[np.isfinite(probabilities[rows]).all(axis=1)]
    label_bins = np.minimum(section.label_bytes[rows] // GIB, probabilities.shape[1] - 1)
    hits = probabilities[rows].argmax(axis=1) == label_bins
    confidence = probabilities[rows].max(axis=1, initial=0.0)
    interval = np.minimum((confidence * INTERVALS).astype(np.int64), INTERVALS - 1)
    jobs = np.bincount(interval, minlength=INTERVALS)
    counts = np.maximum(jobs, 1)
    means = np.bincount(interval, weights=confidence, minlength=INTERVALS) / counts
    shares = np.bincount(interval, weights=hits, minlength=INTERVALS) / counts
    error = float((jobs * np.abs(means - shares)).sum() / len(rows)) if len(rows) else math.nan
    return Reliability(
        tuple(jobs.tolist()), _nan_where_empty(jobs, means), _nan_where_empty(jobs, shares), error
    )


def coverages(section: Section, candidate: str) -> list[CoveragePoint]:
    """Coverage of every bound of a candidate, family by family; of its safe bytes alone where it
    gives no others."""
    rows, clusters = judged_rows(section), architectures(section)
    families = np.array([job.family for job in section.jobs])
    points = []
    for family in FAMILIES:
        for nominal, bounds in sorted(_bounds(section.answers[candidate]).items()):
            selected = rows[(families[rows] == family) & np.isfinite(bounds[rows])]
            if len(selected):
                is_held = section.label_bytes[selected] <= bounds[selected]
                interval = share_interval(is_held, clusters[selected])
                points.append(
                    CoveragePoint(family, nominal, float(is_held.mean()), interval, len(selected))
                )
    return points


def _bounds(answers: Answers) -> dict[float, NDArray[np.float64]]:
    return dict(answers.bounds_bytes) or {COVERAGE: answers.safe_bytes}


def _nan_where_empty(jobs: NDArray[np.int64], values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(np.where(jobs > 0, values, math.nan).tolist())


MIN_ROWS: Final = 20
OCTAVE_WORD: Final = "octave of memory"
_OPTIONS: Final = {
    "family": FAMILIES,
    "optimizer": OPTIMIZERS,
    "precision": PRECISIONS,
    "checkpointing": CHECKPOINTING,
}


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Jobs that share one property; ``rows`` of the section, shape ``[R]``."""

    name: str
    rows: Rows


def groupings(section: Section) -> dict[str, list[Group]]:
    """Property → its groups of at least 20 judged jobs, if there are several."""
    judged = judged_rows(section)
    groups_by_property = {OCTAVE_WORD: octave_groups(section.label_bytes, judged)}
    for option, choices in _OPTIONS.items():
        values = [getattr(section.jobs[row], option) for row in judged.tolist()]
        groups_by_property[option] = _split(judged, values, choices)
    large_groups = {
        name: [group for group in groups_by_property[name] if len(group.rows) >= MIN_ROWS]
        for name in (*_OPTIONS, OCTAVE_WORD)
    }
    return {name: groups for name, groups in large_groups.items() if len(groups) > 1}


def octave_groups(label_bytes: NDArray[np.float64], rows: Rows) -> list[Group]:
    """``rows`` by octaves of their labels, from the lowest up: below 0.5 GiB, 0.5–1, 1–2 and so
    on."""
    octaves = np.maximum(np.floor(np.log2(label_bytes[rows] / GIB)), -2).astype(np.int64)
    groups = _split(rows, octaves.tolist(), range(-2, int(octaves.max(initial=-2)) + 1))
    return [Group(octave_name(int(group.name)), group.rows) for group in groups]


def octave_name(octave: int) -> str:
    """The octave from ``2**octave`` GiB up, for a person; everything below 0.5 GiB is one."""
    return "below 0.5 GiB" if octave < -1 else f"{2.0**octave:g}–{2.0 ** (octave + 1):g} GiB"


def _split(rows: Rows, values: Sequence[Hashable], choices: Sequence[Hashable]) -> list[Group]:
    column = np.array([choices.index(value) for value in values], dtype=np.int64)
    return [Group(str(choices[code]), rows[column == code]) for code in np.unique(column).tolist()]


def label_word(section: Section) -> str:
    """The kind of the labels of ``section``: measured or traced."""
    return "measured" if section.is_measured else "traced"


_TRACE_WORD: Final = "trace"


def estimates(section: Section) -> dict[str, NDArray[np.float64]]:
    """Labels, the section's candidate, candidates that are traces, and what others published;
    bytes, shape ``[B]`` each."""
    traces = [
        name
        for name in section.answers
        if _TRACE_WORD in name.lower() and name != section.candidate
    ]
    return {
        label_word(section): section.label_bytes,
        **{name: section.answers[name].expected_bytes for name in (section.candidate, *traces)},
        **{name: values * MIB for name, values in section.others_mib.items()},
    }
