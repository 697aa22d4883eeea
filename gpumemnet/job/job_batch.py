"""Many jobs as columns that behave like a sequence of jobs: single jobs are built only where somebody asks for one.

A request of a thousand jobs, and a file of a million, spend most of their time on objects that nobody looks at.  Here a batch is
a handful of arrays, which features, support and answers are computed from as they stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import Any, Final, overload

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job.layers import KINDS, Layer
from gpumemnet.job.training_job import FIELD_CHOICES, FIELD_RANGES, TrainingJob

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

NUMBER_FIELDS: Final[tuple[str, ...]] = tuple(name for name, _, _ in FIELD_RANGES)
"""The rows of :attr:`JobBatch.numbers`."""
UNSTATED_AS_ZERO: Final = frozenset({"sequence_length", "traced_peak_bytes"})
"""Those that a job may leave open for good, and that are never 0."""
OPTION_FIELDS: Final[tuple[str, ...]] = (*FIELD_CHOICES, "channels_last", "cudnn_benchmark")
"""What a set of options consists of, in this order."""

OPTIONS_OF: Final = attrgetter(*OPTION_FIELDS)
"""The set of options of a job."""
_NUMBERS_OF: Final = attrgetter(*NUMBER_FIELDS)


@dataclass(frozen=True, slots=True, eq=False)
class JobBatch(Sequence[TrainingJob]):
    """``B`` valid jobs of ``N`` layers together.

    Attributes:
        numbers: the fields :data:`NUMBER_FIELDS` with all totals settled, 0 where a job does not state one, shape ``[9, B]``.
        option_sets: the distinct sets of options (:data:`OPTION_FIELDS`).
        option_codes: position of each job's set among them, shape ``[B]``.
        layer_counts: layers of each job, shape ``[B]``.
        layer_kinds: position of each layer's kind in :data:`gpumemnet.job.layers.KINDS` followed by ``strange_kinds``, ``[N]``.
        layer_activations, layer_parameters: whole numbers, shape ``[N]``.
        strange_kinds: kinds that are not among the known ones.
    """

    numbers: Array
    option_sets: tuple[tuple[Any, ...], ...]
    option_codes: Indices
    layer_counts: Indices
    layer_kinds: Indices
    layer_activations: Array
    layer_parameters: Array
    strange_kinds: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.option_codes)

    @overload
    def __getitem__(self, index: int) -> TrainingJob: ...

    @overload
    def __getitem__(self, index: slice) -> JobBatch: ...

    def __getitem__(self, index: int | slice) -> TrainingJob | JobBatch:
        """One job, built now, or the batch of some."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self._stretch(start, max(start, stop)) if step == 1 else self.take(np.arange(start, stop, step))
        row = range(len(self))[index]
        start = int(self.layer_counts[:row].sum())
        return self._job(row, start, start + int(self.layer_counts[row]))

    def __iter__(self) -> Iterator[TrainingJob]:
        start = 0
        for row, count in enumerate(self.layer_counts.tolist()):
            yield self._job(row, start, start + count)
            start += count

    def column(self, name: str) -> Array:
        """The numbers of the field ``name``, one of :data:`NUMBER_FIELDS`, shape ``[B]``."""
        column: Array = self.numbers[NUMBER_FIELDS.index(name)]
        return column

    def options(self, name: str) -> list[Any]:
        """What each of the ``option_sets`` says of the field ``name``, one of :data:`OPTION_FIELDS`."""
        place = OPTION_FIELDS.index(name)
        return [options[place] for options in self.option_sets]

    @property
    def kind_names(self) -> tuple[str, ...]:
        """What ``layer_kinds`` are positions in."""
        return KINDS + self.strange_kinds

    def take(self, rows: Indices) -> JobBatch:
        """The jobs in ``rows``, in that order."""
        counts = self.layer_counts[rows]
        ends = counts.cumsum()
        first = (self.layer_counts.cumsum() - self.layer_counts)[rows]
        places = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(first - (ends - counts), counts)
        return self._with(rows, places)

    def _stretch(self, start: int, stop: int) -> JobBatch:
        first = int(self.layer_counts[:start].sum())
        return self._with(slice(start, stop), slice(first, first + int(self.layer_counts[start:stop].sum())))

    def _with(self, rows: Indices | slice, places: Indices | slice) -> JobBatch:
        return JobBatch(
            numbers=self.numbers[:, rows],
            option_sets=self.option_sets,
            option_codes=self.option_codes[rows],
            layer_counts=self.layer_counts[rows],
            layer_kinds=self.layer_kinds[places],
            layer_activations=self.layer_activations[places],
            layer_parameters=self.layer_parameters[places],
            strange_kinds=self.strange_kinds,
        )

    def _job(self, row: int, start: int, stop: int) -> TrainingJob:
        values = dict(zip(OPTION_FIELDS, self.option_sets[self.option_codes[row]], strict=True))
        for name, value in zip(NUMBER_FIELDS, self.numbers[:, row].tolist(), strict=True):
            values[name] = int(value) if value or name not in UNSTATED_AS_ZERO else None
        return TrainingJob(layers=self._layers(start, stop), **values)

    def _layers(self, start: int, stop: int) -> tuple[Layer, ...]:
        names = self.kind_names
        kinds = [names[kind] for kind in self.layer_kinds[start:stop].tolist()]
        activations, parameters = (
            map(int, amounts[start:stop].tolist()) for amounts in (self.layer_activations, self.layer_parameters)
        )
        return tuple(map(tuple.__new__, repeat(Layer), zip(kinds, activations, parameters, strict=True)))


def number_columns(jobs: Sequence[TrainingJob]) -> Array:
    """The rows of :attr:`JobBatch.numbers` for jobs that are there one by one."""
    numbers = np.array([_NUMBERS_OF(job) for job in jobs], dtype=np.float64).reshape(len(jobs), len(NUMBER_FIELDS)).T.copy()
    numbers[np.isnan(numbers)] = 0.0  # that is what becomes of None
    return numbers


def layer_counts(jobs: Sequence[TrainingJob]) -> Indices:
    """How many layers each job states."""
    return jobs.layer_counts if isinstance(jobs, JobBatch) else np.array([len(job.layers) for job in jobs], dtype=np.int64)


def some_of(jobs: Sequence[TrainingJob], rows: Sequence[int]) -> Sequence[TrainingJob]:
    """The jobs in ``rows``; ``jobs`` itself where those are all, and of a batch a batch.

    Args:
        rows: rising, so that as many as there are jobs are all.
    """
    if len(rows) == len(jobs):
        return jobs
    return jobs.take(np.array(rows, dtype=np.int64)) if isinstance(jobs, JobBatch) else [jobs[row] for row in rows]
