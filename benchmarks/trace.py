"""Measures the cost of a trace from a cold start, compared with PyTorch's MemTracker on the same
jobs.

    python benchmarks/trace.py

The time includes the import of torch.  The models are those of tests/gpumemnet/extract/examples.
MemTracker counts only the allocated bytes of a CPU run; it is the most similar tool that needs no
GPU.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from gpumemnet.extract.module_calls import inputs_from_example
from gpumemnet.gpu import device_profile
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.operators.rules import Platform
from gpumemnet.tracing.timeline import steady_memory
from gpumemnet.tracing.training_loop import record

EXAMPLES = Path(__file__).parents[1] / "tests/gpumemnet/extract/examples"
RUNS = 3
MIB = 2**20

JOBS = (
    ("ResNet-50, batch 32, fp32", "resnet50.py:build", 32, "3x224x224", "fp32"),
    ("GPT-2 small, batch 8 x 1,024, fp32", "gpt2.py:build", 8, "1024:int64", "fp32"),
    ("7B transformer, batch 1 x 1,024, bf16", "gpt2.py:build_7b", 1, "1024:int64", "bf16"),
)

MEM_TRACKER = """
import sys, torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
sys.path.insert(0, sys.argv[1])
name, batch = sys.argv[2], int(sys.argv[3])
module = __import__(name)
with FakeTensorMode():
    model = module.build()
    optimizer = torch.optim.AdamW(model.parameters())
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        for step in range(2):
            x = torch.zeros(batch, 1024, dtype=torch.long) if name == "gpt2" else torch.zeros(batch, 3, 224, 224)
            y = torch.zeros(batch * (1024 if name == "gpt2" else 1), dtype=torch.long)
            F.cross_entropy(model(x).flatten(0, -2), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                tracker.reset_mod_stats()
"""


def cold(command: list[str]) -> tuple[float, float, str]:
    """Run a command; return seconds, host memory in MiB of the largest process, and the output."""
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, command
    return time.perf_counter() - start, usage.ru_maxrss / 1024, output


def further_batch_seconds(file: str, batch: int) -> float:
    """Return the median seconds for one more batch size, where torch is loaded."""
    sys.path.insert(0, str(EXAMPLES))
    with torch.device("meta"):
        model = __import__(file).build()
    example = (
        torch.empty(batch, 1024, dtype=torch.long)
        if file == "gpt2"
        else torch.empty(batch, 3, 224, 224, device="meta")
    )
    inputs, device = inputs_from_example(example, None), device_profile("H200")
    seconds = []
    for size in range(batch + 1, batch + 4):
        start = time.perf_counter()
        traced = record(model, inputs.resized(size), TraceOptions(), Platform(device=device))
        steady_memory(traced.timeline, device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    table = Table(title=f"Median of {RUNS} cold runs", title_justify="left")
    for heading in (
        "job",
        "trace s",
        "host MiB",
        "traced peak GiB",
        "further batch ms",
        "MemTracker s",
        "host MiB",
    ):
        table.add_column(heading, justify="left" if heading == "job" else "right")
    for name, source, batch, shape, precision in JOBS:
        command = [
            sys.executable,
            "-m",
            "gpumemnet",
            "trace",
            str(EXAMPLES / source),
            "--batch-size",
            str(batch),
        ]
        command += ["--input", shape, "--precision", precision, "--gpu", "H200", "--json"]
        traces = [cold(command) for _ in range(RUNS)]
        file = source.partition(".")[0]
        answer = json.loads(traces[0][2])
        row = [
            name,
            f"{statistics.median(t[0] for t in traces):.1f}",
            f"{max(t[1] for t in traces):,.0f}",
        ]
        row.append(f"{answer['expected_bytes'] / 2**30:.1f}")
        if source.endswith("7b"):
            row += ["-", "-", "-"]
        else:
            row.append(f"{1000 * further_batch_seconds(file, batch):.0f}")
            peers = [
                cold([sys.executable, "-c", MEM_TRACKER, str(EXAMPLES), file, str(batch)])
                for _ in range(RUNS)
            ]
            row += [
                f"{statistics.median(p[0] for p in peers):.1f}",
                f"{max(p[1] for p in peers):,.0f}",
            ]
        table.add_row(*row)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
