"""Checks whether a job resembles a model's training data, and explains why when it does not.

A network's predictions far from its training data are unreliable, and a scheduler has to know.  The
support consists of the options, layer kinds and feature ranges seen in training.  Each reason names
the value of the job and the values seen.

Jobs whose layers' memory is known, by the rules of :mod:`gpumemnet.physics.saved_tensors`, under
options for which the closed form was tested on real networks get the closed form and its own
calibrated bound: outside the support, and for models that do no better than the closed form inside
it, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job.job_table import Array, Indices, JobTable, OptionSet
from gpumemnet.job.layers import KINDS, OTHER_CODE, describe
from gpumemnet.job.training_job import OPTION_FIELDS, UNSTATED_AS_ZERO
from gpumemnet.physics.saved_tensors import ALIASES, alike
from gpumemnet.predict.bundle_card import BundleCard
from gpumemnet.predict.features import FEATURE_NAMES
from gpumemnet.units import format_bytes

Flags = NDArray[np.bool_]
OptionValue = str | bool | int | None

RANGE_TOLERANCE: Final = 1.05
"""Factor by which a value may exceed the largest value seen, or fall below the smallest, and still
be inside."""

_LISTED: Final = 8
"""Longer lists of numbers are written as a range."""
_KNOWN_TABLES: Final = 256
_NAMED: Final = re.compile(r"([a-z][a-z0-9_]*) is ")
_OF_KINDS: Final = "layers of kind"
_GROW_WITH_BATCH: Final = frozenset({"batch_size", "input_bytes", "activation_bytes"})
"""Feature columns that grow with the batch size of a job."""
_CHECKPOINTED, _IS_TRANSFORMER = (
    FEATURE_NAMES.index("is_checkpointed"),
    FEATURE_NAMES.index("is_transformer"),
)


class Support:
    """The support of one bundle, as arrays."""

    def __init__(self, card: BundleCard) -> None:
        self.card = card
        self._inside_kinds = card.kinds | ALIASES | alike(card.kinds)
        self._is_unseen_kind = np.array([kind not in self._inside_kinds for kind in KINDS])
        self._ranges = _Ranges(card.ranges)
        self._grows = np.array([name in _GROW_WITH_BATCH for name in card.ranges], dtype=np.bool_)
        self.range_words = [
            (name, _range(name, low, high)) for name, (low, high) in card.ranges.items()
        ]
        self._numbers = _Numbers(card.options)
        self._closed_form = card.closed_form
        if card.closed_form is not None:
            self._tested_ranges = _Ranges(card.closed_form.ranges)
            self._tested_numbers = _Numbers(card.closed_form.options)
        self._unseen_options = lru_cache(maxsize=_KNOWN_TABLES)(self._count_unseen_options)
        self._tested_options = lru_cache(maxsize=_KNOWN_TABLES)(self._are_tested_options)

    def check(self, table: JobTable, features: Array) -> Unseen:
        """Finds the options, layer kinds and feature values of ``B`` jobs that were not seen in
        training.

        Args:
            table: the jobs.
            features: their feature vectors, shape ``[B, F]``.
        """
        option_counts = self._unseen_options(table.option_sets)[table.option_codes]
        for is_other in self._numbers.others(table):
            option_counts += is_other
        values, beyond = self._ranges.beyond(features)
        counts = option_counts + beyond.sum(axis=1) if beyond.any() else option_counts.copy()
        kinds: dict[int, frozenset[str]] = {}
        is_unseen_kind = self._is_unseen_kind
        if table.unknown_kinds:
            is_unknown = [kind not in self._inside_kinds for kind in table.unknown_kinds]
            is_unseen_kind = np.concatenate((is_unseen_kind, is_unknown))
        is_unseen = is_unseen_kind[table.layer_kinds]
        if is_unseen.any():
            names, found = table.kind_names, dict[int, set[str]]()
            owners = table.layer_owners[is_unseen]
            for row, kind in zip(
                owners.tolist(), table.layer_kinds[is_unseen].tolist(), strict=True
            ):
                found.setdefault(row, set()).add(names[kind])
            kinds = {row: frozenset(theirs) for row, theirs in found.items()}
            counts[list(kinds)] += list(map(len, kinds.values()))
        is_inside: Flags = counts == 0
        is_near = is_inside if is_inside.all() else counts == (beyond & self._grows).sum(axis=1)
        is_by = self._is_by_closed_form(table, features, counts, is_near)
        if self._closed_form is not None and self._closed_form.within_support:
            is_inside |= is_by & is_near
        return Unseen(self, table, option_counts, kinds, values, beyond, counts, is_inside, is_by)

    def _is_by_closed_form(
        self, table: JobTable, features: Array, counts: Indices, is_near: Flags
    ) -> Flags:
        """Whether the closed form answers for each job: where it was tested on real networks, shape
        ``[B]``.

        Inside the support it does so only if the card says so, and not for recomputed blocks of
        transformers, for which the model has narrower bounds.

        Args:
            table: the jobs.
            features: their feature vectors, shape ``[B, F]``.
            counts: number of unseen options, kinds and values of each job, shape ``[B]``.
            is_near: whether these are values that grow with the batch size, if anything, shape
                ``[B]``.
        """
        tested = self._closed_form
        if tested is None:
            return np.zeros(len(table), dtype=np.bool_)
        is_by: Flags = counts > 0 if tested.beyond_support else np.zeros(len(table), dtype=np.bool_)
        if tested.within_support:
            is_by |= is_near & (
                (features[:, _CHECKPOINTED] == 0) | (features[:, _IS_TRANSFORMER] == 0)
            )
        is_by &= table.layer_counts > 0
        if not is_by.any():
            return is_by
        is_by &= self._tested_options(table.option_sets)[table.option_codes]
        for is_other in self._tested_numbers.others(table):
            is_by &= ~is_other
        is_by &= ~self._tested_ranges.beyond(features)[1].any(axis=1)
        if not is_by.any():
            return is_by
        owners, amounts = table.layer_owners, table.layer_activations
        if table.unknown_kinds:
            is_by[owners[table.layer_kinds >= len(KINDS)]] = False
        every = np.bincount(owners, amounts, minlength=len(table))
        other = np.bincount(
            owners, amounts * (table.layer_kinds == OTHER_CODE), minlength=len(table)
        )
        return is_by & (other <= tested.other_share * every)

    def _are_tested_options(self, option_sets: tuple[OptionSet, ...]) -> Flags:
        """Whether the closed form was tested with the options of each set, shape ``[S]``."""
        assert self._closed_form is not None
        tested = self._closed_form.options
        are_tested = [
            all(
                value in tested.get(name, (value,))
                for name, value in zip(OPTION_FIELDS, options, strict=True)
            )
            for options in option_sets
        ]
        return np.array(are_tested, dtype=np.bool_)

    def _count_unseen_options(self, option_sets: tuple[OptionSet, ...]) -> Indices:
        """Number of options of each set that were not seen in training, shape ``[S]``."""
        seen = self.card.options
        counts = [
            sum(
                value not in seen.get(name, (value,))
                for name, value in zip(OPTION_FIELDS, options, strict=True)
            )
            for options in option_sets
        ]
        return np.array(counts, dtype=np.int64)


class _Numbers:
    """The numeric options of a card: the values seen of each."""

    def __init__(self, options: Mapping[str, tuple[OptionValue, ...]]) -> None:
        self._seen = {
            name: np.array(
                [
                    *sorted(
                        {
                            0 if value is None else value
                            for value in seen
                            if not isinstance(value, str)
                        }
                    ),
                    np.inf,
                ]
            )
            for name, seen in options.items()
            if name not in OPTION_FIELDS
        }

    def others(self, table: JobTable) -> Iterator[Flags]:
        """For each option, which jobs have a value that was not seen, shape ``[B]``."""
        for name, seen in self._seen.items():
            numbers = table.column(name)
            yield seen[seen.searchsorted(numbers)] != numbers


class _Ranges:
    """The ranges of a card: the smallest and the largest value seen of some features."""

    def __init__(self, ranges: Mapping[str, tuple[float, float]]) -> None:
        self._columns = np.array([FEATURE_NAMES.index(name) for name in ranges], dtype=np.intp)
        self._low = np.array([low / RANGE_TOLERANCE for low, _ in ranges.values()])
        self._high = np.array([high * RANGE_TOLERANCE for _, high in ranges.values()])

    def beyond(self, features: Array) -> tuple[Array, Flags]:
        """The values of these features, and which lie outside their range; shape ``[B, R]``."""
        values = features.take(self._columns, axis=1)
        return values, (values < self._low) | (values > self._high)


@dataclass(frozen=True, slots=True, eq=False)
class Unseen:
    """Properties of ``B`` jobs that a model has not seen in training; counted for all jobs, worded
    only for requested rows.

    Attributes:
        support: the model's support.
        table: the jobs.
        option_counts: number of unseen options of each job, shape ``[B]``.
        kinds: row → its unseen layer kinds; rows without any are left out.
        values: the features that have a range, shape ``[B, R]``.
        is_beyond: which of these lie outside their range, shape ``[B, R]``.
        counts: number of unseen options, kinds and values of each job, shape ``[B]``; 0 inside the
            support.
        is_inside: whether no model after this one is asked, shape ``[B]``.  Where the closed form
            answers inside the support, that does not depend on the batch size, so that no answer
            changes its model as the batch grows.
        is_by_closed_form: whether the closed form, calibrated on real networks, answers for the
            job, shape ``[B]``.
    """

    support: Support
    table: JobTable
    option_counts: Indices
    kinds: Mapping[int, frozenset[str]]
    values: Array
    is_beyond: Flags
    counts: Indices
    is_inside: Flags
    is_by_closed_form: Flags

    def reasons(self, row: int) -> tuple[str, ...]:
        """Why the job in ``row`` lies outside the support, one sentence each; empty inside the
        support."""
        card, trained = self.support.card, "the model was trained on"
        reasons: tuple[str, ...] = ()
        if self.option_counts[row]:
            reasons += option_reasons(self.table, row, card.options, trained)
        if row in self.kinds:
            unseen, known = (", ".join(sorted(kinds)) for kinds in (self.kinds[row], card.kinds))
            reasons += (f"{_OF_KINDS} {unseen[:200]}; {trained} {known}",)
        for column in self.is_beyond[row].nonzero()[0].tolist():
            name, seen = self.support.range_words[column]
            value = _amount(name, float(self.values[row, column]))
            reasons += (f"{name} is {value}; {trained} {seen}",)
        return reasons

    @property
    def has_unseen_option(self) -> Flags:
        """Whether each job has an unseen option or layer kind, shape ``[B]``."""
        has: Flags = self.option_counts > 0
        has[list(self.kinds)] = True
        return has

    def take(self, rows: Indices) -> Unseen:
        """The same properties of the jobs in ``rows``."""
        kinds = (
            {at: self.kinds[row] for at, row in enumerate(rows.tolist()) if row in self.kinds}
            if self.kinds
            else {}
        )
        return Unseen(
            self.support,
            self.table.take(rows),
            self.option_counts[rows],
            kinds,
            self.values[rows],
            self.is_beyond[rows],
            self.counts[rows],
            self.is_inside[rows],
            self.is_by_closed_form[rows],
        )


def option_reasons(
    table: JobTable, row: int, options: Mapping[str, tuple[OptionValue, ...]], seen_words: str
) -> tuple[str, ...]:
    """One sentence for each option of the job in ``row`` whose value is not listed in
    ``options``."""
    stated = dict(zip(OPTION_FIELDS, table.option_sets[table.option_codes[row]], strict=True))
    reasons = []
    for name, seen in options.items():
        value = stated[name] if name in stated else int(table.column(name)[row])
        if name in UNSTATED_AS_ZERO and not value:
            value = None
        if value not in seen:
            reasons.append(f"{name} is {describe(value)}; {seen_words} {_listed(seen)}")
    return tuple(reasons)


def reason_code(sentence: str) -> str:
    """What a reason is about, as a short name for counting: an option or feature of the job,
    ``layer_kind`` or ``no_number``."""
    found = _NAMED.match(sentence)
    return found[1] if found else "layer_kind" if sentence.startswith(_OF_KINDS) else "no_number"


def _listed(values: Sequence[str | bool | int | None]) -> str:
    described = sorted(describe(value) for value in values)
    if len(described) > _LISTED and all(type(value) is int for value in values):
        return f"{min(values)} to {max(values)}"  # type: ignore[type-var]
    return " or ".join(described)


def _range(column: str, low: float, high: float) -> str:
    return (
        _amount(column, low)
        if low == high
        else f"{_amount(column, low)} to {_amount(column, high)}"
    )


def _amount(column: str, value: float) -> str:
    if column.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"
