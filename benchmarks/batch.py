"""Measures the cost of batch prediction.

    python benchmarks/batch.py [--rows 10000000] [--layered-rows 500000] [--engines local,ray] [--other PYTHON]

Writes files of random jobs within the shipped models' support, answers them with ``gpumemnet
predict --out`` as a user would, and
prints a Markdown table: rows a second from the start of the command to its end, the same with the
start left out, and the largest
resident memory of the command, of its largest worker and of all together.  With ``--other``, the local engine of another
version (the Python interpreter that has it) runs in turn.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

LAYERS = 50
ROW_GROUP = 2**20
POLL_SECONDS = 0.1
FEW_ROWS = 40_000
"""Jobs of the run that tells how long the start takes; half of the jobs where there are fewer than
twice as many."""


@dataclass
class Run:
    """Wall-clock and CPU seconds of one command, and its peak memory in MiB: parent, largest
    worker, all processes."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    parent_mib: float = 0.0
    worker_mib: float = 0.0
    all_mib: float = 0.0


def random_choice(generator: np.random.Generator, choices: list[str], count: int) -> pa.Array:
    return pa.array(np.array(choices)[generator.integers(0, len(choices), count)])


def totals(generator: np.random.Generator, first: int, count: int) -> pa.Table:
    """Return random jobs with totals only."""

    def spread(low: float, high: float) -> pa.Array:
        drawn = np.exp(generator.uniform(np.log(low), np.log(high), count))
        return pa.array(drawn.astype(np.int64))

    return pa.table(
        {
            "job_id": pa.array(np.arange(first, first + count)),
            "family": pa.array(["mlp"] * count),
            "batch_size": pa.array(generator.integers(4, 1000, count)),
            "input_elements": pa.array(generator.integers(64, 4096, count)),
            "optimizer": random_choice(generator, ["adam", "adamw", "sgd"], count),
            "precision": random_choice(generator, ["fp32", "amp_bf16"], count),
            "total_activations": spread(5e2, 5e4),
            "total_parameters": spread(1e5, 1e8),
        }
    )


def layered(generator: np.random.Generator, first: int, count: int) -> pa.Table:
    """Return random MLPs of :data:`LAYERS` layers each: linear, ReLU and dropout in turn."""
    widths = generator.integers(32, 1024, (count, LAYERS // 3 + 2))
    activations = np.repeat(widths[:, 1:], 3, axis=1)[:, :LAYERS]
    parameters = np.zeros((count, LAYERS), np.int64)
    parameters[:, ::3] = ((widths[:, :-1] + 1) * widths[:, 1:])[:, : parameters[:, ::3].shape[1]]
    kinds = pa.array(np.tile(np.resize(["linear", "relu", "dropout"], LAYERS), count))
    columns = [kinds, pa.array(activations.ravel()), pa.array(parameters.ravel())]
    layers = pa.StructArray.from_arrays(columns, ["kind", "activations", "parameters"])
    known = totals(generator, first, count).drop_columns(["total_activations", "total_parameters"])
    known = known.set_column(
        known.schema.get_field_index("input_elements"), "input_elements", pa.array(widths[:, 0])
    )
    starts = pa.array(np.arange(0, count * LAYERS + 1, LAYERS), pa.int32())
    return known.append_column("layers", pa.ListArray.from_arrays(starts, layers))


def write(path: Path, rows: int, *, has_layers: bool) -> None:
    generator = np.random.default_rng(7)
    step = 2**14 if has_layers else 2**18
    make = layered if has_layers else totals
    writer: pq.ParquetWriter | None = None
    for first in range(0, rows, step):
        table = make(generator, first, min(step, rows - first))
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table, row_group_size=ROW_GROUP)
    assert writer is not None
    writer.close()


def measure(jobs: Path, out: Path, engine: str, workers: int, python: str) -> Run:
    """Run the command and sample its memory."""
    command = [
        python,
        "-m",
        "gpumemnet",
        "predict",
        str(jobs),
        "--out",
        str(out),
        "--engine",
        engine,
        "--workers",
        str(workers),
    ]
    run = Run()
    begin = time.perf_counter()
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=out.parent,  # another version is not found where this one lies
    )
    watcher = threading.Thread(target=watch, args=(process.pid, run))
    watcher.start()
    _, errors = process.communicate()
    run.seconds = time.perf_counter() - begin
    watcher.join()
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{errors}")
    return run


