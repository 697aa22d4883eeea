"""Reads tables of jobs from files: Parquet, CSV, JSON Lines and JSON.

Every command that takes a file of jobs reads it here, in chunks of :data:`CHUNK_ROWS` rows.  Values
of Parquet go from the file's columns into those of a :class:`~gpumemnet.job.job_table.JobTable`; only
invalid rows are read one by one, so that the error names the row and the field.
"""

from __future__ import annotations

import bisect
import csv
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gpumemnet.atomic_files import Document, read_file
from gpumemnet.errors import (
    DatasetError,
    FieldError,
    InvalidJobError,
    InvalidRequestError,
    first_line,
)
from gpumemnet.job.arrow_codec import (
    WORD_FIELDS,
    check_columns,
    read_arrow_jobs,
    whole,
)
from gpumemnet.job.job_files import (
    FORMATS,
    JobFile,
    csv_header,
    find_files,
    import_pyarrow,
    open_bytes,
    open_parquet,
)
from gpumemnet.job.job_table import Indices, JobTable
from gpumemnet.job.json_codec import ReadJobs, parse_json, read_jobs
from gpumemnet.job.training_job import JOB_FIELDS

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_ROWS: Final = 4096
"""Rows in one run of the models, counted from the first row of a file.  The last bits of
transformer-based predictions depend on it."""
MAX_JSON_BYTES: Final = 64 * 2**20
_ID_COLUMNS: Final = ("job_id", "id")
"""Columns that may hold the job ids, in order of preference."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of a file, beginning at the start of a chunk.

    Attributes:
        first_row: number of rows (or lines, without the header of a CSV file) before the span.
        row_count: number of rows or lines; ``None`` for all that follow.
        start: byte offset of the first line in a file of lines.
    """

    first_row: int = 0
    row_count: int | None = None
    start: int = 0


class Chunk(NamedTuple):
    """Consecutive rows of a file.

    Attributes:
        numbers: number of each row in its file, starting at 1; empty lines have none.
        read: the valid jobs and the errors of invalid rows, by position in ``numbers``.
        ids: the job ids as text; ``None`` when there are none.
        row_count: number of rows or lines of the file that the chunk covers.
    """

    numbers: Indices
    read: ReadJobs
    ids: pa.Array | None
    row_count: int


class Reader(ExitStack):
    """Reads spans of files; a context manager.

    It keeps a Parquet file open between spans, because the next span often begins where the last
    one ended.

    Args:
        id_column: the column of the job ids; by default ``job_id`` or ``id``, where there is one.
    """

    def __init__(self, id_column: str | None = None) -> None:
        super().__init__()
        self._id_column = id_column
        self._parquet: _ParquetCursor | None = None

    def chunks(self, file: JobFile, span: Span) -> Iterator[Chunk]:
        """Reads the chunks of ``span`` in order.

        Raises:
            DatasetError: when the file is damaged, has changed, or has no column for the ids.
        """
        if file.format == "parquet":
            if self._parquet is None or not self._parquet.reaches(file, span.first_row):
                self.close()
                self._parquet = _ParquetCursor(file, span.first_row, self._id_column)
                self.push(self._parquet)
            return self._parquet.chunks(span)
        if file.format == "csv":
            header, columns = csv_header(file.location)
            id_name = id_column_of(columns, self._id_column, file.location)
            id_names: tuple[str, ...] = () if id_name is None else (id_name,)
            read_line = partial(_csv_document, columns, {*JOB_FIELDS, *id_names})
            span = replace(span, start=span.start or len(header))
            return _line_chunks(file, span, id_names, read_line)
        id_names = _ID_COLUMNS if self._id_column is None else (self._id_column,)
        return _line_chunks(file, span, id_names, parse_json)


def read_job_tables(path: Path) -> Iterator[JobTable]:
    """Reads the jobs of one file as tables of at most :data:`CHUNK_ROWS`; only JSON is read into
    memory as a whole.

    Raises:
        InvalidRequestError: when the file does not exist, is too large for JSON, or has an unknown
            suffix.
        InvalidJobError: names the line or the index, and the field, of the first invalid job.
        DatasetError: when a file is damaged or lacks a column; names the row of an invalid job in
            Parquet or CSV.
        MissingExtraError: when pyarrow is needed and not installed.
    """
    if path.suffix not in (".json", *FORMATS):
        raise InvalidRequestError(f"{path} must end in .json, {', '.join(FORMATS)}", "jobs")
    if path.suffix == ".json":
        yield from _json_tables(path)
        return
    [file] = find_files([str(path)])
    with Reader() as reader:
        for chunk in reader.chunks(file, Span()):
            for row, error in sorted(chunk.read.errors.items()):
                number = chunk.numbers[row]
                if file.format == "jsonl":
                    raise error_at(error, f"line {number}")
                raise DatasetError(f"{path}, row {number}: {error}")
            if len(chunk.read.table):
                yield chunk.read.table


