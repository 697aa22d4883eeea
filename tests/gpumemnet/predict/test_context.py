"""One CUDA context for one GPU, whichever model answers; and what no answer is below."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpumemnet import Predictor, TrainingJob, job_from_dict, job_from_json
from gpumemnet.errors import FieldError, InvalidJobError
from gpumemnet.gpu import context, device_profile
from gpumemnet.job.job_table import JobTable
from gpumemnet.predict.features import FEATURE_NAMES, feature_matrix
from gpumemnet.predict.prediction import PredictionTable
from gpumemnet.units import MIB

ROOT = Path(__file__).parents[3]
DEFAULT = Predictor.default()
EXAMPLE = job_from_json((ROOT / "examples/mlp_job.json").read_bytes())
GOLDEN = [
    job_from_dict(job)
    for job in json.loads((ROOT / "tests/golden/jobs.json").read_text())["jobs"].values()
]
JOBS = [replace(job, traced_peak_bytes=None) for job in GOLDEN if not job.is_replica]
BATCHES = sorted({share * 2**power // 8 for share in (8, 9, 11, 13) for power in range(3, 13)})
A100 = "NVIDIA A100-SXM4-40GB"


def sweep(job: TrainingJob, encoder: str | None = None) -> PredictionTable:
    return DEFAULT.predict_many(
        [replace(job, batch_size=batch) for batch in BATCHES], gpu="A100", encoder=encoder
    )


def test_the_gpu_and_the_context_are_the_same_for_every_job() -> None:
    expected = context(device_profile(A100)).expected_bytes
    for one in DEFAULT.predict_many(JOBS):
        assert (one.gpu, one.gpu_source, one.context_bytes) == (A100, "default", expected)
        assert "for drivers since CUDA 12.2" in one.context_source


def test_a_site_states_its_gpu_and_its_context() -> None:
    site = Predictor.default(gpu="H100", context_bytes=1443 * MIB)
    plain, stated = DEFAULT.predict(EXAMPLE, gpu="H100"), site.predict(EXAMPLE)
    assert (stated.gpu, stated.gpu_source, stated.context_bytes) == (
        plain.gpu,
        "setting",
        1443 * MIB,
    )
    assert "GPUMEMNET_CONTEXT_MIB" in stated.context_source
    assert stated.expected_bytes - plain.expected_bytes == 1443 * MIB - plain.context_bytes
    assert site.predict(EXAMPLE, gpu="A100").gpu_source == "request"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gpu": "Voodoo2"}, "gpu: no profile of 'Voodoo2'"),
        ({"context_bytes": 0}, "context_bytes: must be between 1 and 17179869184"),
        ({"context_bytes": 2**40}, "context_bytes: must be between 1 and 17179869184"),
    ],
)
def test_a_setting_that_cannot_be(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(FieldError) as raised:
        Predictor.default(**settings)
    assert str(raised.value).startswith(sentence)


def test_no_answer_is_below_what_every_step_holds() -> None:
    certain = [
        FEATURE_NAMES.index(name)
        for name in ("weight_bytes", "gradient_bytes", "optimizer_state_bytes")
    ]
    for job in JOBS[::3]:
        answers = sweep(job)
        held = feature_matrix(JobTable.from_jobs([job]), 0)[0, certain].sum()
        least = held + answers[0].context_bytes
        assert (answers.expected_bytes >= np.floor(least)).all()
        assert (answers.safe_bytes.compressed() >= np.floor(least)).all()


def test_request_and_limit_grow_with_the_batch() -> None:
    compared = 0
    for job in JOBS[::3]:
        answers = sweep(job)
        for amounts in (
            answers.expected_bytes.astype(float),
            answers.safe_bytes.data.astype(float),
        ):
            compared += len(amounts) - 1
            assert (amounts[1:] >= 0.9999 * amounts[:-1]).all()
    assert compared > 300


@pytest.mark.parametrize("peak_bytes", [1, 33_192])
def test_a_traced_peak_below_what_every_step_holds_is_refused(peak_bytes: int) -> None:
    wrong = replace(EXAMPLE, traced_peak_bytes=peak_bytes)
    with pytest.raises(
        InvalidJobError, match=rf"traced_peak_bytes: is {peak_bytes:,} bytes, below the 704,"
    ):
        DEFAULT.predict(wrong)
    assert list(DEFAULT.refusals(JobTable.from_jobs([EXAMPLE, wrong]))) == [1]
    assert DEFAULT.predict(replace(EXAMPLE, traced_peak_bytes=2**30)).in_support
