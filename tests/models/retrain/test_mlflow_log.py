"""``python -m models retrain --mlflow`` against a real store in an SQLite file; each test
has its own."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpumemnet.cli import main
from gpumemnet.predict.bundle import load_bundle
from gpumemnet.site.releases import Registry
from gpumemnet.units import MIB
from models.retrain.collect import HELD_OUT_RULE
from tests.models.retraining import EPOCHS, dataset, measured, observed
from tests.registries import other_bundle

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("mlflow") is None,
        reason="MLflow is not installed: pip install -e '.[mlflow]'",
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of SQLAlchemy, by MLflow
]

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

Retrain = Callable[..., int]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry whose champion is to be beaten by observations, and a work folder in which that
    has been found out.

    The champion states that no held-out architecture was trained on, so one model is trained.
    """
    folder = tmp_path_factory.mktemp("site")
    base = dataset(folder / "base.parquet", measured(119, 1))
    origin = hashlib.sha256(base.read_bytes()).hexdigest()
    retrained = {"held_out": HELD_OUT_RULE, "datasets": [origin], "learned_until": None}
    registry = Registry(folder / "registry")
    bundle = other_bundle(folder / "first", "first", retraining=retrained, families=["mlp"])
    registry.create_release("first", [bundle.source], parent=None)
    registry.set_champion("first", by="test", reason="")
    dataset(folder / "site.parquet", observed(measured(200, 2, context_bytes=700 * MIB)))
    assert retraining(folder, folder, "--dry-run") == 0
    return folder


def retraining(site: Path, place: Path, *more: str) -> int:
    files = (
        "--dataset",
        site / "base.parquet",
        "--observations",
        site / "site.parquet",
        "--registry",
        place / "registry",
    )
    given = ("--without-committed", *files, "--work", place / "work", "--epochs", EPOCHS)
    return main(["retrain", *map(str, given), *more])


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a store with MLflow's tables, which take seconds to make."""
    folder = tmp_path_factory.mktemp("mlflow")
    client_of(folder).search_experiments()
    return folder


@pytest.fixture
def place(site: Path, empty_store: Path, tmp_path: Path) -> Path:
    """A copy of registry, work folder and an empty store."""
    for name in ("registry", "work"):
        shutil.copytree(site / name, tmp_path / name)
    shutil.copyfile(empty_store / "mlflow.db", tmp_path / "mlflow.db")
    return tmp_path


@pytest.fixture
def retrain(site: Path, place: Path) -> Retrain:
    """Retrains there with tracking."""
    return lambda *more: retraining(site, place, "--mlflow", f"sqlite:///{place}/mlflow.db", *more)


def client_of(place: Path) -> MlflowClient:
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{place}/mlflow.db", f"sqlite:///{place}/mlflow.db")


def champion(place: Path) -> str:
    return Registry(place / "registry").aliases().champion


def runs(place: Path) -> list[Run]:
    client = client_of(place)
    [experiment] = client.search_experiments(filter_string="name = 'gpumemnet'")
    found = client.search_runs(
        [experiment.experiment_id], "tags.`gpumemnet.run` != ''", order_by=["attributes.start_time"]
    )
    return list(found)


def test_a_promotion_is_a_run_and_a_version_with_the_alias(place: Path, retrain: Retrain) -> None:
    assert retrain() == 0
    release = champion(place)
    [run] = runs(place)
    assert run.info.status == "FINISHED"
    assert run.data.params["champion"] == "first"
    assert run.data.params["file/site.parquet"].startswith("sha256 ")
    assert run.data.params["verdict"].startswith("better: ")
    figures = {
        name.rpartition("/")[2]: value
        for name, value in run.data.metrics.items()
        if "newest observations/measures/error/" in name
    }
    assert figures["candidate"] < figures["champion"]
    assert run.data.tags["gpumemnet.exit_code"] == "0"
    assert run.data.tags["gpumemnet.release"] == release

    artifacts = place / "mlflow-artifacts" / run.info.run_id / "artifacts"
    assert (artifacts / "report.md").read_text("utf-8").startswith("# Retraining")
    assert json.loads((artifacts / "release" / "release.json").read_text("utf-8"))["lineage"]
    bundles = [load_bundle(folder) for folder in (artifacts / "release" / "bundles").iterdir()]
    stored = Registry(place / "registry").release(release).bundles
    assert {bundle.sha256 for bundle in bundles} == set(stored)
    assert not [path for path in artifacts.rglob("*") if path.suffix in (".pkl", ".pickle")]

    version = client_of(place).get_model_version_by_alias("gpumemnet", "champion")
    assert version.run_id == run.info.run_id
    assert version.tags["gpumemnet.release"] == release


@pytest.mark.nightly
def test_nothing_changed_makes_no_second_version_and_rollback_is_followed(
    place: Path, retrain: Retrain
) -> None:
    retrain()
    release = champion(place)
    assert retrain() == 10  # the first look at what was learned of the new champion
    assert retrain() == 10
    assert len(runs(place)) == 2
    client = client_of(place)
    assert client.get_registered_model("gpumemnet").aliases == {"champion": 1}
    Registry(place / "registry").rollback(by="test", reason="")
    assert retrain() == 10
    assert champion(place) == "first"
    followed = client.get_model_version_by_alias("gpumemnet", "champion")
    assert followed.tags["gpumemnet.release"] == "first"
    promoting = next(run for run in runs(place) if run.data.params["champion"] == "first")
    assert promoting.data.tags["gpumemnet.release"] == release
    assert "taken back" in promoting.data.tags["mlflow.note.content"]


def test_a_dry_run_is_logged_and_registers_nothing(place: Path, retrain: Retrain) -> None:
    assert retrain("--dry-run") == 0
    [run] = runs(place)
    assert run.data.tags["gpumemnet.dry_run"] == "true"
    assert "gpumemnet.release" not in run.data.tags
    assert client_of(place).search_registered_models() == []
    assert champion(place) == "first"


def test_failed_tracking_is_a_warning_after_the_promotion_and_the_next_run_moves_the_alias(
    site: Path,
    place: Path,
    retrain: Retrain,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert retraining(site, place, "--mlflow", "http://me:secret@127.0.0.1:9") == 0
    told = capsys.readouterr()
    release = champion(place)
    assert f"{release} is champion" in told.out
    assert "warning: not tracked: the MLflow store http://127.0.0.1:9" in told.err
    assert "secret" not in told.err
    assert retrain() == 10
    version = client_of(place).get_model_version_by_alias("gpumemnet", "champion")
    assert version.tags["gpumemnet.release"] == release


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--mlflow", "./mlruns"), "--mlflow: must be an SQLite file"),
        (("--mlflow", "ftp://mlflow"), "--mlflow: must be an SQLite file"),
    ],
)
def test_impossible_tracking_is_refused_before_any_work(
    place: Path,
    retrain: Retrain,
    more: tuple[str, str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert retrain(*more) == 2
    assert capsys.readouterr().err.startswith(f"error: {sentence}")
    assert champion(place) == "first"


def test_without_mlflow_it_says_so_before_any_work(
    place: Path,
    retrain: Retrain,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("models.retrain.mlflow_log.find_spec", lambda name: None)
    assert retrain() == 2
    assert "pip install -e '.[mlflow]'" in capsys.readouterr().err
    assert champion(place) == "first"
