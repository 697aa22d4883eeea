"""The measurements of the dataset builder's tests, and quick child processes."""

from __future__ import annotations

import pytest

from tests.dataset_builder.conftest import job, measurement, oom
from tests.torch_forks import ForkedChild

__all__ = ["job", "measurement", "oom"]


@pytest.fixture(autouse=True)
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's code runs in a process forked from one that has loaded PyTorch; the command line's
    tests start interpreters, as users do."""
    monkeypatch.setattr("gpumemnet.sandbox.process.start_child", ForkedChild)
