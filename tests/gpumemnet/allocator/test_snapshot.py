"""Recorded histories: their file, the snapshot, and the comparison with what really happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from gpumemnet.allocator import parse_settings
from tests.gpumemnet.allocator.snapshot import (
    compare,
    snapshot_history,
)

TRAINING = """
import json, sys, torch
torch.cuda.init()
torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU(), torch.nn.Conv2d(64, 128, 3, stride=2), torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(8), torch.nn.Flatten(), torch.nn.Linear(8192, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 10),
).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    images = torch.randn(16 + 8 * step, 3, 96, 96, device="cuda")
    model(images).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
statistics = torch.cuda.memory_stats()
snapshot = torch.cuda.memory._snapshot()
keys = ("action", "addr", "size", "stream")
json.dump({
    "trace": [{key: event[key] for key in keys if key in event} for event in snapshot["device_traces"][0]],
    "reserved": statistics["reserved_bytes.all.current"],
    "peak_reserved": statistics["reserved_bytes.all.peak"],
    "peak_allocated": statistics["allocated_bytes.all.peak"],
}, sys.stdout)
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "text", ["", "expandable_segments:True", "roundup_power2_divisions:4", "max_split_size_mb:64"]
)
def test_the_simulator_does_what_a_gpu_does(text: str) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    command = [sys.executable, "-c", TRAINING]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": text}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    report = json.loads(done.stdout)
    found = compare(snapshot_history({"device_traces": [report["trace"]]}), parse_settings(text))
    assert (found.first_difference, found.unknown_frees) == (None, 0)
    assert found.reserved_bytes == report["reserved"]
    assert found.peak_reserved_bytes == report["peak_reserved"]
    assert found.peak_allocated_bytes == report["peak_allocated"]
