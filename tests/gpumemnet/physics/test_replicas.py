"""One of several replicas (``DistributedDataParallel``): what it takes more than alone, and what
nobody learns from it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from gpumemnet import trace
from gpumemnet.errors import DatasetError
from gpumemnet.job.dataset import read_dataset, write_dataset
from gpumemnet.job.json_codec import job_from_dict
from gpumemnet.job.layers import Layer
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.physics.replicas import communicator_bound_bytes, communicator_bytes
from gpumemnet.predict.distribution import BinScheme, MemoryDistribution, bins_of_width
from gpumemnet.predict.predictor import Predictor
from gpumemnet.site.calibration import calibrate
from gpumemnet.site.observations import read_site_rows
from gpumemnet.site.validation import validate
from gpumemnet.tracing import ExtraResults
from gpumemnet.units import GIB, MIB
from models.retrain.collect import collect
from models.training.data import labelled_families, load_labelled_jobs, load_training_rows
from tests.jobs import jobs, mlp
from tests.models.retraining import dataset, measured
from tests.sites import DATASETS

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


def test_frozen_parameters_have_no_buckets() -> None:
    job = replace(mlp(2048, depth=2), ranks=8)
    frozen = replace(
        job, trainable_parameters=job.trainable_parameters // 2 if job.trainable_parameters else 0
    )
    alone = [PREDICTOR.predict(replace(one, ranks=1)).expected_bytes for one in (job, frozen)]
    ranks = [PREDICTOR.predict(one).expected_bytes for one in (job, frozen)]
    more = [rank - own for rank, own in zip(ranks, alone, strict=True)]
    assert more[0] - more[1] == pytest.approx(2 * (job.trainable_parameters or 0), abs=8)


def test_the_bins_move_with_the_amounts() -> None:
    job = mlp(4096)
    alone, rank = (
        PREDICTOR.predict(replace(job, ranks=ranks), bins=bins_of_width(64 * MIB))
        for ranks in (1, 4)
    )
    middles = (np.arange(rank.bins.count) + 0.5) * 64 * MIB
    means = [float(one.probabilities @ middles) for one in (alone, rank)]
    assert means[1] - means[0] == pytest.approx(
        rank.expected_bytes - alone.expected_bytes, abs=64 * MIB
    )
    low, high = rank.bin_bounds_bytes
    assert low <= rank.expected_bytes <= (high or rank.expected_bytes)
    assert rank.probabilities.sum() == pytest.approx(1)


@given(st.floats(19, 26), st.floats(0.001, 0.2), st.floats(0, 2.0**36))
def test_a_moved_distribution_has_its_centre_and_its_width_there(
    at: float, scale: float, more: float
) -> None:
    one = MemoryDistribution(np.ones((1, 1)), np.array([[at]]), np.array([[scale]]))
    moved = one.moved(np.array([more]))
    assert float(moved.locations[0, 0]) == pytest.approx(np.log(np.exp(at) + more), rel=1e-12)
    width = np.exp(one.locations) * one.scales
    assert np.exp(moved.locations) * moved.scales == pytest.approx(width, rel=1e-9)
    edges = np.log(np.array([np.exp(at) + more]))
    assert moved.bin_probabilities(edges)[0] == pytest.approx([0.5, 0.5], abs=1e-6)


def test_jobs_that_are_alone_are_not_moved_at_all() -> None:
    scheme = BinScheme(GIB, 64)
    two = MemoryDistribution(
        np.full((2, 2), 0.5), np.array([[20.0, 21.0], [22.0, 23.0]]), np.full((2, 2), 0.1)
    )
    moved = two.moved(np.array([0.0, 5.0 * GIB]))
    edges = scheme.log_inner_edges
    np.testing.assert_array_equal(
        moved.bin_probabilities(edges)[0], two.bin_probabilities(edges)[0]
    )
    assert moved.bin_probabilities(edges)[1].argmax() > two.bin_probabilities(edges)[1].argmax()


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


def test_the_command_line_takes_ranks(tmp_path: Path) -> None:
    source = tmp_path / "net.py"
    source.write_text(
        "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 10))\n"
    )
    out = tmp_path / "job.json"
    words = [
        f"{source}:build",
        "--batch-size",
        "32",
        "--input",
        "64",
        "--ranks",
        "4",
        "--out",
        str(out),
    ]
    subprocess.run(
        [sys.executable, "-m", "gpumemnet", "extract", *words], check=True, capture_output=True
    )
    assert json.loads(out.read_text())["ranks"] == 4
    done = subprocess.run(
        [sys.executable, "-m", "gpumemnet", "predict", str(out), "--json"],
        check=True,
        capture_output=True,
    )
    assert json.loads(done.stdout)["expected_bytes"] > 688 * MIB
    shown = subprocess.run(
        [sys.executable, "-m", "gpumemnet", "predict", str(out)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "one of 4 replicas" in shown.stdout


def test_a_dataset_without_the_column_holds_jobs_that_are_alone(tmp_path: Path) -> None:
    rows = list(
        read_dataset(DATASETS / "published_mlp_a100.parquet")[:20]
    )  # of before there were ranks
    assert {row.job.ranks for row in rows} == {1}
    rows[3] = replace(rows[3], job=replace(rows[3].job, ranks=8))
    write_dataset(tmp_path / "rows.parquet", rows)
    assert [row.job.ranks for row in read_dataset(tmp_path / "rows.parquet")] == [
        1,
        1,
        1,
        8,
        *[1] * 16,
    ]


def test_alike_rows_are_alone_or_replicas() -> None:
    rows = [
        replace(row, context_bytes=None)
        for row in read_dataset(DATASETS / "published_mlp_a100.parquet")[:300]
    ]
    spread = [
        replace(
            row,
            job=replace(row.job, ranks=8),
            peak_device_bytes=(row.peak_device_bytes or 0) + 2 * GIB,
        )
        for row in rows
    ]
    assert [
        one for one in validate(rows + spread) if one.rule == "below-floor" and one.row <= 300
    ] == [one for one in validate(rows) if one.rule == "below-floor"]


def test_replicas_are_no_training_rows(tmp_path: Path) -> None:
    rows = measured(60, 1)
    spread = [replace(row, job=replace(row.job, ranks=4)) for row in rows]
    mixed = dataset(tmp_path / "mixed.parquet", rows[:40] + spread[40:])
    assert len(load_labelled_jobs(mixed, "mlp")) == 40
    assert len(load_training_rows(mixed)) == 40
    found = collect([mixed])
    assert len(found.rows) == 40
    assert [(one.rows, "one of several replicas" in one.reason) for one in found.refusals] == [
        (20, True)
    ]
    only = dataset(tmp_path / "only.parquet", spread)
    assert labelled_families(only) == []
    with pytest.raises(DatasetError, match="one of several replicas"):
        calibrate(
            read_site_rows([only]),
            [bundle for bundle in PREDICTOR.bundles if bundle.card.family == "mlp"],
        )
