"""Measured rates of a machine: the file is one that plans are made with."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from dataset_builder.measure.machine_rates import measure_machine
from gpumemnet.gpu import PROFILE_FORMAT
from gpumemnet.planner.costs import MACHINE, find_machine, machine_to_dict


def test_rates_are_measured_and_read_again(tmp_path: Path) -> None:
    """On the CPU, through the code that a GPU runs."""
    machine = measure_machine(torch.device("cpu"), matrix_size=64, copied_bytes=1 << 16, rounds=3)
    assert set(machine.flops_per_second) == {"fp32"}
    assert machine.efficiency == 1
    path = tmp_path / "machine.json"
    rates = machine_to_dict(machine)
    for document in (rates, {"format": PROFILE_FORMAT, "profile": {}, MACHINE: rates}):
        path.write_text(json.dumps(document))
        assert find_machine(path) == machine
