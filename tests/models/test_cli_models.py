"""``gpumemnet train`` and ``evaluate`` as a person runs it, on the published measurements where they are
available."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpumemnet.predict.predictor import Predictor
from tests.jobs import small_job


def models(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpumemnet", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


def refused(*arguments: str | Path) -> str:
    done = models(*arguments)
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr


def test_without_a_dataset_it_says_where_to_get_one(tmp_path: Path) -> None:
    said = refused("evaluate", "--dataset", tmp_path / "none.parquet")
    assert "none.parquet does not exist" in said
    assert "import-published" in said
    assert "CC BY 4.0" in said


def test_a_file_that_is_no_dataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    assert "no whole Parquet file" in refused(
        "train", "--dataset", tmp_path / "x.parquet", "--out", tmp_path / "bundle"
    )


def test_a_family_without_rows_is_refused(published: Path, tmp_path: Path) -> None:
    said = refused("train", "--dataset", published, "--family", "cnn", "--out", tmp_path / "bundle")
    assert "has no measured cnn job" in said


@pytest.fixture(scope="module")
def evaluated(published: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("report")
    done = models(
        "evaluate", "--dataset", published, "--out", folder, "--epochs", "12", "--folds", "2"
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.mark.nightly
def test_the_table_holds_every_candidate_and_the_classifier_beats_physics(
    evaluated: tuple[Path, str],
) -> None:
    folder, printed = evaluated
    document = json.loads((folder / "evaluation.json").read_text())
    rows = {row["candidate"]: row for row in document["candidates"]}
    assert list(rows) == [
        "commonest bin",
        "calibrated physics (3 numbers)",
        "calibrated closed form",
        "ExtraTrees on its residual",
        "MLP-based classifier",
        "MLP-based classifier, totals only",
    ]
    assert all(name in printed for name in rows)
    assert printed.strip().endswith((folder / "evaluation.md").read_text().strip().splitlines()[-1])
    assert document["jobs"] == 3000
    assert rows["commonest bin"]["bins"]["published-1000mib"]["accuracy"] == pytest.approx(
        0.8507, abs=1e-4
    )
    physics, classifier = rows["calibrated physics (3 numbers)"], rows["MLP-based classifier"]
    for figure in (
        "median_error_mib",
        "p90_error_mib",
        "p99_error_mib",
        "mean_error_mib",
        "wasted",
    ):
        assert classifier[figure] < physics[figure]
    assert classifier["bins"]["published-1000mib"]["accuracy"] >= 0.99
    assert classifier["above_safe"] <= 0.015


@pytest.mark.nightly
def test_training_gives_a_bundle_that_predicts(
    published: Path, evaluated: tuple[Path, str], tmp_path: Path
) -> None:
    metrics = evaluated[0] / "evaluation.json"
    done = models(
        "train",
        "--dataset",
        published,
        "--out",
        tmp_path / "mine",
        "--epochs",
        "12",
        "--metrics",
        metrics,
        "--json",
    )
    assert done.returncode == 0, done.stderr
    assert (
        json.loads(done.stdout).items()
        >= {"bundle": str(tmp_path / "mine"), "name": "mine", "jobs": 3000}.items()
    )
    estimate = Predictor.load(tmp_path / "mine").predict(small_job())
    assert estimate.in_support
    assert estimate.estimator == "mine"
    card = json.loads((tmp_path / "mine" / "card.json").read_text())
    assert card["metrics"] == json.loads(metrics.read_text())["candidates"]
    assert card["training_data"]["licence"] == "CC BY 4.0"


@pytest.mark.nightly
def test_metrics_of_another_dataset_do_not_enter_a_card(
    published: Path, evaluated: tuple[Path, str], tmp_path: Path
) -> None:
    document = json.loads((evaluated[0] / "evaluation.json").read_text())
    (tmp_path / "evaluation.json").write_text(json.dumps({**document, "data_sha256": "0" * 64}))
    arguments = (
        "train",
        "--dataset",
        published,
        "--out",
        tmp_path / "mine",
        "--metrics",
        tmp_path / "evaluation.json",
    )
    assert "was measured on another dataset" in refused(*arguments)
    assert not (tmp_path / "mine").exists()
