"""Measured rates of a machine: the file is one that plans are made with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from dataset_builder.measure.machine_rates import measure_machine
from gpumemnet.planner.costs import find_machine, machine_to_dict


def test_rates_are_measured_and_read_again(tmp_path: Path) -> None:
    """On the CPU, through the code that a GPU runs."""
    machine = measure_machine(torch.device("cpu"), matrix_size=64, copied_bytes=1 << 16, rounds=3)
    assert set(machine.flops_per_second) == {"fp32"}
    assert machine.efficiency == 1
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine_to_dict(machine)))
    assert find_machine(path) == machine


def test_without_a_gpu_the_command_says_so(tmp_path: Path) -> None:
    out = tmp_path / "machine.json"
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "dataset_builder", "rates", "--out", str(out)],
        capture_output=True,
        text=True,
        env=hidden,
        check=False,
    )
    assert done.returncode == 2
    assert "PyTorch finds no GPU" in done.stderr
    assert not out.exists()
