"""The mixture of logistics: against scipy's logistic, and its sums."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import logistic

from gpumemnet.predict.distribution import BinScheme, MemoryDistribution
from gpumemnet.units import GIB, MIB


def below(several: MemoryDistribution, points: np.ndarray) -> np.ndarray:
    """P(memory ≤ point), ``[B, E]``, from the bins between the points."""
    return several.bin_probabilities(points).cumsum(axis=1)[:, :-1]


@settings(max_examples=10)
@given(
    st.integers(0, 2**32),
    st.sampled_from([3, 300]),
    st.sampled_from([1, 5, 16]),
    st.sampled_from([64 * MIB, GIB, 8 * GIB]),
)
def test_bins_are_the_differences_of_what_lies_below(
    seed: int, count: int, components: int, width_bytes: int
) -> None:
    generator = np.random.default_rng(seed)
    weights = generator.dirichlet(np.ones(components), count)
    locations = generator.uniform(18, 27, (count, 1)) + generator.normal(
        0, 0.1, (count, components)
    )
    scales = np.exp(generator.uniform(-9, 1, (count, components)))
    edges = BinScheme(width_bytes, 64).log_inner_edges
    probabilities = MemoryDistribution(weights, locations, scales).bin_probabilities(edges)
    expected = (
        weights[:, None] * logistic.cdf(edges[:, None], locations[:, None], scales[:, None])
    ).sum(axis=2)
    assert probabilities.cumsum(axis=1)[:, :-1] == pytest.approx(expected, abs=1e-12)
    assert probabilities.min() >= 0
    assert probabilities.sum(axis=1) == pytest.approx(1, abs=1e-12)


def test_a_widened_distribution_keeps_its_centre() -> None:
    two = MemoryDistribution(
        np.full((2, 2), 0.5), np.array([[20.0, 21.0]] * 2), np.full((2, 2), 0.1)
    )
    wider = two.widened(np.array([1.0, 2.0]))
    points = np.linspace(18, 25, 20)
    assert below(wider, points)[0] == pytest.approx(below(two, points)[0])
    assert below(wider, 20.5 + 2.0 * (points - 20.5))[1] == pytest.approx(below(two, points)[1])
