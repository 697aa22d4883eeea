"""Reads the chunks of a part, rows of Parquet or lines of CSV or JSON Lines, as job tables."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gpumemnet.batch.inputs import InputFile
from gpumemnet.batch.opening import csv_header, reading, require_pyarrow
from gpumemnet.batch.parquet_rows import ID_COLUMNS, ParquetRows, id_column_of
from gpumemnet.batch.plan import CHUNK_ROWS, Part
from gpumemnet.errors import DatasetError, FieldError, InvalidJobError
from gpumemnet.job.arrow_codec import COUNT_FIELDS, SWITCH_FIELDS, read_arrow_jobs, row_documents
from gpumemnet.job.job_table import Indices
from gpumemnet.job.json_codec import ReadJobs, merge_reads, parse_json, read_jobs
from gpumemnet.job.training_job import JOB_FIELDS

if TYPE_CHECKING:
    import pyarrow as pa

_SWITCH_WORDS: Final = {
    word: word.lower() == "true" for word in ("true", "false", "True", "False", "TRUE", "FALSE")
}
_WHOLE_NUMBER: Final = r"^-?[0-9]{1,18}$"
_NO_FRACTION: Final = r"\.0*$"
"""What pandas writes behind a whole number in a column with gaps."""
_LEAST_BLOCK_BYTES: Final = 2**16


class Chunk(NamedTuple):
    """Consecutive rows of a file.

    Attributes:
        numbers: number of each row in its file, starting at 1; empty lines have none.
        read: the valid jobs and the errors of invalid rows, by position in ``numbers``.
        identities: the job ids as text; ``None`` when there are none.
        row_count: number of rows or lines of the file that the chunk covers.
    """

    numbers: Indices
    read: ReadJobs
    identities: pa.Array | None
    row_count: int


class PartReader:
    """Reads parts; keeps a Parquet file open between parts, because the next part often begins
    where the last one ended."""

    def __init__(self) -> None:
        self._rows: ParquetRows | None = None

    def __enter__(self) -> PartReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def chunks(self, file: InputFile, part: Part, id_column: str | None) -> Iterator[Chunk]:
        """Reads the chunks of ``part`` in order.

        Raises:
            DatasetError: when the file is damaged, has changed, or lacks the column ``id_column``.
        """
        if file.format == "csv":
            return _csv_chunks(file, part, id_column)
        if file.format == "jsonl":
            return _json_chunks(file, part, id_column)
        return self._parquet_chunks(file, part, id_column)

    def _parquet_chunks(
        self, file: InputFile, part: Part, id_column: str | None
    ) -> Iterator[Chunk]:
        if self._rows is None or not self._rows.is_near(file, part.first_row):
            self._close()
            self._rows = ParquetRows(file, part.first_row, id_column)
        rows = self._rows
        first = part.first_row
        for batch in rows.read(first, part.row_count):
            yield _parquet_chunk(file, rows.identity, first, batch)
            first += len(batch)
        if first != part.first_row + part.row_count:
            raise DatasetError(
                f"{file.location} is damaged after row {first}: it holds fewer rows than it says"
            )

    def _close(self) -> None:
        if self._rows is not None:
            self._rows.close()
            self._rows = None


def _parquet_chunk(
    file: InputFile, identity: str | None, first: int, batch: pa.RecordBatch
) -> Chunk:
    import pyarrow as pa

    identities = None
    if identity is not None:
        try:
            identities = batch.column(identity).cast(pa.string())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise DatasetError(
                f"{file.location}: the column '{identity}' cannot be written as text"
            ) from None
    return Chunk(
        np.arange(first + 1, first + 1 + len(batch)), read_arrow_jobs(batch), identities, len(batch)
    )


def _json_chunks(file: InputFile, part: Part, id_column: str | None) -> Iterator[Chunk]:
    names = ID_COLUMNS if id_column is None else (id_column,)
    for first, lines in _lines(file, part):
        numbers: list[int] = []
        documents: list[Any] = []
        identities: list[str | None] = []
        broken: dict[int, FieldError] = {}
        for number, line in enumerate(lines, start=first + 1):
            if line.isspace():
                continue
            identity = None
            try:
                document = parse_json(line)
            except InvalidJobError as error:
                broken[len(numbers)] = error
                document = None
            if isinstance(document, dict):
                found = next((name for name in names if name in document), None)
                if found is not None:
                    identity = document[found] if found in JOB_FIELDS else document.pop(found)
            numbers.append(number)
            documents.append(document)
            identities.append(
                None
                if identity is None
                else identity
                if isinstance(identity, str)
                else json.dumps(identity)
            )
        read = read_jobs(documents)
        read.errors.update(broken)
        texts = None
        if any(identity is not None for identity in identities):
            texts = require_pyarrow("predicting into a file").array(identities, "string")
        yield Chunk(np.array(numbers, dtype=np.int64), read, texts, len(lines))


def _lines(file: InputFile, part: Part) -> Iterator[tuple[int, list[bytes]]]:
    """Yields, for each chunk, the number of lines before it and its lines."""
    with reading(file) as stream:
        stream.seek(part.start)
        for first in range(part.first_row, part.first_row + part.row_count, CHUNK_ROWS):
            count = min(CHUNK_ROWS, part.first_row + part.row_count - first)
            lines = list(islice(stream, count))
            if len(lines) != count:
                raise DatasetError(
                    f"{file.location} has changed since it was first read: run the same command again"
                )
            yield first, lines


def _csv_chunks(file: InputFile, part: Part, id_column: str | None) -> Iterator[Chunk]:
    header, names = csv_header(file)
    identity = id_column_of(names, id_column, file.location)
    for first, lines in _lines(file, part):
        yield _csv_chunk(header, names, identity, first, lines)


def _csv_chunk(
    header: bytes, names: list[str], identity: str | None, first: int, lines: list[bytes]
) -> Chunk:
    rows = [row for row, line in enumerate(lines) if not line.isspace()]
    texts = [lines[row] for row in rows]
    columns = [name for name in dict.fromkeys((*JOB_FIELDS, identity)) if name in names]
    tables = _csv_tables(header, columns, texts, 0)
    good = [
        position for start, table in tables for position in range(start, start + table.num_rows)
    ]
    broken: dict[int, FieldError] = {
        position: InvalidJobError(f"is no line of CSV with {len(names)} columns in UTF-8")
        for position in set(range(len(texts))).difference(good)
    }
    numbers = first + 1 + np.array(rows, dtype=np.int64)
    if not good:
        return Chunk(numbers, read_jobs([])._replace(errors=broken), None, len(lines))
    pa = require_pyarrow("reading CSV")
    batch = pa.concat_tables([table for _, table in tables]).combine_chunks().to_batches()[0]
    read = merge_reads([(np.array(good, dtype=np.int64), _read_csv(batch))])
    read.errors.update(broken)
    identities = None
    if identity is not None:
        identities = batch.column(identity)
        if len(good) < len(texts):
            position_of = dict(zip(good, range(len(good)), strict=True))
            identities = identities.take(
                pa.array([position_of.get(position) for position in range(len(texts))], pa.int64())
            )
    return Chunk(numbers, read, identities, len(lines))


def _csv_tables(
    header: bytes, columns: list[str], lines: list[bytes], start: int
) -> list[tuple[int, pa.Table]]:
    """Parses these columns into tables of strings, each with the position of its first line; skips
    malformed lines."""
    table = _parsed_csv(header, columns, lines)
    if table is not None:
        return [(start, table)]
    if len(lines) < 2:
        return []
    half = len(lines) // 2
    return _csv_tables(header, columns, lines[:half], start) + _csv_tables(
        header, columns, lines[half:], start + half
    )


def _parsed_csv(header: bytes, columns: list[str], lines: list[bytes]) -> pa.Table | None:
    """Parses the lines as one table of strings; ``None`` when one of them is malformed."""
    import pyarrow as pa
    from pyarrow import csv

    content = header + b"".join(lines) + b"\n"
    try:
        table = csv.read_csv(
            io.BytesIO(content),
            read_options=csv.ReadOptions(
                use_threads=False, block_size=max(len(content), _LEAST_BLOCK_BYTES)
            ),
            convert_options=csv.ConvertOptions(
                include_columns=columns,
                column_types=dict.fromkeys(columns, pa.string()),
                strings_can_be_null=True,
                null_values=[""],
            ),
        )
    except pa.ArrowInvalid:
        return None
    return table if table.num_rows == len(lines) else None


def _read_csv(batch: pa.RecordBatch) -> ReadJobs:
    """Reads jobs without layers from the columns; jobs with layers, and rows with an invalid cell,
    as dictionaries."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if "layers" in batch.schema.names and batch.column("layers").null_count < len(batch):
        return read_jobs(_csv_documents(batch, np.arange(len(batch))))
    arrays, names = [], []
    is_malformed = np.zeros(len(batch), dtype=np.bool_)
    for name in batch.schema.names:
        if name not in JOB_FIELDS or name == "layers":
            continue
        column = batch.column(name)
        if name in COUNT_FIELDS:
            column = pc.replace_substring_regex(column, _NO_FRACTION, "")
            column = _cast(
                column,
                pa.int64(),
                lambda texts: pc.match_substring_regex(texts, _WHOLE_NUMBER),
                is_malformed,
            )
        elif name in SWITCH_FIELDS:
            column = _cast(
                column,
                pa.bool_(),
                lambda texts: pc.is_in(texts, pa.array(list(_SWITCH_WORDS))),
                is_malformed,
            )
        arrays.append(column)
        names.append(name)
    columns = pa.RecordBatch.from_arrays(arrays, names)
    if not is_malformed.any():
        return read_arrow_jobs(columns)
    well_formed, malformed = (~is_malformed).nonzero()[0], is_malformed.nonzero()[0]
    from_columns = read_arrow_jobs(columns.take(pa.array(well_formed)))
    return merge_reads(
        [(well_formed, from_columns), (malformed, read_jobs(_csv_documents(batch, malformed)))]
    )


