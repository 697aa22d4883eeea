"""``--engine ray``: the same campaign on a Ray cluster of this machine that believes it has two
GPUs, and without Ray a sentence.

Stand-in processes take the place of the GPUs, as in ``test_campaign``; Ray is real, and the tests
skip where it is not installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dataset_builder.measure.journal import Journal, Settings, read_journal
from dataset_builder.recipe.recipe import load_recipe
from dataset_builder.recipe.sampling import sample_jobs
from gpumemnet.units import GIB

ROOT = Path(__file__).parents[3]
REHEARSAL = Path(__file__).with_name("rehearsal") / "rehearse.py"
JOBS = 8

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install -e '.[ray]'",
)


@pytest.fixture
def campaign(tmp_path: Path) -> tuple[Path, list[str]]:
    """A campaign's folder and the keys of its jobs; the first runs out of memory."""
    recipe = load_recipe("mlp")
    planned = sample_jobs(recipe, JOBS, 0, 5 * GIB)
    keys = [job.key for job in planned]
    (tmp_path / "behaviour.json").write_text(json.dumps({keys[0]: "oom"}))
    with Journal(tmp_path) as journal:
        journal.keep_plan(Settings(recipe.name, recipe.digest, 0, JOBS), planned)
    return tmp_path, keys


def rehearse(folder: Path) -> str:
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{REHEARSAL.parent}",
        "STAND_IN_FOLDER": str(folder),
    }
    command = [sys.executable, str(REHEARSAL), str(folder), "ray", str(JOBS), "2"]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    ).stderr


def keys_in(folder: Path) -> list[str]:
    return [json.loads(line)["key"] for line in (folder / "journal.jsonl").read_text().splitlines()]


@pytest.mark.nightly
@needs_ray
def test_every_job_is_measured_once_on_one_of_two_gpus(campaign: tuple[Path, list[str]]) -> None:
    folder, keys = campaign
    assert "8 of 8 jobs" in rehearse(folder)
    assert sorted(keys_in(folder)) == sorted(keys)
    assert sorted(row.status for row in read_journal(folder)) == ["ok"] * 7 + ["oom"]
    for gpu in ("gpu0", "gpu1"):
        assert (folder / gpu / "runs.log").read_text().count("\n") >= JOBS // 2


@needs_ray
@pytest.mark.nightly
def test_a_lost_gpu_is_one_sentence_and_its_jobs_are_left_for_the_next_run(
    campaign: tuple[Path, list[str]],
) -> None:
    folder, keys = campaign
    (folder / "lose").touch()
    errors = rehearse(folder)
    assert "error: 1 of 2 GPUs stopped early: the GPU stand-in was lost" in errors
    assert "Traceback" not in errors
    assert len(set(keys_in(folder))) == len(keys_in(folder)) >= JOBS // 2
    (folder / "lose").unlink()
    rehearse(folder)
    assert sorted(keys_in(folder)) == sorted(keys)


def test_without_ray_or_gpu_it_is_one_sentence_and_no_folder(tmp_path: Path) -> None:
    """A package that cannot be imported stands in for one that is not installed."""
    (tmp_path / "ray.py").write_text("raise ImportError")
    command = [
        sys.executable,
        "-m",
        "dataset_builder",
        "campaign",
        "mlp",
        "--out",
        str(tmp_path / "c"),
        "--engine",
        "ray",
    ]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == "error: --engine ray needs the package 'ray': install the extra, in a clone with  pip install -e '.[ray]'\n"
    )
    assert not (tmp_path / "c").exists()
