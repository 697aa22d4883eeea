"""Compares traces of one of several GPUs with PyTorch's own data parallelism, job by job.

``python benchmarks/several_gpus.py [--jobs 30] [--seed 0] [--keep FILE.json]`` needs what
``benchmarks/cuda_code.py`` needs. Jobs of the builder's recipes train on the null GPU as one rank;
the other ranks do not exist. ``DistributedDataParallel`` and ``fully_shard`` run unmodified on
PyTorch's fake process group, whose collectives finish at once (DDP on gloo with one rank, because
the fake group returns no results). NCCL's own buffers are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.cuda_code import GPU, PEAKS, Peaks, peaks_of  # noqa: E402
from dataset_builder.measure import training  # noqa: E402
from dataset_builder.planned_job import PlannedJob, parse_planned, training_job  # noqa: E402
from dataset_builder.recipe import load_recipe, sample_jobs  # noqa: E402
from gpumemnet.errors import GpumemnetError  # noqa: E402
from gpumemnet.extract.checkpointing import blocks  # noqa: E402
from gpumemnet.gpu import device_profile  # noqa: E402
from gpumemnet.launchers.rank_program import gathered_in  # noqa: E402
from gpumemnet.tracing.training_loop import AUTOCAST  # noqa: E402
from research.traces.labels import traceable  # noqa: E402

FAMILIES = ("mlp", "cnn", "transformer")
PARALLEL_FORMS = (("ddp", 8), ("fsdp", 8), ("fsdp_zero2", 4), ("ddp", 2), ("fsdp", 6), ("fsdp", 64))
MOST_BYTES = 40 * 2**30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=30, help="number of jobs of each family")
    parser.add_argument("--seed", type=int, default=0, help="seed of the recipes' samples")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument(
        "--keep", type=Path, help="file for the jobs and their peaks on CUDA's code"
    )
    parser.add_argument("--train", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        print(json.dumps(trained(json.loads(arguments.train))), flush=True)
        os._exit(0)  # threads of the process group may still be running
    shares = (*(f"{peak}: equal" for peak in PEAKS), "reserved: within 1 %")
    table = Table(
        "way", "family", "jobs", "refused by both", "by one", *shares, "furthest below", "above"
    )
    jobs = [
        job
        for family in arguments.families
        for job in sampled(family, arguments.jobs, arguments.seed)
    ]
    results = list(compared(jobs))
    for form in ("ddp", "fsdp", "fsdp_zero2"):
        for family in arguments.families:
            pairs = [
                (real, peaks)
                for job, real, peaks in results
                if (job["parallel"], job["family"]) == (form, family)
            ]
            table.add_row(form, family, *figures(pairs))
    Console(width=140).print(table)
    if arguments.keep:
        kept = [
            json.dumps({**job, **dict(zip(PEAKS, real, strict=True))}, separators=(",", ":"))
            for job, real, _ in results
            if real
        ]
        arguments.keep.write_text(
            f'{{"torch": "{torch.__version__}", "jobs": [\n' + ",\n".join(kept) + "\n]}\n"
        )


def sampled(family: str, jobs: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield jobs of a recipe, each with a form of data parallelism."""
    planned = sample_jobs(load_recipe(family), jobs, seed, MOST_BYTES)
    for job, (parallel, ranks) in zip(planned, cycle(PARALLEL_FORMS), strict=False):
        options = job.options
        if (
            parallel != "ddp"
        ):  # sharding supports neither a gradient scaler nor weights in the NHWC format
            precision = "amp_bf16" if options.precision == "amp_fp16" else options.precision
            options = replace(options, precision=precision, channels_last=False)
        job = replace(job, options=options)
        yield {**job.to_dict(), "parallel": parallel, "ranks": ranks}


