"""Opens the files of a batch; every failure becomes an error message of one sentence that names the
file."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from gpumemnet.batch.inputs import InputFile, open_input
from gpumemnet.errors import DatasetError, MissingExtraError, first_line
from gpumemnet.job.arrow_codec import WORD_FIELDS
from gpumemnet.job.training_job import JOB_FIELDS, REQUIRED_FIELDS

_BUFFER_BYTES: Final = 2**20
_HEADER_BYTES: Final = 2**20


@contextmanager
def reading(file: InputFile) -> Iterator[Any]:
    """Opens a file as a stream of bytes.

    Raises:
        DatasetError: when the file cannot be read, on opening or within the ``with`` statement.
    """
    try:
        with open_input(file.location) as stream:
            yield stream
    except OSError as error:
        raise DatasetError(
            f"{file.location} cannot be read: {error.strerror or first_line(error)}"
        ) from None


@contextmanager
def open_parquet(file: InputFile) -> Iterator[Any]:
    """Opens a Parquet file for reading in small buffers, so that memory does not grow with the size
    of its row groups.

    Columns of strings with few distinct values are read as dictionaries.

    Raises:
        DatasetError: when the file is damaged, on opening or within the ``with`` statement.
        MissingExtraError: when pyarrow is not installed.
    """
    pyarrow = require_pyarrow("reading Parquet")
    import pyarrow.parquet as pq

    with reading(file) as stream:
        try:
            metadata = pq.read_metadata(stream)
            with pq.ParquetFile(
                stream,
                metadata=metadata,
                read_dictionary=_words(metadata.schema),
                buffer_size=_BUFFER_BYTES,
                pre_buffer=False,
            ) as parquet:
                yield parquet
        except (OSError, pyarrow.ArrowException) as error:
            raise DatasetError(
                f"{file.location} is no whole Parquet file: {first_line(error)}"
            ) from None


def csv_header(file: InputFile) -> tuple[bytes, list[str]]:
    """Reads the first line of a CSV file; returns the line unchanged, and the column names.

    Raises:
        DatasetError: when the line is not a CSV header in UTF-8, or a column is missing or appears
            twice.
    """
    with reading(file) as stream:
        line = stream.readline(_HEADER_BYTES)
    try:
        names = next(csv.reader([line.decode("utf-8-sig").rstrip("\r\n")]), [])
    except (UnicodeDecodeError, csv.Error):
        raise DatasetError(
            f"{file.location}: the first line is no header of CSV in UTF-8"
        ) from None
    for name in REQUIRED_FIELDS:
        if name not in names:
            raise DatasetError(f"{file.location} holds no jobs: the column '{name}' is missing")
    for name in JOB_FIELDS:
        if names.count(name) > 1:
            raise DatasetError(f"{file.location}: there are two columns called '{name}'")
    return line, names


def require_pyarrow(purpose: str) -> Any:
    """Imports pyarrow.

    Raises:
        MissingExtraError: when pyarrow is not installed.
    """
    try:
        import pyarrow
    except ImportError:
        raise MissingExtraError("pyarrow", "parquet", purpose) from None
    return pyarrow


def _words(schema: Any) -> list[str]:
    """Paths of the string columns with few distinct values: options of the job, and the kinds of
    the layers."""
    paths = [schema.column(index).path for index in range(len(schema))]
    chosen = [
        path
        for path in paths
        if path in WORD_FIELDS or (path.startswith("layers.") and path.endswith(".kind"))
    ]
    return [
        path for path in chosen if schema.column(paths.index(path)).physical_type == "BYTE_ARRAY"
    ]
