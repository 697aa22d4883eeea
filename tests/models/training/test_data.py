"""Splits: no architecture stands on both sides, and every row is tested once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.training.data import fold_numbers, folds


@given(
    st.lists(st.integers(0, 30), min_size=40, max_size=200), st.integers(2, 5), st.integers(0, 9)
)
def test_groups_stay_together(groups: list[int], count: int, seed: int) -> None:
    codes = np.array([*groups, *range(count)])
    tested = []
    for training, test in folds(codes, count, seed):
        assert not set(codes[training]) & set(codes[test])
        assert len(training) + len(test) == len(codes)
        assert len(test)
        tested += test.tolist()
    assert sorted(tested) == list(range(len(codes)))


def test_too_few_architectures_are_reported() -> None:
    with pytest.raises(ValueError, match="2 architectures cannot be split into 3"):
        fold_numbers(np.array([0, 1, 1]), 3, 0)
