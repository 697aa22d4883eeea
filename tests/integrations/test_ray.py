"""Shares of a GPU for Ray, and a local Ray that takes them."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumemnet import job_from_dict
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.gpu_fit import target
from gpumemnet.predict.prediction import Prediction
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import MIB
from integrations.ray.ray_resources import ray_resources
from service.api.examples import EXAMPLE_JOBS

ROOT = Path(__file__).parents[2]
JOB = job_from_dict(EXAMPLE_JOBS["mlp"])

IN_RAY = """
import json, ray, gpumemnet
from gpumemnet import job_from_dict
from integrations.ray.ray_resources import ray_resources

job = job_from_dict(json.loads({job!r}))
resources = ray_resources(job, "A100-40GB", memory_resource="gpu_memory_mib")
ray.init(num_cpus=1, num_gpus=1, resources={{"gpu_memory_mib": 40960}}, include_dashboard=False, log_to_driver=False)

@ray.remote(num_cpus=0)
class Training:
    def assigned(self):
        return ray.get_runtime_context().get_assigned_resources()

side_by_side = int(1 / resources["num_gpus"])
trainings = [Training.options(**resources).remote() for _ in range(side_by_side + 1)]
answers = [training.assigned.remote() for training in trainings]
ray.wait(answers, num_returns=side_by_side, timeout=300)
ready, waiting = ray.wait(answers, num_returns=len(trainings), timeout=4)  # no more can be had than those
print(json.dumps([resources, side_by_side, len(ready), ray.get(ready[0])]))
ray.shutdown()
"""


def test_the_share_is_the_safe_amount_over_what_the_gpu_has() -> None:
    resources = ray_resources(JOB, "A100-40GB")
    safe_bytes = resources.estimate.safe_bytes
    assert safe_bytes is not None
    available_bytes = target("A100-40GB").available_mib * MIB
    assert resources.available_bytes == available_bytes
    assert list(resources) == ["num_gpus"]
    assert (
        safe_bytes
        <= resources["num_gpus"] * available_bytes
        < safe_bytes + available_bytes / 10_000 + 1
    )
    assert round(resources["num_gpus"], 4) == resources["num_gpus"]
    assert resources.reasons == ()


def test_a_job_unlike_the_training_data_gets_a_whole_gpu_and_the_reason() -> None:
    resources = ray_resources(
        job_from_dict({**EXAMPLE_JOBS["mlp"], "gradient_accumulation": 64}),
        "A100",
        memory_resource="mib",
    )
    assert resources == {"num_gpus": 1, "resources": {"mib": target("A100").available_mib}}
    assert resources.reasons == resources.estimate.reasons != ()


def test_a_job_larger_than_the_gpu_gets_a_whole_one_and_the_reason() -> None:
    shipped = Predictor.default()

    class Large:
        def predict(self, job: TrainingJob, **options: Any) -> Prediction:
            return dataclasses.replace(shipped.predict(job, **options), safe_bytes=2**40)

    resources = ray_resources(JOB, "T4", predictor=Large())
    assert resources == {"num_gpus": 1}
    assert "1048576 MiB" in resources.reasons[0]


def test_one_of_several_replicas_gets_a_gpu_of_its_own() -> None:
    resources = ray_resources(job_from_dict({**EXAMPLE_JOBS["mlp"], "ranks": 4}), "A100")
    assert resources == {"num_gpus": 1}
    assert "one of 4 replicas" in resources.reasons[0]


@settings(max_examples=50)
@given(st.integers(1, 2**38))
def test_shares_that_fit_one_gpu_hold_safe_amounts_that_do(safe_bytes: int) -> None:
    class Fixed:
        def predict(self, job: TrainingJob, **options: Any) -> Prediction:
            return dataclasses.replace(ESTIMATE, safe_bytes=safe_bytes)

    share = ray_resources(JOB, "A100", predictor=Fixed())["num_gpus"]
    assert 0 < share <= 1
    side_by_side = int(1 / share)
    assert side_by_side == 1 or side_by_side * safe_bytes <= target("A100").available_mib * MIB


ESTIMATE = Predictor.default().predict(JOB)


@pytest.mark.nightly
def test_a_local_ray_puts_so_many_jobs_on_one_gpu_and_no_more(tmp_path: Path) -> None:
    """In the interpreter that GPUMEMNET_TEST_RAY_PYTHON names, or in this one: Ray needs a separate
    environment here."""
    python = os.environ.get("GPUMEMNET_TEST_RAY_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import ray"], capture_output=True, timeout=300).returncode:
        pytest.skip(
            "Ray is not installed: pip install -e '.[ray]', or name an interpreter in GPUMEMNET_TEST_RAY_PYTHON"
        )
    # three to a GPU, so that a machine of two cores starts them all in time
    job = {
        **EXAMPLE_JOBS["mlp"],
        "batch_size": 16000,
        "layers": None,
        "total_parameters": 200_000_000,
        "total_activations": 40_000,
    }
    script = IN_RAY.format(job=json.dumps(job))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    resources, side_by_side, running, assigned = json.loads(done.stdout.splitlines()[-1])
    assert 1 < side_by_side < 20
    assert running == side_by_side
    assert assigned == {
        "GPU": resources["num_gpus"],
        "gpu_memory_mib": resources["resources"]["gpu_memory_mib"],
    }
