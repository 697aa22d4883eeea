"""Compares predictions for one of several replicas with traces of that replica, job by job.

``python benchmarks/replicas.py [--jobs 60] [--seed 11]``: jobs of the builder's recipes, of
architectures that the traced models were not trained on, are traced alone and as one of eight ranks
of PyTorch's ``DistributedDataParallel``. The models predict both.  NCCL's buffers are left out,
because the trace does not see them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.cuda_code import GPU  # noqa: E402
from benchmarks.several_gpus import FAMILIES, MOST_BYTES  # noqa: E402
from dataset_builder.planned_job import PlannedJob, training_job  # noqa: E402
from dataset_builder.recipe import load_recipe, sample_jobs  # noqa: E402
from gpumemnet.errors import GpumemnetError  # noqa: E402
from gpumemnet.gpu import context, device_profile  # noqa: E402
from gpumemnet.job.dataset import read_dataset  # noqa: E402
from gpumemnet.job.measurement import architecture_key  # noqa: E402
from gpumemnet.job.training_job import TrainingJob  # noqa: E402
from gpumemnet.physics.replicas import communicator_bound_bytes, communicator_bytes  # noqa: E402
from gpumemnet.predict.predictor import Predictor  # noqa: E402
from research.traces.labels import traceable, traced_run  # noqa: E402

RANKS = 8
DATASETS = ROOT / "dataset_builder" / "datasets"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=60, help="number of jobs of each family")
    parser.add_argument("--seed", type=int, default=11, help="seed of the recipes' samples")
    arguments = parser.parse_args()
    predictor = Predictor.default()
    table = Table(
        "family",
        "jobs",
        "answer",
        "median error",
        "95th percentile",
        "too low by > 1 %",
        "above the limit",
    )
    for family in FAMILIES:
        trained_on = {
            architecture_key(row.job)
            for row in read_dataset(DATASETS / f"traced_{family}_h200.parquet")
        }
        rows = [
            trace_alone_and_as_replica(job, planned)
            for job, planned in jobs_of(family, arguments.jobs, arguments.seed, trained_on)
        ]
        jobs, alone, rank = zip(*(row for row in rows if row is not None), strict=True)
        of_alone, of_rank = (
            amounts(predictor, [replace(job, ranks=ranks) for job in jobs]) for ranks in (1, RANKS)
        )
        of_rank -= [[communicator_bytes((RANKS,))], [communicator_bound_bytes((RANKS,))]]
        inside = ~np.isnan(of_alone[1])  # the other jobs have no safe bytes
        for name, labels, (expected, safe) in (
            ("alone, of a job that is alone", alone, of_alone),
            ("alone, of a replica", rank, of_alone),
            ("with ranks, of a replica", rank, of_rank),
        ):
            table.add_row(
                family,
                str(inside.sum()),
                name,
                *figures(np.array(labels)[inside], expected[inside], safe[inside]),
            )
    Console(width=140).print(table)


def jobs_of(
    family: str, count: int, seed: int, trained_on: set[str]
) -> Iterator[tuple[TrainingJob, PlannedJob]]:
    """Yield jobs of the recipe whose architectures are not in ``trained_on``."""
    for planned in sample_jobs(load_recipe(family), count, seed, MOST_BYTES):
        job = training_job(planned)
        if architecture_key(job) not in trained_on:
            yield job, planned


def trace_alone_and_as_replica(
    job: TrainingJob, planned: PlannedJob
) -> tuple[TrainingJob, int, int] | None:
    """Return the job with its bytes alone and as a replica; ``None`` if it cannot be traced."""
    device = device_profile(GPU)
    labels = []
    for parallel, ranks in (("none", 1), ("ddp", RANKS)):
        try:
            network, inputs, options, platform = traceable(planned, job.attention_kernel, device)
            run = traced_run(
                network, inputs, replace(options, parallel=parallel, ranks=ranks), platform
            )
        except GpumemnetError as error:
            print(f"{job.family}: {error}", file=sys.stderr)
            return None
        labels.append(run.reserved_bytes + context(device).expected_bytes)
    return job, labels[0], labels[1]


def amounts(predictor: Predictor, jobs: list[TrainingJob]) -> np.ndarray:
    """Return expected and safe bytes, shape ``[2, B]``; NaN where there are none."""
    estimates = predictor.predict_many(jobs, gpu=GPU)
    return np.array(
        [
            [estimate.expected_bytes for estimate in estimates],
            [estimate.safe_bytes or np.nan for estimate in estimates],
        ]
    )


def figures(label: np.ndarray, expected: np.ndarray, limit: np.ndarray) -> tuple[str, ...]:
    error = expected / label - 1
    return (
        f"{np.median(abs(error)):.1%}",
        f"{np.quantile(abs(error), 0.95):.1%}",
        f"{np.mean(error < -0.01):.0%}",
        f"{int((label > limit).sum())} of {len(label)}",
    )


if __name__ == "__main__":
    main()
