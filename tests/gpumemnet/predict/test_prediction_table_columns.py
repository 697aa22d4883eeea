"""Tables of predictions: the most probable bin without all probabilities, and columns that agree
with single rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.distribution import MemoryDistribution, bins_of_width
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import GIB, MIB
from tests.jobs import jobs

PREDICTOR = Predictor.default()


@settings(max_examples=100)
@given(
    st.integers(0, 2**32),
    st.sampled_from([64 * MIB, GIB, 8 * GIB, 200 * GIB]),
    st.sampled_from([0.001, 0.05, 1.0]),
)
def test_the_most_probable_bin_is_that_of_all_probabilities(
    seed: int, width_bytes: int, spread: float
) -> None:
    generator = np.random.default_rng(seed)
    weights = generator.dirichlet(np.ones(5), 50).astype(np.float32)
    locations = (
        generator.uniform(19, 27, (50, 1)) + spread * generator.normal(size=(50, 5))
    ).astype(np.float32)
    scales = (spread * generator.uniform(0.01, 2, (50, 5))).astype(np.float32)
    parts: Any = weights, locations, scales  # float32, as a graph gives them
    distribution = MemoryDistribution(*parts)
    edges = bins_of_width(width_bytes).log_inner_edges
    expected = distribution.bin_probabilities(edges).argmax(axis=1)
    for near in (expected, np.zeros(50, np.int64), generator.integers(0, len(edges) + 1, 50)):
        np.testing.assert_array_equal(distribution.most_probable_bins(edges, near), expected)


@settings(max_examples=30)
@given(st.lists(jobs(), min_size=1, max_size=30), st.sampled_from([None, "L4"]))
def test_columns_say_what_single_predictions_say(many: list[TrainingJob], gpu: str | None) -> None:
    predictions = PREDICTOR.predict_many(many, gpu=gpu)
    index = predictions.bin_index
    for row, prediction in enumerate(predictions):
        assert index[row] == prediction.bin_index == predictions.probabilities[row].argmax()
        assert predictions.reasons(row) == prediction.reasons
        assert predictions.in_support[row] == prediction.in_support == (not prediction.reasons)
    np.testing.assert_array_equal(index, predictions.bin_index)
    assert predictions.safe_bytes.tolist() == [prediction.safe_bytes for prediction in predictions]
    assert predictions.expected_bytes.tolist() == [
        prediction.expected_bytes for prediction in predictions
    ]
