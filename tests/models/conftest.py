"""Labelled jobs for tests of training: synthetic ones in memory, and the published measurements."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from gpumemnet.job.job_table import JobTable
from gpumemnet.job.layers import Layer
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.features import FEATURE_NAMES
from gpumemnet.units import GIB, MIB
from models.training.data import LabelledJobs, features_on, folds
from tests.sites import DATASETS

GPU = "NVIDIA A100-SXM4-40GB"


def random_mlp(generator: random.Random) -> TrainingJob:
    width = inputs = generator.randint(16, 4096)
    layers = []
    for _ in range(generator.randint(1, 6)):
        following = generator.randint(8, 4096)
        layers += [Layer("linear", following, (width + 1) * following), Layer("relu", following)]
        width = following
    return TrainingJob(
        family="mlp",
        batch_size=generator.randint(4, 2000),
        input_elements=inputs,
        optimizer="adam",
        precision="fp32",
        layers=(*layers, Layer("linear", 10, (width + 1) * 10)),
    )


@pytest.fixture(scope="session")
def synthetic() -> LabelledJobs:
    """300 jobs whose memory follows a known rule, with one in fifty too large for the card."""
    generator = random.Random(5)
    jobs = tuple(random_mlp(generator) for _ in range(300))
    features = features_on(GPU, jobs)
    noise = np.random.default_rng(5).normal(0, 4 * MIB, len(jobs))
    labels = 1.1 * features[:, FEATURE_NAMES.index("segment_bytes")] + 1.3 * GIB + noise
    oom = np.arange(len(jobs)) % 50 == 7
    return LabelledJobs(
        jobs=JobTable.from_jobs(jobs),
        features=features,
        label_bytes=np.where(oom, np.nan, labels),
        lower_bytes=np.where(oom, 1 * GIB, labels - MIB),
        upper_bytes=np.where(oom, np.inf, labels + MIB),
        groups=np.arange(len(jobs)) // 2,
        gpu=GPU,
        capacity_bytes=40 * GIB,
        provenance="measured",
        label_source="nvml_process",
        sha256="0" * 64,
    )


@pytest.fixture(scope="session")
def halves(synthetic: LabelledJobs) -> tuple[LabelledJobs, LabelledJobs]:
    """Training jobs, and test jobs of other architectures that have a label."""
    training, test = folds(synthetic.groups, 3, seed=1)[0]
    return synthetic.take(training), synthetic.take(test[~np.isnan(synthetic.label_bytes[test])])


@pytest.fixture(scope="session")
def published() -> Path:
    """The dataset of the published measurements."""
    return DATASETS / "published_mlp_a100.parquet"
