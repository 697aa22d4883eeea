"""Rows labelled by tracing: their label, that they say so, that a campaign goes on, and the traced
peaks of measured rows."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dataset_builder.families import mlp
from dataset_builder.planned_job import Options, PlannedJob
from gpumemnet.gpu import context, device_profile
from gpumemnet.job.dataset import read_dataset, write_dataset
from gpumemnet.job.measurement import measurement_from_dict, measurement_to_dict
from research.cli import main
from research.traces.labels import traced_measurement

ROOT = Path(__file__).parents[3]
H200 = device_profile("H200")
RECIPE = """
name: tiny
family: mlp
memory: {from: 0.1 GiB, to: 2 GiB}
work: {max_pflop_per_step: 0.01}
features:
  shape: [uniform]
  depth: {from: 1, to: 3, scale: linear}
  width: {from: 64, to: 512, scale: log}
  input_width: 64
  output_width: 10
  activation: [relu, gelu]
  norm: [none, batch_norm]
  dropout: 0.0
options:
  batch_size: {from: 16, to: 60000, scale: log}
  optimizer: [sgd, adafactor]
  optimizer_implementation: default
  precision: [fp32, amp_bf16]
  checkpointing: none
  gradient_accumulation: 1
  frozen_share: 0.0
"""


def planned(width: int = 4096, **options: object) -> PlannedJob:
    architecture = mlp.MlpArchitecture(
        shape="uniform",
        input_width=256,
        output_width=10,
        hidden_widths=(width, width),
        activation="relu",
        norm="none",
        dropout=0.0,
        output_activation="none",
    )
    return PlannedJob("mlp", architecture, Options(batch_size=64, **options))  # type: ignore[arg-type]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "research", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_traced_row_is_reserved_bytes_and_context_and_is_marked_as_traced() -> None:
    row = traced_measurement(planned(), "tiny", 0, H200)
    parameters = (256 * 4096 + 4096) + (4096 * 4096 + 4096) + (4096 * 10 + 10)
    assert row.status == "ok"
    assert (row.provenance, row.label_source) == ("traced", "traced")
    assert row.peak_reserved_bytes is not None
    assert row.peak_reserved_bytes > 4 * 4 * parameters  # weights, gradients, Adam's two moments
    assert row.label_bytes == row.peak_reserved_bytes + context(H200).expected_bytes
    assert row.label_bytes == row.steady_process_bytes == row.startup_peak_bytes
    assert row.label_state == "steady"
    assert row.job.traced_peak_bytes is None  # the label must not stand among the features
    assert measurement_from_dict(measurement_to_dict(row)) == row


@pytest.mark.nightly
def test_a_campaign_writes_a_dataset_and_resumes_where_it_stopped(tmp_path: Path) -> None:
    recipe, out = tmp_path / "tiny.yaml", tmp_path / "out"
    recipe.write_text(RECIPE)
    done = run("trace-recipe", recipe, "--out", out, "--jobs", 6, "--workers", 1, "--gpu", "A100")
    assert done.returncode == 0, done.stderr
    first = read_dataset(out / "dataset.parquet")
    assert [row.status for row in first] == ["ok"] * 6
    assert {row.gpu for row in first} == {"NVIDIA A100-SXM4-40GB"}
    journal = out / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:4]) + lines[4][:50])  # torn by a crash
    done = run("trace-recipe", recipe, "--out", out, "--jobs", 6, "--workers", 1, "--gpu", "A100")
    assert done.returncode == 0, done.stderr
    again = read_dataset(out / "dataset.parquet")
    assert {(row.architecture, row.options, row.label_bytes) for row in again} == {
        (row.architecture, row.options, row.label_bytes) for row in first
    }
    said = run("trace-recipe", recipe, "--out", out, "--jobs", 7, "--gpu", "A100")
    assert said.returncode == 2
    assert "holds another campaign" in said.stderr


@pytest.mark.nightly
def test_measured_rows_are_given_their_traced_peak(tmp_path: Path) -> None:
    traced = traced_measurement(planned(), "tiny", 0, H200)
    measured = replace(traced, provenance="measured", label_source="nvml_process")
    write_dataset(tmp_path / "in.parquet", [measured])
    files = (str(tmp_path / "in.parquet"), "--out", str(tmp_path / "out.parquet"))
    assert main(["add-traces", *files, "--workers", "1"]) == 0
    [row] = read_dataset(tmp_path / "out.parquet")
    assert row.job.traced_peak_bytes == traced.peak_reserved_bytes
    assert row.label_bytes == measured.label_bytes
