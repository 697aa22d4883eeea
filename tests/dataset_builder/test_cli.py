"""``python -m dataset_builder`` as a process: what it prints, what it writes, how it exits."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from dataset_builder.measure.journal import Journal
from dataset_builder.measure.nvml import visible_meters
from gpumemnet.cli import main
from gpumemnet.errors import MeasurementError
from gpumemnet.job.dataset import read_dataset, write_dataset
from gpumemnet.job.measurement import Measurement

ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs it in this process, which is quicker."""
    words = ["build", *map(str, arguments)]
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as errors:
        status = main(words)
    return subprocess.CompletedProcess(words, status, out.getvalue(), errors.getvalue())


def has_gpu() -> bool:
    try:
        return bool(visible_meters())
    except MeasurementError:
        return False


def test_without_a_gpu_it_is_one_sentence_and_no_folder(tmp_path: Path) -> None:
    if has_gpu():
        pytest.skip("this machine has a GPU")
    done = run("campaign", "mlp", "--out", tmp_path / "c")
    assert done.returncode == 2
    assert done.stderr.startswith("error: nothing can be measured here")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "c").exists()


def test_a_wrong_recipe_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("family: mlp\nfetures: {}\n")
    done = run("campaign", tmp_path / "r.yaml", "--out", tmp_path / "c")
    assert (done.returncode, done.stdout) == (2, "")
    assert "fetures: is not a known key: did you mean 'features'?" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "c").exists()


def test_merge_writes_a_campaign_and_checks_datasets(
    tmp_path: Path, measurement: Measurement, oom: Measurement
) -> None:
    with Journal(tmp_path / "c") as journal:
        journal.append("a", measurement)
        journal.append("b", replace(oom, job=replace(oom.job, batch_size=999)))
    out = tmp_path / "d.parquet"
    done = run("merge", tmp_path / "c", "--out", out)
    assert (done.returncode, done.stdout) == (
        0,
        f"2 of 2 rows written to {out}: 0 repeated a job, 0 contradicted another\n",
    )
    assert [row.status for row in read_dataset(out)] == ["ok", "oom"]
    done = run("merge", out, tmp_path / "c")
    assert (done.returncode, done.stdout) == (0, "4 rows, 0 findings\n")
    assert json.loads(run("merge", out, "--json").stdout) == {"rows": 2, "findings": []}
    write_dataset(out, [measurement, replace(measurement, steady_process_bytes=1)])
    done = run("merge", out)
    assert done.returncode == 3
    assert f"{out} row 2: below-weights: the weights take" in done.stdout


def test_missing_files_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source in ("missing.parquet", "empty"):
        for out in ((), ("--out", tmp_path / "out.parquet")):
            done = run("merge", tmp_path / source, *out)
            assert done.returncode == 2
            assert done.stderr.startswith("error: ")
            assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_the_campaign_process_never_loads_torch() -> None:
    modules = "dataset_builder.measure.campaign, dataset_builder.cli, dataset_builder.recipe"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_fork_server_loads_all_that_training_needs_and_starts_no_thread() -> None:
    code = """
import os, sys
import dataset_builder.measure.training
assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not be forked"
before = set(sys.modules)
import torch
from dataset_builder.families import mlp
from dataset_builder.planned_job import Options
from dataset_builder.planned_job import PlannedJob
from dataset_builder.measure.training import train
architecture = mlp.MlpArchitecture(shape="uniform", input_width=3, output_width=2, hidden_widths=(4,), activation="relu")
options = Options(batch_size=4, checkpointing="every_block", precision="amp_bf16", optimizer="adamw")
train(PlannedJob("mlp", architecture, options), torch.device("cpu"), 0, lambda _: 0)
late = sorted(name for name in set(sys.modules) - before if name.startswith("torch."))
assert len(late) < 20, late
"""
    environment = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
