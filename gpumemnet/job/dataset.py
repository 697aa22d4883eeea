"""The dataset on disk: one Parquet schema with a version, read and written atomically, in batches.

``dataset_builder`` writes it and ``models`` reads it; its job columns carry the names of
:class:`~gpumemnet.job.training_job.TrainingJob`, so a Parquet file of plain jobs (no labels) is
read by the same code.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpumemnet.atomic_files import sync_folder
from gpumemnet.errors import DatasetError, InvalidJobError, MissingExtraError, first_line
from gpumemnet.job.arrow_codec import check_columns, read_arrow_jobs
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.measurement import (
    MEASUREMENT_FIELDS,
    Measurement,
    measurement_from_dict,
    measurement_to_dict,
)
from gpumemnet.job.training_job import JOB_FIELDS, REQUIRED_FIELDS

if TYPE_CHECKING:
    import pyarrow as pa

DATASET_VERSION: Final = 1
"""Version of the Parquet schema, kept in the file's metadata under :data:`VERSION_KEY`."""
VERSION_KEY: Final = b"gpumemnet.dataset_version"
LATER_COLUMNS: Final = frozenset(
    {"traced_peak_bytes", "ranks", "architecture_family", "label_state", "traced", "traced_version"}
)
"""Columns added to version 1 after its first files; a file without one has no values there."""
ROWS_PER_BATCH: Final = 2_000

_STRINGS: Final = frozenset(
    {
        *(
            "family",
            "optimizer",
            "precision",
            "activation_function",
            "attention_kernel",
            "optimizer_implementation",
        ),
        *(
            "checkpointing",
            "status",
            "label_source",
            "provenance",
            "gpu",
            "recipe",
            "architecture",
            "options",
        ),
        *(
            "architecture_key",
            "reason",
            "protocol",
            "history",
            "driver",
            "cuda",
            "cudnn",
            "torch",
            "allocator_settings",
        ),
        *("architecture_family", "label_state", "traced_version"),
    }
)
_REQUIRED: Final = frozenset(
    {
        *REQUIRED_FIELDS,
        *(
            "schema_version",
            "layers",
            "total_activations",
            "total_parameters",
            "trainable_parameters",
        ),
        *(
            "optimizer_implementation",
            "checkpointing",
            "channels_last",
            "gradient_accumulation",
            "cudnn_benchmark",
            "ranks",
        ),
        *(
            "status",
            "label_source",
            "capacity_bytes",
            "provenance",
            "gpu",
            "recipe",
            "architecture",
            "options",
        ),
        *("architecture_key", "phases", "allocator"),
    }
)


def job_schema() -> pa.Schema:
    """Columns of a Parquet file of jobs, named as the fields of
    :class:`~gpumemnet.job.training_job.TrainingJob`."""
    return _schema(JOB_FIELDS)


def dataset_schema() -> pa.Schema:
    """Columns of a dataset: the job's, then the measurement's; the version is in the schema's
    metadata."""
    return _schema((*JOB_FIELDS, *MEASUREMENT_FIELDS)).with_metadata(
        {VERSION_KEY: str(DATASET_VERSION).encode()}
    )


def write_dataset(path: str | Path, measurements: Iterable[Measurement]) -> int:
    """Write ``measurements`` to ``path`` atomically.

    Returns:
        The number of rows.

    Raises:
        DatasetError: on a stand-in row, or when the file cannot be written (folder missing, disk
            full).
        MissingExtraError: when pyarrow is not installed.
    """
    return _write(Path(path), map(_dataset_row, measurements), dataset_schema())


def read_dataset(path: str | Path) -> list[Measurement]:
    """Every measurement of ``path``.

    Raises:
        DatasetError: when the file is missing, truncated, foreign or of another version; names the
            row of a bad value.
        MissingExtraError: when pyarrow is not installed.
    """
    measurements: list[Measurement] = []
    path = Path(path)
    with _open_parquet(path) as file:
        check_dataset_schema(path, file.schema_arrow)
        present = [name for name in dataset_schema().names if name in file.schema_arrow.names]
        for row, document in _rows(path, file, present, ROWS_PER_BATCH):
            try:
                measurements.append(measurement_from_dict(document))
            except (DatasetError, InvalidJobError) as error:
                raise DatasetError(f"{path}, row {row}: {error}") from None
    return measurements


