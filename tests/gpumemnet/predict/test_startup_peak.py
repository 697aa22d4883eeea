"""The start-up peak beside the steady state: what cuDNN's search takes in the first step."""

from dataclasses import replace

import gpumemnet
from gpumemnet.gpu import available_mib, device_profile
from gpumemnet.job.layers import Layer
from gpumemnet.job.training_job import TrainingJob, totals_only
from gpumemnet.units import MIB
from tests.jobs import mlp

PREDICTOR = gpumemnet.Predictor.default()
GPU = "A100-40GB"
CONTEXT_BYTES = PREDICTOR.prediction_gpu(GPU).context.expected_bytes
SIDE = 224
CONVOLUTION = 64 * SIDE**2
"""Outputs of a convolution per sample."""
SHALLOW = TrainingJob(
    family="cnn",
    batch_size=128,
    input_elements=3 * SIDE**2,
    optimizer="sgd",
    precision="fp32",
    cudnn_benchmark=True,
    layers=(
        Layer("conv2d", CONVOLUTION, 1_728),
        Layer("relu", CONVOLUTION, 0),
        Layer("conv2d", CONVOLUTION, 36_864),
        Layer("relu", CONVOLUTION, 0),
        Layer("max_pool", CONVOLUTION // 64, 0),
        Layer("linear", 1_000, 50_176_000),
    ),
)
WEIGHTS_BYTES = 4 * (1_728 + 36_864 + 50_176_000)


def test_a_search_holds_the_weights_and_three_and_a_half_times_the_largest_convolution() -> None:
    answer = PREDICTOR.predict(SHALLOW, gpu=GPU)
    by_hand = CONTEXT_BYTES + WEIGHTS_BYTES + 3.5 * 4 * 128 * 2 * CONVOLUTION
    assert answer.startup_peak_bytes > 1.1 * answer.expected_bytes
    assert abs(answer.startup_peak_bytes / by_hand - 1.0) < 0.01


def test_a_search_takes_no_more_than_the_gpu_has() -> None:
    largest = PREDICTOR.predict(replace(SHALLOW, batch_size=470), gpu=GPU)
    assert (
        largest.startup_peak_bytes
        == available_mib(device_profile(GPU)) * MIB
        > largest.expected_bytes
    )
    beyond = PREDICTOR.predict(replace(SHALLOW, batch_size=4_000), gpu=GPU)
    assert beyond.startup_peak_bytes == beyond.expected_bytes


def test_without_a_search_both_are_equal() -> None:
    plain = replace(SHALLOW, cudnn_benchmark=False)
    for job in (plain, totals_only(SHALLOW)):
        answer = PREDICTOR.predict(job, gpu=GPU)
        assert answer.startup_peak_bytes == answer.expected_bytes


def test_tables_and_documents_say_what_single_predictions_say() -> None:
    jobs = [replace(SHALLOW, cudnn_benchmark=False), mlp(256), SHALLOW, totals_only(SHALLOW)]
    table = PREDICTOR.predict_many(jobs, gpu=GPU)
    single = [PREDICTOR.predict(job, gpu=GPU).startup_peak_bytes for job in jobs]
    assert table.startup_peak_bytes.tolist() == [one.startup_peak_bytes for one in table] == single
    assert [document["startup_peak_bytes"] for document in table.documents()] == single
