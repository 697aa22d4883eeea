"""Rows are read once, and those that cannot be true are refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpumemnet.errors import DatasetError
from gpumemnet.units import MIB
from models.retrain.collect import Refusal, collect
from tests.models.retraining import dataset, measured, observed, relabelled

ROWS = 60


def refused(*refusals: Refusal) -> str:
    return " / ".join(f"{one.file}: {one.rows}: {one.reason}" for one in refusals)


def test_a_file_given_twice_counts_once(tmp_path: Path) -> None:
    first = dataset(tmp_path / "a.parquet", measured(ROWS, 1))
    found = collect([first, dataset(tmp_path / "copy.parquet", measured(ROWS, 1))])
    assert len(found.data) == ROWS
    assert "the same file as a.parquet" in refused(*found.refusals)


def test_rows_of_two_files_that_say_the_same_count_once(tmp_path: Path) -> None:
    rows = measured(ROWS, 1)
    found = collect(
        [
            dataset(tmp_path / "a.parquet", rows),
            dataset(tmp_path / "b.parquet", rows[:10] + measured(ROWS, 2)),
        ]
    )
    assert len(found.data) == 2 * ROWS
    assert "all files: 10: the same job again" in refused(*found.refusals)


def test_a_label_below_the_weights_is_refused(tmp_path: Path) -> None:
    rows = measured(ROWS, 1)
    rows[3] = relabelled(rows[3], 1 * MIB / 1024)
    found = collect([dataset(tmp_path / "a.parquet", rows)])
    assert len(found.data) == ROWS - 1
    assert "a.parquet: 1: mlp: below-weights" in refused(*found.refusals)


def test_a_file_with_mib_for_bytes_is_refused(tmp_path: Path) -> None:
    rows = [relabelled(one, (one.peak_device_bytes or 0) / MIB) for one in measured(ROWS, 2)]
    found = collect(
        [
            dataset(tmp_path / "a.parquet", measured(ROWS, 1)),
            dataset(tmp_path / "mib.parquet", rows),
        ]
    )
    assert len(found.data) == ROWS
    assert "mib.parquet: 60: mlp: below-weights" in refused(*found.refusals)


def test_real_models_and_failures_are_left_out(tmp_path: Path) -> None:
    rows = measured(ROWS, 1)
    rows[0] = replace(rows[0], recipe="zoo")
    rows[1] = replace(rows[1], status="error", reason="crash", peak_device_bytes=None)
    found = collect([dataset(tmp_path / "a.parquet", rows)])
    assert len(found.data) == ROWS - 2
    assert "for testing only" in refused(*found.refusals)


def test_only_observed_rows_are_accepted_as_observations(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no site has observed"):
        collect([], [dataset(tmp_path / "a.parquet", measured(ROWS, 1))])


def test_held_out_architectures_are_about_a_seventh_and_never_trained_on(tmp_path: Path) -> None:
    found = collect([dataset(tmp_path / "a.parquet", measured(400, 1))])
    assert 0.08 < found.is_held_out.mean() < 0.22
    assert not (found.is_held_out & found.is_training).any()
    again = collect([dataset(tmp_path / "b.parquet", measured(400, 1)[::-1])])
    held_out, held_out_again = (
        {*one.data.groups[one.is_held_out].tolist()} for one in (found, again)
    )
    assert held_out == held_out_again


def test_the_newest_fifth_of_the_observations_is_for_judging(tmp_path: Path) -> None:
    rows = measured(100, 2, context_bytes=500 * MIB)
    base = dataset(tmp_path / "base.parquet", measured(400, 1))
    found = collect([base], [dataset(tmp_path / "site.parquet", observed(rows))])
    assert found.is_newest.sum() == 20
    assert not (found.is_newest & ~found.is_observed).any()
    assert found.observed_at[found.is_newest].min() > (found.learned_until or 0)
    contexts = found.data.context_bytes[found.is_observed]
    assert contexts == pytest.approx(np.full(100, 500 * MIB), abs=60 * MIB)


def test_observations_that_the_champion_was_trained_on_are_not_the_newest(tmp_path: Path) -> None:
    late = 1.7e9 + 3600.0 * 95
    site = dataset(tmp_path / "site.parquet", observed(measured(100, 2)))
    found = collect([], [site], champion_until=late)
    assert found.observed_at[found.is_newest].tolist() == [
        late + 3600.0 * step for step in range(1, 5)
    ]


def test_the_newest_of_several_runs_of_one_job_counts(tmp_path: Path) -> None:
    rows = measured(40, 2)
    site = dataset(tmp_path / "site.parquet", observed([rows[0]] * 60 + rows))
    found = collect([], [site])
    own = found.data.jobs.column("total_parameters") == rows[0].job.total_parameters
    assert own.sum() == 1
    assert found.observed_at[own] == [1.7e9 + 3600.0 * 60]
