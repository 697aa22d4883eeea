"""The mixture of logistics: against scipy's logistic, and its sums."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import logistic

from gpumemnet.predict.distribution import BinScheme, MemoryDistribution
from gpumemnet.units import GIB, MIB


def mixture(
    weights: list[float], locations: list[float], scales: list[float]
) -> MemoryDistribution:
    return MemoryDistribution(np.array([weights]), np.array([locations]), np.array([scales]))


def below(several: MemoryDistribution, points: np.ndarray) -> np.ndarray:
    """P(memory ≤ point), ``[B, E]``, from the bins between the points."""
    return several.bin_probabilities(points).cumsum(axis=1)[:, :-1]


def test_cdf_is_that_of_the_components() -> None:
    one = mixture([0.3, 0.7], [20.0, 21.5], [0.1, 0.4])
    points = np.linspace(18, 24, 50)
    expected = 0.3 * logistic.cdf(points, 20.0, 0.1) + 0.7 * logistic.cdf(points, 21.5, 0.4)
    assert below(one, points)[0] == pytest.approx(expected, abs=1e-12)


@given(
    st.lists(
        st.tuples(st.floats(0.01, 1), st.floats(15, 27), st.floats(1e-4, 2)), min_size=1, max_size=6
    ),
    st.integers(1, 300),
)
def test_bin_probabilities_are_probabilities(
    components: list[tuple[float, float, float]], count: int
) -> None:
    weights, locations, scales = (list(part) for part in zip(*components, strict=True))
    one = mixture([weight / sum(weights) for weight in weights], locations, scales)
    probabilities = one.bin_probabilities(BinScheme(GIB, count).log_inner_edges)
    assert probabilities.shape == (1, count)
    assert probabilities.min() >= 0
    assert probabilities.sum() == pytest.approx(1, abs=1e-9)


@given(
    st.integers(0, 2**32), st.sampled_from([1, 5, 16]), st.sampled_from([64 * MIB, GIB, 8 * GIB])
)
def test_bins_of_many_are_the_differences_of_what_lies_below(
    seed: int, components: int, width_bytes: int
) -> None:
    generator = np.random.default_rng(seed)
    count = 300
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


def test_wide_bins_add_up_narrow_ones() -> None:
    one = mixture([0.5, 0.5], [21.0, 22.0], [0.2, 0.05])
    narrow, wide = (
        one.bin_probabilities(BinScheme(width * GIB, 64 // width).log_inner_edges)[0]
        for width in (1, 4)
    )
    assert narrow.reshape(16, 4).sum(axis=1) == pytest.approx(wide, abs=1e-12)


def test_replaced_rows_become_one_logistic() -> None:
    two = MemoryDistribution(
        np.full((2, 2), 0.5), np.array([[20.0, 21.0]] * 2), np.full((2, 2), 0.1)
    )
    changed = two.replaced(np.array([False, True]), np.array([9.0, 23.0]), np.array([9.0, 0.3]))
    points = np.linspace(18, 25, 20)
    assert below(changed, points)[0] == pytest.approx(below(two, points)[0])
    assert below(changed, points)[1] == pytest.approx(logistic.cdf(points, 23.0, 0.3))