def watch(pid: int, run: Run) -> None:
    cpu: dict[int, float] = {}
    try:
        parent = psutil.Process(pid)
        while True:
            processes = [parent, *parent.children(recursive=True)]
            sizes = []
            for process in processes:
                try:
                    sizes.append((process.pid, process.memory_info().rss / 2**20))
                    times = process.cpu_times()
                    cpu[process.pid] = times.user + times.system
                except psutil.NoSuchProcess:
                    continue
            if not parent.is_running() or parent.status() == psutil.STATUS_ZOMBIE:
                break
            run.parent_mib = max(
                run.parent_mib, next((size for process_id, size in sizes if process_id == pid), 0.0)
            )
            run.worker_mib = max(
                [run.worker_mib, *(size for process_id, size in sizes if process_id != pid)]
            )
            run.all_mib = max(run.all_mib, sum(size for _, size in sizes))
            time.sleep(POLL_SECONDS)
    except psutil.NoSuchProcess:
        pass
    run.cpu_seconds = sum(cpu.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000, help="jobs with totals only")
    parser.add_argument(
        "--layered-rows", type=int, default=500_000, help=f"jobs of {LAYERS} layers"
    )
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--engines", default="local,ray" if importlib.util.find_spec("ray") else "local"
    )
    parser.add_argument("--other", help="Python interpreter of another version of gpumemnet")
    parser.add_argument(
        "--folder", type=Path, help="where the files go; a temporary folder unless given"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        few = folder / "few.parquet"
        print(
            f"{arguments.workers} workers, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start\n"
        )
        print(
            "| jobs | layers | engine | seconds | rows/s | after the start | CPU µs a row | parent MiB | worker MiB | all MiB |"
        )
        print("|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|")
        for rows, has_layers in ((arguments.rows, False), (arguments.layered_rows, True)):
            if not rows:
                continue
            jobs = folder / "jobs.parquet"
            write(jobs, rows, has_layers=has_layers)
            few_rows = min(FEW_ROWS, rows // 2)
            write(few, few_rows, has_layers=has_layers)
            outputs = []
            engines = {name: (name, sys.executable) for name in arguments.engines.split(",")}
            if arguments.other:
                engines["other local"] = "local", arguments.other
            for name, (engine, python) in engines.items():
                start = measure(few, folder / "few_out.parquet", engine, arguments.workers, python)
                out = folder / f"{name}.parquet"
                run = measure(jobs, out, engine, arguments.workers, python)
                outputs += [out] if python == sys.executable else []
                further_seconds, further_rows = run.seconds - start.seconds, rows - few_rows
                later = (
                    f"{further_rows / further_seconds:,.0f}"
                    if further_seconds > 0
                    else "too few jobs"
                )
                cells = [
                    *(
                        f"{rows:,}",
                        str(LAYERS if has_layers else 0),
                        name,
                        f"{run.seconds:.1f}",
                        f"{rows / run.seconds:,.0f}",
                    ),
                    *(later, f"{(run.cpu_seconds - start.cpu_seconds) / further_rows * 1e6:.2f}"),
                    *(f"{run.parent_mib:,.0f}", f"{run.worker_mib:,.0f}", f"{run.all_mib:,.0f}"),
                ]
                print("| " + " | ".join(cells) + " |", flush=True)
            if len({path.read_bytes() for path in outputs}) > 1:
                sys.exit("the engines differ")
            jobs.unlink()


if __name__ == "__main__":
    main()
