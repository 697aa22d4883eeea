"""Conformal quantiles and the weighted median: what n values carry, and how often an interval
holds."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemnet.predict.conformal import (
    binomial_tail,
    bounds_kept,
    conformal_quantiles,
    conformal_rank,
    weighted_centre,
)

coverages = st.floats(0.01, 0.999)
scores = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300).map(np.array)


@given(st.integers(1, 5000), coverages)
def test_the_rank_promises_the_coverage_and_no_smaller_one_does(
    count: int, coverage: float
) -> None:
    rank = conformal_rank(count, coverage)
    if rank is None:
        assert count / (count + 1) < coverage
    else:
        assert rank / (count + 1) >= coverage - 1e-9
        assert rank == 1 or (rank - 1) / (count + 1) < coverage


@given(scores, st.lists(coverages, min_size=1, max_size=9).map(sorted))
def test_quantiles_are_scores_that_rise_and_stop_where_they_are_not_carried(
    values: np.ndarray, levels: list[float]
) -> None:
    found = conformal_quantiles(values, levels)
    carried = [value for value in found if value is not None]
    assert found == (*carried, *(None,) * (len(levels) - len(carried)))
    assert carried == sorted(carried)
    assert set(carried) <= set(values.tolist())
    assert conformal_quantiles(values[::-1], levels) == found


def test_an_infinite_score_is_never_a_bound() -> None:
    values = np.array([0.0] * 18 + [math.inf])
    assert conformal_quantiles(values, (0.9, 0.95)) == (0.0, None)


def test_the_promised_coverage_holds_for_any_distribution() -> None:
    draw = np.random.default_rng(0)
    for count, coverage in ((9, 0.9), (34, 0.9), (34, 0.95), (120, 0.99)):
        samples = draw.standard_cauchy((4000, count + 1))
        bounds = [conformal_quantiles(row[:-1], (coverage,))[0] for row in samples]
        held = np.mean(
            [
                bound is not None and row[-1] <= bound
                for bound, row in zip(bounds, samples, strict=True)
            ]
        )
        assert held >= coverage - 3 * math.sqrt(coverage * (1 - coverage) / 4000)


@given(scores, st.floats(-1e5, 1e5))
def test_the_centre_moves_with_its_values_and_lies_in_its_interval(
    values: np.ndarray, shift: float
) -> None:
    weights = np.linspace(1.0, 3.0, len(values))
    one, other = weighted_centre(values, weights), weighted_centre(values + shift, weights)
    assert values.min() <= one.low <= one.value <= one.high <= values.max()
    assert other.value == pytest.approx(one.value + shift, abs=1e-6)
    assert one.confidence <= 0.95
    assert one.count == len(values)


def test_the_interval_holds_the_centre_as_often_as_it_says() -> None:
    draw = np.random.default_rng(1)
    for count in (3, 6, 16, 50):
        spreads = draw.lognormal(sigma=1.0, size=(3000, count))
        values = draw.laplace(size=spreads.shape) * spreads
        centres = [
            weighted_centre(row, 1.0 / spread) for row, spread in zip(values, spreads, strict=True)
        ]
        held = np.mean([centre.low <= 0.0 <= centre.high for centre in centres])
        assert held >= centres[0].confidence - 0.02


def test_a_bound_is_kept_missed_or_untested() -> None:
    unknown = math.nan
    label = np.array([5.0, 5.0, unknown, unknown, unknown, unknown, 5.0])
    is_oom = np.array([False, False, True, True, True, False, False])
    limit = np.array([unknown, 9.0, 3.0, 4.0, unknown, 9.0, 9.0])
    bound = np.array([5.0, 4.0, 4.0, 4.0, 4.0, 4.0, unknown])
    kept = bounds_kept(label, is_oom, limit, bound)
    np.testing.assert_array_equal(kept, [1.0, 0.0, unknown, 0.0, 0.0, unknown, unknown])


def test_the_binomial_tail_by_hand() -> None:
    assert binomial_tail(0, 3, 0.5) == 1.0
    assert binomial_tail(2, 3, 0.5) == pytest.approx(0.5)
    assert binomial_tail(4, 3, 0.5) == 0.0
