"""The script that logs a retraining, against a real store in an SQLite file; each test has its
own."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpumemnet.cli import main
from gpumemnet.predict.bundle import load_bundle
from gpumemnet.site.releases import Registry
from gpumemnet.units import MIB
from models.retrain.collect import HELD_OUT_RULE
from tests.models.filled_graphs import fill_graphs
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

SCRIPT = Path(__file__).parents[2] / "integrations/mlflow/log_retraining.py"


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
    fill_graphs()
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


def arguments(place: Path, *more: str, uri: str = "") -> list[str]:
    """The script and what it is given: the newest report there."""
    report = max(
        (place / "work" / "runs").glob("*/report.json"), key=lambda each: each.stat().st_mtime_ns
    )
    return [*map(str, (SCRIPT, report, "--uri", uri or f"sqlite:///{place}/mlflow.db")), *more]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the script in this process, which has loaded MLflow, for its exit code."""
    spec = importlib.util.spec_from_file_location("log_retraining", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, value in {**script._ENVIRONMENT, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}.items():
        monkeypatch.setenv(name, value)

    def run(place: Path, *more: str, uri: str = "") -> int:
        monkeypatch.setattr(sys, "argv", arguments(place, *more, uri=uri))
        status: int = script.main()
        return status

    return run


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


def test_a_promotion_is_a_run_and_a_version_with_the_alias(
    site: Path, place: Path, log: Callable[..., int]
) -> None:
    assert retraining(site, place) == 0
    release, registry = champion(place), ("--registry", str(place / "registry"))
    command = [sys.executable, *arguments(place, *registry)]
    variables = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    [run] = runs(place)
    assert run.info.status == "FINISHED"
    assert run.data.params["file/site.parquet"].startswith("sha256 ")
    assert run.data.params["verdict"].startswith("better: ")
    figures = {
        name.rpartition("/")[2]: value
        for name, value in run.data.metrics.items()
        if "newest observations/measures/error/" in name
    }
    assert figures["candidate"] < figures["champion"]

    artifacts = place / "mlflow-artifacts" / run.info.run_id / "artifacts"
    assert json.loads((artifacts / "report.json").read_text("utf-8"))["promote"]
    assert json.loads((artifacts / "release" / "release.json").read_text("utf-8"))["lineage"]
    bundles = [load_bundle(folder) for folder in (artifacts / "release" / "bundles").iterdir()]
    stored = Registry(place / "registry").release(release).bundles
    assert {bundle.sha256 for bundle in bundles} == set(stored)

    client = client_of(place)
    version = client.get_model_version_by_alias("gpumemnet", "champion")
    assert (version.run_id, version.tags["gpumemnet.release"]) == (run.info.run_id, release)
    Registry(place / "registry").rollback(by="test", reason="")
    assert log(place, *registry) == 0
    assert len(runs(place)) == 1
    followed = client.get_model_version_by_alias("gpumemnet", "champion")
    assert followed.tags["gpumemnet.release"] == "first"


def test_a_dry_run_registers_nothing_and_no_password_is_shown(
    place: Path, log: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert log(place) == 0
    assert len(runs(place)) == 1
    assert client_of(place).search_registered_models() == []
    assert log(place, uri="http://me:secret@127.0.0.1:9") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the MLflow store http://127.0.0.1:9")
    assert "secret" not in said
