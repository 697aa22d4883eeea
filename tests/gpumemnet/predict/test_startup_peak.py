"""The start-up peak: the steady state, and unknown where cuDNN searches in the first step."""

from dataclasses import replace

import gpumemnet
from gpumemnet.job.layers import Layer
from gpumemnet.job.training_job import TrainingJob
from tests.jobs import mlp, totals_only

PREDICTOR = gpumemnet.Predictor.default()
GPU = "A100-40GB"
SIDE = 224
SEARCHING = TrainingJob(
    family="cnn",
    batch_size=128,
    input_elements=3 * SIDE**2,
    optimizer="sgd",
    precision="fp32",
    cudnn_benchmark=True,
    layers=(
        Layer("conv2d", 64 * SIDE**2, 1_728),
        Layer("relu", 64 * SIDE**2, 0),
        Layer("max_pool", SIDE**2, 0),
        Layer("linear", 1_000, 50_176_000),
    ),
)
QUIET = (
    replace(SEARCHING, cudnn_benchmark=False),
    totals_only(replace(SEARCHING, cudnn_benchmark=False)),
    replace(mlp(256), cudnn_benchmark=True),
)
"""Jobs without a search: no ``cudnn_benchmark``, or no convolution."""


def test_a_search_leaves_the_start_up_peak_unknown() -> None:
    for job in (SEARCHING, totals_only(SEARCHING)):
        assert PREDICTOR.predict(job, gpu=GPU).startup_peak_bytes is None


def test_without_a_search_it_is_the_steady_state() -> None:
    for job in QUIET:
        answer = PREDICTOR.predict(job, gpu=GPU)
        assert answer.startup_peak_bytes == answer.expected_bytes


def test_tables_and_documents_say_what_single_predictions_say() -> None:
    jobs = [*QUIET, SEARCHING, totals_only(SEARCHING)]
    table = PREDICTOR.predict_many(jobs, gpu=GPU)
    single = [PREDICTOR.predict(job, gpu=GPU).startup_peak_bytes for job in jobs]
    assert [document["startup_peak_bytes"] for document in table.documents()] == single
    assert [one.startup_peak_bytes for one in table] == single
    assert [table[row].startup_peak_bytes for row in range(len(jobs))] == single