def _cast(
    column: pa.Array,
    kind: pa.DataType,
    is_well_formed: Callable[[pa.Array], pa.Array],
    is_malformed: Any,
) -> pa.Array:
    """Casts strings to ``kind``; strings in another form become null and set ``is_malformed``."""
    import pyarrow as pa
    import pyarrow.compute as pc

    well_formed = is_well_formed(column)
    if pc.all(well_formed, min_count=0).as_py() is not False:
        return column.cast(kind)
    well_formed = well_formed.fill_null(True)
    is_malformed |= ~well_formed.to_numpy(zero_copy_only=False)
    return pc.if_else(well_formed, column, pa.scalar(None, column.type)).cast(kind)


def _csv_documents(batch: pa.RecordBatch, rows: Indices) -> list[dict[str, Any]]:
    """Converts rows to dictionaries for :func:`gpumemnet.job.json_codec.read_jobs`; a cell of the
    wrong type stays a string."""
    documents = row_documents(batch, rows)
    for document in documents:
        for name, text in document.items():
            if name in COUNT_FIELDS:
                document[name] = _whole(text)
            elif name in SWITCH_FIELDS:
                document[name] = _SWITCH_WORDS.get(text, text)
            elif name == "layers":
                try:
                    document[name] = parse_json(text)
                except InvalidJobError:
                    document[name] = text
    return documents


def _whole(text: str) -> int | str:
    whole = re.sub(_NO_FRACTION, "", text)
    digits = whole.removeprefix("-")
    return int(whole) if digits.isascii() and digits.isdigit() and len(digits) <= 18 else text
