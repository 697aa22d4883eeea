"""Splits by architecture: no network on both sides, and no fold that moves when rows are added."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset_builder.split import fold_of, split_by_architecture, write_split
from gpumemnet.errors import DatasetError
from gpumemnet.job.layers import Layer
from gpumemnet.job.measurement import Measurement
from gpumemnet.job.training_job import TrainingJob


def sized(
    measurement: Measurement, width: int, batch_size: int = 8, recipe: str = "mlp"
) -> Measurement:
    layers = (Layer("linear", width, 11 * width), Layer("linear", 2, 2 * width + 2))
    job = TrainingJob(
        family="mlp",
        batch_size=batch_size,
        input_elements=10,
        optimizer="sgd",
        precision="fp32",
        layers=layers,
    )
    return replace(measurement, job=job, architecture_key="", recipe=recipe)


def test_rows_of_one_network_share_a_fold_and_added_rows_move_none(
    measurement: Measurement,
) -> None:
    rows = [sized(measurement, width, batch) for width in range(1, 60) for batch in (1, 2)]
    before = split_by_architecture(rows[:40], 5, 0)
    after = split_by_architecture(reversed(rows), 5, 0)
    assert len(before.fold_of) == 20
    assert len(after.fold_of) == 59
    assert before.fold_of.items() <= after.fold_of.items()
    assert split_by_architecture(rows, 5, 1).fold_of != after.fold_of


def test_folds_are_even_up_to_chance() -> None:
    sizes = Counter(fold_of(f"{key:016x}", 5, 3) for key in range(2_000))
    assert sorted(sizes) == [0, 1, 2, 3, 4]
    assert all(abs(size - 400) < 80 for size in sizes.values()), "four standard deviations"


@given(st.text(max_size=16), st.integers(2, 100), st.integers(0, 2**40))
def test_a_fold_is_within_the_requested_number(key: str, folds: int, seed: int) -> None:
    assert 0 <= fold_of(key, folds, seed) < folds


def test_real_models_test_only(tmp_path: Path, measurement: Measurement) -> None:
    rows = [
        sized(measurement, 3),
        sized(measurement, 4),
        sized(measurement, 4, recipe="zoo"),
        sized(measurement, 5, recipe="zoo"),
    ]
    split = split_by_architecture(rows, 2, 0)
    assert set(split.fold_of) == {rows[0].architecture_key}
    assert split.test_only == {rows[1].architecture_key, rows[3].architecture_key}
    write_split(split, tmp_path / "s.json")
    document = json.loads((tmp_path / "s.json").read_text())
    assert document["fold_of"] == split.fold_of
    assert document["test_only"] == sorted(split.test_only)
    assert (document["version"], document["folds"], document["seed"]) == (1, 2, 0)


def test_impossible_splits_are_refused(tmp_path: Path, measurement: Measurement) -> None:
    with pytest.raises(DatasetError, match="at least 2 folds"):
        split_by_architecture([measurement], 1, 0)
    with pytest.raises(DatasetError, match="cannot be written"):
        write_split(split_by_architecture([measurement], 2, 0), tmp_path / "missing" / "s.json")
