"""The dataset: measurements as columns, in a Parquet file with one versioned schema.

``dataset_builder`` writes it and ``models`` reads it.  Its job columns carry the names of
:class:`~gpumemnet.job.training_job.TrainingJob`, so every command that reads jobs from Parquet
reads a dataset too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.atomic_files import Document, replacing
from gpumemnet.errors import DatasetError, first_line
from gpumemnet.job.arrow_codec import is_layers, read_arrow_jobs
from gpumemnet.job.job_files import (
    DATASET_VERSION,
    VERSION_KEY,
    dataset_version,
    import_pyarrow,
    open_parquet,
)
from gpumemnet.job.job_table import Array, Columns, JobTable, Rows
from gpumemnet.job.measurement import (
    COUNT_COLUMNS,
    MAX_BYTES,
    MEASUREMENT_FIELDS,
    STATE_COLUMNS,
    TRACED_PARTS,
    Measurement,
    Phase,
    architecture_keys,
    check_states,
    label_column,
    measurement_of,
    measurement_to_dict,
)
from gpumemnet.job.training_job import JOB_FIELDS, REQUIRED_FIELDS, TOTAL_FIELDS, TrainingJob

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_AT_ONCE: Final = 2_000
_OR_NONE: Final = " | None"
_FILLED_FIELDS: Final = {*TOTAL_FIELDS, "trainable_parameters"}
"""Fields that a job may leave out and a :class:`TrainingJob` always has."""


@dataclass(frozen=True, eq=False)
class Dataset(Columns, Rows[Measurement]):
    """``B`` measurements as columns; a single row is a :class:`Measurement`.

    Attributes:
        jobs: the jobs.
        columns: the other fields of the measurements, under their names, in Arrow.
        keys: the architecture key of each job, shape ``[B]``.
    """

    jobs: JobTable
    columns: pa.Table
    keys: NDArray[np.object_]

    @staticmethod
    def from_measurements(measurements: Sequence[Measurement]) -> Dataset:
        """The columns of ``measurements``; a dataset stays as it is."""
        if isinstance(measurements, Dataset):
            return measurements
        pa = import_pyarrow("tables of measurements")
        schema = _schema(MEASUREMENT_FIELDS)
        return Dataset(
            JobTable.from_jobs([measurement.job for measurement in measurements]),
            pa.Table.from_pylist([_row(one) for one in measurements], schema),
            np.array([one.architecture_key for one in measurements], dtype=object),
        )

    def __iter__(self) -> Iterator[Measurement]:
        documents = (
            row for batch in self.columns.to_batches(_ROWS_AT_ONCE) for row in batch.to_pylist()
        )
        for job, document in zip(self.jobs, documents, strict=True):
            yield measurement_of(job, document)

    def numbers(self, name: str) -> Array:
        """The field ``name``, a count or ``seconds``; NaN where a row has none, shape ``[B]``."""
        column = self.columns.column(name).cast("float64")
        return np.asarray(column.to_numpy(), dtype=np.float64)

    def words(self, name: str) -> NDArray[np.object_]:
        """The strings of the field ``name``; ``None`` where a row has none, shape ``[B]``."""
        return np.array(self.columns.column(name).to_pylist(), dtype=object)

    def traced(self, part: str) -> Array:
        """The traced bytes of one of :data:`~gpumemnet.job.measurement.TRACED_PARTS`; NaN where a
        row has none, shape ``[B]``."""
        import pyarrow.compute as pc

        found = pc.map_lookup(self.columns.column("traced"), part, "first").cast("float64")
        return np.asarray(found.to_numpy(), dtype=np.float64)

    @cached_property
    def label_bytes(self) -> Array:
        """The labels; NaN where the job did not end ``ok``, shape ``[B]``."""
        labels = np.full(len(self), np.nan)
        sources, is_ok = self.words("label_source"), self.words("status") == "ok"
        for source in set(sources):
            own = is_ok & (sources == source)
            labels[own] = self.numbers(label_column(source))[own]
        steady = self.numbers("steady_process_bytes")
        return np.where(is_ok & ~np.isnan(steady), steady, labels)

    @property
    def split_groups(self) -> NDArray[np.object_]:
        """What a split never divides, see :attr:`Measurement.split_group`, shape ``[B]``."""
        families = self.words("architecture_family")
        return np.where(families.astype(bool), families, self.keys)


def dataset_schema() -> pa.Schema:
    """Columns of a dataset: the job's, then the measurement's; the version is in the schema's
    metadata."""
    return _schema((*JOB_FIELDS, *MEASUREMENT_FIELDS)).with_metadata(
        {VERSION_KEY: str(DATASET_VERSION).encode()}
    )


def is_dataset(path: str | Path) -> bool:
    """Whether the Parquet file at ``path`` is a dataset, rather than a table of plain jobs.

    Raises:
        DatasetError: when the file is missing, no Parquet, or a dataset of another version.
        MissingExtraError: when pyarrow is not installed.
    """
    with open_parquet(str(path)) as parquet:
        return dataset_version(parquet.schema_arrow, str(path)) is not None


def read_dataset(path: str | Path) -> Dataset:
    """Reads the dataset at ``path``.

    Raises:
        DatasetError: when the file is missing, damaged, no dataset or of another version; names the
            row of a bad value.
        MissingExtraError: when pyarrow is not installed.
    """
    import_pyarrow("reading datasets")
    import pyarrow as pa

    with open_parquet(str(path), as_dictionaries=False) as parquet:
        schema = dataset_schema()
        _check_schema(path, parquet.schema_arrow, schema)
        present = [name for name in schema.names if name in parquet.schema_arrow.names]
        measured = [name for name in MEASUREMENT_FIELDS if name in present]
        jobs, batches, count = [], [], 0
        try:
            for batch in parquet.iter_batches(_ROWS_AT_ONCE, columns=present):
                read = read_arrow_jobs(batch)
                for row, error in sorted(read.errors.items()):
                    raise DatasetError(f"{path}, row {count + row + 1}: {error}")
                jobs.append(read.table)
                batches.append(batch.select(measured))
                count += len(batch)
        except (OSError, pa.ArrowException) as error:
            raise DatasetError(
                f"{path} is damaged after row {count}: {first_line(error)}"
            ) from None
    stated = pa.Table.from_batches(batches, pa.schema([schema.field(name) for name in measured]))
    columns = pa.concat_tables(  # those that older files lack are null
        [stated, _schema(MEASUREMENT_FIELDS).empty_table()], promote_options="default"
    )
    table = JobTable.concatenate(jobs)
    keys = np.array(list(architecture_keys(table)), dtype=object)
    dataset = Dataset(table, columns.select(MEASUREMENT_FIELDS), keys)
    _check_rows(dataset, path)
    return dataset


def write_dataset(path: str | Path, measurements: Iterable[Measurement]) -> int:
    """Writes ``measurements`` to ``path`` atomically.

    Returns:
        The number of rows.

    Raises:
        DatasetError: on a stand-in row, or when the file cannot be written (folder missing, disk
            full).
        MissingExtraError: when pyarrow is not installed.
    """
    pa = import_pyarrow("writing datasets")
    import pyarrow.parquet as pq

    path, schema, rows = Path(path), dataset_schema(), map(_row, measurements)
    count = 0
    try:
        with replacing(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
            while batch := list(itertools.islice(rows, _ROWS_AT_ONCE)):
                if any(row["provenance"] == "stand_in" for row in batch):
                    raise DatasetError(
                        "a rehearsal with a stand-in process measured nothing: its rows cannot enter a dataset"
                    )
                writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
                count += len(batch)
    except OSError as error:
        raise DatasetError(f"{path} cannot be written: {error.strerror or error}") from None
    return count


def _row(measurement: Measurement) -> Document:
    document = measurement_to_dict(measurement)
    return document | {name: list(document[name].items()) for name in ("allocator", "traced")}


def _schema(names: Sequence[str]) -> pa.Schema:
    """The Arrow columns of these fields, by the types that the classes declare."""
    pa = import_pyarrow("reading and writing Parquet")
    layer = [("kind", pa.string()), ("activations", pa.int64()), ("parameters", pa.int64())]
    layer += [("trains", pa.bool_()), ("block", pa.int64())]
    phase = [("name", pa.string()), *((field.name, pa.int64()) for field in fields(Phase)[1:])]
    types = {
        "str": pa.string(),
        "int": pa.int64(),
        "bool": pa.bool_(),
        "float": pa.float64(),
        "Mapping[str, int]": pa.map_(pa.string(), pa.int64()),
        "tuple[Layer, ...]": pa.list_(pa.struct(layer)),
        "tuple[Phase, ...]": pa.list_(pa.struct(phase)),
    }
    declared = {
        field.name: str(field.type) for field in (*fields(TrainingJob), *fields(Measurement))
    }
    optional = {name for name in names if declared[name].endswith(_OR_NONE)} - _FILLED_FIELDS
    optional |= {"traced"}
    return pa.schema(
        [
            pa.field(name, types[declared[name].removesuffix(_OR_NONE)], name in optional)
            for name in names
        ]
    )


def _check_schema(path: str | Path, found: pa.Schema, schema: pa.Schema) -> None:
    """Refuses a file whose schema is not this version's dataset schema.

    A column that may be empty may be missing: columns were added to version 1 after its first files.
    """
    if dataset_version(found, str(path)) is None:
        raise DatasetError(f"{path} is no gpumemnet dataset: its metadata state no dataset version")
    for column in schema:
        if column.name in found.names:
            kind = found.field(column.name).type
            # Older files lack the later fields of a layer.
            is_right = is_layers(kind) if column.name == "layers" else kind == column.type
            if not is_right:
                raise DatasetError(
                    f"{path}: the column '{column.name}' is {kind}, not {column.type}"
                )
        elif column.name in REQUIRED_FIELDS or not (column.nullable or column.name in JOB_FIELDS):
            raise DatasetError(f"{path} lacks the column '{column.name}'")


def _check_rows(dataset: Dataset, path: str | Path) -> None:
    """Refuses rows that no :class:`Measurement` can have, with its sentence."""
    import pyarrow.compute as pc

    stated = dataset.words("architecture_key")
    is_wrong = (stated != "") & (stated != dataset.keys)
    is_wrong |= np.isnan(dataset.numbers("capacity_bytes"))
    for name in COUNT_COLUMNS:
        numbers = dataset.numbers(name)
        is_wrong |= (numbers < 0) | (numbers > MAX_BYTES)
    states = [*(dataset.words(name) for name in STATE_COLUMNS), ~np.isnan(dataset.label_bytes)]
    known: set[tuple[Any, ...]] = set()
    for row, state in enumerate(zip(*states, strict=True)):
        if state not in known:
            try:
                check_states(*state)
                known.add(state)
            except DatasetError:
                is_wrong[row] = True
    traced = dataset.columns.column("traced").combine_chunks()
    is_unknown = ~np.isin(traced.keys.to_numpy(zero_copy_only=False), TRACED_PARTS)
    if is_unknown.any():
        lengths = pc.list_value_length(traced).fill_null(0).to_numpy()
        is_wrong[np.repeat(np.arange(len(dataset)), lengths)[is_unknown]] = True
    for row in is_wrong.nonzero()[0].tolist():
        try:
            dataset[row]
        except DatasetError as error:
            raise DatasetError(f"{path}, row {row + 1}: {error}") from None
