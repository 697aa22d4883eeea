"""The predictor with the shipped bundle: what it answers inside its support, outside, and to questions without sense."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpumemnet.bins import PUBLISHED_BINS, bins_of_width
from gpumemnet.devices import device_profile, device_profiles
from gpumemnet.errors import BundleError, InvalidRequestError, UnsupportedJobError
from gpumemnet.job import TrainingJob, totals_only
from gpumemnet.job_json import job_from_json
from gpumemnet.layers import Layer
from gpumemnet.predictor import Predictor
from gpumemnet.units import GIB, MIB
from tests.jobs import jobs, small_job

PREDICTOR = Predictor.default()
EXAMPLE = Path(__file__).parents[2] / "examples" / "mlp_job.json"


def mlp(width: int, batch_size: int = 512, depth: int = 3) -> TrainingJob:
    layers = [Layer("linear", width, (1024 + 1) * width), Layer("relu", width)]
    layers += [Layer("linear", width, (width + 1) * width), Layer("relu", width)] * (depth - 1)
    return small_job(batch_size=batch_size, input_elements=1024, layers=(*layers, Layer("linear", 100, (width + 1) * 100)))


def test_the_example_of_the_readme() -> None:
    estimate = PREDICTOR.predict(job_from_json(EXAMPLE.read_bytes()), coverage=0.99)
    assert estimate.in_support
    assert estimate.reasons == ()
    assert estimate.gpu == "NVIDIA A100-SXM4-40GB"
    assert estimate.bin_bounds_bytes == (2 * GIB, 3 * GIB)
    assert estimate.safe_bytes is not None
    assert 2048 * MIB < estimate.expected_bytes < estimate.safe_bytes < 1.12 * estimate.expected_bytes


@pytest.mark.parametrize("width", [64, 512, 2048, 4096])
def test_totals_alone_are_answered_much_like_layers(width: int) -> None:
    full, bare = PREDICTOR.predict(mlp(width)), PREDICTOR.predict(totals_only(mlp(width)))
    assert bare.in_support
    assert bare.expected_bytes == pytest.approx(full.expected_bytes, rel=0.06)


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_any_mlp_job_gets_a_whole_answer(job: TrainingJob) -> None:
    assume(job.family == "mlp")
    estimate = PREDICTOR.predict(job)
    assert estimate.expected_bytes > 0
    assert estimate.probabilities.sum() == pytest.approx(1, abs=1e-9)
    assert estimate.probabilities.min() >= 0
    assert estimate.in_support == (not estimate.reasons) == (estimate.safe_bytes is not None)
    assert estimate.safe_bytes is None or estimate.safe_bytes >= estimate.expected_bytes


def test_many_are_answered_as_one_by_one() -> None:
    many = [mlp(width, batch_size) for width in (32, 700, 3000) for batch_size in (8, 1000, 40_000)]
    many += [totals_only(job) for job in many]
    for job, estimate in zip(many, PREDICTOR.estimate(many), strict=True):
        alone = PREDICTOR.predict(job)
        assert estimate.expected_bytes == pytest.approx(alone.expected_bytes, rel=1e-5)
        assert estimate.reasons == alone.reasons
        np.testing.assert_allclose(estimate.probabilities, alone.probabilities, atol=1e-3)
    assert PREDICTOR.estimate([]) == []


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (mlp(512, batch_size=4096), "batch_size is 4,096; the model was trained on 4 to 1,023"),
        (small_job(optimizer="sgd"), "optimizer is 'sgd'; the model was trained on 'adam'"),
        (small_job(sequence_length=128), "sequence_length is 128; the model was trained on null"),
        (
            small_job(layers=(Layer("conv2d", 9, 9), Layer("magic", 3, 4))),
            "layers of kind conv2d, magic; the model was trained on",
        ),
        (small_job(precision="bf16"), "precision is 'bf16'; the model was trained on 'fp32'"),
        (small_job(trainable_parameters=1000), "trainable_share is 0.0173; the model was trained on 1"),
        (small_job(input_elements=10**6), "input_elements is 1,000,000; the model was trained on 5 to 4,095"),
    ],
)
def test_outside_the_support_there_is_a_reason_and_no_bound(job: TrainingJob, reason: str) -> None:
    estimate = PREDICTOR.predict(job)
    assert not estimate.in_support
    assert estimate.safe_bytes is None
    assert any(one.startswith(reason) for one in estimate.reasons), estimate.reasons


def test_an_option_never_seen_is_answered_with_doubt() -> None:
    assert PREDICTOR.predict(mlp(2048)).probabilities.max() > 0.95
    assert PREDICTOR.predict(replace(mlp(2048), optimizer="adagrad")).probabilities.max() < 0.8


def test_outside_the_answer_is_physics_and_grows() -> None:
    sizes = [PREDICTOR.predict(mlp(16_384, batch_size)).expected_bytes for batch_size in (1024, 4096, 16_384, 65_536)]
    assert sizes == sorted(sizes)
    # Weights of 16,384² twice and their Adam state alone are 8 GiB; activations of the largest batch some 24 GiB more.
    assert sizes[0] > 8 * GIB
    assert sizes[-1] > sizes[0] + 12 * GIB


def test_fewer_optimizer_states_take_less() -> None:
    sgd, adamw = (PREDICTOR.predict(replace(mlp(4096, depth=8), optimizer=name)).expected_bytes for name in ("sgd", "adamw"))
    assert sgd < adamw


@given(st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.99, 0.995]))
@settings(deadline=None)
def test_more_coverage_needs_more_memory(coverage: float) -> None:
    less, more = (PREDICTOR.predict(mlp(1500), coverage=level).safe_bytes for level in (coverage, 0.999))
    assert less is not None
    assert more is not None
    assert less < more


def test_a_coverage_between_levels_takes_the_next_higher() -> None:
    assert PREDICTOR.predict(mlp(800), coverage=0.985).safe_bytes == PREDICTOR.predict(mlp(800), coverage=0.99).safe_bytes


@pytest.mark.parametrize("coverage", [0, 0.1, 0.9999, 1, 5, -1, math.nan, True, "0.9", None])
def test_a_coverage_without_sense_is_refused(coverage: float) -> None:
    with pytest.raises(InvalidRequestError, match="coverage: must be"):
        PREDICTOR.predict(small_job(), coverage=coverage)


@pytest.mark.parametrize("bins", [*PUBLISHED_BINS.values(), bins_of_width(GIB // 4)])
def test_any_bins_agree_on_where_memory_lies(bins: object) -> None:
    estimate = PREDICTOR.predict(mlp(2900), bins=bins)  # type: ignore[arg-type]
    lower, upper = estimate.bin_bounds_bytes
    assert lower <= estimate.expected_bytes
    assert upper is None or estimate.expected_bytes < upper


def test_a_family_without_a_model_is_named() -> None:
    with pytest.raises(UnsupportedJobError, match="family: no model for cnn jobs is loaded: there is one for mlp"):
        PREDICTOR.estimate([small_job(), small_job(family="cnn")])


def test_without_bundles_there_is_no_predictor() -> None:
    with pytest.raises(BundleError, match="no bundle to predict with"):
        Predictor([])


def test_devices_are_found_by_name_and_alias() -> None:
    assert device_profile("h200") is device_profile("NVIDIA H200")
    for profile in device_profiles():
        assert profile.capacity_source
        assert profile.blas_workspace_source
        assert (profile.context_bytes is None) == profile.context_source.startswith("unknown")
    with pytest.raises(InvalidRequestError, match="known GPUs are A100"):
        device_profile("TPU")
