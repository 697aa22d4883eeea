"""KServe's and Triton's own clients are answered, by the example that shows how to use them."""

import importlib.util
import json
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


@pytest.mark.parametrize(("client", "package"), [("kserve", "kserve"), ("triton", "tritonclient")])
def test_an_independent_client_is_answered(service: RunningService, predictor: Predictor, client: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed, whose client would ask")
    command = [sys.executable, str(EXAMPLE), "--client", client, "--url", service.url, "--coverage", "0.9", str(JOB), str(JOB)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.splitlines()
    expected = predictor.predict(job_from_json(JOB.read_bytes()), coverage=0.9)
    assert len(lines) == 2
    assert expected.safe_bytes is not None
    for line in map(json.loads, lines):
        assert line["request_mib"] == ceil_mib(expected.expected_bytes)
        assert line["limit_mib"] == ceil_mib(expected.safe_bytes)
        assert line["model"] == expected.estimator