def read_jobs(path: str | Path, batch_rows: int = ROWS_PER_BATCH) -> Iterator[JobTable]:
    """The jobs of a dataset or of a Parquet file of plain jobs, streamed in tables of at most
    ``batch_rows``.

    A column that the file lacks takes the field's default; columns that are no job field are not
    read.

    Raises:
        DatasetError: when the file is missing, truncated, no Parquet or without a required column;
            names the row and field of a bad value.
        MissingExtraError: when pyarrow is not installed.
    """
    path = Path(path)
    with _open_parquet(path) as file:
        check_columns(file.schema_arrow, str(path))
        columns = [name for name in JOB_FIELDS if name in file.schema_arrow.names]
        first = 1
        for batch in _batches(path, file, columns, batch_rows):
            read = read_arrow_jobs(batch)
            for row, error in sorted(read.errors.items()):
                raise DatasetError(f"{path}, row {first + row}: {error}")
            first += len(batch)
            yield read.table


def is_dataset(path: str | Path) -> bool:
    """Whether the Parquet file at ``path`` is a dataset of any version, rather than a table of
    plain jobs.

    Raises:
        DatasetError: when the file is missing or no Parquet.
        MissingExtraError: when pyarrow is not installed.
    """
    with _open_parquet(Path(path)) as file:
        return VERSION_KEY in (file.schema_arrow.metadata or {})


def check_dataset_schema(path: Path, schema: pa.Schema) -> None:
    """Refuse a file whose schema is not this version's dataset schema.

    Raises:
        DatasetError: says whether the file is no dataset, of another version, or lacks a column or
            has one of another type.
    """
    version = (schema.metadata or {}).get(VERSION_KEY)
    if version is None:
        raise DatasetError(f"{path} is no gpumemnet dataset: its metadata state no dataset version")
    if version != str(DATASET_VERSION).encode():
        raise DatasetError(
            f"{path} has dataset version {version.decode(errors='replace')[:20]}, and this version of gpumemnet reads "
            f"{DATASET_VERSION}: upgrade gpumemnet or build the dataset again"
        )
    for column in dataset_schema():
        if column.name not in schema.names:
            if column.name in LATER_COLUMNS:
                continue
            raise DatasetError(f"{path} lacks the column '{column.name}'")
        found = schema.field(column.name).type
        if found != column.type:
            raise DatasetError(f"{path}: the column '{column.name}' is {found}, not {column.type}")


def _schema(names: tuple[str, ...]) -> pa.Schema:
    pa = _import_pyarrow()
    layer = pa.struct(
        [("kind", pa.string()), ("activations", pa.int64()), ("parameters", pa.int64())]
    )
    numbers = (
        "allocated_bytes",
        "reserved_bytes",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "process_bytes",
        "device_bytes",
    )
    phase = pa.struct([("name", pa.string()), *((number, pa.int64()) for number in numbers)])
    types = dict.fromkeys(_STRINGS, pa.string()) | {
        "layers": pa.list_(layer),
        "phases": pa.list_(phase),
        "allocator": pa.map_(pa.string(), pa.int64()),
        "traced": pa.map_(pa.string(), pa.int64()),
        "channels_last": pa.bool_(),
        "cudnn_benchmark": pa.bool_(),
        "seconds": pa.float64(),
    }
    return pa.schema(
        [
            pa.field(name, types.get(name, pa.int64()), nullable=name not in _REQUIRED)
            for name in names
        ]
    )


def _dataset_row(measurement: Measurement) -> dict[str, Any]:
    if measurement.provenance == "stand_in":
        raise DatasetError(
            "a rehearsal with a stand-in process measured nothing: its rows cannot enter a dataset"
        )
    maps = {name: list(getattr(measurement, name).items()) for name in ("allocator", "traced")}
    return measurement_to_dict(measurement) | maps


def _write(path: Path, rows: Iterator[dict[str, Any]], schema: pa.Schema) -> int:
    pa = _import_pyarrow()
    import pyarrow.parquet as pq

    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    count = 0
    try:
        with partial.open("wb") as file:
            with pq.ParquetWriter(file, schema, compression="zstd") as writer:
                while batch := list(itertools.islice(rows, ROWS_PER_BATCH)):
                    writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
                    count += len(batch)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise DatasetError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return count


@contextlib.contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    pa = _import_pyarrow()
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except FileNotFoundError:
        raise DatasetError(f"{path} does not exist") from None
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"{path} is no whole Parquet file: {first_line(error)}") from None
    with file:
        yield file


def _rows(
    path: Path, file: Any, columns: list[str], batch_rows: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    row = 0
    for batch in _batches(path, file, columns, batch_rows):
        for document in batch.to_pylist():
            row += 1
            yield row, document


def _batches(
    path: Path, file: Any, columns: list[str], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    pa = _import_pyarrow()
    row = 0
    try:
        for batch in file.iter_batches(batch_size=batch_rows, columns=columns):
            yield batch
            row += len(batch)
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"{path} is damaged after row {row}: {first_line(error)}") from None


def _import_pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise MissingExtraError("pyarrow", "parquet", "reading and writing Parquet") from None
    return pyarrow
