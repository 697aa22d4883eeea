"""Valid questions, spoilt in every way: the answer is a prediction or says what is wrong, and the
log stays without a traceback.

:mod:`test_fuzz` asks with made-up documents; here valid ones are changed, as text and as bytes, so
that the fault lies deep.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import event, given

from service.api.examples import EXAMPLE_JOBS, predict_examples
from service.api.responses import Problem
from tests.conftest import StartService
from tests.fuzzing import fuzzed, spoilt_json

JOBS = list(EXAMPLE_JOBS.values())
LISTED = {
    **JOBS[0],
    "layers": [
        [layer["kind"], layer["activations"], layer["parameters"]] for layer in JOBS[0]["layers"]
    ],
}
UNKNOWN_ID = "01900000-0000-7000-8000-000000000000"
OPTIONS = {"coverage": 0.95, "bin_width_mib": 2048}
QUESTIONS: dict[str, Sequence[Mapping[str, Any]]] = {
    "/v1/predict": [
        *({"job": job, **OPTIONS} for job in JOBS),
        *predict_examples("mlp").values(),
        {"job": LISTED, "bins": "published-1000mib"},
    ],
    "/v1/predict/batch": [{"jobs": [JOBS[0], LISTED, *JOBS[1:]], **OPTIONS}],
    "/v1/batch-sizes": [
        {
            "job": JOBS[0],
            "gpu": "A100",
            "mig": "1g.5gb",
            "free_mib": 3000,
            "max_batch": 16,
            "coverage": 0.9,
        }
    ],
    "/v1/observations": [
        {
            "job": job,
            "gpu": "A100",
            "peak_mib": 1700,
            "source": "nvml_process",
            "oom": False,
            "driver": "550",
            "torch": "2.8",
        }
        for job in JOBS
    ]
    + [
        {
            "prediction_id": UNKNOWN_ID,
            "peak_bytes": 2**31,
            "source": "dcgm",
            "oom": True,
            "limit_mib": 4000,
        },
        {
            "observations": [
                {
                    "job": JOBS[0],
                    "gpu": "H100",
                    "peak_mib": 900,
                    "source": "dcgm",
                    "idempotency_key": "a",
                }
            ]
            * 3
        },
    ],
}


@pytest.fixture(scope="module")
def http(
    start_service: StartService, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A service of its own, whose log holds these questions alone."""
    with start_service(GPUMEMNET_REGISTRY=str(tmp_path_factory.mktemp("registry"))) as running:
        with httpx.Client(
            base_url=running.url, timeout=300, headers={"Content-Type": "application/json"}
        ) as client:
            yield client
            assert client.get("/healthz").status_code == 200
        assert "Traceback" not in running.log.read_text()


def assert_answered(response: httpx.Response) -> None:
    event(f"status {response.status_code}")
    if response.status_code in (200, 201):
        assert response.content
        return
    assert 400 <= response.status_code < 500
    assert response.headers["content-type"] == "application/problem+json"
    assert Problem.model_validate_json(response.content).status == response.status_code


@pytest.mark.parametrize("path", QUESTIONS)
def test_spoilt_questions(http: httpx.Client, path: str) -> None:
    @fuzzed
    @given(body=spoilt_json(QUESTIONS[path]))
    def ask(body: bytes) -> None:
        assert_answered(http.post(path, content=body))

    ask()
