"""KServe's and Triton's own clients are answered, by the example that shows how to use them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpumemnet.job.json_codec import job_from_json
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import ceil_mib
from tests.conftest import RunningService

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "oip_client.py"
JOB = ROOT / "examples" / "mlp_job.json"


def python_with(client: str) -> str:
    """The Python that has the client.  KServe's cannot stand beside the versions in
    constraints.txt.

    kserve 0.21 wants pandas below 3, protobuf below 7, psutil below 6 and python-dateutil below 3,
    and 450 MB with what it needs.
    """
    if client == "triton":
        if (
            importlib.util.find_spec("tritonclient") is None
        ):  # CI has it, with the other extras of the tests
            pytest.skip("the package tritonclient is not installed, whose client would ask")
        return sys.executable
    python = os.environ.get("KSERVE_PYTHON")
    if python is None:
        pytest.skip(
            "KSERVE_PYTHON names no Python with kserve: it excludes versions that this project is tested with"
        )
    return python


@pytest.mark.parametrize("client", ["kserve", "triton"])
def test_an_independent_client_is_answered(
    service: RunningService, predictor: Predictor, client: str
) -> None:
    asking = [python_with(client), str(EXAMPLE), "--client", client, "--url", service.url]
    done = subprocess.run(
        [*asking, "--coverage", "0.9", str(JOB), str(JOB)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    expected = predictor.predict(job_from_json(JOB.read_bytes()), coverage=0.9)
    assert len(lines) == 2
    assert expected.safe_bytes is not None
    for line in map(json.loads, lines):
        assert line["request_mib"] == ceil_mib(expected.expected_bytes)
        assert line["limit_mib"] == ceil_mib(expected.safe_bytes)
        assert line["model"] == expected.estimator
