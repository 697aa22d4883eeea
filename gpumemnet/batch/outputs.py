"""Joins finished parts, in order, into the output, which appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol

from gpumemnet.batch.answers import answer_schema
from gpumemnet.batch.inputs import is_url, local_path, store
from gpumemnet.batch.plan import PART_ROWS, Part
from gpumemnet.batch.scratch import Scratch, no_room
from gpumemnet.batch.text_formats import csv_header
from gpumemnet.data.atomic_files import sync_folder
from gpumemnet.errors import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa

_OBJECT_STORES: Final = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "memory", "hf"})
"""Stores in which an object appears when it is whole; in others it is written under another name first."""
COMPRESSION: Final = "zstd"


class Joiner(Protocol):
    """Writes parts one after the other into a stream."""

    def add(self, path: Path) -> None:
        """Write the answers of the part at ``path``."""

    def close(self) -> None:
        """Write what is left; the stream stays open."""


class ParquetJoiner:
    """Parts in Arrow's format, as Parquet; row groups do not depend on how the work was shared."""

    def __init__(self, stream: IO[bytes]) -> None:
        import pyarrow.parquet as pq

        schema = answer_schema()
        words = [field.name for field in schema if field.name not in ("row", "request_mib", "limit_mib", "job_id")]
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
        """Write the part, or hold it until there are enough rows for a row group."""
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
        """Write what is held, and the footer."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        """Write what is held as a row group."""
        import pyarrow as pa

        if self._rows:
            self._writer.write_table(pa.concat_tables(self._held).unify_dictionaries(), row_group_size=PART_ROWS)
        self._held, self._rows = [], 0


class LineJoiner:
    """Parts of lines as they stand, behind a header where there is one."""

    def __init__(self, stream: IO[bytes], header: bytes) -> None:
        self._stream = stream
        stream.write(header)

    def add(self, path: Path) -> None:
        """Copy the part."""
        with path.open("rb") as part:
            shutil.copyfileobj(part, self._stream, 2**20)

    def close(self) -> None:
        """There is nothing left."""


class Output:
    """The output of a batch on its way: parts are added in order, and :meth:`publish` lets it appear.

    Raises (all methods):
        DatasetError: when it cannot be written; finished parts stay.
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
                else LineJoiner(self._stream, csv_header(answer_schema()) if output_format == "csv" else b"")
            )
        except OSError as error:
            raise no_room(self._path, error) from None

    def add(self, part: Part) -> None:
        """Add the next part."""
        try:
            self._joiner.add(self._scratch.answers(part))
            rejected = self._scratch.rejected(part)
            if rejected.exists():
                with rejected.open("rb") as stream:
                    shutil.copyfileobj(stream, self._rejected)
        except OSError as error:
            raise no_room(self._location, error) from None

    def publish(self, is_empty: bool, has_rejected: bool) -> None:
        """Let the rejected rows appear, and the output, unless it ``is_empty``; older ones make room."""
        try:
            self._joiner.close()
            for stream in (self._stream, self._rejected):
                stream.flush()
                os.fsync(stream.fileno())
            _publish(self._rejected_path if has_rejected else None, rejected_location(self._location))
            if not is_empty:
                _publish(self._path, self._location)
        except OSError as error:
            raise no_room(self._location, error) from None
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the files; what is not published stays invisible."""
        with suppress(OSError, ValueError):
            self._joiner.close()
        for stream in (self._stream, self._rejected):
            with suppress(OSError):
                stream.close()


def rejected_location(location: str) -> str:
    """Where the rejected rows of the output at ``location`` go: ``predictions.parquet`` → ``predictions.rejected.jsonl``."""
    return os.path.splitext(location)[0] + ".rejected.jsonl"  # noqa: PTH122 - a URL is no path


def check_writable(location: str, inputs: Iterable[str]) -> None:
    """Refuse an output that is one of the inputs, or for which there is no folder.

    Raises:
        DatasetError: says which.
    """
    if is_url(location):
        store(location)
        is_input = location in set(inputs)
    else:
        is_input = local_path(location).resolve() in {local_path(each).resolve() for each in inputs if not is_url(each)}
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
    """Let the file at ``path`` appear at ``location``, or nothing be there."""
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
    except Exception as error:  # the packages for stores raise errors of their own
        raise OSError(f"{type(error).__name__}: {error}") from None


def _protocols(system: Any) -> tuple[str, ...]:
    return (system.protocol,) if isinstance(system.protocol, str) else tuple(system.protocol)
