"""The scoreboard: its figures on rows counted by hand, what it keeps, and a small part of it from
the command line."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from gpumemnet.predict.distribution import PUBLISHED_BINS
from gpumemnet.units import GIB, MIB
from research.cli import main
from research.scoreboard.answers import Answer, KeptAnswers
from research.scoreboard.board import Column, agreement, tables
from research.scoreboard.collect import SPARE
from research.scoreboard.fitted import schedtune_answers
from research.scoreboard.protocol import calibrated, failures, figures, fitted_line
from research.scoreboard.run import ANSWERS
from research.scoreboard.sets import SETS, load_set

BINS = PUBLISHED_BINS[1000]
DATASETS = Path("dataset_builder/datasets")
NAN = float("nan")


def test_figures_of_rows_counted_by_hand() -> None:
    labels = np.array([10.0, 10.0, 20.0, NAN]) * GIB
    estimates = np.array([11.0, 9.0, 20.0, 50.0]) * GIB
    capacities = np.full(4, 40.0 * GIB)
    spare = np.array([0.0, 2.0, 0.0, NAN]) * GIB
    found = figures(labels, estimates, capacities, spare, np.array([1.0, 2.0, 3.0, 4.0]), BINS)
    assert (found.rows, found.measured) == (4, 3)
    assert found.median_error == pytest.approx(0.1)
    assert found.under == pytest.approx(1 / 3)
    assert found.over == pytest.approx(0.1 / 3)
    assert (
        found.failures == 0
    )  # 9 GiB suffice for a run that can spare 2; the last one was forecast to run out of memory
    assert found.saved == pytest.approx(((29 + 31 + 20) / 40 + 0) / 4)
    assert found.bins == pytest.approx(1 / 3)
    assert found.seconds == 2.5


def test_a_run_fails_by_a_wrong_forecast_or_by_too_low_a_limit() -> None:
    labels = np.array([10.0, 10.0, 10.0, NAN, NAN])
    estimates = np.array([7.0, 8.0, 50.0, 30.0, 50.0])
    spare = np.array([2.0, 2.0, 2.0, NAN, NAN])
    assert failures(labels, estimates, np.full(5, 40.0), spare).tolist() == [1, 0, 1, 1, 0]


def test_an_estimate_and_a_bound_are_judged_as_forecast_and_limit() -> None:
    labels = np.array([10.0, 10.0, 10.0, NAN])
    estimates = np.array([9.0, 9.0, 39.0, 45.0])
    limits = np.array([11.0, 9.5, 50.0, 60.0])
    judged = failures(labels, estimates, np.full(4, 40.0), np.zeros(4), limits)
    assert judged.tolist() == [0, 1, 0, 0]  # a bound above the GPU's memory is no forecast


def test_a_line_is_not_moved_by_one_wrong_reading_and_never_sees_its_own_family() -> None:
    estimates = np.linspace(1.0, 20.0, 40) * GIB
    labels = 1.5 * estimates + GIB
    labels[7] *= 6.0
    assert fitted_line(estimates, labels) == pytest.approx((1.5, GIB), rel=1e-3)
    groups = np.arange(40) // 4
    own = groups == 3
    moved = labels.copy()
    moved[own] *= 10.0
    before, after = calibrated(labels, estimates, groups), calibrated(moved, estimates, groups)
    np.testing.assert_array_equal(before.expected_bytes[own], after.expected_bytes[own])
    np.testing.assert_array_equal(before.bound_bytes[own], after.bound_bytes[own])
    assert (before.bound_bytes >= before.expected_bytes).all()


def test_a_table_compares_all_estimators_on_equal_rows(tmp_path: Path) -> None:
    rows = load_set(SETS[0], DATASETS, 40)

    def column(name: str, factor: float, some: Mapping[int, None]) -> Column:
        return Column(
            name, {row: Answer(round(rows.labels[row] * factor), 0.1) for row in some}, {}, 0
        )

    every = dict.fromkeys(range(40))
    most, few = dict.fromkeys(range(30)), dict.fromkeys(range(5))
    (table,) = tables(
        rows,
        [column("double", 2.0, every), column("near", 1.01, most), column("rare", 1.0, few)],
        KeptAnswers(tmp_path / "none"),
    )
    assert [line.name for line in table.lines] == ["double", "near"] or table.lines[
        0
    ].with_line.median_error < 1e-6
    assert {line.raw.rows for line in table.lines} == {30}
    assert table.left_out == {"rare": 5}
    raw = {line.name: line.raw.median_error for line in table.lines}
    assert raw["double"] == pytest.approx(1.0, abs=1e-4)
    assert raw["near"] == pytest.approx(0.01, abs=1e-4)


def test_the_simulated_test_of_a_limit_is_compared_with_runs_that_were_repeated(
    tmp_path: Path,
) -> None:
    rows = load_set(SETS[0], DATASETS, 4)
    answers = KeptAnswers(tmp_path / "none")
    answers.keep(
        rows.recipe.name, rows.sha256, SPARE, {row: Answer(10 * MIB, 0.0) for row in range(3)}
    )
    near = [
        rows.labels[0] - 5 * MIB,
        rows.labels[1] - 20 * MIB,
        rows.labels[2] - 20 * MIB,
        rows.labels[3],
    ]
    given = {row: Answer(round(size), 0.0) for row, size in enumerate(near)}
    column = Column("tool", given, {0: 0.0, 1: 1.0, 2: 0.0, 3: 0.0}, 0)
    count, share = agreement(rows, [column], answers)["tool"]
    assert count == 3  # what the last one could have spared is not known
    assert share == pytest.approx(2 / 3)


def test_schedtune_learns_from_other_families_only_and_adds_its_largest_error() -> None:
    rows = load_set(SETS[0], DATASETS, 60)
    (answers,) = schedtune_answers(rows).values()
    assert sorted(answers) == list(range(60))
    ratios = {round(answer.bound_bytes / answer.total_bytes, 3) for answer in answers.values()}  # type: ignore[operator]
    assert len(ratios) <= 5  # one for each fold
    assert min(ratios) >= 1.0
    errors = [abs(answer.total_bytes / rows.labels[row] - 1) for row, answer in answers.items()]
    assert np.median(errors) < 0.2


@pytest.mark.nightly
def test_a_small_part_from_the_command_line(tmp_path: Path) -> None:
    command = ["scoreboard", "--smoke", "--cpu-budget", "0", "--out", str(tmp_path)]
    assert main(command) == 0
    document = json.loads((tmp_path / "results.json").read_text())
    assert set(document["sets"]) == {"mlp", "cnn"}
    names = {line["name"] for line in document["sets"]["mlp"]["tables"][0]["lines"]}
    assert {"naive", "Horus", "SchedTune", "gpumemnet, trace", "gpumemnet, closed form"} <= names
    assert {"index.md", "appendix.md", "results.json", "safe.png", ANSWERS} == {
        path.name for path in tmp_path.iterdir()
    }
    assert "| A100-SXM4-40GB | 2,827 | 44 |" in (tmp_path / "index.md").read_text()
