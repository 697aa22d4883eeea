"""Files of jobs: finds them by path, glob or URL, and opens them; an error is one sentence that names
the file."""

from __future__ import annotations

import csv
import glob
import hashlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from gpumemnet.errors import (
    DatasetError,
    InvalidRequestError,
    check_installed,
    first_line,
)
from gpumemnet.job.arrow_codec import WORD_FIELDS, check_names

FORMATS: Final = {".parquet": "parquet", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
"""Suffix → format that is read in constant memory."""
DATASET_VERSION: Final = 1
"""Version of the dataset's schema, kept in the file's metadata under :data:`VERSION_KEY`."""
VERSION_KEY: Final = b"gpumemnet.dataset_version"

_SCHEME: Final = "://"
_BUFFER_BYTES: Final = 2**20
_MAX_HEADER_BYTES: Final = 2**20
_STAMPS: Final = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created")


@dataclass(frozen=True, slots=True)
class JobFile:
    """One file of jobs.

    Attributes:
        location: path, or URL with its scheme.
        format: a value of :data:`FORMATS`.
        size_bytes: size of the file.
        stamp: a value that changes with the content: the modification time, or the store's tag.
    """

    location: str
    format: str
    size_bytes: int
    stamp: str


def file_sha256(path: Path) -> str:
    """SHA-256 of the content of a file.

    Raises:
        DatasetError: when it is missing or cannot be read.
    """
    with open_bytes(str(path)) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_url(location: str) -> bool:
    """Whether ``location`` is in a store; paths and ``file://`` URLs are not."""
    return _SCHEME in location and not location.startswith("file" + _SCHEME)


def local_path(location: str) -> Path:
    """The path of a local file, given as a path or as a ``file://`` URL."""
    return Path(location.removeprefix("file" + _SCHEME))


def format_of(location: str, purpose: str) -> str:
    """The format that the suffix tells.

    Raises:
        InvalidRequestError: when the suffix is unknown; its field is ``purpose``.
    """
    suffix = PurePosixPath(location).suffix.lower()
    if suffix not in FORMATS:
        raise InvalidRequestError(f"{location} must end in {', '.join(FORMATS)}", purpose)
    return FORMATS[suffix]


def find_files(patterns: Iterable[str]) -> list[JobFile]:
    """Finds the files that paths, globs and URLs match, each once; the matches of a glob are sorted
    by name.

    Raises:
        InvalidRequestError: when one of them matches nothing, a suffix is unknown, or a package for
            a store is missing.
    """
    locations = dict.fromkeys(each for pattern in patterns for each in _matches(pattern))
    return [_describe(location) for location in locations]


def store(url: str) -> tuple[Any, str]:
    """Opens the store of ``url`` as an fsspec file system; returns it with the path inside it.

    Raises:
        InvalidRequestError: when the scheme is unknown, or a package is missing.
    """
    scheme = url.split(_SCHEME)[0]
    try:
        system, path = importlib.import_module("fsspec.core").url_to_fs(url)
    except ImportError as error:
        raise InvalidRequestError(
            f"{url}: stores need the package fsspec and the one for {scheme}, such as s3fs ({first_line(error, 120)})",
            "jobs",
        ) from None
    except ValueError:
        raise InvalidRequestError(f"{url}: fsspec knows no store called {scheme}", "jobs") from None
    return system, path


@contextmanager
def open_bytes(location: str) -> Iterator[Any]:
    """Opens a file as a stream of bytes.

    Raises:
        DatasetError: when the file cannot be read, on opening or within the ``with`` statement.
    """
    try:
        if is_url(location):
            system, path = store(location)
            stream = system.open(path, "rb")
        else:
            stream = local_path(location).open("rb", buffering=_BUFFER_BYTES)
        with stream:
            yield stream
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise DatasetError(f"{location} cannot be read: {reason}") from None


@contextmanager
def open_parquet(location: str, *, as_dictionaries: bool = True) -> Iterator[Any]:
    """Opens a Parquet file for reading in small buffers, so that memory does not grow with the size
    of its row groups.

    Args:
        location: path or URL.
        as_dictionaries: read strings with few distinct values as dictionaries, which is faster.

    Raises:
        DatasetError: when the file is missing or damaged, on opening or within the ``with``
            statement.
        MissingExtraError: when pyarrow is not installed.
    """
    pyarrow = import_pyarrow("reading Parquet")
    import pyarrow.parquet as pq

    with open_bytes(location) as stream:
        try:
            metadata = pq.read_metadata(stream)
            with pq.ParquetFile(
                stream,
                metadata=metadata,
                read_dictionary=_word_columns(metadata.schema) if as_dictionaries else (),
                buffer_size=_BUFFER_BYTES,
                pre_buffer=False,
            ) as parquet:
                dataset_version(parquet.schema_arrow, location)
                yield parquet
        except (OSError, pyarrow.ArrowException) as error:
            raise DatasetError(
                f"{location} is no whole Parquet file: {first_line(error)}"
            ) from None


def dataset_version(schema: Any, location: str) -> int | None:
    """The dataset version that a Parquet file states; ``None`` for a table of plain jobs.

    Raises:
        DatasetError: when this version of gpumemnet cannot read it.
    """
    version = (schema.metadata or {}).get(VERSION_KEY)
    if version is None:
        return None
    if version != str(DATASET_VERSION).encode():
        raise DatasetError(
            f"{location} has dataset version {version.decode(errors='replace')[:20]}, and this version of gpumemnet reads "
            f"{DATASET_VERSION}: upgrade gpumemnet or build the dataset again"
        )
    return DATASET_VERSION


def csv_header(location: str) -> tuple[bytes, list[str]]:
    """Reads the first line of a CSV file; returns the line unchanged, and the column names.

    Raises:
        DatasetError: when the line is not a CSV header in UTF-8, or a column is missing or appears
            twice.
    """
    with open_bytes(location) as stream:
        line = stream.readline(_MAX_HEADER_BYTES)
    try:
        names = next(csv.reader([line.decode("utf-8-sig").rstrip("\r\n")]), [])
    except (UnicodeDecodeError, csv.Error):
        raise DatasetError(f"{location}: the first line is no header of CSV in UTF-8") from None
    check_names(names, location)
    return line, names


def import_pyarrow(purpose: str) -> Any:
    """Imports pyarrow.

    Raises:
        MissingExtraError: when pyarrow is not installed.
    """
    check_installed("pyarrow", "parquet", purpose)
    import pyarrow

    return pyarrow


def _matches(pattern: str) -> list[str]:
    if is_url(pattern):
        if not glob.has_magic(pattern):
            return [pattern]
        system, path = store(pattern)
        found = [
            system.unstrip_protocol(str(name))
            for name in sorted(_ask_store(pattern, lambda: system.glob(path)))
        ]
    else:
        path = str(local_path(pattern))
        # A file may have a bracket in its name.
        if not glob.has_magic(path) or Path(path).exists():
            return [path]
        found = sorted(name for name in glob.glob(path, recursive=True) if Path(name).is_file())  # noqa: PTH207 - absolute globs
    if not found:
        raise InvalidRequestError(f"{pattern}: no file has such a name", "jobs")
    return found


def _describe(location: str) -> JobFile:
    form = format_of(location, "jobs")
    if is_url(location):
        system, path = store(location)
        facts = _ask_store(location, lambda: system.info(path))
        if facts.get("type") == "directory" or facts.get("size") is None:
            raise InvalidRequestError(f"{location} is no file", "jobs")
        stamp = next((facts[name] for name in _STAMPS if name in facts), "")
        return JobFile(location, form, int(facts["size"]), str(stamp))
    file = Path(location)
    if not file.is_file():
        problem = "is no file" if file.exists() else "does not exist"
        raise InvalidRequestError(f"{location} {problem}", "jobs")
    state = file.stat()
    return JobFile(location, form, state.st_size, str(state.st_mtime_ns))


def _ask_store(location: str, call: Callable[[], Any]) -> Any:
    """Calls ``call``; the packages for stores have exception classes of their own."""
    try:
        return call()
    except FileNotFoundError:
        raise InvalidRequestError(f"{location} does not exist", "jobs") from None
    except Exception as error:
        raise InvalidRequestError(
            f"{location} cannot be reached ({type(error).__name__}: {first_line(error, 160)})",
            "jobs",
        ) from None


def _word_columns(schema: Any) -> list[str]:
    """Paths of the string columns with few distinct values: options of the job, and the kinds of
    the layers."""
    columns = [schema.column(index) for index in range(len(schema))]
    return [
        column.path
        for column in columns
        if column.physical_type == "BYTE_ARRAY"
        and (
            column.path in WORD_FIELDS
            or (column.path.startswith("layers.") and column.path.endswith(".kind"))
        )
    ]
