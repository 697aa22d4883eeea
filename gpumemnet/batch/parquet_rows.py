"""Reads rows of a Parquet file from any row on, in batches of equal size, with a cursor that only
moves forward."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from gpumemnet.batch.inputs import InputFile
from gpumemnet.batch.opening import open_parquet
from gpumemnet.batch.plan import CHUNK_ROWS
from gpumemnet.errors import DatasetError, first_line
from gpumemnet.job.training_job import JOB_FIELDS

if TYPE_CHECKING:
    import pyarrow as pa

ID_COLUMNS: Final = ("job_id", "id")
"""Columns that may hold the job ids, in order of preference."""


def id_column_of(names: Sequence[str], id_column: str | None, where: str) -> str | None:
    """Finds the column that holds the job ids; ``None`` when there is none.

    Raises:
        DatasetError: when the column ``id_column`` is missing.
    """
    if id_column is None:
        return next((name for name in ID_COLUMNS if name in names), None)
    if id_column not in names:
        raise DatasetError(f"{where} has no column '{id_column}' for the jobs' ids")
    return id_column


class ParquetRows:
    """The rows of ``file``, starting at the row group that holds the row ``first``.

    Attributes:
        identity: the column of the job ids; ``None`` when there is none.

    Raises (all methods):
        DatasetError: when the file is damaged, or lacks the column ``id_column``.
    """

    def __init__(self, file: InputFile, first: int, id_column: str | None) -> None:
        self._file = file
        self._stack = ExitStack()
        parquet = self._stack.enter_context(open_parquet(file))
        try:
            names = parquet.schema_arrow.names
            self.identity = id_column_of(names, id_column, file.location)
            columns = [name for name in (*JOB_FIELDS, self.identity) if name in names]
            self._starts = _starts(parquet.metadata)
            group = self._group(first)
            self._row = self._starts[group]
            groups = list(range(group, parquet.metadata.num_row_groups))
            self._batches: Iterator[pa.RecordBatch] = parquet.iter_batches(
                CHUNK_ROWS,
                row_groups=groups,
                columns=list(dict.fromkeys(columns)),
                use_threads=False,
            )
        except BaseException:
            self._stack.close()
            raise
        self._rest: pa.RecordBatch | None = None

    def is_near(self, file: InputFile, first: int) -> bool:
        """Whether reading on from here reaches the row ``first`` of ``file`` faster than starting
        at its row group."""
        return file == self._file and self._starts[self._group(first)] <= self._row <= first

    def read(self, first: int, count: int) -> Iterator[pa.RecordBatch]:
        """Reads ``count`` rows from the row ``first`` on, in batches of
        :data:`~gpumemnet.batch.plan.CHUNK_ROWS`."""
        held: list[pa.RecordBatch] = []
        remaining = min(CHUNK_ROWS, count)
        while remaining:
            batch = self._next()
            if batch is None:
                break
            skipped = min(max(first - self._row, 0), len(batch))
            taken = batch.slice(skipped, remaining)
            self._row += skipped + len(taken)
            if skipped + len(taken) < len(batch):
                self._rest = batch.slice(skipped + len(taken))
            if not len(taken):
                continue
            held.append(taken)
            remaining -= len(taken)
            if not remaining:
                count -= sum(map(len, held))
                yield _joined(held)
                held, remaining = [], min(CHUNK_ROWS, count)
        if held:
            yield _joined(held)

    def close(self) -> None:
        """Closes the file."""
        self._stack.close()

    def _next(self) -> pa.RecordBatch | None:
        import pyarrow as pa

        if self._rest is not None:
            batch, self._rest = self._rest, None
            return batch
        try:
            return next(self._batches, None)
        except (OSError, pa.ArrowException) as error:
            raise DatasetError(
                f"{self._file.location} is damaged after row {self._row}: {first_line(error)}"
            ) from None

    def _group(self, row: int) -> int:
        """Position of the row group that holds the row."""
        return max(bisect.bisect_right(self._starts, row) - 1, 0)


def _starts(metadata: Any) -> list[int]:
    """Number of rows before each row group."""
    starts, rows = [], 0
    for number in range(metadata.num_row_groups):
        starts.append(rows)
        rows += metadata.row_group(number).num_rows
    return starts


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    import pyarrow as pa

    return pa.Table.from_batches(batches).unify_dictionaries().combine_chunks().to_batches()[0]
