"""Joins finished parts, in order, into the output file, and publishes it atomically."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol

from gpumemnet.atomic_files import sync_folder
from gpumemnet.batch.answers import answer_schema
from gpumemnet.batch.plan import PART_ROWS, Part
from gpumemnet.batch.scratch import Scratch, no_room
from gpumemnet.batch.text_formats import csv_header
from gpumemnet.errors import DatasetError
from gpumemnet.job.job_files import is_url, local_path, store

if TYPE_CHECKING:
    import pyarrow as pa

_OBJECT_STORES: Final = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "memory", "hf"}
)
"""Schemes of stores that publish an object only when it is complete; elsewhere it is written under
another name first."""
COMPRESSION: Final = "zstd"


class Joiner(Protocol):
    """Writes parts in order into a stream."""

    def add(self, path: Path) -> None:
        """Writes the answers of the part at ``path``."""

    def close(self) -> None:
        """Writes the rest; the stream stays open."""


class ParquetJoiner:
    """Joins parts in Arrow's format into Parquet; the row groups do not depend on the number of
    workers."""

    def __init__(self, stream: IO[bytes]) -> None:
        import pyarrow.parquet as pq

        schema = answer_schema()
        words = [
            field.name
            for field in schema
            if field.name not in ("row", "request_mib", "limit_mib", "job_id")
        ]
        self._writer = pq.ParquetWriter(
            stream,
            schema,
            compression=COMPRESSION,
            compression_level=1,
            use_dictionary=words,
            column_encoding={"row": "DELTA_BINARY_PACKED"},
        )
        self._held: list[pa.Table] = []
        self._rows = 0

    def add(self, path: Path) -> None:
        """Writes the part, or holds it until there are enough rows for a row group."""
        import pyarrow as pa

        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
            if not self._held and len(table) >= PART_ROWS:
                self._writer.write_table(table, row_group_size=PART_ROWS)
                return
            self._held.append(pa.ipc.open_file(path.read_bytes()).read_all())
        self._rows += len(table)
        if self._rows >= PART_ROWS:
            self._flush()

    def close(self) -> None:
        """Writes the parts on hold, and the footer."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        """Writes the parts on hold as a row group."""
        import pyarrow as pa

        if self._rows:
            self._writer.write_table(
                pa.concat_tables(self._held).unify_dictionaries(), row_group_size=PART_ROWS
            )
        self._held, self._rows = [], 0


class LineJoiner:
    """Copies parts of lines unchanged, after the header."""

    def __init__(self, stream: IO[bytes], header: bytes) -> None:
        self._stream = stream
        stream.write(header)

    def add(self, path: Path) -> None:
        """Copies the part."""
        with path.open("rb") as part:
            shutil.copyfileobj(part, self._stream, 2**20)

    def close(self) -> None:
        """Does nothing: all parts are already written."""


class Output:
    """The output of a running batch: :meth:`add` takes parts in order, and :meth:`publish` makes
    the file visible.

    Raises (all methods):
        DatasetError: when the output cannot be written; finished parts are kept.
    """

    def __init__(self, location: str, output_format: str, scratch: Scratch) -> None:
        self._location = location
        self._scratch = scratch
        self._path = scratch.folder / f"joined.{output_format}.partial"
        self._rejected_path = scratch.folder / "rejected.jsonl.partial"
        try:
            self._stream = self._path.open("wb")
            self._rejected = self._rejected_path.open("wb")
            self._joiner: Joiner = (
                ParquetJoiner(self._stream)
                if output_format == "parquet"
                else LineJoiner(
                    self._stream, csv_header(answer_schema()) if output_format == "csv" else b""
                )
            )
        except OSError as error:
            raise no_room(self._path, error) from None

    def add(self, part: Part) -> None:
        """Adds the next part."""
        try:
            self._joiner.add(self._scratch.answers(part))
            rejected = self._scratch.rejected(part)
            if rejected.exists():
                with rejected.open("rb") as stream:
                    shutil.copyfileobj(stream, self._rejected)
        except OSError as error:
            raise no_room(self._location, error) from None

    def publish(self, is_empty: bool, has_rejected: bool) -> None:
        """Publishes the rejected rows and, unless it ``is_empty``, the output; both replace older
        files."""
        try:
            self._joiner.close()
            for stream in (self._stream, self._rejected):
                stream.flush()
                os.fsync(stream.fileno())
            _publish(
                self._rejected_path if has_rejected else None, rejected_location(self._location)
            )
            if not is_empty:
                _publish(self._path, self._location)
        except OSError as error:
            raise no_room(self._location, error) from None
        finally:
            self.close()

    def close(self) -> None:
        """Closes the files without publishing them."""
        with suppress(OSError, ValueError):
            self._joiner.close()
        for stream in (self._stream, self._rejected):
            with suppress(OSError):
                stream.close()


def rejected_location(location: str) -> str:
    """The file of the rejected rows of the output at ``location``: ``predictions.parquet`` →
    ``predictions.rejected.jsonl``."""
    return os.path.splitext(location)[0] + ".rejected.jsonl"  # noqa: PTH122 - a URL is no path


def check_writable(location: str, inputs: Iterable[str]) -> None:
    """Checks that the output is not one of the inputs, and that its folder exists.

    Raises:
        DatasetError: says which condition fails.
    """
    if is_url(location):
        store(location)
        is_input = location in set(inputs)
    else:
        is_input = local_path(location).resolve() in {
            local_path(each).resolve() for each in inputs if not is_url(each)
        }
    if is_input:
        raise DatasetError(f"{location} is one of the inputs: choose another file for the answers")
    if is_url(location):
        return
    path = local_path(location)
    if not path.parent.is_dir():
        raise DatasetError(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir():
        raise DatasetError(f"{path} is a folder: name a file")


def _publish(path: Path | None, location: str) -> None:
    """Moves the file at ``path`` to ``location``; without ``path``, removes the file at
    ``location``."""
    if not is_url(location):
        target = local_path(location)
        if path is None:
            with suppress(FileNotFoundError):
                target.unlink()
            return
        path.replace(target)
        sync_folder(target.parent)
        return
    system, target_name = store(location)
    try:
        if path is None:
            if system.exists(target_name):
                system.rm_file(target_name)
        elif not _OBJECT_STORES.isdisjoint(_protocols(system)):
            system.put_file(str(path), target_name)
        else:
            system.put_file(str(path), f"{target_name}.partial")
            system.mv(f"{target_name}.partial", target_name)
    except OSError:
        raise
    except Exception as error:  # the packages for stores have their own exception classes
        raise OSError(f"{type(error).__name__}: {error}") from None


def _protocols(system: Any) -> tuple[str, ...]:
    return (system.protocol,) if isinstance(system.protocol, str) else tuple(system.protocol)
