"""Estimates in CARMA's task descriptions: one line changes, the file is never half-written, and
nothing known leaves it alone."""

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpumemnet import Predictor, job_from_json
from gpumemnet.units import ceil_mib
from tests.conftest import RunningService

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "integrations/carma/write_estimate.py"
JOB = ROOT / "examples/mlp_job.json"
TASK = b"""# a task of the test's own, of the shape of those that CARMA ships
conda activate tf
python /home/user/train.py --batch_size 32
task.model
data
32
exclusive
1
788
2231.6129
53.99452972
8000"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "task.rad"
    path.write_bytes(TASK)
    return path


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
    )


def expected_task(amount: object) -> bytes:
    return TASK.removesuffix(b"8000") + str(amount).encode()


def test_the_expected_amount_is_written_and_nothing_else_changes(task: Path) -> None:
    task.chmod(0o640)
    done = run(task, JOB)
    estimate = Predictor.default().predict(job_from_json(JOB.read_text()))
    assert (done.returncode, done.stderr) == (0, "")
    assert task.read_bytes() == expected_task(ceil_mib(estimate.expected_bytes))
    assert stat.S_IMODE(task.stat().st_mode) == 0o640
    assert [path.name for path in task.parent.iterdir()] == ["task.rad"]


def test_a_service_is_asked_where_one_is_named(task: Path, service: RunningService) -> None:
    for gpu in ("A100-40GB", "H100"):
        assert run(task, JOB, "--url", service.url, "--gpu", gpu).returncode == 0
        own = Predictor.default().predict(job_from_json(JOB.read_text()), gpu=gpu)
        assert task.read_bytes() == expected_task(ceil_mib(own.expected_bytes))


def test_the_safe_amount_and_another_gpu(task: Path) -> None:
    assert run(task, JOB, "--limit", "--gpu", "A100-80GB").returncode == 0
    estimate = Predictor.default().predict(job_from_json(JOB.read_text()), gpu="A100-80GB")
    assert estimate.safe_bytes is not None
    assert task.read_bytes() == expected_task(ceil_mib(estimate.safe_bytes))


def test_where_nothing_is_known_no_older_number_stays(task: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    document = json.loads(JOB.read_text()) | {"gradient_accumulation": 64}
    job.write_text(json.dumps(document))
    for options, amount in (((), 40000), (("--unknown-mib", "24000"), 24000)):
        task.write_bytes(TASK)
        done = run(task, job, *options)
        assert (done.returncode, task.read_bytes()) == (0, expected_task(amount))
        assert "no safe amount is known" in done.stderr


def test_it_fails_open(task: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    for arguments in (
        (task, JOB, "--url", "http://127.0.0.1:1"),
        (task, bad),
        (task, JOB, "--gpu", "no such GPU"),
    ):
        done = run(*arguments)
        assert (done.returncode, task.read_bytes()) == (0, TASK)
        assert "is left as it is: " in done.stderr
        assert "Traceback" not in done.stderr
