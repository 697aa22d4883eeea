"""Labelled jobs for tests of training: the smaller of the shipped datasets."""

from __future__ import annotations

import pytest

from models.training.data import LabelledJobs, load_labelled_jobs
from tests.sites import DATASETS

FEW = (
    DATASETS / "published_transformer_a100.parquet",
    DATASETS / "real_runs" / "published_xmem_rtx30_40.parquet",
    DATASETS / "real_runs" / "traced_ordinary_networks.parquet",
)


@pytest.fixture(scope="session")
def few() -> LabelledJobs:
    """Some 350 jobs of three sources, GPUs and families; 27 ran out of memory."""
    return load_labelled_jobs(FEW)
