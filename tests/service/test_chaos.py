"""The chaos run in short: CHAOS_SECONDS says how long, 6 unless it is set."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_nothing_is_lost_and_nothing_fails_while_workers_die_and_models_change() -> None:
    seconds = float(os.environ.get("CHAOS_SECONDS", "6"))
    command = [
        sys.executable,
        "benchmarks/chaos.py",
        "--seconds",
        str(seconds),
        "--kill-every",
        "2.5",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 180, cwd=ROOT)
    assert done.stdout, done.stderr
    summary = json.loads(done.stdout)
    assert summary["broken rules"] == [], done.stdout
    assert done.returncode == 0
    statuses = summary["statuses"]
    assert summary["workers killed"] > 0
    assert summary["swaps"] > 0
    for kind in (
        "predict 200",
        "batch 200",
        "text 200",
        "observe 201",
        "bad 422",
    ):
        assert statuses[kind] > 0
