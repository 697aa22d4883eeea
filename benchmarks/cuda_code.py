"""Compares traces with PyTorch's own CUDA code, job by job: requested, allocated and reserved
bytes.

``python benchmarks/cuda_code.py [--jobs 100] [--seed 0] [--cudnn LIBRARY] [--keep FILE.json]``
needs a CUDA build of PyTorch, gcc and the toolkit's headers, but no GPU.  A campaign of each family
runs on the null GPU of ``tests/dataset_builder/measure/null_gpu``, which counts memory and runs no
kernel, and every job of it is traced.  Libraries
are left out: cuDNN and cuBLAS allocate no memory there, so the trace omits the workspaces of
convolutions.  With ``--cudnn
LIBRARY`` cuDNN states its plans on both sides, and PyTorch's own code chooses among them and
allocates their workspaces.  Jobs whose memory depends on computed values are not comparable.  Jobs
that call Triton kernels (Adafactor with convolutions, torch 2.13) end in an error and are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from dataset_builder.measure.journal import read_journal  # noqa: E402
from gpumemnet.errors import GpumemnetError  # noqa: E402
from gpumemnet.extract.module_calls import ModelInputs  # noqa: E402
from gpumemnet.gpu import device_profile  # noqa: E402
from gpumemnet.job.measurement import Measurement  # noqa: E402
from gpumemnet.sandbox.process import in_processes  # noqa: E402
from gpumemnet.tracing.api import TraceOptions  # noqa: E402
from gpumemnet.tracing.operators import library_workspaces  # noqa: E402
from gpumemnet.tracing.operators.rules import Platform, Scratch, with_cudnn  # noqa: E402
from research.traces.labels import subject, traced_run  # noqa: E402

FAMILIES = ("mlp", "cnn", "transformer")
GPU = "H200"
PEAKS = ("requested", "allocated", "reserved")

Peaks = tuple[int, int, int]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=100, help="number of jobs of each family")
    parser.add_argument("--seed", type=int, default=0, help="seed of the campaigns")
    parser.add_argument(
        "--families",
        nargs="+",
        choices=FAMILIES,
        default=list(FAMILIES),
        help="kinds of networks",
    )
    parser.add_argument(
        "--cudnn",
        type=Path,
        help="libcudnn.so.9, from 9.8 on, that states the workspaces of convolutions",
    )
    parser.add_argument(
        "--keep", type=Path, help="file for the jobs and their peaks on CUDA's code"
    )
    arguments = parser.parse_args()
    import torch

    table = Table(
        "family",
        "jobs",
        *(f"{peak}: equal" for peak in PEAKS),
        "reserved: within 1 %",
        "furthest below",
        "above",
    )
    kept: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for family in arguments.families:
            rows = campaign(Path(folder), family, arguments.jobs, arguments.seed, arguments.cudnn)
            pairs = list(compared(rows, arguments.cudnn))
            table.add_row(family, str(len(pairs)), *_figures(pairs))
            kept += [{**_job(row), **dict(zip(PEAKS, real, strict=True))} for row, real, _ in pairs]
    Console(width=130).print(table)
    if arguments.keep:
        lines = ",\n".join(json.dumps(job, separators=(",", ":")) for job in kept)
        arguments.keep.write_text(f'{{"torch": "{torch.__version__}", "jobs": [\n{lines}\n]}}\n')


def campaign(
    folder: Path, family: str, jobs: int, seed: int, cudnn: Path | None
) -> list[Measurement]:
    """Run a campaign of ``family`` on the null GPU; return the jobs that finished."""
    from tests.dataset_builder.measure.null_gpu.build import build, cudnn_environment, environment

    libraries, out = folder / "libraries", folder / family
    if not libraries.exists():
        build(libraries)
    command = [
        sys.executable,
        "-m",
        "dataset_builder",
        "campaign",
        family,
        "--jobs",
        str(jobs),
        "--seed",
        str(seed),
    ]
    variables = os.environ | environment(libraries) | (cudnn_environment(cudnn) if cudnn else {})
    subprocess.run(
        [*command, "--workers", "3", "--out", str(out)],
        cwd=ROOT,
        env=variables,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return [row for row in read_journal(out) if row.status == "ok"]


def compared(
    rows: list[Measurement], cudnn: Path | None
) -> Iterator[tuple[Measurement, Peaks, Peaks]]:
    """Yield each row that can be traced, its peaks in CUDA's code, and the peaks of its trace."""
    for row, found in zip(
        rows, in_processes(traced, [(row, cudnn) for row in rows], None), strict=True
    ):
        if (
            found is not None
            and row.peak_allocated_bytes is not None
            and row.peak_reserved_bytes is not None
        ):
            yield (
                row,
                (
                    row.allocator["peak_requested_bytes"],
                    row.peak_allocated_bytes,
                    row.peak_reserved_bytes,
                ),
                found,
            )


def traced(row: Measurement, cudnn: Path | None) -> Peaks | None:
    """Return the peaks of the trace of ``row``; ``None`` if it cannot be traced."""
    try:
        found = subject(row, device_profile(GPU))
        return peaks_of(found.network, found.inputs, found.options, found.platform, cudnn)
    except GpumemnetError:
        return None


def peaks_of(
    network: nn.Module,
    inputs: ModelInputs,
    options: TraceOptions,
    platform: Platform,
    cudnn: Path | None = None,
) -> Peaks:
    """Return the peaks of requested, allocated and reserved bytes of a trace.

    Args:
        network, inputs, options, platform: the job.
        cudnn: the cuDNN that states the workspaces of convolutions; they are left out by default.

    Raises:
        ExtractError: when the network cannot be traced.
    """
    if cudnn:
        run = traced_run(network, inputs, options, with_cudnn(platform, str(cudnn))[0])
    else:
        with without_cudnn():
            run = traced_run(network, inputs, options, platform)
    return run.requested_bytes, run.allocated_bytes, run.reserved_bytes


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Remove the workspaces of convolutions; the benchmark of cuDNN still empties the allocator's
    cache."""

    def nothing(
        convolution: Any, operation: str, platform: Platform, after: int | None = None
    ) -> tuple[Scratch, ...]:
        if library_workspaces.is_native(convolution) or not platform.cudnn_benchmark:
            return ()
        return (Scratch(0, 0, "convolution_benchmark", after=after, once=(operation, convolution)),)

    original = library_workspaces.cudnn_workspace
    library_workspaces.cudnn_workspace = nothing
    try:
        yield
    finally:
        library_workspaces.cudnn_workspace = original


def _figures(pairs: list[tuple[Measurement, Peaks, Peaks]]) -> list[str]:
    real, found = (np.array([pair[column] for pair in pairs], dtype=float) for column in (1, 2))
    equal = (real == found).mean(axis=0)
    error = (found - real)[:, 2] / real[:, 2]
    shares = [f"{share:.1%}" for share in (*equal, np.mean(abs(error) <= 0.01))]
    return [*shares, f"{min(0.0, error.min()):.1%}", f"{max(0.0, error.max()):.1%}"]


def _job(row: Measurement) -> dict[str, Any]:
    return {
        "family": row.job.family,
        "architecture": json.loads(row.architecture),
        "options": json.loads(row.options),
    }


if __name__ == "__main__":
    main()
