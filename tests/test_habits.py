"""What ``make check`` picks, what ``make nightly`` runs, and the hooks of pre-commit."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from benchmarks.nightly import STEPS
from gpumemnet.cli.commands import ENTRIES
from research.cli import app as research
from tests.changed import changed_files, pick_tests

ROOT = Path(__file__).parents[1]
NEEDS_MORE = (
    *(
        "nightly",
        "cuda_code",
        "several_gpus",
        "true_values",
        "convolution_workspaces",
        "closed_form_rows",
        "real_jobs_cuda_code",
    ),
    *("replay_spread", "plan_checks"),
)
"""Scripts that no nightly run has what they need for: CUDA's code, cuDNN, or published tables."""


@pytest.mark.parametrize(
    ("changed", "picked"),
    [
        ("gpumemnet/site/drift.py", "tests/gpumemnet/site"),
        ("service/api/operations.py", "tests/service/api"),
        ("service/settings.py", "tests/service/test_settings.py"),
        ("dataset_builder/families/mlp.py", "tests/dataset_builder/families"),
        ("tests/models/training/test_data.py", "tests/models/training/test_data.py"),
        ("tests/sites.py", "tests/gpumemnet/site/test_calibration.py"),
        ("benchmarks/cuda_code.py", "tests/research/traces/test_cuda_code.py"),
        ("Dockerfile", "tests/test_dockerfile.py"),
    ],
)
def test_the_tests_of_a_changed_file_are_found(changed: str, picked: str) -> None:
    found = pick_tests([changed], ROOT)
    assert picked in found
    assert all((ROOT / place).exists() for place in found)


def test_no_test_is_picked_twice_and_a_deleted_one_is_left_out() -> None:
    found = pick_tests(
        ["gpumemnet/site/drift.py", "tests/gpumemnet/site/test_drift.py", "tests/test_gone.py"],
        ROOT,
    )
    assert "tests/gpumemnet/site" in found
    assert not {"tests/gpumemnet/site/test_drift.py", "tests/test_gone.py"} & set(found)


def test_a_change_is_what_is_not_on_main_or_else_the_last_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        settings = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        subprocess.run(
            ["git", *settings, *arguments], cwd=tmp_path, check=True, capture_output=True
        )

    git("init", "--initial-branch", "main")
    for name in ("first", "second"):
        (tmp_path / name).write_text("")
        git("add", name)
        git("commit", "--message", name)
    assert changed_files(tmp_path) == ["second"]
    git("switch", "--create", "branch")
    (tmp_path / "third").write_text("")
    git("add", "third")
    git("commit", "--message", "third")
    (tmp_path / "fourth").write_text("")
    (tmp_path / "first").write_text("changed")
    assert changed_files(tmp_path) == ["first", "fourth", "third"]


def test_every_nightly_step_is_a_command_that_exists() -> None:
    of_research: Any = typer.main.get_command(research)
    commands = {"gpumemnet": ENTRIES, "research": of_research.commands}
    for step in STEPS:
        first, *others = step.arguments
        if others and others[0] in commands:
            assert others[1] in commands[others[0]]
        else:
            assert first in ("-c", "-m") or (ROOT / first).is_file()
    scripts = {Path(step.arguments[0]).stem for step in STEPS}
    for script in sorted((ROOT / "benchmarks").glob("*.py")):
        if "argparse" in script.read_text():
            assert script.stem in {*scripts, *NEEDS_MORE}


def test_pre_commit_runs_the_projects_own_tools() -> None:
    configuration = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    entries = [
        hook["entry"] for repository in configuration["repos"] for hook in repository["hooks"]
    ]
    assert all(repository["repo"] == "local" for repository in configuration["repos"])
    tools = Path(sys.executable).parent
    for entry in entries:
        program = Path(entry.split()[0])
        assert program.parent == Path(".venv/bin")
        assert shutil.which(program.name, path=str(tools))
