"""The job table: ``B`` training jobs as columns, and their layers as ragged columns.

All computations take a job table; a single job is a table of one row.  Users construct a job as a
:class:`~gpumemnet.job.training_job.TrainingJob`, which is one row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Final, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job.layers import (
    CODE_OF_KIND,
    KINDS,
    OTHER_CODE,
    UNKNOWN,
    Layer,
    unchecked_layers,
)
from gpumemnet.job.training_job import (
    FIELD_RANGES,
    NUMBER_FIELDS,
    OPTION_FIELDS,
    UNSTATED_AS_ZERO,
    TrainingJob,
)

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]
T = TypeVar("T")
OptionSet = tuple[Any, ...]
"""Values of the fields :data:`~gpumemnet.job.training_job.OPTION_FIELDS`, in that order."""

_OPTIONS_OF: Final = attrgetter(*OPTION_FIELDS)
_NUMBERS_OF: Final = attrgetter(*NUMBER_FIELDS)
_FIELDS_OF_LAYER: Final = [itemgetter(index) for index in range(len(Layer._fields))]
_TRAINS_OF_CODE: Final = (False, True, None)
"""Code in the column ``layer_trains`` → its value; the last is that of -1."""
_OF_LAYERS: Final = (
    *("layer_kinds", "layer_activations", "layer_parameters", "layer_trains", "layer_blocks"),
)
"""The columns with an entry for each layer."""
_INDEX_OF_NUMBER: Final = {name: index for index, name in enumerate(NUMBER_FIELDS)}
_SMALLEST, _LARGEST = np.array([limits for _, *limits in FIELD_RANGES], dtype=np.float64).T[
    ..., None
]
_MAY_STAY_UNSTATED: Final = np.array([[name in UNSTATED_AS_ZERO] for name in NUMBER_FIELDS])
_TOTALS: Final = slice(*(NUMBER_FIELDS.index("total_activations") + end for end in (0, 2)))
_PARAMETERS: Final = NUMBER_FIELDS.index("total_parameters")
_TRAINABLE: Final = NUMBER_FIELDS.index("trainable_parameters")


def codes_with(unknown_kinds: Sequence[str]) -> dict[str, int]:
    """Layer kind → its code in a table that has these unknown kinds."""
    if not unknown_kinds:
        return CODE_OF_KIND
    return {kind: code for code, kind in enumerate((*KINDS, *unknown_kinds))}


class Rows(Sequence[T]):
    """Base of tables: a slice is a table, too."""

    __slots__ = ()

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> T | Self:
        """One row for an index, a table for a slice."""
        taken = self.take(np.arange(len(self))[index].reshape(-1))
        return taken if isinstance(index, slice) else next(iter(taken))

    @abstractmethod
    def take(self, rows: Indices | Flags) -> Self:
        """The rows at these positions, in that order; or those for which it is true."""


@dataclass(frozen=True, slots=True, eq=False)
class JobTable(Rows[TrainingJob]):
    """``B`` valid jobs with ``N`` layers in total.

    Attributes:
        numbers: the fields :data:`~gpumemnet.job.training_job.NUMBER_FIELDS`, with totals derived
            from the layers and 0 for fields that a job does not state, shape
            ``[10, B]``.
        option_sets: the distinct sets of options.
        option_codes: position of each job's set in :attr:`option_sets`, shape ``[B]``.
        layer_counts: number of layers of each job, shape ``[B]``.
        layer_kinds: position of each layer's kind in :attr:`kind_names`, shape ``[N]``.
        layer_activations, layer_parameters: elements of each layer, whole numbers as floats, shape
            ``[N]``.
        layer_trains: 1 for layers that train, 0 for others, shape ``[N]``.
        layer_blocks: number of each layer's block, 0 outside of all blocks, shape ``[N]``.  Both
            columns hold :data:`~gpumemnet.job.layers.UNKNOWN` where a layer does not say it.
        unknown_kinds: layer kinds in this table that are not in :data:`gpumemnet.job.layers.KINDS`.
    """

    numbers: Array
    option_sets: tuple[OptionSet, ...]
    option_codes: Indices
    layer_counts: Indices
    layer_kinds: Indices
    layer_activations: Array
    layer_parameters: Array
    layer_trains: Indices
    layer_blocks: Indices
    unknown_kinds: tuple[str, ...] = ()

    @classmethod
    def from_jobs(cls, jobs: Sequence[TrainingJob]) -> JobTable:
        """Builds the table whose rows are ``jobs``; a table stays as it is."""
        if isinstance(jobs, JobTable):
            return jobs
        layers = [*chain.from_iterable([job.layers for job in jobs])]
        numbers = (
            np.array(list(map(_NUMBERS_OF, jobs)), dtype=np.float64)
            .reshape(len(jobs), len(NUMBER_FIELDS))
            .T.copy()
        )
        numbers[numbers != numbers] = 0.0  # numpy turned None into NaN
        return cls.from_columns(
            numbers,
            list(map(_OPTIONS_OF, jobs)),
            np.array([len(job.layers) for job in jobs], dtype=np.int64),
            *(list(map(field, layers)) for field in _FIELDS_OF_LAYER),
        )

    @classmethod
    def from_columns(
        cls,
        numbers: Array,
        options: Sequence[OptionSet],
        layer_counts: Indices,
        kinds: Sequence[str],
        activations: Sequence[int],
        parameters: Sequence[int],
        trains: Sequence[bool | None],
        blocks: Sequence[int | None],
    ) -> JobTable:
        """Builds a table from the columns of jobs that have been checked.

        Args:
            numbers, layer_counts: see the attributes.
            options: each job's set of options.
            kinds, activations, parameters, trains, blocks: of all layers, grouped by job, in the
                order of the jobs.
        """
        codes: dict[OptionSet, int] = {}
        option_codes = [codes.setdefault(option_set, len(codes)) for option_set in options]
        unknown = tuple(sorted(set(kinds) - CODE_OF_KIND.keys()))
        code_of = codes_with(unknown)
        return cls(
            numbers,
            tuple(codes),
            np.array(option_codes, dtype=np.int64),
            layer_counts,
            np.array([code_of[kind] for kind in kinds], dtype=np.int64),
            np.array(activations, dtype=np.float64),
            np.array(parameters, dtype=np.float64),
            _codes(trains),
            _codes(blocks),
            unknown,
        )

    def settle_numbers(self) -> NDArray[np.bool_]:
        """Checks the counts of the jobs, and fills in what they do not state, NaN until then: totals
        from the layers, the trainable parameters from those not stated to be frozen, and else 0.

        Returns:
            Which jobs break a rule, shape ``[B]``; a
            :class:`~gpumemnet.job.training_job.TrainingJob` says which rule.
        """
        numbers, owners, count = self.numbers, self.layer_owners, len(self)
        sums = np.array(
            [
                np.bincount(owners, each, count)
                for each in (self.layer_activations, self.layer_parameters)
            ],
            dtype=np.float64,
        )
        has_none = self.layer_counts == 0
        sums[:, has_none] = np.nan
        is_unstated = np.isnan(numbers)
        totals, trainable = numbers[_TOTALS], numbers[_TRAINABLE]
        np.copyto(totals, sums, where=is_unstated[_TOTALS])
        frozen = np.bincount(owners, self.layer_parameters * (self.layer_trains == 0), count)
        largest = numbers[_PARAMETERS] - frozen
        np.copyto(trainable, largest, where=is_unstated[_TRAINABLE])
        stays_unstated = is_unstated & _MAY_STAY_UNSTATED
        is_within = (numbers >= _SMALLEST) & (numbers <= _LARGEST)
        is_right = (is_within | stays_unstated).all(axis=0)
        is_right &= has_none | (totals == sums).all(axis=0)
        is_right &= trainable <= largest
        numbers[stays_unstated] = 0.0
        return ~is_right

    @staticmethod
    def concatenate(tables: Sequence[JobTable]) -> JobTable:
        """Joins the rows of all ``tables`` in order."""
        tables = [table for table in tables if len(table)] or tables[:1] or [JobTable.from_jobs(())]
        if len(tables) == 1:
            return tables[0]
        option_sets = dict.fromkeys(chain.from_iterable(table.option_sets for table in tables))
        code_of = {options: code for code, options in enumerate(option_sets)}
        unknown = tuple(sorted(set(chain.from_iterable(table.unknown_kinds for table in tables))))
        code_of_kind = codes_with(unknown)
        option_codes, kinds = [], []
        for table in tables:
            codes = np.array([code_of[options] for options in table.option_sets], dtype=np.int64)
            option_codes.append(codes[table.option_codes])
            places = np.array([code_of_kind[kind] for kind in table.kind_names], dtype=np.int64)
            kinds.append(places[table.layer_kinds])
        columns = {
            name: np.concatenate([getattr(table, name) for table in tables])
            for name in ("layer_counts", *_OF_LAYERS)
        }
        return JobTable(
            numbers=np.concatenate([table.numbers for table in tables], axis=1),
            option_sets=tuple(option_sets),
            option_codes=np.concatenate(option_codes),
            unknown_kinds=unknown,
            **columns | {"layer_kinds": np.concatenate(kinds)},
        )

    def __len__(self) -> int:
        return len(self.option_codes)

    def __iter__(self) -> Iterator[TrainingJob]:
        layers = self.split_by_job(self.flat_layers())
        rows = zip(self.numbers.T.tolist(), self.option_codes.tolist(), layers, strict=True)
        for numbers, code, own in rows:
            values = dict(zip(OPTION_FIELDS, self.option_sets[code], strict=True))
            for name, value in zip(NUMBER_FIELDS, numbers, strict=True):
                values[name] = int(value) if value or name not in UNSTATED_AS_ZERO else None
            yield TrainingJob(layers=tuple(own), **values)

    def column(self, name: str) -> Array:
        """Values of the field ``name``, one of :data:`~gpumemnet.job.training_job.NUMBER_FIELDS`,
        shape ``[B]``."""
        return self.numbers[_INDEX_OF_NUMBER[name]]

    def options(self, name: str) -> list[Any]:
        """Value of the field ``name`` in each of :attr:`option_sets`."""
        index = OPTION_FIELDS.index(name)
        return [options[index] for options in self.option_sets]

    @property
    def kind_names(self) -> tuple[str, ...]:
        """The names that :attr:`layer_kinds` refers to: the known kinds, then
        :attr:`unknown_kinds`."""
        return KINDS + self.unknown_kinds

    @property
    def known_kinds(self) -> Indices:
        """Position of each layer's kind in ``KINDS``, with ``other`` for unknown kinds, shape
        ``[N]``."""
        if not self.unknown_kinds:
            return self.layer_kinds
        return np.where(self.layer_kinds < len(KINDS), self.layer_kinds, OTHER_CODE)

    @property
    def layer_owners(self) -> Indices:
        """Position of the job that each layer belongs to, shape ``[N]``."""
        return np.repeat(np.arange(len(self)), self.layer_counts)

    def take(self, rows: Indices | Flags) -> Self:
        """The jobs at these positions, in that order; or those for which it is true."""
        counts = self.layer_counts[rows]
        ends = counts.cumsum()
        first = (self.layer_counts.cumsum() - self.layer_counts)[rows]
        places = np.arange(counts.sum()) + np.repeat(first - (ends - counts), counts)
        return replace(
            self,
            numbers=self.numbers[:, rows],
            option_codes=self.option_codes[rows],
            layer_counts=counts,
            **self._of_layers(places),
        )

    def _of_layers(self, places: Indices | slice) -> dict[str, Any]:
        return {name: getattr(self, name)[places] for name in _OF_LAYERS}

    def with_numbers(self, name: str, values: Array) -> JobTable:
        """A copy of the table in which the field ``name`` has the given ``values``, shape
        ``[B]``."""
        numbers = self.numbers.copy()
        numbers[_INDEX_OF_NUMBER[name]] = values
        return replace(self, numbers=numbers)

    def option_column(self, name: str) -> NDArray[Any]:
        """Each job's value of the field ``name``, one of
        :data:`~gpumemnet.job.training_job.OPTION_FIELDS`, shape ``[B]``."""
        return np.array(self.options(name), dtype=object)[self.option_codes]

    def without_layers(self) -> JobTable:
        """The same jobs with their totals only."""
        counts = np.zeros(len(self), dtype=np.int64)
        return replace(self, layer_counts=counts, **self._of_layers(slice(0)), unknown_kinds=())

    def split_by_job(self, values: Sequence[T]) -> Iterator[Sequence[T]]:
        """Divides values of all layers, ``N``, into those of each job."""
        ends = self.layer_counts.cumsum().tolist()
        starts = (0, *ends)
        return (values[start:end] for start, end in zip(starts, ends, strict=False))

    def flat_layers(self) -> tuple[Layer, ...]:
        """The layers of all jobs, grouped by job, ``N`` in total."""
        return self._layers(slice(None))

    def layers(self, row: int) -> tuple[Layer, ...]:
        """The layers of one job."""
        first = int(self.layer_counts[:row].sum())
        return self._layers(slice(first, first + int(self.layer_counts[row])))

    def _layers(self, places: slice) -> tuple[Layer, ...]:
        names = self.kind_names
        return unchecked_layers(
            [names[kind] for kind in self.layer_kinds[places].tolist()],
            map(int, self.layer_activations[places].tolist()),
            map(int, self.layer_parameters[places].tolist()),
            map(_TRAINS_OF_CODE.__getitem__, self.layer_trains[places].tolist()),
            (None if block == UNKNOWN else block for block in self.layer_blocks[places].tolist()),
        )


def _codes(stated: Sequence[bool | int | None]) -> Indices:
    """What layers state, as numbers."""
    return np.array([UNKNOWN if each is None else each for each in stated], dtype=np.int64)


class Columns:
    """Base of a frozen dataclass of jobs and further columns, one entry a row; mappings say
    something of all rows."""

    jobs: JobTable

    def __len__(self) -> int:
        return len(self.jobs)

    def take(self, rows: Indices | Flags) -> Self:
        """The rows at these positions, in that order; or those for which it is true."""
        own: Any = self
        rows = np.arange(len(self))[rows]
        taken = {each.name: _taken(getattr(own, each.name), rows) for each in fields(own)}
        return replace(own, **taken)

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """The rows of all ``parts``, at least one, in order."""
        own: Any = cls
        columns = ([getattr(part, each.name) for part in parts] for each in fields(own))
        return cls(*map(_joined, columns))


def _taken(column: Any, rows: Indices) -> Any:
    if isinstance(column, Mapping):
        return column
    return column[rows] if isinstance(column, np.ndarray) else column.take(rows)


def _joined(columns: Sequence[Any]) -> Any:
    if isinstance(columns[0], Mapping):
        return {name: value for column in columns for name, value in column.items()}
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(columns)
    if isinstance(columns[0], JobTable):
        return JobTable.concatenate(columns)
    import pyarrow as pa

    return pa.concat_tables(columns)
