"""The journal: durable rows, torn ends, foreign folders and a disk that is full."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dataset_builder.measure.journal import Journal, Settings, read_journal
from dataset_builder.recipe import load_recipe, sample_jobs
from gpumemnet.errors import DatasetError
from gpumemnet.job.measurement import Measurement
from gpumemnet.units import GIB

SMALL_RECIPES = str(Path(__file__).parents[1] / "small_recipes")
SETTINGS = Settings("mlp", "digest", 0, 5)


def test_rows_are_there_at_once_and_keys_are_remembered(
    tmp_path: Path, measurement: Measurement, oom: Measurement
) -> None:
    with Journal(tmp_path / "c") as journal:
        journal.append("a", measurement)
        assert list(read_journal(tmp_path / "c")) == [measurement]
        journal.append("b", oom)
    with Journal(tmp_path / "c") as journal:
        assert journal.finished == {"a", "b"}
    assert list(read_journal(tmp_path / "c")) == [measurement, oom]


@pytest.mark.parametrize("tail", [b"{", b'{"key": "c", "row": {}}', b"\x00\xff", b'{"key'])
def test_an_incomplete_last_line_is_cut_off(
    tmp_path: Path, measurement: Measurement, tail: bytes
) -> None:
    with Journal(tmp_path) as journal:
        journal.append("a", measurement)
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(tail)
    assert list(read_journal(tmp_path)) == [measurement]
    with Journal(tmp_path) as journal:
        assert journal.finished == {"a"}
        journal.append("b", measurement)
    assert list(read_journal(tmp_path)) == [measurement, measurement]


@pytest.mark.parametrize("line", [b"{\n", b"[]\n", b'{"key": "x"}\n', b"\xff\n"])
def test_a_damaged_line_is_named(tmp_path: Path, measurement: Measurement, line: bytes) -> None:
    with Journal(tmp_path) as journal:
        journal.append("a", measurement)
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(line)
    for attempt in (lambda: Journal(tmp_path), lambda: list(read_journal(tmp_path))):
        with pytest.raises(DatasetError, match=r"journal.jsonl, line 2 is damaged"):
            attempt()


def test_a_row_that_is_not_a_measurement_is_named(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text('{"key": "a", "row": {"family": "mlp"}}\n')
    with pytest.raises(DatasetError, match="line 1: batch_size: is missing"):
        list(read_journal(tmp_path))


def test_a_folder_without_a_campaign_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="holds no campaign"):
        list(read_journal(tmp_path))


def test_two_journals_of_one_folder_are_refused(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(DatasetError, match="another campaign is running"):
        Journal(tmp_path)
    with Journal(tmp_path):
        pass


def test_the_plan_is_kept_and_other_settings_are_refused(tmp_path: Path) -> None:
    planned = sample_jobs(load_recipe(SMALL_RECIPES + "/mlp.yaml"), 5, 0, 80 * GIB)
    with Journal(tmp_path) as journal:
        assert journal.plan(SETTINGS) is None
        journal.keep_plan(SETTINGS, planned)
    with Journal(tmp_path) as journal:
        assert journal.plan(SETTINGS) == planned
        with pytest.raises(
            DatasetError, match=r"holds another campaign \(recipe mlp, seed 0, 5 jobs\)"
        ):
            journal.plan(replace(SETTINGS, seed=1))


def test_a_file_in_place_of_the_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("")
    with pytest.raises(DatasetError, match="cannot be written"):
        Journal(tmp_path / "c")
