"""Checks whether a job resembles a model's training data, and explains why when it does not.

A scheduler has to know what lies outside the training data.  The support consists of the options,
layer kinds and feature ranges seen in training.  Outside it the bound widens by what the line missed
when whole sources were left out.  There is no bound where even that says nothing: where the memory of
the job's layers is unknown, or a value lies more than ten times beyond its range.  Each reason names
the value of the job and the values seen.

No range is of a column that grows with the batch size, so the support is the same at every batch
size of a job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from gpumemnet.job.job_table import Array, Flags, Indices, JobTable, OptionSet
from gpumemnet.job.layers import KINDS, OTHER_CODE, describe
from gpumemnet.job.training_job import OPTION_FIELDS, UNSTATED_AS_ZERO
from gpumemnet.physics.saved_tensors import ALIASES, alike
from gpumemnet.predict.bundle_card import BundleCard, OptionValue
from gpumemnet.predict.features import FEATURE_NAMES
from gpumemnet.units import format_bytes

RANGE_TOLERANCE: Final = 1.05
"""Factor by which a value may exceed the largest value seen, or fall below the smallest, and still
be inside."""
FARTHEST: Final = 10.0
"""Factor beyond the range from which there is no bound."""

_LISTED: Final = 8
"""Longer lists of numbers are written as a range."""
_KNOWN_TABLES: Final = 256


class Support:
    """The support of one bundle, as arrays."""

    def __init__(self, card: BundleCard) -> None:
        self.card = card
        self.inside_kinds = card.kinds | ALIASES | alike(card.kinds)
        self._is_unseen_kind = np.array([kind not in self.inside_kinds for kind in KINDS])
        self._columns = np.array([FEATURE_NAMES.index(name) for name in card.ranges], dtype=np.intp)
        self._low, self._high = np.array([*card.ranges.values()]).reshape(-1, 2).T
        self._numbers = {
            name: np.array([*sorted({0 if value is None else value for value in seen}), np.inf])
            for name, seen in card.options.items()
            if name not in OPTION_FIELDS
        }
        self._unseen_options = lru_cache(maxsize=_KNOWN_TABLES)(self._count_unseen_options)

    def check(self, table: JobTable, features: Array) -> Unseen:
        """Finds the options, layer kinds and feature values of ``B`` jobs that were not seen in
        training.

        Args:
            table: the jobs.
            features: their feature vectors, shape ``[B, F]`` or more columns.
        """
        options = self._unseen_options(table.option_sets)[table.option_codes]
        for name, seen in self._numbers.items():
            numbers = table.column(name)
            options = options + (seen[seen.searchsorted(numbers)] != numbers)
        values = features.take(self._columns, axis=1)
        # a value of 0 is not stated
        distances = np.maximum(
            np.divide(self._low, values, out=np.zeros_like(values), where=values > 0),
            values / self._high,
        )
        beyond = distances > RANGE_TOLERANCE
        is_unknown = (distances > FARTHEST).any(axis=1)
        kinds: dict[int, frozenset[str]] = {}
        is_unseen_kind = self._is_unseen_kind
        if table.unknown_kinds:
            extra = [kind not in self.inside_kinds for kind in table.unknown_kinds]
            is_unseen_kind = np.concatenate((is_unseen_kind, extra))
        is_unseen = is_unseen_kind[table.layer_kinds]
        if is_unseen.any():
            owners, found = table.layer_owners[is_unseen], dict[int, set[str]]()
            for row, kind in zip(
                owners.tolist(), table.layer_kinds[is_unseen].tolist(), strict=True
            ):
                found.setdefault(row, set()).add(table.kind_names[kind])
            kinds = {row: frozenset(theirs) for row, theirs in found.items()}
        shares = other_shares(table)
        is_other = shares > self.card.other_share
        counts = options + beyond.sum(axis=1) + is_other
        if kinds:
            counts[list(kinds)] += list(map(len, kinds.values()))
        return Unseen(
            *(self, table, options, kinds, values, beyond, shares, counts),
            is_unknown | is_other,
        )

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


@dataclass(frozen=True, eq=False)
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
        other_shares: share of the activations that layers without a rule put out, shape ``[B]``.
        counts: number of unseen options, kinds and values of each job, shape ``[B]``; 0 inside the
            support.
        is_unknown: whether a job lies so far outside that no bound is known, shape ``[B]``.
    """

    support: Support
    table: JobTable
    option_counts: Indices
    kinds: Mapping[int, frozenset[str]]
    values: Array
    is_beyond: Flags
    other_shares: Array
    counts: Indices
    is_unknown: Flags

    def reasons(self, row: int) -> tuple[str, ...]:
        """Why the job in ``row`` lies outside the support, one sentence each; empty inside the
        support."""
        card, trained = self.support.card, "the model was trained on"
        reasons: tuple[str, ...] = ()
        if self.option_counts[row]:
            reasons += option_reasons(self.table, row, card.options, trained)
        if row in self.kinds:
            unseen, known = (", ".join(sorted(kinds)) for kinds in (self.kinds[row], card.kinds))
            reasons += (f"layers of kind {unseen[:200]}; {trained} {known}",)
        if self.other_shares[row] > card.other_share:
            reasons += (
                f"layers of kind other put out {self.other_shares[row]:.0%} of the activations, and nothing is known of "
                f"their memory; {trained} at most {card.other_share:.0%}",
            )
        ranges = [*card.ranges.items()]
        for column in self.is_beyond[row].nonzero()[0].tolist():
            name, (low, high) = ranges[column]
            value = _amount(name, float(self.values[row, column]))
            reasons += (f"{name} is {value}; {trained} {_range(name, low, high)}",)
        return reasons


def other_shares(table: JobTable) -> Array:
    """The share of each job's activations that layers of a kind without a rule put out."""
    owners, amounts = table.layer_owners, table.layer_activations
    is_other = (table.layer_kinds >= len(KINDS)) | (table.layer_kinds == OTHER_CODE)
    every, other = (
        np.bincount(owners, part, minlength=len(table)) for part in (amounts, amounts * is_other)
    )
    return other / np.maximum(every, 1.0)


def option_reasons(
    table: JobTable, row: int, options: Mapping[str, Sequence[OptionValue]], seen_words: str
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
