"""``python -m models retrain --mlflow`` against a real store in an SQLite file; each test
has its own."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpumemnet.cli import main
from gpumemnet.errors import TrackingError
from gpumemnet.predict.bundle import load_bundle
from gpumemnet.site.mlflow import MlflowStore
from gpumemnet.site.releases import Registry
from gpumemnet.units import MIB
from models.retrain.row_splits import HELD_OUT_RULE
from tests.mlflow_stores import empty_store, needs_mlflow, store_in
from tests.models.retraining import EPOCHS, dataset, measured, observed
from tests.registries import other_bundle, shipped

pytestmark = needs_mlflow

if TYPE_CHECKING:
    from mlflow.entities import Run

Retrain = Callable[..., int]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry whose champion is to be beaten by observations, and a work folder in which that
    has been found out.

    The champion states that it was trained on a dataset that is too small for a candidate of its
    own.  So only one model is trained.
    """
    folder = tmp_path_factory.mktemp("site")
    base = dataset(folder / "base.parquet", measured(119, 1))
    name = "mlp-a100-published"
    origin = hashlib.sha256(base.read_bytes()).hexdigest()
    learned = {**shipped(name).card.document["training_data"], "sha256": origin}
    retrained = {"held_out": HELD_OUT_RULE, "origins": [origin], "learned_until": None}
    registry = Registry(folder / "registry")
    bundle = other_bundle(
        folder / "first", "first", name, training_data=learned, retraining=retrained
    )
    registry.create_release("first", [registry.add_bundle(bundle.source).sha256], parent=None)
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


