"""Says whether a job resembles those that a model was trained on, and in words why it does not.

A network's answer is worth nothing far from its training data, and a scheduler has to know.  The support is the box of the
options and of the feature ranges seen in training; whoever asks beyond it gets the reason with the value and the range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, contains, itemgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.bundle import BundleCard
from gpumemnet.features import FEATURE_NAMES
from gpumemnet.job import TrainingJob
from gpumemnet.job_batch import NUMBER_FIELDS, OPTION_FIELDS, JobBatch
from gpumemnet.layers import describe
from gpumemnet.saved_tensors import ALIASES
from gpumemnet.units import format_bytes

RANGE_TOLERANCE: Final = 1.05
"""A value this much beyond the largest (or below the smallest) seen still counts as inside."""

_KIND: Final = itemgetter(0)
_LISTED: Final = 8
"""More numbers than this are told as their range."""


class Support:
    """The support of one bundle, as arrays."""

    def __init__(self, card: BundleCard) -> None:
        self._options = card.options
        # The family stands among them so that there are always several: of one alone attrgetter makes no tuple.
        self._options_of = attrgetter("family", *card.options)
        self._seen_options = ({card.family}, *map(frozenset, card.options.values()))
        self._kinds = card.kinds
        self._inside_kinds = card.kinds | ALIASES
        self._ranges = card.ranges
        columns = [FEATURE_NAMES.index(name) for name in card.ranges]
        self._columns = np.array(columns, dtype=np.intp)
        self._low = np.array([low / RANGE_TOLERANCE for low, _ in card.ranges.values()])
        self._high = np.array([high * RANGE_TOLERANCE for _, high in card.ranges.values()])

    def reasons(self, jobs: Sequence[TrainingJob], features: NDArray[np.float64]) -> tuple[list[tuple[str, ...]], list[bool]]:
        """For each job the reasons why it lies outside (none for jobs inside), and whether an option or a kind is among them.

        Args:
            jobs: ``B`` jobs.
            features: their feature vectors, shape ``[B, F]``.
        """
        values = features.take(self._columns, axis=1)
        beyond = (values < self._low) | (values > self._high)
        reasons = self._batch_reasons(jobs) if isinstance(jobs, JobBatch) else [self._job_reasons(job) for job in jobs]
        has_unseen_option = list(map(bool, reasons))
        if beyond.any():
            for row in np.flatnonzero(beyond.any(axis=1)):
                reasons[row] += self._range_reasons(values[row], beyond[row])
        return reasons, has_unseen_option

    def _job_reasons(self, job: TrainingJob) -> tuple[str, ...]:
        has_known_options = all(map(contains, self._seen_options, self._options_of(job)))
        if has_known_options and self._inside_kinds.issuperset(map(_KIND, job.layers)):
            return ()
        return option_reasons(job, self._options) + self._kind_reasons({layer.kind for layer in job.layers})

    def _batch_reasons(self, jobs: JobBatch) -> list[tuple[str, ...]]:
        """The same for every job of a batch: looked at once for each set of options, kind of layer and number."""
        if not self._options.keys() <= {*OPTION_FIELDS, *NUMBER_FIELDS}:
            return [self._job_reasons(job) for job in jobs]
        is_unseen_set = [
            any(value not in self._options.get(name, (value,)) for name, value in zip(OPTION_FIELDS, options, strict=True))
            for options in jobs.option_sets
        ]
        is_outside = np.array(is_unseen_set, dtype=np.bool_)[jobs.option_codes]
        for name, seen in self._options.items():
            if name in NUMBER_FIELDS:
                is_outside |= ~np.isin(jobs.column(name), [0 if value is None else value for value in seen])
        reasons: list[tuple[str, ...]] = [()] * len(jobs)
        rows = np.flatnonzero(is_outside).tolist()
        if rows:
            numbers = [jobs.column(name).tolist() for name in self._options if name in NUMBER_FIELDS]
            codes = jobs.option_codes.tolist()
            known: dict[tuple[float, ...], tuple[str, ...]] = {}
            for row in rows:
                key = (codes[row], *(column[row] for column in numbers))
                if key not in known:
                    known[key] = option_reasons(jobs[row], self._options)
                reasons[row] = known[key]
        names = jobs.kind_names
        is_unseen_kind = np.array([name not in self._inside_kinds for name in names])[jobs.layer_kinds]
        if is_unseen_kind.any():
            owners = np.repeat(np.arange(len(jobs)), jobs.layer_counts)[is_unseen_kind]
            unseen: dict[int, set[str]] = {}
            for row, kind in zip(owners.tolist(), jobs.layer_kinds[is_unseen_kind].tolist(), strict=True):
                unseen.setdefault(row, set()).add(names[kind])
            for row, kinds in unseen.items():
                reasons[row] += self._kind_reasons(kinds)
        return reasons

    def _kind_reasons(self, kinds: set[str]) -> tuple[str, ...]:
        unseen = kinds - self._inside_kinds
        if not unseen:
            return ()
        return (f"layers of kind {', '.join(sorted(unseen))[:200]}; the model was trained on {', '.join(sorted(self._kinds))}",)

    def _range_reasons(self, values: NDArray[np.float64], beyond: NDArray[np.bool_]) -> tuple[str, ...]:
        names = tuple(self._ranges)
        return tuple(
            f"{names[index]} is {_amount(names[index], values[index])}; the model was trained on "
            f"{_range(names[index], *self._ranges[names[index]])}"
            for index in np.flatnonzero(beyond)
        )


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
