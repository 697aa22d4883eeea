"""The job-array script: each task runs a campaign in its own folder with its own seed.

A stand-in takes the place of the interpreter and runs the rehearsal, so that the arguments that the
script makes are really used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dataset_builder.measure.journal import read_journal

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "dataset_builder" / "scripts" / "slurm_array.sh"
REHEARSAL = Path(__file__).with_name("rehearsal") / "rehearse.py"

INTERPRETER = f"""#!{sys.executable}
import json, os, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
(out / "held").mkdir(parents=True)
(out / "behaviour.json").write_text("{{}}")
(out / "arguments.json").write_text(json.dumps(sys.argv[1:]))
os.environ["STAND_IN_FOLDER"] = str(out)
os.execv(sys.executable, [sys.executable, {str(REHEARSAL)!r}, str(out), "process", "2"])
"""


def submit(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    interpreter = folder / "python"
    interpreter.write_text(INTERPRETER)
    interpreter.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environment = (
        clean
        | {"PYTHON": str(interpreter), "PYTHONPATH": str(ROOT), "OUT": str(folder / "all")}
        | variables
    )
    return subprocess.run(
        ["bash", str(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_two_tasks_use_separate_folders(tmp_path: Path) -> None:
    for task in ("0", "1"):
        done = submit(
            tmp_path,
            SLURM_ARRAY_TASK_ID=task,
            SLURM_CPUS_PER_TASK="6",
            RECIPE="mlp",
            TIME_BUDGET="30",
        )
        assert done.returncode == 0, done.stderr
        folder = tmp_path / "all" / task
        arguments = json.loads((folder / "arguments.json").read_text())
        assert arguments[:4] == ["-m", "dataset_builder", "campaign", "mlp"]
        assert arguments[4:] == [
            "--out",
            str(folder),
            "--seed",
            task,
            "--workers",
            "6",
            "--time-budget",
            "30",
        ]
        assert [row.status for row in read_journal(folder)] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("variables", "missing"),
    [({"RECIPE": "mlp"}, "SLURM_ARRAY_TASK_ID"), ({"SLURM_ARRAY_TASK_ID": "0"}, "RECIPE")],
)
def test_missing_parts_are_stated(tmp_path: Path, variables: dict[str, str], missing: str) -> None:
    done = submit(tmp_path, **variables)
    assert done.returncode != 0
    assert missing in done.stderr
    assert not (tmp_path / "all").exists()
