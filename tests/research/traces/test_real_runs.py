"""Published runs of real models become a dataset with traced parts, by a command that continues
where it was stopped."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from gpumemnet.job.dataset import read_dataset
from gpumemnet.job.measurement import TRACED_PARTS, Measurement
from gpumemnet.site.implausible_rows import implausible_rows
from gpumemnet.units import MIB
from research.cli import main
from research.published_tables import timm_models
from research.traces.kept_runs import KeptRuns
from research.traces.labels import PROTOCOL
from tests.research.published_tables.test_timm_models import row as timm_row


def table(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def xmem_row(
    batch_size: int, measured: int, out_of_memory: bool = False, gpu: str = "3060"
) -> dict[str, str]:
    return {
        "kind": "cnn",
        "model": "MobeNetV3Small",
        "optimizer": "Adam",
        "batch_size": str(batch_size),
        "zero_grad_mode": "",
        "gpu": f"NVIDIA GeForce RTX {gpu}",
        "capacity_bytes": str(12_622_168_064),
        "measured_bytes": str(measured),
        "out_of_memory": str(out_of_memory),
        "xmem_bytes": "1000000000.5",
        "llmem_bytes": "",
    }


def imported(source: Path, folder: Path, *options: str, fails: bool = False) -> list[Measurement]:
    out = folder / "out.parquet"
    command = [
        "import-real-runs",
        str(source),
        "--out",
        str(out),
        "--runs",
        str(folder / "runs"),
        *options,
    ]
    assert main(command) == (2 if fails else 0)
    return [] if fails else list(read_dataset(out))


def test_runs_are_traced_once_and_rows_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        xmem_row(64, 400 * MIB),
        xmem_row(256, 900 * MIB, gpu="4060"),
        xmem_row(9_000, 12_000 * MIB, True),
    ]
    source = table(tmp_path / "runs.csv", rows)
    assert imported(source, tmp_path, "--time-budget", "0") == []
    assert "1 models are not traced yet: run the command again" in capsys.readouterr().out
    small, large, crashed = imported(source, tmp_path)
    assert "1 models traced" in capsys.readouterr().out
    assert small.job.has_layers
    assert tuple(small.traced) == TRACED_PARTS
    assert (
        small.job.traced_peak_bytes
        == small.traced["steady_reserved_bytes"]
        < large.traced["steady_reserved_bytes"]
    )
    assert 0 < large.traced["steady_allocated_bytes"] <= large.traced["steady_reserved_bytes"]
    assert (small.status, small.label_bytes, small.label_state) == ("ok", 400 * MIB, "steady")
    assert (crashed.status, crashed.label_bytes, crashed.peak_device_bytes) == (
        "oom",
        None,
        12_000 * MIB,
    )
    assert small.architecture_family == "mobilenet"
    assert implausible_rows([small, large, crashed]) == []
    assert imported(source, tmp_path) == [small, large, crashed]
    assert "0 models traced" in capsys.readouterr().out


def test_readings_that_caught_the_search_for_algorithms_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timm_models.declare_detection()
    timm = pytest.importorskip("timm")
    monkeypatch.setattr(timm_models, "TIMM_VERSION", timm.__version__)
    batches = (8, 16, 32, 64)
    first = [timm_row(batch, 20_000, 100.0, model="resnet10t") for batch in batches]
    imported(table(tmp_path / "first.csv", first), tmp_path)
    runs = KeptRuns(tmp_path / "runs")
    parts = runs.read_parts("resnet10t", PROTOCOL)
    assert len(parts) == len(batches)
    for each in parts.values():  # whatever the search takes here, it takes much
        each["startup_peak_reserved_bytes"] = 3 * each["steady_reserved_bytes"]
    runs.keep_parts("resnet10t", PROTOCOL, parts)
    steady = sorted(round(each["steady_reserved_bytes"] / MIB) + 1_800 for each in parts.values())
    peak = 3 * (steady[0] - 1_800) + 1_800
    read = [peak, *steady[1:]]
    rows = [
        timm_row(batch, reading, 100.0, model="resnet10t")
        for batch, reading in zip(batches, read, strict=True)
    ]
    found = imported(table(tmp_path / "second.csv", rows), tmp_path)
    assert [row.label_state for row in found] == ["startup", "steady", "steady", "steady"]
    assert {row.split_group for row in found} == {"resnet"}
