"""The dataset on disk: what is written is read back, and what is damaged or foreign is refused in
one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpumemnet.errors import DatasetError
from gpumemnet.job.dataset import (
    Dataset,
    read_dataset,
    write_dataset,
)
from gpumemnet.job.job_files import DATASET_VERSION, VERSION_KEY
from gpumemnet.job.layers import Layer
from gpumemnet.job.measurement import (
    Measurement,
    architecture_key,
)
from gpumemnet.job.table_reader import CHUNK_ROWS, read_job_tables
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.units import MIB
from tests.jobs import totals_only
from tests.parquet_jobs import write_jobs

ROOT = Path(__file__).parents[3]


def test_measurements_survive_the_file(
    tmp_path: Path, measurement: Measurement, oom: Measurement
) -> None:
    path = tmp_path / "d.parquet"
    assert write_dataset(path, [measurement, oom]) == 2
    assert list(read_dataset(path)) == [measurement, oom]
    assert pq.read_schema(path).metadata[VERSION_KEY] == str(DATASET_VERSION).encode()
    assert [each.name for each in tmp_path.iterdir()] == ["d.parquet"]


def test_the_label_is_the_steady_state_or_follows_its_source(
    measurement: Measurement, oom: Measurement
) -> None:
    device = replace(measurement, label_source="nvml_device_difference")
    steady = replace(measurement, steady_process_bytes=550 * MIB, label_state="steady")
    rows = [measurement, device, steady, oom]
    labels = [600 * MIB, 601 * MIB, 550 * MIB, None]
    assert [row.label_bytes for row in rows] == labels
    read = Dataset.from_measurements(rows).label_bytes.tolist()
    assert read[:3] == labels[:3]
    assert math.isnan(read[3])


def test_jobs_are_read_from_a_dataset_and_from_plain_jobs(
    tmp_path: Path, job: TrainingJob, measurement: Measurement
) -> None:
    write_dataset(tmp_path / "d.parquet", [measurement])
    write_jobs(tmp_path / "j.parquet", [job, totals_only(job)])
    assert [list(table) for table in read_job_tables(tmp_path / "d.parquet")] == [[job]]
    assert [list(table) for table in read_job_tables(tmp_path / "j.parquet")] == [
        [job, totals_only(job)]
    ]


def test_jobs_stream_in_batches(tmp_path: Path, job: TrainingJob) -> None:
    jobs = [replace(totals_only(job), batch_size=1 + index) for index in range(CHUNK_ROWS + 5)]
    write_jobs(tmp_path / "j.parquet", jobs)
    batches = list(read_job_tables(tmp_path / "j.parquet"))
    assert [len(batch) for batch in batches] == [CHUNK_ROWS, 5]
    assert [each for batch in batches for each in batch] == jobs


def test_a_file_with_only_the_required_columns_is_enough(tmp_path: Path) -> None:
    columns = {
        "family": ["mlp"],
        "batch_size": pa.array([8], pa.int32()),
        "input_elements": [4],
        "optimizer": ["sgd"],
        "precision": ["fp32"],
        "total_activations": [10],
        "total_parameters": [20],
        "comment": ["mine"],
    }
    pq.write_table(pa.table(columns), tmp_path / "j.parquet")
    [[job]] = read_job_tables(tmp_path / "j.parquet")
    assert (job.batch_size, job.total_parameters, job.has_layers) == (8, 20, False)


def test_a_bad_job_is_named_by_row_and_field(tmp_path: Path, job: TrainingJob) -> None:
    write_jobs(tmp_path / "j.parquet", [job, job])
    table = pq.read_table(tmp_path / "j.parquet")
    index = table.schema.get_field_index("optimizer")
    pq.write_table(
        table.set_column(index, "optimizer", pa.array(["adam", "adamax"])), tmp_path / "bad.parquet"
    )
    with pytest.raises(DatasetError, match=r"bad.parquet, row 2: optimizer: must be one of"):
        list(read_job_tables(tmp_path / "bad.parquet"))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _other_version(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({VERSION_KEY: b"99"}), path)


def _without_column(path: Path) -> None:
    pq.write_table(pq.read_table(path).drop_columns(["capacity_bytes"]), path)


def _wrong_type(path: Path) -> None:
    table = pq.read_table(path)
    index = table.schema.get_field_index("capacity_bytes")
    pq.write_table(table.set_column(index, "capacity_bytes", pa.array(["many"])), path)


def _impossible_value(path: Path) -> None:
    table = pq.read_table(path)
    index = table.schema.get_field_index("status")
    pq.write_table(table.set_column(index, table.schema.field(index), pa.array(["fine"])), path)


def _other_key(path: Path) -> None:
    table = pq.read_table(path)
    index = table.schema.get_field_index("architecture_key")
    pq.write_table(table.set_column(index, table.schema.field(index), pa.array(["0" * 16])), path)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (Path.unlink, "cannot be read: No such file"),
        (_truncate, "no whole Parquet file"),
        (lambda path: path.write_text("family,batch\n"), "no whole Parquet file"),
        (_other_version, "has dataset version 99, and this version of gpumemnet reads 1: upgrade"),
        (_without_column, "lacks the column 'capacity_bytes'"),
        (_wrong_type, "the column 'capacity_bytes' is string, not int64"),
        (_impossible_value, "row 1: status must be one of ok, oom"),
        (_other_key, "row 1: architecture_key is '0000000000000000', but"),
    ],
)
def test_damaged_and_foreign_files_are_refused(
    tmp_path: Path, measurement: Measurement, damage: Callable[[Path], object], sentence: str
) -> None:
    path = tmp_path / "d.parquet"
    write_dataset(path, [measurement])
    damage(path)
    with pytest.raises(DatasetError, match=sentence) as caught:
        read_dataset(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"status": "fine"}, "status must be one of"),
        ({"capacity_bytes": -1}, "capacity_bytes"),
        ({"peak_process_bytes": 1.5}, "peak_process_bytes"),
        ({"peak_process_bytes": None}, "holds no label"),
    ],
)
def test_impossible_measurements_cannot_be_made(
    measurement: Measurement, changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(DatasetError, match=sentence):
        replace(measurement, **changes)  # type: ignore[arg-type]


def test_the_old_file_remains_when_writing_fails(tmp_path: Path, measurement: Measurement) -> None:
    path = tmp_path / "d.parquet"
    write_dataset(path, [measurement])
    before = path.read_bytes()
    with pytest.raises(DatasetError, match="stand-in"):
        write_dataset(path, [measurement, replace(measurement, provenance="stand_in")])
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["d.parquet"]
    with pytest.raises(DatasetError, match="cannot be written"):
        write_dataset(tmp_path / "nowhere" / "d.parquet", [measurement])


def test_the_key_is_that_of_the_network_alone(job: TrainingJob) -> None:
    key = architecture_key(job)
    assert architecture_key(replace(job, batch_size=1, optimizer="sgd", precision="fp32")) == key
    other = (*job.layers[:-1], Layer("linear", 4, 84))
    assert (
        architecture_key(replace(job, layers=other, total_activations=None, total_parameters=None))
        != key
    )
    assert architecture_key(replace(job, family="cnn")) != key
