"""The published table, and the measurements of the product's tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from research.published_tables.rows import WHERE_TO_GET_IT
from tests.dataset_builder.conftest import job, measurement, oom
from tests.sites import DATASETS

__all__ = ["job", "measurement", "oom"]

PUBLISHED = Path(
    os.environ.get("GPUMEMNET_PUBLISHED_CSV")
    or Path(__file__).parents[3] / "shared/data/published_mlp_a100.csv"
)


@pytest.fixture(scope="session")
def published() -> Path:
    """The dataset of the published measurements."""
    return DATASETS / "published_mlp_a100.parquet"


@pytest.fixture(scope="session")
def published_csv() -> Path:
    """The published table; skips with the place to get it."""
    if not PUBLISHED.is_file():
        pytest.skip(f"{PUBLISHED} is absent (set GPUMEMNET_PUBLISHED_CSV): {WHERE_TO_GET_IT}")
    return PUBLISHED
