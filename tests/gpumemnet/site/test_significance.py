"""Statistical tests for drift, against published numbers, SciPy and simulation."""

import math
from itertools import product

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from gpumemnet.site.significance import (
    binomial_tail,
    fisher_test,
    holm,
    ks_distance,
    ks_probability,
    sign_test,
)

probabilities = st.floats(0.0, 1.0)


@given(st.integers(0, 12), st.integers(0, 12), probabilities)
def test_the_binomial_tail_is_the_sum_of_its_terms(
    count: int, trials: int, probability: float
) -> None:
    terms = [
        math.comb(trials, k) * probability**k * (1 - probability) ** (trials - k)
        for k in range(trials + 1)
    ]
    assert binomial_tail(count, trials, probability) == pytest.approx(
        min(1.0, sum(terms[count:])), abs=1e-12
    )


def test_the_sign_test_by_hand() -> None:
    assert sign_test(0, 0) == 1.0
    assert sign_test(5, 5) == 1.0
    assert sign_test(10, 0) == sign_test(0, 10) == pytest.approx(2 / 1024)


def test_fishers_test_of_the_lady_tasting_tea() -> None:
    assert fisher_test(3, 4, 1, 4) == pytest.approx(34 / 70)
    assert fisher_test(4, 4, 0, 4) == pytest.approx(2 / 70)
    assert fisher_test(5, 10, 50, 100) == 1.0


@given(st.integers(1, 25), st.integers(1, 25), st.data())
def test_fishers_test_does_not_care_which_is_first(
    one: int, other: int, data: st.DataObject
) -> None:
    first, second = data.draw(st.integers(0, one)), data.draw(st.integers(0, other))
    found = fisher_test(first, one, second, other)
    assert 0.0 < found <= 1.0
    assert fisher_test(second, other, first, one) == pytest.approx(found)
    assert fisher_test(one - first, one, other - second, other) == pytest.approx(found)


@given(
    st.lists(st.integers(-9, 9), min_size=1, max_size=60),
    st.lists(st.integers(-9, 9), min_size=2, max_size=60),
)
def test_the_distance_from_quantiles_is_never_above_the_one_from_the_values(
    values: list[int], others: list[int]
) -> None:
    one, other = np.array(values, dtype=float), np.array(others, dtype=float)
    exact = max(
        abs(np.mean(one <= point) - np.mean(other <= point)) for point in (*values, *others)
    )
    for steps in (5, 65, 2000):
        quantiles = np.quantile(other, np.linspace(0, 1, steps), method="inverted_cdf")
        found = ks_distance(one, quantiles)
        assert 0.0 <= found <= exact + 1e-12
    assert found >= exact - 2 / 1999 - 1e-12


def test_the_probability_of_a_distance_by_simulation() -> None:
    draw = np.random.default_rng(0)
    for count, others in ((20, 1000), (200, 1500)):
        distances = [
            ks_distance(
                draw.normal(size=count),
                np.quantile(draw.normal(size=others), np.linspace(0, 1, 65), method="inverted_cdf"),
            )
            for _ in range(1500)
        ]
        found = np.array([ks_probability(distance, count, others) for distance in distances])
        for level in (0.2, 0.05, 0.01):
            assert np.mean(found <= level) <= level + 3 * math.sqrt(level / 1500)
    assert ks_probability(0.0, 20, 20) == 1.0
    assert ks_probability(1.0, 50, 1000) < 1e-20


@given(st.lists(probabilities, max_size=40))
def test_holm_corrects_upwards_and_keeps_the_order(found: list[float]) -> None:
    corrected = holm(found)
    assert all(one <= other <= 1.0 for one, other in zip(found, corrected, strict=True))
    for (one, fixed), (other, also) in product(zip(found, corrected, strict=True), repeat=2):
        assert one > other or fixed <= also
    if found:
        assert min(corrected) == pytest.approx(min(1.0, len(found) * min(found)))


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


@given(st.integers(0, 60), st.integers(0, 60), st.floats(0.001, 0.999))
def test_binomial_and_sign_test_are_scipys(above: int, below: int, probability: float) -> None:
    trials = above + below
    assert binomial_tail(above, trials, probability) == pytest.approx(
        scipy.stats.binom.sf(above - 1, trials, probability), rel=1e-9
    )
    if trials:
        assert sign_test(above, below) == pytest.approx(
            scipy.stats.binomtest(above, trials, 0.5).pvalue, rel=1e-9
        )
