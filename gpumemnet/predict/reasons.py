"""Why each job of a batch lies outside a model's support: counted for all at once, put into words where somebody asks.

Most reasons are counted only to see which model knows a job best, and never read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job.job_batch import Array, Indices, JobBatch

Flags = NDArray[np.bool_]
Words = tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Reasons(Sequence[Words]):
    """The reasons against ``B`` jobs, each job's when it is asked for.

    Attributes:
        jobs: the jobs.
        option_counts: options of each that were not seen in training, shape ``[B]``.
        strange_kinds: job → its layer kinds that were not seen; jobs without any are not in it.
        values: the features that have a range, shape ``[B, R]``.
        is_beyond: which of them lie beyond it, shape ``[B, R]``.
        option_words, kind_words, range_words: put into words the options of a job, kinds, and a value of a column.
        counts: how many options, kinds and values speak against each job, shape ``[B]``.
    """

    jobs: JobBatch
    option_counts: Indices
    strange_kinds: Mapping[int, frozenset[str]]
    values: Array
    is_beyond: Flags
    option_words: Callable[[tuple[Any, ...], JobBatch, int], Words]
    kind_words: Callable[[frozenset[str]], Words]
    range_words: Callable[[int, float], str]
    counts: Indices

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, index: int) -> Words: ...

    @overload
    def __getitem__(self, index: slice) -> list[Words]: ...

    def __getitem__(self, index: int | slice) -> Words | list[Words]:
        """The reasons against one job, put into words now, or of some."""
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        if not self.counts[row]:
            return ()
        words: Words = ()
        if self.option_counts[row]:
            words = self.option_words(self.jobs.option_sets[self.jobs.option_codes[row]], self.jobs, row)
        if row in self.strange_kinds:
            words += self.kind_words(self.strange_kinds[row])
        columns = self.is_beyond[row].nonzero()[0].tolist()
        if columns:
            values = self.values[row].tolist()
            words += tuple([self.range_words(column, values[column]) for column in columns])
        return words

    @property
    def has_unseen_option(self) -> Flags:
        """Whether an option or a layer kind is among the reasons against each job, shape ``[B]``."""
        has: Flags = self.option_counts > 0
        has[list(self.strange_kinds)] = True
        return has

    def take(self, rows: Indices) -> Reasons:
        """The reasons against the jobs in ``rows``, which rise."""
        kinds: dict[int, frozenset[str]] = {}
        if self.strange_kinds:
            kinds = {at: self.strange_kinds[row] for at, row in enumerate(rows.tolist()) if row in self.strange_kinds}
        return Reasons(
            jobs=self.jobs.take(rows),
            option_counts=self.option_counts[rows],
            strange_kinds=kinds,
            values=self.values[rows],
            is_beyond=self.is_beyond[rows],
            option_words=self.option_words,
            kind_words=self.kind_words,
            range_words=self.range_words,
            counts=self.counts[rows],
        )


def outside_rows(reasons: Sequence[tuple[str, ...]]) -> list[int]:
    """Positions of the jobs that have reasons against them."""
    if isinstance(reasons, Reasons):
        return np.flatnonzero(reasons.counts).tolist()
    return [row for row, words in enumerate(reasons) if words]