def compared(
    jobs: list[dict[str, Any]],
) -> Iterator[tuple[dict[str, Any], Peaks | None, Peaks | None]]:
    """Yield each job with its peaks in CUDA's code and in its trace; ``None`` where PyTorch or the
    trace rejects it."""
    from tests.dataset_builder.measure.null_gpu.build import build, environment

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        build(Path(folder))

        def run(job: dict[str, Any]) -> Peaks | None:
            command = [sys.executable, __file__, "--train", json.dumps(job)]
            done = subprocess.run(
                command,
                env=os.environ | environment(Path(folder), card=f"card{id(job)}"),
                capture_output=True,
                text=True,
            )
            if done.returncode:
                log(
                    job,
                    f"PyTorch: {(done.stderr.strip().splitlines() or [f'ended with {done.returncode}'])[-1]}",
                )
                return None
            requested, allocated, reserved = json.loads(done.stdout.splitlines()[-1])
            return requested, allocated, reserved

        for job, real in zip(jobs, pool.map(run, jobs), strict=True):
            peaks = None
            try:
                peaks = traced(job)
            except GpumemnetError as error:
                log(job, f"trace: {error}")
            if real and peaks and peaks != real:
                log(
                    job,
                    ", ".join(
                        f"{peak} {a:,} {b:,}" for peak, a, b in zip(PEAKS, real, peaks, strict=True)
                    ),
                )
            yield job, real, peaks


def log(job: dict[str, Any], what: str) -> None:
    options = {
        name: value
        for name, value in job["options"].items()
        if value not in ("none", "default", False, 0.0)
    }
    print(
        f"{job['family']} {job['parallel']} {job['ranks']} {options}: {what[:300]}",
        file=sys.stderr,
        flush=True,
    )


def traced(job: dict[str, Any]) -> Peaks:
    """Return the peaks of the trace of ``job``.

    Raises:
        ExtractError: when the job cannot be traced.
    """
    planned = planned_of(job)
    network, inputs, options, platform = traceable(
        planned, training_job(planned).attention_kernel, device_profile(GPU)
    )
    return peaks_of(
        network, inputs, replace(options, parallel=job["parallel"], ranks=job["ranks"]), platform
    )


def planned_of(job: dict[str, Any]) -> PlannedJob:
    return parse_planned({name: job[name] for name in ("family", "architecture", "options")})


def trained(job: dict[str, Any]) -> Peaks:
    """Train ``job`` as one rank among several; return the peaks of PyTorch's allocator."""
    from tests.dataset_builder.measure.null_gpu.first_rank import begin, peaks

    planned, parallel = planned_of(job), job["parallel"]
    begin(job["ranks"], parallel == "ddp")
    build, autocast = training.build_network, training._autocast
    gathered: list[torch.dtype | None] = [None]

    def spread(planned: PlannedJob, device: torch.device) -> nn.Module:
        if parallel == "ddp":
            return nn.parallel.DistributedDataParallel(build(planned, device), device_ids=[0])
        network = build(planned, torch.device("cpu"))
        gathered[0] = gathered_in(network, parallel, AUTOCAST.get(planned.options.precision))
        return sharded(network, gathered[0], None if parallel == "fsdp" else False)

    def autocast_unless_sharded(
        options: Any, device: torch.device
    ) -> AbstractContextManager[object]:
        return autocast(options, device) if gathered[0] is None else nullcontext()

    with (
        patch.object(training, "build_network", spread),
        patch.object(training, "_autocast", autocast_unless_sharded),
    ):
        training.train(
            planned, torch.device("cuda", 0), 0, lambda phase: torch.cuda.memory_reserved()
        )
    requested, allocated, reserved = peaks()
    return requested, allocated, reserved


def sharded(network: nn.Module, gathered: torch.dtype | None, reshard: bool | None) -> nn.Module:
    """Shard ``network`` as PyTorch's documentation recommends: each block, then the remaining
    parameters."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(
        param_dtype=gathered, reduce_dtype=None if gathered is None else torch.float32
    )
    for each in (*blocks(network), network):
        fully_shard(each, mp_policy=policy, reshard_after_forward=reshard)
    return network


def figures(results: list[tuple[Peaks | None, Peaks | None]]) -> list[str]:
    pairs = [(real, traced_bytes) for real, traced_bytes in results if real and traced_bytes]
    both = sum(real is None and traced_bytes is None for real, traced_bytes in results)
    counts = [str(len(pairs)), str(both), str(len(results) - len(pairs) - both)]
    if not pairs:
        return counts
    real, traced_bytes = (
        np.array([pair[column] for pair in pairs], dtype=float) for column in (0, 1)
    )
    error = (traced_bytes - real)[:, 2] / real[:, 2]
    shares = [
        f"{share:.1%}"
        for share in (*(real == traced_bytes).mean(axis=0), np.mean(abs(error) <= 0.01))
    ]
    return [*counts, *shares, f"{min(0.0, error.min()):.1%}", f"{max(0.0, error.max()):.1%}"]


if __name__ == "__main__":
    main()
