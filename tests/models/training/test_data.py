"""The training data: what a label means, whose rows count, and splits."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemnet.errors import DatasetError
from gpumemnet.job.dataset import read_dataset
from models.training.data import (
    STEADY_PART,
    LabelledJobs,
    fold_numbers,
    folds,
    labelled_jobs,
    load_labelled_jobs,
)
from tests.jobs import totals_only
from tests.sites import DATASETS

XMEM = DATASETS / "real_runs" / "published_xmem_rtx30_40.parquet"


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
    with pytest.raises(DatasetError, match="2 different architectures cannot be split into 3"):
        fold_numbers(np.array([0, 1, 1]), 3, 0)


def test_labels_are_of_the_steady_state_above_the_context() -> None:
    rows = read_dataset(XMEM)
    data = load_labelled_jobs([XMEM])
    is_ok = rows.words("status") == "ok"
    is_startup = is_ok & (rows.words("label_state") == "startup")
    assert data.is_measured.sum() == is_ok.sum() - is_startup.sum()
    assert (~data.is_measured).sum() == (rows.words("status") == "oom").sum()
    steady = rows.traced(STEADY_PART)[is_ok & ~is_startup]
    above = data.label_bytes[data.is_measured]
    assert np.median(above - steady) == pytest.approx(0.0, abs=2**20)
    assert np.isinf(data.upper_bytes[~data.is_measured]).all()
    assert (data.lower_bytes[~data.is_measured] > 6 * 2**30).all()


def test_readings_without_a_context_are_refused() -> None:
    row = next(row for row in read_dataset(XMEM) if row.status == "ok")
    totals = replace(totals_only(row.job), traced_peak_bytes=None)
    bare = replace(row, job=totals, traced={}, architecture_key="")
    with pytest.raises(DatasetError, match="state neither the CUDA context"):
        labelled_jobs([bare] * 3, "mine")


def test_no_family_and_no_large_table_decides_alone(few: LabelledJobs) -> None:
    weights = few.weights
    assert weights.mean() == pytest.approx(1.0)
    own = few.sources == "published_transformer_a100"
    assert set(few.families[own]) == {"sampled"}
    rare = few.families == "alexnet"
    if rare.any():
        assert weights[rare].min() > weights[own].max()
    assert few.calibrates.all()  # published readings, and traces of real networks
