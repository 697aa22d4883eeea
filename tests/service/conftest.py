import copy
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gpumemnet.predict.predictor import Predictor
from service.api.examples import EXAMPLE_JOBS
from tests.conftest import RunningService


@pytest.fixture(scope="session")
def http(service: RunningService) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=300) as client:
        yield client


@pytest.fixture(scope="session")
def predictor() -> Predictor:
    return Predictor.default()


@pytest.fixture
def job(predictor: Predictor) -> dict[str, Any]:
    """The document of a job that a shipped model answers for."""
    return copy.deepcopy(dict(EXAMPLE_JOBS[predictor.bundles[0].card.families[0]]))
