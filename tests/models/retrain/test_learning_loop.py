"""The loop from observation to swap by its public commands, and small: few jobs, a short plan, a
champion of one family and encoder."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def loop(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "benchmarks" / "learning_loop.py", "--small", *arguments]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.nightly
def test_another_context_is_detected_learned_and_served() -> None:
    done = loop("--jobs", 200, "--new", 40, "--epochs", 4)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = {
        line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:]
        for line in done.stdout.splitlines()
    }
    before, after = (
        float(cell.split(" MiB")[0].replace(",", "")) for cell in cells["median error"]
    )
    assert 850 < before < 950
    assert after < 100
    assert cells["release"][0] == "first"
    assert cells["release"][1].startswith("retrain-")
    assert f"the running service answers from {cells['release'][1]}" in done.stdout
