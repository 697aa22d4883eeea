"""Says whether a job resembles those that a model was trained on, and in words why it does not.

A network's answer is worth nothing far from its training data, and a scheduler has to know.  The support is the box of the
options and of the feature ranges seen in training; whoever asks beyond it gets the reason with the value and the range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from operator import attrgetter, contains, itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpumemnet.features.vector import FEATURE_NAMES, TOTAL_COLUMNS
from gpumemnet.job.job_batch import NUMBER_FIELDS, OPTION_FIELDS, UNSTATED_AS_ZERO, Indices, JobBatch
from gpumemnet.job.layers import describe
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.physics.saved_tensors import ALIASES, alike
from gpumemnet.predict.bundle import BundleCard
from gpumemnet.predict.reasons import Reasons
from gpumemnet.units import format_bytes

RANGE_TOLERANCE: Final = 1.05
"""A value this much beyond the largest (or below the smallest) seen still counts as inside."""

_BATCH_FIELDS: Final = frozenset({*OPTION_FIELDS, *NUMBER_FIELDS})
_KIND: Final = itemgetter(0)
_LISTED: Final = 8
"""More numbers than this are told as their range."""


class Against(NamedTuple):
    """What speaks against a model's answers for ``B`` jobs.

    Attributes:
        reasons: why each job lies outside the support; none for jobs inside.
        has_unseen_option: whether an option or a layer kind is among them.
        counts: how many options, layer kinds and values were not seen; 0 for jobs inside.
    """

    reasons: Sequence[tuple[str, ...]]
    has_unseen_option: Sequence[bool] | NDArray[np.bool_]
    counts: Sequence[int] | Indices

    def take(self, rows: Sequence[int] | Indices) -> Against:
        """The same of the jobs in ``rows``, which rise."""
        if isinstance(self.reasons, Reasons):
            return against_batch(self.reasons.take(np.asarray(rows, dtype=np.int64)))
        return Against(
            [self.reasons[row] for row in rows],
            [self.has_unseen_option[row] for row in rows],
            [self.counts[row] for row in rows],
        )


def against_batch(reasons: Reasons) -> Against:
    """What the reasons against the jobs of a batch say."""
    return Against(reasons, reasons.has_unseen_option, reasons.counts)


class Support:
    """The support of one bundle, as arrays."""

    def __init__(self, card: BundleCard) -> None:
        self._options = card.options
        # The family stands among them so that there are always several: of one alone attrgetter makes no tuple.
        self._options_of = attrgetter("family", *card.options)
        self._seen_options = ({card.family}, *map(frozenset, card.options.values()))
        self._kinds = card.kinds
        self._inside_kinds = card.kinds | ALIASES | alike(card.kinds)
        columns = [FEATURE_NAMES.index(name) for name in card.ranges]
        self._columns = np.array(columns, dtype=np.intp)
        self.is_about_totals = set(card.ranges) <= {column.name for column in TOTAL_COLUMNS}
        """Whether the columns :data:`gpumemnet.features.vector.TOTAL_COLUMNS` are all that it looks at."""
        self.takes_batches = card.options.keys() <= _BATCH_FIELDS
        """Whether it answers batches with :class:`~gpumemnet.predict.reasons.Reasons`."""
        self._low = np.array([low / RANGE_TOLERANCE for low, _ in card.ranges.values()])
        self._high = np.array([high * RANGE_TOLERANCE for _, high in card.ranges.values()])
        self._bounds = list(zip(columns, self._low.tolist(), self._high.tolist(), strict=True))
        self._range_words = [(name, _range(name, low, high)) for name, (low, high) in card.ranges.items()]
        self._seen_words = {field: _listed(seen) for field, seen in card.options.items()}

    def against(self, jobs: Sequence[TrainingJob], features: NDArray[np.float64]) -> Against:
        """What speaks against the model's answers.

        Args:
            jobs: ``B`` jobs; those of a batch have :class:`~gpumemnet.predict.reasons.Reasons`.
            features: their feature vectors, shape ``[B, F]``; where :attr:`is_about_totals`, the first columns are enough.
        """
        values = features.take(self._columns, axis=1)
        beyond = (values < self._low) | (values > self._high)
        if isinstance(jobs, JobBatch) and self.takes_batches:
            return against_batch(self._batch_reasons(jobs, values, beyond))
        found = [self._job_reasons(job) for job in jobs]
        reasons, counts = [words for words, _ in found], [count for _, count in found]
        has_unseen_option = list(map(bool, counts))
        if beyond.any():
            for row in np.flatnonzero(beyond.any(axis=1)).tolist():
                columns = np.flatnonzero(beyond[row]).tolist()
                counts[row] += len(columns)
                reasons[row] += tuple([self._range_reason(column, values[row, column]) for column in columns])
        return Against(reasons, has_unseen_option, counts)

    def spans(self, features: Sequence[float]) -> bool:
        """Whether the sizes of a job with these features are among those seen; its options may lie outside."""
        return not any(features[column] < low or features[column] > high for column, low, high in self._bounds)

    def knows(self, job: TrainingJob) -> bool:
        """Whether nothing speaks against the options and layer kinds of ``job``; its sizes may lie outside."""
        return all(map(contains, self._seen_options, self._options_of(job))) and self._inside_kinds.issuperset(
            map(_KIND, job.layers)
        )

    def _job_reasons(self, job: TrainingJob) -> tuple[tuple[str, ...], int]:
        """What speaks against the options and layer kinds of a job in words, and of how many of them."""
        if self.knows(job):
            return (), 0
        words, kinds = option_reasons(job, self._options), set(map(_KIND, job.layers))
        return words + self._kind_reasons(kinds), len(words) + len(kinds - self._inside_kinds)

    def _batch_reasons(self, jobs: JobBatch, values: NDArray[np.float64], beyond: NDArray[np.bool_]) -> Reasons:
        """The same for every job of a batch: looked at once for each set of options, kind of layer and number."""
        unseen_options = [
            sum(value not in self._options.get(name, (value,)) for name, value in zip(OPTION_FIELDS, options, strict=True))
            for options in jobs.option_sets
        ]
        option_counts = np.array(unseen_options, dtype=np.int64)[jobs.option_codes]
        for name, seen in self._options.items():
            if name in NUMBER_FIELDS:
                option_counts += ~np.isin(jobs.column(name), [0 if value is None else value for value in seen])
        counts = option_counts + beyond.sum(axis=1) if beyond.any() else option_counts.copy()
        names = jobs.kind_names
        is_unseen_name = np.array([name not in self._inside_kinds for name in names])
        is_unseen_kind = is_unseen_name[jobs.layer_kinds]
        unseen: dict[int, set[str]] = {}
        if is_unseen_kind.any():
            owners = np.repeat(np.arange(len(jobs)), jobs.layer_counts)[is_unseen_kind]
            for row, kind in zip(owners.tolist(), jobs.layer_kinds[is_unseen_kind].tolist(), strict=True):
                unseen.setdefault(row, set()).add(names[kind])
            counts[list(unseen)] += list(map(len, unseen.values()))
        return Reasons(
            jobs=jobs,
            option_counts=option_counts,
            strange_kinds={row: frozenset(kinds) for row, kinds in unseen.items()},
            values=values,
            is_beyond=beyond,
            option_words=self._option_words,
            kind_words=self._kind_reasons,
            range_words=self._range_reason,
            counts=counts,
        )

    def _option_words(self, options: tuple[Any, ...], jobs: JobBatch, row: int) -> tuple[str, ...]:
        """A sentence for each option of a job of a batch that is not among those seen."""
        values = dict(zip(OPTION_FIELDS, options, strict=True))
        words = []
        for field, seen in self._options.items():
            if field in values:
                value = values[field]
            else:
                number = int(jobs.column(field)[row])
                value = None if not number and field in UNSTATED_AS_ZERO else number
            if value not in seen:
                words.append(f"{field} is {describe(value)}; the model was trained on {self._seen_words[field]}")
        return tuple(words)

    def _kind_reasons(self, kinds: Set[str]) -> tuple[str, ...]:
        unseen = kinds - self._inside_kinds
        if not unseen:
            return ()
        return (f"layers of kind {', '.join(sorted(unseen))[:200]}; the model was trained on {', '.join(sorted(self._kinds))}",)

    def _range_reason(self, column: int, value: float) -> str:
        name, seen = self._range_words[column]
        return f"{name} is {_amount(name, value)}; the model was trained on {seen}"


def option_reasons(
    job: TrainingJob, options: Mapping[str, tuple[str | bool | int | None, ...]], seen_words: str = "the model was trained on"
) -> tuple[str, ...]:
    """A sentence for each option of ``job`` that is not among those seen."""
    return tuple(
        f"{field} is {describe(getattr(job, field))}; {seen_words} {_listed(seen)}"
        for field, seen in options.items()
        if getattr(job, field) not in seen
    )


def _listed(values: Sequence[str | bool | int | None]) -> str:
    described = sorted(describe(value) for value in values)
    if len(described) > _LISTED and all(type(value) is int for value in values):
        return f"{min(values)} to {max(values)}"  # type: ignore[type-var]
    return " or ".join(described)


def _range(column: str, low: float, high: float) -> str:
    return _amount(column, low) if low == high else f"{_amount(column, low)} to {_amount(column, high)}"


def _amount(column: str, value: float) -> str:
    if column.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"
