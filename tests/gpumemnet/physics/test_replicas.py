"""One of several replicas (``DistributedDataParallel``): what it takes more than alone, and what
nobody learns from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from gpumemnet import trace
from gpumemnet.errors import DatasetError
from gpumemnet.job.json_codec import job_from_dict
from gpumemnet.job.layers import Layer
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.physics.replicas import communicator_bound_bytes, communicator_bytes
from gpumemnet.predict.predictor import Predictor
from gpumemnet.site.calibration import calibrate
from gpumemnet.site.observations import read_site_rows
from gpumemnet.tracing import ExtraResults
from models.retrain.collect import collect
from models.training.data import load_labelled_jobs
from tests.jobs import jobs
from tests.models.retraining import dataset, measured

PREDICTOR = Predictor.default()


HOLDS_ITS_PARAMETERS_ONLY = TrainingJob(
    family="cnn",
    batch_size=2,
    input_elements=61,
    optimizer="sgd",
    precision="fp32",
    layers=(Layer("linear", 0, 30_000_000),),
)
"""Its answer is the least that a job with so many parameters can hold."""


@given(jobs(), st.sampled_from([2, 3, 8, 512]))
@example(HOLDS_ITS_PARAMETERS_ONLY, 2)
def test_a_replica_takes_its_gradients_twice_and_what_nccl_holds(
    job: TrainingJob, ranks: int
) -> None:
    alone, rank = (PREDICTOR.predict(replace(job, ranks=count)) for count in (1, ranks))
    gradients = (job.trainable_parameters or 0) * (2 if job.precision == "bf16" else 4)
    more = gradients + communicator_bytes((ranks,))
    assert rank.expected_bytes == pytest.approx(alone.expected_bytes + more, rel=1e-12, abs=1)
    assert (rank.in_support, rank.reasons, rank.estimator) == (
        alone.in_support,
        alone.reasons,
        alone.estimator,
    )
    assert (rank.safe_bytes is None) == (alone.safe_bytes is None)
    if rank.safe_bytes is not None and alone.safe_bytes is not None:
        assert rank.safe_bytes == pytest.approx(
            alone.safe_bytes + gradients + communicator_bound_bytes((ranks,)), rel=1e-12, abs=1
        )


def test_a_trace_of_a_replica_finds_what_is_added() -> None:
    layers = [
        layer
        for _ in range(6)
        for layer in (nn.Linear(4096, 4096, bias=False, device="meta"), nn.ReLU())
    ]
    model, inputs = nn.Sequential(*layers), torch.empty(64, 4096, device="meta")
    alone = trace(model, inputs, extras=ExtraResults(job=True))
    rank = trace(model, inputs, parallel="ddp", ranks=8, extras=ExtraResults(job=True))
    gradients = 6 * 4096 * 4096 * 4
    more = rank.reserved_bytes - alone.reserved_bytes
    assert more == pytest.approx(gradients, rel=0.15)  # the allocator's segments lie otherwise, too
    assert rank.job is not None
    job = job_from_dict(rank.job)
    assert (job.ranks, job.traced_peak_bytes) == (8, rank.reserved_bytes)
    # What a trace has seen is not added again.
    told = PREDICTOR.predict(job, gpu="A100")
    as_if_alone = PREDICTOR.predict(replace(job, ranks=1), gpu="A100")
    assert told.expected_bytes - as_if_alone.expected_bytes == communicator_bytes((8,))


def test_replicas_are_no_training_rows(tmp_path: Path) -> None:
    rows = measured(60, 1)
    spread = [replace(row, job=replace(row.job, ranks=4)) for row in rows]
    mixed = dataset(tmp_path / "mixed.parquet", rows[:40] + spread[40:])
    assert len(load_labelled_jobs([mixed])) == 40
    found = collect([mixed])
    assert len(found.data) == 40
    assert [(one.rows, "one of several replicas" in one.reason) for one in found.refusals] == [
        (20, True)
    ]
    only = dataset(tmp_path / "only.parquet", spread)
    with pytest.raises(DatasetError, match="holds no row to train on"):
        load_labelled_jobs([only])
    with pytest.raises(DatasetError, match="one of several replicas"):
        calibrate(
            read_site_rows([only]),
            PREDICTOR.bundles,
        )
