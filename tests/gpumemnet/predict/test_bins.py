"""Bins: edges, indices, names, and widths that make no sense."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemnet.errors import InvalidRequestError
from gpumemnet.predict.distribution import PUBLISHED_BINS, BinScheme, bins_of_width
from gpumemnet.units import GIB, MIB


@given(st.integers(MIB, 64 * GIB), st.integers(1, 60), st.floats(0, 2**45))
def test_every_amount_lies_in_its_bin(width: int, count: int, amount: float) -> None:
    scheme = BinScheme(width, count)
    index = int(scheme.index(amount))
    lower, upper = scheme.bounds_bytes(index)
    assert lower <= amount
    assert upper is None or amount < upper
    assert (upper is None) == (index == count - 1)


def test_the_open_bin_lies_above_the_card() -> None:
    scheme = bins_of_width(GIB, 40 * GIB)
    assert scheme.count == 41
    assert scheme.bounds_bytes(40) == (40 * GIB, None)
    assert int(scheme.index(40 * GIB - 1)) == 39


def test_published_schemes_have_their_widths() -> None:
    assert [*PUBLISHED_BINS] == [1000, 2000, 8000]
    assert PUBLISHED_BINS[8000].index(np.array([7999 * MIB, 8000 * MIB])).tolist() == [0, 1]


def test_edges_are_where_the_bins_meet() -> None:
    scheme = BinScheme(2 * GIB, 4)
    assert np.exp(scheme.log_inner_edges) / GIB == pytest.approx([2, 4, 6])


def test_any_amount_has_a_bin() -> None:
    assert BinScheme(GIB, 4).index(np.array([-1.0, 0.0, np.inf, 1e300])).tolist() == [0, 0, 3, 3]


@pytest.mark.parametrize(
    "width", [0, -GIB, 1, MIB - 1, float("nan"), float("inf"), "1", True, None, 10**400]
)
def test_a_width_without_sense_is_refused(width: object) -> None:
    with pytest.raises(InvalidRequestError, match="bin_width"):
        bins_of_width(width)  # type: ignore[arg-type]


def test_too_many_bins_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="4096"):
        bins_of_width(MIB, 64 * GIB)
