"""The measurements of the dataset builder's tests."""

from __future__ import annotations

from tests.dataset_builder.conftest import job, measurement, oom

__all__ = ["job", "measurement", "oom"]