@pytest.fixture
def place(site: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of registry, work folder and an empty store."""
    for name in ("registry", "work"):
        shutil.copytree(site / name, tmp_path / name)
    store_in(tmp_path, empty_store(tmp_path_factory))
    return tmp_path


@pytest.fixture
def retrain(site: Path, place: Path) -> Retrain:
    """Retrains there with tracking."""
    return lambda *more: retraining(site, place, "--mlflow", f"sqlite:///{place}/mlflow.db", *more)


def store_of(place: Path) -> MlflowStore:
    return MlflowStore(f"sqlite:///{place}/mlflow.db")


def champion(place: Path) -> str:
    return Registry(place / "registry").aliases().champion


def runs(place: Path, kind: str = "retraining") -> list[Run]:
    store = store_of(place)
    found = store.client.search_runs(
        [store.experiment()],
        f"tags.`gpumemnet.kind` = '{kind}'",
        order_by=["attributes.start_time"],
    )
    return list(found)


def test_a_promotion_is_a_run_and_a_version_with_the_alias(place: Path, retrain: Retrain) -> None:
    assert retrain() == 0
    release = champion(place)
    assert release.startswith("retrain-")
    [run] = runs(place)
    assert run.info.status == "FINISHED"
    assert run.data.params["champion"] == "first"
    assert run.data.params["seed"] == "0"
    assert run.data.params["file/site.parquet"].startswith("sha256 ")
    assert run.data.params["mlp-a100-observed/mlp/verdict"].startswith("better: ")
    figures = {
        who: run.data.metrics[f"mlp-a100-observed/mlp/newest observations/error/{who}"]
        for who in ("champion", "candidate")
    }
    assert figures["candidate"] < figures["champion"]
    assert run.data.tags["gpumemnet.exit_code"] == "0"
    assert run.data.tags["gpumemnet.release"] == release

    artifacts = place / "mlflow-artifacts" / run.info.run_id / "artifacts"
    assert (artifacts / "report.md").read_text("utf-8").startswith("# Retraining")
    assert json.loads((artifacts / "lineage.json").read_text("utf-8"))["files"]
    bundle = load_bundle(artifacts / "bundles" / "mlp-a100-observed")
    assert bundle.sha256 in Registry(place / "registry").release(release).bundles
    assert not [
        path
        for path in artifacts.rglob("*")
        if path.suffix in (".pkl", ".pickle") or path.name == "MLmodel"
    ]

    version = store_of(place).client.get_model_version_by_alias("gpumemnet", "champion")
    assert version.run_id == run.info.run_id
    assert version.tags["gpumemnet.release"] == release


def test_nothing_changed_makes_no_second_version_and_rollback_is_followed(
    place: Path, retrain: Retrain
) -> None:
    retrain()
    release = champion(place)
    assert retrain() == 10  # the first look at what was learned of the new champion
    assert retrain() == 10
    assert len(runs(place)) == 2
    store = store_of(place)
    assert store.client.get_registered_model("gpumemnet").aliases == {"champion": 1}
    Registry(place / "registry").rollback(by="test", reason="")
    assert retrain() == 10
    assert champion(place) == "first"
    followed = store.client.get_model_version_by_alias("gpumemnet", "champion")
    assert followed.tags["gpumemnet.release"] == "first"
    promoting = next(run for run in runs(place) if run.data.params["champion"] == "first")
    assert promoting.data.tags["gpumemnet.release"] == release
    assert "taken back" in promoting.data.tags["mlflow.note.content"]


def test_a_dry_run_is_logged_and_registers_nothing(place: Path, retrain: Retrain) -> None:
    assert retrain("--dry-run") == 0
    [run] = runs(place)
    assert run.data.tags["gpumemnet.dry_run"] == "true"
    assert "gpumemnet.release" not in run.data.tags
    assert store_of(place).client.search_registered_models() == []
    assert champion(place) == "first"


@pytest.mark.parametrize(
    "breaks", ["log_batch", "log_artifacts", "create_model_version", "set_registered_model_alias"]
)
def test_failed_tracking_does_not_hide_a_promotion_and_is_repeated(
    place: Path,
    retrain: Retrain,
    breaks: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from mlflow import MlflowClient

    def fails(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(MlflowClient, breaks, fails)
        assert retrain() == 0
    told = capsys.readouterr()
    release = champion(place)
    assert f"{release} is champion" in told.out
    assert "warning: not tracked: the MLflow store sqlite:///" in told.err
    assert "No space left on device" in told.err
    assert "champion" not in (
        store_of(place).client.get_registered_model("gpumemnet").aliases if breaks[0] == "s" else {}
    )

    assert retrain() == 10
    found = runs(place)
    assert {run.data.tags.get("gpumemnet.release") for run in found} == {release, None}
    assert all(run.info.status == "FINISHED" for run in found)
    assert (
        store_of(place)
        .client.get_model_version_by_alias("gpumemnet", "champion")
        .tags["gpumemnet.release"]
        == release
    )


def test_a_store_that_cannot_be_reached_is_a_warning_after_the_promotion(
    site: Path, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert retraining(site, place, "--mlflow", "http://me:secret@127.0.0.1:9") == 0
    told = capsys.readouterr()
    assert champion(place) in told.out
    assert "warning: not tracked: the MLflow store http://127.0.0.1:9" in told.err
    assert "secret" not in told.err


def test_a_deleted_report_does_not_stop_the_next_run(place: Path, retrain: Retrain) -> None:
    (place / "work" / "untracked").mkdir()
    (place / "work" / "untracked" / "gone.json").write_text('{"report": "runs/gone/report.md"}')
    assert retrain() == 0
    assert not list((place / "work" / "untracked").iterdir())
    assert retrain() == 10
    assert len(runs(place)) == 2


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
    monkeypatch.setattr("gpumemnet.site.mlflow.find_spec", lambda name: None)
    assert retrain() == 2
    assert "pip install -e '.[mlflow]'" in capsys.readouterr().err
    assert champion(place) == "first"


def test_a_file_that_is_not_a_store_is_named(tmp_path: Path) -> None:
    (tmp_path / "some.db").write_bytes(b"no database" * 500)
    with pytest.raises(TrackingError, match=r"some\.db cannot be opened"):
        MlflowStore(f"sqlite:///{tmp_path}/some.db")
