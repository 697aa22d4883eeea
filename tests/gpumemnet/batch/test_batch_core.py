"""What batches rely on: the most probable bin without all probabilities, and reasons that are put into words late."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumemnet.features.vector import total_matrix
from gpumemnet.job.json_codec import job_to_dict
from gpumemnet.job.json_columns import read_jobs
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.bins import bins_of_width
from gpumemnet.predict.distribution import MemoryDistribution
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import GIB, MIB
from tests.jobs import jobs

PREDICTOR = Predictor.default()


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.sampled_from([64 * MIB, GIB, 8 * GIB, 200 * GIB]), st.sampled_from([0.001, 0.05, 1.0]))
def test_the_most_probable_bin_is_that_of_all_probabilities(seed: int, width_bytes: int, spread: float) -> None:
    generator = np.random.default_rng(seed)
    weights = generator.dirichlet(np.ones(5), 50).astype(np.float32)
    locations = (generator.uniform(19, 27, (50, 1)) + spread * generator.normal(size=(50, 5))).astype(np.float32)
    scales = (spread * generator.uniform(0.01, 2, (50, 5))).astype(np.float32)
    distribution = MemoryDistribution(weights, locations, scales)
    edges = bins_of_width(width_bytes).log_inner_edges
    expected = distribution.bin_probabilities(edges).argmax(axis=1)
    for near in (expected, np.zeros(50, np.int64), generator.integers(0, len(edges) + 1, 50)):
        np.testing.assert_array_equal(distribution.most_probable_bins(edges, near), expected)


@settings(max_examples=30)
@given(st.lists(jobs(), min_size=1, max_size=30), st.sampled_from([None, "L4"]))
def test_columns_say_what_single_estimates_say(many: list[TrainingJob], gpu: str | None) -> None:
    batch = read_jobs([job_to_dict(job) for job in many]).jobs
    for part in PREDICTOR.parts(batch, gpu=gpu):
        estimates = part.estimates
        indices = estimates.bin_indices
        np.testing.assert_array_equal(indices, estimates.probabilities.argmax(axis=1))
        np.testing.assert_array_equal(indices, estimates.bin_indices)
        assert [row for row, estimate in enumerate(estimates) if estimate.reasons] == sorted(estimates.reasons)
        assert np.flatnonzero(np.isnan(estimates.safe_bytes)).tolist() == sorted(estimates.reasons)


def test_features_of_totals_do_not_depend_on_the_company() -> None:
    batch = read_jobs([job_to_dict(job) for job in _totals(3000)]).jobs
    model = PREDICTOR.models_of("mlp")[0]
    whole = model.look(batch, model.own_place)
    np.testing.assert_array_equal(whole.features[2500:2600], model.look(batch[2500:2600], model.own_place).features)
    assert list(whole.against.reasons) == list(model.glance(batch, model.own_place, total_matrix(batch)))


def _totals(count: int) -> list[TrainingJob]:
    return [
        TrainingJob(
            family="mlp",
            batch_size=1 + number % 2000,
            input_elements=100,
            optimizer="adam",
            precision="fp32",
            total_activations=1000 + number,
            total_parameters=10**5 + number**2,
        )
        for number in range(count)
    ]


def test_reasons_can_be_cut_and_taken() -> None:
    batch = read_jobs([job_to_dict(job) for job in _totals(2000)]).jobs
    model = PREDICTOR.models_of("mlp")[0]
    reasons = model.glance(batch, model.own_place, total_matrix(batch))
    assert reasons[-1] == reasons[1999]
    assert reasons[1990:] == [reasons[row] for row in range(1990, 2000)]
    assert list(reasons.take(np.array([3, 1990]))) == [reasons[3], reasons[1990]]
    with pytest.raises(IndexError):
        reasons[2000]
