"""``python -m models search``: a few tiny trials, killed and gone on with, and what becomes of the
plan that is found."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpumemnet.atomic_files import locked
from gpumemnet.errors import InvalidRequestError
from gpumemnet.predict.bundle import Bundle
from gpumemnet.units import MIB
from models.cli import main
from models.retrain.holdout import is_held_out
from models.search.objective import fold_loss, load_task
from models.training.mlp import TrainingPlan
from models.training.plan_file import read_plan
from tests.models.retraining import dataset, measured, observed
from tests.registries import shipped

ROOT = Path(__file__).parents[3]
ROWS = measured(400, 1)
TRIALS = 3
KILLED = """
import os, signal, sys
import models.search.engines as engines
original, calls = engines.fold_loss, []
def dies(*arguments):
    calls.append(arguments)
    if len(calls) == 4:  # the second fold of the second trial
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)
engines.fold_loss = dies
from models.cli import main
sys.exit(main(sys.argv[1:]))
"""

needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None,
    reason="Optuna is not installed: pip install -e '.[search]'",
)
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install -e '.[ray]'",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset(tmp_path_factory.mktemp("search") / "base.parquet", ROWS)


def arguments(base: Path, folder: Path, *more: str) -> list[str]:
    given = (
        "search",
        "--dataset",
        base,
        "--folds",
        2,
        "--epochs",
        1,
        "--storage",
        f"sqlite:///{folder}/search.db",
    )
    return [*map(str, given), "--out", str(folder / "plan.json"), "--trials", str(TRIALS), *more]


def tried(folder: Path) -> list[tuple[dict[str, Any], float]]:
    """The parameters of each complete trial, and its value."""
    import optuna

    storage = f"sqlite:///{folder}/search.db"
    [study] = optuna.get_all_study_summaries(storage)
    trials = optuna.load_study(study_name=study.study_name, storage=storage).get_trials()
    return [(trial.params, trial.value) for trial in trials if trial.state.name == "COMPLETE"]


def found(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "plan.json").read_text("utf-8"))
    return document


@pytest.fixture(scope="module")
def searched(base: Path) -> Path:
    """The folder of a complete, uninterrupted search."""
    folder = base.parent / "searched"
    folder.mkdir()
    assert main(arguments(base, folder)) == 0
    return folder


@needs_optuna
def test_the_plan_file_says_that_its_figures_are_optimistic(searched: Path) -> None:
    document = found(searched)
    assert "do not measure a model" in document["about"]
    search = document["search"]
    assert (
        search["on_the_folds_that_chose_it"]["plan"]
        <= search["on_the_folds_that_chose_it"]["without_a_search"]
    )
    assert sum(search["trials"].values()) == TRIALS
    assert search["rows"] == sum(not is_held_out(row.architecture_key) for row in ROWS) < len(ROWS)
    assert search["left_out"].startswith("sha256(")
    assert "seed" not in document["plan"]
    assert read_plan(searched / "plan.json").plan(7, None) == TrainingPlan(
        **document["plan"], seed=7
    )


@needs_optuna
def test_a_repeated_search_trains_nothing_and_more_trials_resume_it(
    base: Path, searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(searched, tmp_path / "more")
    losses: list[int] = []

    def counted(*given: Any) -> float:
        losses.append(given[-1])
        return fold_loss(*given)

    monkeypatch.setattr("models.search.engines.fold_loss", counted)
    assert main(arguments(base, folder)) == 0
    assert losses == []
    assert found(folder)["plan"] == found(searched)["plan"]
    assert main([*arguments(base, folder), "--trials", str(TRIALS + 1)]) == 0
    assert losses[0] == 0
    assert len(losses) <= 2
    assert sum(found(folder)["search"]["trials"].values()) == TRIALS + 1


@needs_optuna
@pytest.mark.nightly
def test_a_killed_search_goes_on_and_finds_the_same(
    base: Path, searched: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", KILLED, *arguments(base, tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "plan.json").exists()
    assert len(tried(tmp_path)) == 1
    assert main(arguments(base, tmp_path)) == 0
    assert tried(tmp_path) == tried(searched)
    assert found(tmp_path)["plan"] == found(searched)["plan"]


@needs_optuna
def test_a_plan_that_is_worse_on_the_first_fold_is_not_trained_on_the_others(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    worse = iter(range(1, 100))

    def loss(task: object, plan: TrainingPlan, fold: int) -> float:
        given.append((plan.hidden, fold))
        return float(next(worse))

    monkeypatch.setattr("models.search.engines.fold_loss", loss)
    assert main([*arguments(base, tmp_path), "--trials", "7"]) == 0
    assert found(tmp_path)["search"]["trials"] == {"complete": 4, "pruned": 3, "diverged": 0}
    assert [fold for _, fold in given] == [0, 1] * 4 + [0] * 3


@needs_optuna
def test_a_plan_that_diverges_is_not_chosen(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "models.search.engines.fold_loss",
        lambda task, plan, fold: 1.0 if plan.hidden == 48 else float("nan"),
    )
    assert main(arguments(base, tmp_path)) == 0
    assert found(tmp_path)["search"]["trials"]["diverged"] > 0
    assert found(tmp_path)["plan"]["hidden"] == 48


def test_each_fold_is_trained_anew_and_gives_the_same_again(base: Path) -> None:
    task = load_task(base, "mlp", "mlp", 2, 0)
    plan = TrainingPlan(members=2, hidden=8, epochs=1)
    assert fold_loss(task, plan, 1) == fold_loss(task, plan, 1) != fold_loss(task, plan, 0)


def test_the_transformer_is_judged_too(base: Path) -> None:
    from models.training.sequence import SequencePlan

    task = load_task(base, "mlp", "transformer", 2, 0)
    assert (
        0.0 < fold_loss(task, SequencePlan(width=4, depth=1, heads=1, hidden=8, epochs=1), 0) < 1.0
    )


@needs_optuna
def test_an_impossible_search_is_one_sentence(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = dataset(tmp_path / "few.parquet", ROWS[:100])
    site = dataset(tmp_path / "site.parquet", observed(measured(400, 2, context_bytes=700 * MIB)))
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(base.read_bytes()[:3000])
    (tmp_path / "damaged.db").write_bytes(b"no database" * 500)
    cases = (
        (("--dataset", few), "mlp jobs that no retraining holds out are too few for 2 folds"),
        (("--dataset", site), "holds observations"),
        (("--dataset", cut), "cut.parquet"),
        (("--dataset", tmp_path / "none.parquet"), "does not exist"),
        (("--family", "cnn"), "has no cnn job"),
        (("--encoder", "common"), "encoder: must be mlp or transformer"),
        (("--engine", "slurm"), "engine: must be local or ray"),
        (("--storage", "postgresql://host/db"), "storage: must be an SQLite file"),
        (("--storage", f"sqlite:///{tmp_path}/none/search.db"), "cannot be written"),
        (("--storage", f"sqlite:///{tmp_path}/damaged.db"), "file is not a database"),
        (("--out", tmp_path / "none" / "plan.json"), "does not exist"),
    )
    for more, sentence in cases:
        assert main([*arguments(base, tmp_path), *map(str, more)]) == 2, more
        told = capsys.readouterr().err.splitlines()[-1]
        assert told.startswith("error: ")
        assert sentence in told
    with locked(tmp_path / "search.db.lock", 1.0):
        assert main(arguments(base, tmp_path)) == 2
    assert "another search is using" in capsys.readouterr().err
    assert not (tmp_path / "plan.json").exists()


def test_without_optuna_it_says_what_to_install(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(arguments(base, tmp_path)) == 2
    assert "pip install -e '.[search]'" in capsys.readouterr().err


@pytest.mark.nightly
@needs_optuna
@needs_ray
def test_ray_tasks_find_a_plan_in_the_same_storage(
    base: Path, searched: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(searched, tmp_path / "ray")
    command = [
        sys.executable,
        "-m",
        "models",
        *arguments(base, folder, "--engine", "ray", "--workers", "2"),
    ]
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    done = subprocess.run(
        [*command, "--trials", str(TRIALS + 2)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert sum(found(folder)["search"]["trials"].values()) == TRIALS + 2


# the plan's file


def plan_file(folder: Path, **changes: Any) -> Path:
    document = {
        "kind": "gpumemnet training plan",
        "format": 1,
        "family": "mlp",
        "encoder": "mlp",
        "plan": {"hidden": 8, "members": 2, "epochs": 1},
    }
    path = folder / "made.json"
    path.write_text(json.dumps({**document, **changes}), "utf-8")
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"kind": "something else"},
        {"family": "gnn"},
        {"encoder": "common"},
        {"plan": [1]},
        {"plan": {"hidden": 0}},
        {"plan": {"hidden": 8.5}},
        {"plan": {"hidden": True}},
        {"plan": {"learning_rate": 1e999}},
        {"plan": {"layers": 3}},
        {"plan": {"seed": 3}},
        {"encoder": "transformer", "plan": {"width": 16, "heads": 3}},
    ],
)
def test_a_file_that_is_not_a_plan_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="is not a plan as 'gpumemnet search' writes it"):
        read_plan(plan_file(tmp_path, **changes))


def test_training_follows_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = dataset(tmp_path / "rows.parquet", measured(160, 3))
    plans = []

    def save(
        folder: Path, classifier: object, data: object, plan: TrainingPlan, **given: object
    ) -> Bundle:
        plans.append(plan)
        return shipped()

    monkeypatch.setattr("models.training.export.save_classifier", save)  # the export takes seconds
    given = [
        "train",
        "--dataset",
        str(rows),
        "--out",
        str(tmp_path / "bundle"),
        "--plan",
        str(plan_file(tmp_path)),
    ]
    assert main([*given, "--seed", "5"]) == 0
    assert main([*given, "--epochs", "2"]) == 0
    assert plans == [
        TrainingPlan(hidden=8, members=2, epochs=1, seed=5),
        TrainingPlan(hidden=8, members=2, epochs=2),
    ]


def test_a_plan_for_another_classifier_is_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_file(tmp_path, family="cnn")
    assert (
        main(
            [
                "train",
                "--dataset",
                str(base),
                "--out",
                str(tmp_path / "bundle"),
                "--plan",
                str(plan),
            ]
        )
        == 2
    )
    assert "is for cnn jobs and the encoder mlp" in capsys.readouterr().err
    twice = ["--plan", str(plan), "--plan", str(plan)]
    assert (
        main(["retrain", "--dry-run", "--without-committed", "--dataset", str(base), *twice]) == 2
    )
    assert "both for cnn jobs" in capsys.readouterr().err