def read_documents(path: Path) -> Iterator[tuple[int, Any]]:
    """The JSON values in a file of JSON Lines, each with the number of its line.

    Raises:
        InvalidJobError: names the line that is not JSON.
        DatasetError: when the file cannot be read.
    """
    with open_bytes(str(path)) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.isspace():
                try:
                    document = parse_json(line)
                except InvalidJobError as error:
                    raise error_at(error, f"{path}, line {number}") from None
                yield number, document


def error_at(error: FieldError, place: str, between: str = ", ") -> FieldError:
    """The same error with a place in a file or in a document before its field: ``layers[3].kind``
    at ``job`` is ``job.layers[3].kind`` with a dot between."""
    return type(error)(error.reason, between.join(filter(None, (place, error.field))))


def id_column_of(names: Sequence[str], id_column: str | None, location: str) -> str | None:
    """Finds the column that holds the job ids; ``None`` when there is none.

    Raises:
        DatasetError: when the column ``id_column`` is missing.
    """
    if id_column is None:
        return next((name for name in _ID_COLUMNS if name in names), None)
    if id_column not in names:
        raise DatasetError(f"{location} has no column '{id_column}' for the jobs' ids")
    return id_column


class _ParquetCursor(ExitStack):
    """The chunks of a Parquet file from the row group that holds the row ``first`` on."""

    def __init__(self, file: JobFile, first: int, id_column: str | None) -> None:
        super().__init__()
        self._file = file
        parquet = self.enter_context(open_parquet(file.location))
        try:
            check_columns(parquet.schema_arrow, file.location)
            names = parquet.schema_arrow.names
            self._ids = id_column_of(names, id_column, file.location)
            self._rows = parquet.metadata.num_rows
            groups = range(parquet.num_row_groups)
            sizes = [parquet.metadata.row_group(group).num_rows for group in groups]
            self._starts = [0, *accumulate(sizes)][:-1] or [0]
            group = self._group(first)
            self._next_row = self._starts[group]
            self._batches: Iterator[pa.RecordBatch] = parquet.iter_batches(
                CHUNK_ROWS,
                row_groups=groups[group:],
                columns=[name for name in dict.fromkeys((*JOB_FIELDS, self._ids)) if name in names],
                use_threads=False,
            )
        except BaseException:
            self.close()
            raise
        self._aligned = self._align()

    def reaches(self, file: JobFile, first: int) -> bool:
        """Whether reading on from here reaches the row ``first`` of ``file`` faster than starting
        at its row group."""
        return file == self._file and self._starts[self._group(first)] <= self._next_row <= first

    def chunks(self, span: Span) -> Iterator[Chunk]:
        """Reads the rows of ``span``."""
        import pyarrow as pa

        stop = self._rows if span.row_count is None else span.first_row + span.row_count
        while self._next_row < stop:
            try:
                first, batch = next(self._aligned)
            except (OSError, pa.ArrowException, StopIteration) as error:
                reason = first_line(error) or "it holds fewer rows than it says"
                raise DatasetError(
                    f"{self._file.location} is damaged after row {self._next_row}: {reason}"
                ) from None
            if first >= span.first_row:
                yield self._chunk(first, batch)

    def _align(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Cuts the file's batches anew at multiples of :data:`CHUNK_ROWS`; yields each with the
        number of rows before it."""

        first = self._next_row
        skip = -first % CHUNK_ROWS
        first += skip
        held: list[pa.RecordBatch] = []
        for batch in self._batches:
            held.append(batch.slice(skip))
            skip -= len(batch) - len(held[-1])
            while (size := sum(map(len, held))) >= CHUNK_ROWS:
                rest = held[-1].slice(len(held[-1]) - (size - CHUNK_ROWS))
                held[-1] = held[-1].slice(0, len(held[-1]) - len(rest))
                self._next_row = first + CHUNK_ROWS
                yield first, _joined(held)
                first, held = self._next_row, [rest]
        if size := sum(map(len, held)):
            self._next_row = first + size
            yield first, _joined(held)

    def _chunk(self, first: int, batch: pa.RecordBatch) -> Chunk:
        import pyarrow as pa

        ids = None
        if self._ids is not None:
            try:
                ids = batch.column(self._ids).cast(pa.string())
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                raise DatasetError(
                    f"{self._file.location}: the column '{self._ids}' cannot be written as text"
                ) from None
        numbers = np.arange(first + 1, first + 1 + len(batch))
        return Chunk(numbers, read_arrow_jobs(batch), ids, len(batch))

    def _group(self, row: int) -> int:
        """Position of the row group that holds the row."""
        return max(bisect.bisect_right(self._starts, row) - 1, 0)


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    import pyarrow as pa

    table = pa.Table.from_batches([batch for batch in batches if len(batch)])
    return table.unify_dictionaries().combine_chunks().to_batches()[0]


def _lines(file: JobFile, span: Span) -> Iterator[tuple[int, list[bytes]]]:
    """Yields, for each chunk, the number of lines before it and its lines."""
    first, left = span.first_row, span.row_count
    with open_bytes(file.location) as stream:
        stream.seek(span.start)
        while left is None or left > 0:
            count = CHUNK_ROWS if left is None else min(CHUNK_ROWS, left)
            lines = list(islice(stream, count))
            if left is not None and len(lines) != count:
                raise DatasetError(
                    f"{file.location} has changed since it was first read: run the same command again"
                )
            if not lines:
                return
            yield first, lines
            first += len(lines)
            left = None if left is None else left - len(lines)


# JSON.


def _json_tables(path: Path) -> Iterator[JobTable]:
    if not path.is_file():
        raise InvalidRequestError(f"{path} does not exist", "jobs")
    try:
        document = parse_json(read_file(path, MAX_JSON_BYTES))
    except OSError as error:
        reason = f"{path} cannot be read: {error.strerror}; write many jobs one a line (.jsonl)"
        raise InvalidRequestError(reason, "jobs") from None
    documents = document if isinstance(document, list) else [document]
    for start in range(0, len(documents), CHUNK_ROWS):
        read = read_jobs(documents[start : start + CHUNK_ROWS])
        for row, wrong in sorted(read.errors.items()):
            place = f"[{start + row}]" if documents is document else ""
            raise error_at(wrong, place, ".")
        yield read.table


# Lines: JSON, or CSV with a header.


def _line_chunks(
    file: JobFile, span: Span, id_names: Sequence[str], read_line: Callable[[bytes], Any]
) -> Iterator[Chunk]:
    for first, lines in _lines(file, span):
        numbers: list[int] = []
        documents: list[Any] = []
        ids: list[str | None] = []
        broken: dict[int, FieldError] = {}
        for number, line in enumerate(lines, start=first + 1):
            if line.isspace():
                continue
            document = found = None
            try:
                document = read_line(line)
            except InvalidJobError as error:
                broken[len(numbers)] = error
            if isinstance(document, dict):
                name = next((name for name in id_names if name in document), None)
                if name is not None:
                    found = document[name] if name in JOB_FIELDS else document.pop(name)
            numbers.append(number)
            documents.append(document)
            ids.append(found if found is None or isinstance(found, str) else json.dumps(found))
        read = read_jobs(documents)
        read.errors.update(broken)
        has_ids = any(each is not None for each in ids)
        texts = import_pyarrow("reading job ids").array(ids, "string") if has_ids else None
        yield Chunk(np.array(numbers, dtype=np.int64), read, texts, len(lines))


def _csv_document(columns: Sequence[str], is_read: Collection[str], line: bytes) -> Document:
    """The cells of a line that are not empty, by the names of their columns; a cell of the wrong
    type stays text."""
    csv.field_size_limit(sys.maxsize)  # the layers of a job are one cell
    try:
        [cells] = csv.reader([line.decode().rstrip("\r\n")], strict=True)
    except (ValueError, csv.Error):
        cells = []
    if len(cells) != len(columns):
        raise InvalidJobError(f"is no line of CSV with {len(columns)} columns in UTF-8")
    document: Document = {
        name: cell for name, cell in zip(columns, cells, strict=True) if cell and name in is_read
    }
    for name, cell in document.items():
        if name in JOB_FIELDS and name not in WORD_FIELDS:
            with suppress(InvalidJobError):
                document[name] = whole(parse_json(cell if name == "layers" else cell.lower()))
    return document
