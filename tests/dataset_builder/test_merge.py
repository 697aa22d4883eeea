"""Datasets of several GPUs and hosts become one: nothing twice, nothing lost, no contradiction
settled in silence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dataset_builder.merge import merge_datasets
from gpumemnet.errors import DatasetError
from gpumemnet.job.dataset import read_dataset, write_dataset
from gpumemnet.job.measurement import Measurement
from gpumemnet.units import GIB, MIB
from tests.dataset_builder.test_cli import run

ROOT = Path(__file__).parents[2]


def dataset(folder: Path, name: str, *rows: Measurement) -> Path:
    path = folder / name / "dataset.parquet"
    path.parent.mkdir(exist_ok=True)
    write_dataset(path, rows)
    return path


def larger(measurement: Measurement, by_bytes: int) -> Measurement:
    return replace(measurement, peak_process_bytes=(measurement.peak_process_bytes or 0) + by_bytes)


def test_two_gpus_and_repeated_rows(
    tmp_path: Path, measurement: Measurement, oom: Measurement
) -> None:
    other_gpu = larger(replace(measurement, gpu="another"), 100 * MIB)
    other_batch = replace(oom, job=replace(oom.job, batch_size=999))
    again = replace(larger(measurement, 2 * MIB), seconds=9.0, neighbours=0)
    one = dataset(tmp_path, "one", measurement, other_batch)
    two = dataset(tmp_path, "two", measurement, other_gpu, again)
    merged = merge_datasets([one, two], tmp_path / "all.parquet")
    assert list(read_dataset(tmp_path / "all.parquet")) == [measurement, other_batch, other_gpu]
    assert (merged.read, merged.written, merged.repeats) == (5, 3, 2)


def test_it_is_idempotent_and_may_write_onto_a_source(
    tmp_path: Path, measurement: Measurement, oom: Measurement
) -> None:
    one, two = (
        dataset(tmp_path, "one", measurement),
        dataset(tmp_path, "two", replace(oom, gpu="another")),
    )
    out = tmp_path / "all.parquet"
    merge_datasets([one, two], out)
    first = out.read_bytes()
    merge_datasets([out, one, two, two], out)
    assert out.read_bytes() == first


def test_contradictions_are_refused_until_the_caller_decides(
    tmp_path: Path, measurement: Measurement
) -> None:
    rows = [measurement, larger(measurement, 2 * MIB + 1), replace(measurement, torch="2.12.0")]
    one, two = dataset(tmp_path, "one", rows[0], rows[2]), dataset(tmp_path, "two", rows[1])
    out = tmp_path / "all.parquet"
    with pytest.raises(DatasetError, match="nothing was written") as refused:
        merge_datasets([one, two], out)
    assert not out.exists()
    _, named = str(refused.value).split("\n")
    assert named == f"{one} row 1 (600 MiB) contradicts {two} row 1 (602 MiB)"
    merged = merge_datasets([one, two], out, keep_first=True)
    assert sorted(map(rows.index, read_dataset(out))) == [0, 2]
    assert merged.repeats == 0
    assert len(merged.conflicts) == 1


def test_out_of_memory_rows_beside_a_label(
    tmp_path: Path, measurement: Measurement, oom: Measurement
) -> None:
    fits_elsewhere = replace(oom, capacity_bytes=GIB // 2)
    timeout = replace(oom, status="timeout", reason="slow")
    merged = merge_datasets(
        [dataset(tmp_path, "a", timeout, fits_elsewhere, measurement)], tmp_path / "all.parquet"
    )
    assert list(read_dataset(tmp_path / "all.parquet")) == [measurement], "the label tells most"
    assert merged.repeats == 2
    higher = replace(oom, capacity_bytes=70 * GIB)
    merge_datasets(
        [dataset(tmp_path, "b", timeout, fits_elsewhere, higher)], tmp_path / "all.parquet"
    )
    assert list(read_dataset(tmp_path / "all.parquet")) == [higher], "the highest bound"
    source, out = dataset(tmp_path, "c", measurement, oom), tmp_path / "all.parquet"
    with pytest.raises(DatasetError, match="1 rows contradict") as refused:
        merge_datasets([source], out)
    assert "(600 MiB) contradicts" in str(refused.value)
    assert "out of memory with 80.0 GiB free" in str(refused.value)


def test_sources_that_cannot_be_read_leave_the_old_file(
    tmp_path: Path, measurement: Measurement
) -> None:
    out = tmp_path / "all.parquet"
    write_dataset(out, [measurement])
    before = out.read_bytes()
    (tmp_path / "bad.parquet").write_bytes(before[:-20])
    with pytest.raises(DatasetError, match="no whole Parquet file"):
        merge_datasets([out, tmp_path / "bad.parquet"], out)
    assert out.read_bytes() == before


def test_the_command(tmp_path: Path, measurement: Measurement) -> None:
    one, two = (
        dataset(tmp_path, "one", measurement),
        dataset(tmp_path, "two", larger(measurement, GIB)),
    )
    out = tmp_path / "all.parquet"

    refused = run("merge", one, two, "--out", out)
    assert (refused.returncode, refused.stdout) == (2, "")
    error, conflict = refused.stderr.splitlines()
    assert conflict.startswith(f"{one} row 1")
    assert error.startswith("error: 1 rows contradict")
    document = json.loads(run("merge", one, two, "--out", out, "--keep-first", "--json").stdout)
    assert (document["read"], document["written"]) == (2, 1)
    assert document["conflicts"] == [conflict]
