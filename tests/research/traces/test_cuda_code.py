"""The trace against PyTorch's own CUDA code: peaks of some sixty jobs as its allocator had them, on
a device that counts memory.

``tests/fixtures/cuda_code_peaks.json`` holds jobs of the recipes as ``benchmarks/cuda_code.py``
runs them with a CUDA build of
PyTorch: of seed 1 those that are quick to trace, whatever their figures, and three of seed 11 that
were wrong once.  It is no
measurement: no kernel ran, cuDNN and cuBLAS asked for nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cuda_code import Peaks, peaks_of
from dataset_builder.planned_job import parse_planned, training_job
from gpumemnet.gpu import device_profile
from gpumemnet.units import MIB
from research.traces.labels import traceable
from tests.nightly import nightly

FIXTURE = Path(__file__).parents[2] / "fixtures" / "cuda_code_peaks.json"
SEGMENT_BYTES = 2 * MIB
FAMILIES = ("mlp", "transformer", "cnn")


def traced(job: dict[str, Any]) -> Peaks:
    planned = parse_planned({name: job[name] for name in ("family", "architecture", "options")})
    return peaks_of(
        *traceable(planned, training_job(planned).attention_kernel, device_profile("H200"))
    )


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the peaks are those of torch 2.13"
)
@pytest.mark.parametrize(
    ("family", "every"), [("transformer", 3), *nightly([(one, 1) for one in FAMILIES])]
)
def test_a_trace_reserves_what_pytorch_reserves(family: str, every: int) -> None:
    jobs = [job for job in json.loads(FIXTURE.read_text())["jobs"] if job["family"] == family]
    jobs = jobs[::every]
    requested_alike = reserved_alike = 0
    for job in jobs:
        requested, allocated, reserved = traced(job)
        assert abs(requested - job["requested"]) <= 4096, job
        assert abs(allocated - job["allocated"]) <= 256 * 1024, job
        assert abs(reserved - job["reserved"]) <= SEGMENT_BYTES, job
        requested_alike += requested == job["requested"]
        reserved_alike += reserved == job["reserved"]
    assert requested_alike >= len(jobs) - 1
    assert reserved_alike >= len(jobs) - 1
