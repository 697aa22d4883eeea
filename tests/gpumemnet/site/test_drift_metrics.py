"""Drift for Prometheus: what the textfile collector would read, and that it never reads half of
it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gpumemnet.site.drift import DriftReport, Finding, drift_metrics
from tests.sites import A100, DATASETS, site_rows, write_rows

Samples = dict[str, dict[tuple[str, ...], float]]


def samples(text: str) -> Samples:
    """Metric → values of its labels, in the order of their names → value."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.type == "gauge"
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, {})[
                tuple(text for _, text in sorted(sample.labels.items()))
            ] = sample.value
    return found


def drift(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpumemnet", "drift", *map(str, arguments)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GPUMEMNET_")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=clean
    )


def test_the_command_leaves_metrics_for_each_family_and_gpu(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.parquet", site_rows(60, shift_mib=400))
    file = tmp_path / "gpumemnet.prom"
    file.write_text("older\n")
    done = drift(rows, "--reference", DATASETS / "published_mlp_a100.parquet", "--metrics", file)
    assert done.returncode == 10, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"rows.parquet", "gpumemnet.prom"}
    assert file.stat().st_mode & 0o444 == 0o444  # the exporter is another user
    found = samples(file.read_text())
    assert found["gpumemnet_drift_due"] == {(): 1.0}
    assert found["gpumemnet_drift_jobs"] == {("mlp", A100): 60.0}
    kinds = {labels[2] for labels in found["gpumemnet_drift"]}
    assert kinds == {"error", "coverage", "support", "features"}
    assert found["gpumemnet_drift"]["mlp", A100, "error"] == 1.0
    assert found["gpumemnet_drift"]["mlp", A100, "support"] == 0.0
    assert found["gpumemnet_drift_effect_ratio"]["mlp", A100, "error"] > 0.05
    assert found["gpumemnet_drift_probability"]["mlp", A100, "error"] < 0.01
    assert abs(found["gpumemnet_drift_last_run_timestamp_seconds"][()] - time.time()) < 60


def test_what_cannot_be_said_leaves_the_old_file(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.parquet", [])
    file = tmp_path / "gpumemnet.prom"
    file.write_text("older\n")
    assert drift(rows, "--metrics", file).returncode == 2
    assert file.read_text() == "older\n"


@pytest.mark.parametrize(
    ("file", "words"), [("drift.txt", "must end in .prom"), ("none/drift.prom", "No such file")]
)
def test_a_file_that_cannot_be_written_is_said_in_a_sentence(
    tmp_path: Path, file: str, words: str
) -> None:
    rows = write_rows(tmp_path / "rows.parquet", site_rows(20, shift_mib=0))
    done = drift(rows, "--metrics", tmp_path / file)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def finding(
    kind: str, gpu: str | None, effect: float = 0.2, is_drift: bool = False, jobs: int = 40
) -> Finding:
    return Finding(kind, "cnn", gpu, "x", jobs, effect, 0.1, 0.5, 0.5, is_drift, "in words")


def test_of_several_tests_of_a_kind_the_gravest_speaks() -> None:
    findings = (
        finding("features", None, 0.4, is_drift=True),
        finding("features", None, 0.9, jobs=50),
    )
    found = samples(drift_metrics(DriftReport(findings, (), 0.01, ("error",)), 5.0))
    assert found["gpumemnet_drift"] == {("cnn", "", "features"): 1.0}
    assert found["gpumemnet_drift_effect_ratio"] == {("cnn", "", "features"): 0.4}
    assert found["gpumemnet_drift_jobs"] == {("cnn", ""): 50.0}
    assert found["gpumemnet_drift_due"] == {(): 0.0}  # features start no retraining here
    assert found["gpumemnet_drift_last_run_timestamp_seconds"] == {(): 5.0}


def test_where_nothing_could_be_tested_the_run_is_there_all_the_same() -> None:
    found = samples(drift_metrics(DriftReport((), ("too few",), 0.01, None), 5.0))
    assert found["gpumemnet_drift_due"] == {(): 0.0}
    assert set(found) == {"gpumemnet_drift_due", "gpumemnet_drift_last_run_timestamp_seconds"}


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.floats(allow_nan=False))
def test_whatever_a_gpu_is_called_the_text_can_be_read(gpu: str, effect: float) -> None:
    text = drift_metrics(DriftReport((finding("error", gpu, effect),), (), 0.01, None), 5.0)
    lines = [line for line in text.split("\n") if line.startswith("gpumemnet_drift_jobs{")]
    assert len(lines) == 1
    assert lines[0].endswith("} 40.0")
