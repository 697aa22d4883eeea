"""``gpumemnet registry push`` and ``pull``: a real MLflow store in an SQLite file between two
registries."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from gpumemnet.cli import main
from gpumemnet.site.mlflow import MlflowStore, check_store
from gpumemnet.site.releases import Registry
from tests.conftest import StartService
from tests.mlflow_stores import empty_store, needs_mlflow, store_in
from tests.registries import add_release

pytestmark = needs_mlflow

Place = tuple[Registry, str, Registry]
"""The registry of those who train, the store, and the registry that a service reads."""


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return empty_store(tmp_path_factory)


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory, empty: Path) -> Path:
    """A folder with a registry whose champion ``first`` stands in a store."""
    folder = tmp_path_factory.mktemp("pushed")
    registry = Registry(folder / "trained")
    add_release(registry, folder, "first")
    registry.set_champion("first", by="test", reason="")
    assert (
        main(
            [
                "registry",
                "push",
                "--registry",
                str(registry.folder),
                "--tracking-uri",
                store_in(folder, empty),
            ]
        )
        == 0
    )
    return folder


@pytest.fixture
def place(pushed: Path, tmp_path: Path) -> Place:
    """The same, and beside it a registry that nothing was pulled into."""
    trained = Registry(shutil.copytree(pushed / "trained", tmp_path / "trained"))
    return (
        trained,
        f"sqlite:///{shutil.copyfile(pushed / 'mlflow.db', tmp_path / 'mlflow.db')}",
        Registry(tmp_path / "served"),
    )


def push(place: Place) -> None:
    assert (
        main(["registry", "push", "--registry", str(place[0].folder), "--tracking-uri", place[1]])
        == 0
    )


def pull(place: Place, *more: str) -> int:
    return main(
        ["registry", "pull", "--registry", str(place[2].folder), "--tracking-uri", place[1], *more]
    )


def second(place: Place, tmp_path: Path) -> None:
    add_release(place[0], tmp_path, "second")
    place[0].set_champion("second", by="test", reason="")
    push(place)


def test_the_champion_is_pulled_with_all_its_bundles(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, _, served = place
    assert pull(place) == 0
    assert "first is champion: version 1 of gpumemnet" in capsys.readouterr().out
    assert served.aliases().champion == "first"
    assert set(served.release("first").bundles) == set(trained.release("first").bundles)
    assert served.release("first").lineage["pulled"]["version"] == "1"
    assert served.verify() == ()


def test_a_second_pull_changes_nothing(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    pull(place)
    before = place[2].aliases_file.read_bytes()
    assert pull(place) == 0
    assert "as before" in capsys.readouterr().out
    assert place[2].aliases_file.read_bytes() == before


def test_the_aliases_follow_the_registry_and_its_rollback(place: Place, tmp_path: Path) -> None:
    trained, uri, served = place
    pull(place)
    second(place, tmp_path)
    add_release(trained, tmp_path, "third")
    trained.set_challenger("third")
    push(place)
    store = MlflowStore(uri)
    assert store.client.get_registered_model("gpumemnet").aliases == {
        "champion": 2,
        "challenger": 3,
    }
    assert store.client.get_model_version("gpumemnet", "2").tags["gpumemnet.release"] == "second"
    pull(place)
    pull(place, "--alias", "challenger")
    assert (served.aliases().champion, served.aliases().challenger) == ("second", "third")

    trained.rollback(by="test", reason="")
    trained.set_challenger(None)
    push(place)
    assert store.client.get_registered_model("gpumemnet").aliases == {"champion": 1}
    pull(place)
    pull(place, "--alias", "challenger")
    assert (served.aliases().champion, served.aliases().challenger) == ("first", None)


def test_a_rollback_on_the_spot_stays_until_the_alias_is_moved(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, _, served = place
    pull(place)
    second(place, tmp_path)
    pull(place)
    served.rollback(by="operator", reason="")
    assert pull(place) == 0
    assert "second was pulled before" in capsys.readouterr().out
    assert served.aliases().champion == "first"
    add_release(trained, tmp_path, "third")
    trained.set_champion("third", by="test", reason="")
    push(place)
    pull(place)
    assert served.aliases().champion == "third"


def test_another_alias_becomes_what_is_said(place: Place) -> None:
    MlflowStore(place[1]).client.set_registered_model_alias("gpumemnet", "staging", "1")
    assert pull(place, "--alias", "staging", "--as", "challenger") == 0
    assert (place[2].aliases().champion, place[2].aliases().challenger) == ("shipped", "first")


def test_a_name_that_is_taken_here_stays_what_it_is(place: Place, tmp_path: Path) -> None:
    add_release(place[2], tmp_path, "first", gpu="another")
    assert pull(place) == 0
    assert place[2].aliases().champion.startswith("first-")


@pytest.mark.parametrize("file", ["model.onnx", "card.json", "SHA256SUMS", "release.json"])
def test_what_was_altered_in_the_store_is_not_pulled(
    pushed: Path, empty: Path, tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Registry(pushed / "trained"), store_in(tmp_path, empty), Registry(tmp_path / "served")
    push(place)
    found = next((tmp_path / "mlflow-artifacts").glob(f"**/{file}"))
    found.write_bytes(found.read_bytes()[:-40])
    assert pull(place) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: version 1 of gpumemnet in sqlite:///")
    assert "/tmp/gpumemnet-" not in said
    assert place[2].aliases().champion == "shipped"
    assert place[2].verify() == ()
    assert len(place[2].releases()) == 1


def test_a_release_of_bundles_that_it_does_not_hold_is_refused(
    pushed: Path, empty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Registry(pushed / "trained"), store_in(tmp_path, empty), Registry(tmp_path / "served")
    push(place)
    document = next((tmp_path / "mlflow-artifacts").glob("**/release.json"))
    first = place[0].release("first").bundles[0]
    document.write_text(document.read_text("utf-8").replace(first, "../" * 20 + "tmp"), "utf-8")
    assert pull(place) == 2
    assert "release.json is none of this format" in capsys.readouterr().err


def test_what_cannot_be_asked_is_one_sentence(
    place: Place,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    nothing = tmp_path / "damaged.db"
    nothing.write_bytes(b"no database" * 1000)
    asked = (
        (["--alias", "production"], "has no alias production"),
        (
            ["--tracking-uri", "mlruns"],
            "must be an SQLite file (sqlite:///mlflow.db) or an MLflow server",
        ),
        (["--tracking-uri", "postgresql://me:secret@host/db"], "not 'postgresql://host/db'"),
        (["--tracking-uri", f"sqlite:///{tmp_path}/none.db"], "there is no MLflow store"),
        (["--tracking-uri", f"sqlite:///{nothing}"], "file is not a database"),
        (
            ["--tracking-uri", "http://me:secret@127.0.0.1:9"],
            "the MLflow store http://127.0.0.1:9 ",
        ),
        (["--alias", "x' or '"], "alias: use up to 100 letters"),
        (["--tracking-model", "x' or '"], "--tracking-model: use up to 100 letters"),
        (["--as", "king"], "must be champion or challenger"),
        (["--every", "0"], "must be at least 1 second"),
    )
    for more, sentence in asked:
        assert pull(place, *more) == 2
        said = capsys.readouterr().err
        assert sentence in said
        assert said.startswith("error: ")
        assert len(said.splitlines()) == 1
        assert "secret" not in said
    assert not (tmp_path / "none.db").exists()
    assert place[2].aliases().champion == "shipped"


def test_push_and_pull_answer_programs_in_json(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pull(place, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["version"], document["release"], document["has_changed"]) == (
        "1",
        "first",
        True,
    )
    command = [
        "registry",
        "push",
        "--registry",
        str(place[0].folder),
        "--tracking-uri",
        place[1],
        "--json",
    ]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out) == {"model": "gpumemnet", "moved": {}}


def test_pushing_a_registry_that_is_not_there_moves_no_alias(place: Place, tmp_path: Path) -> None:
    assert (
        main(
            [
                "registry",
                "push",
                "--registry",
                str(tmp_path / "mistyped"),
                "--tracking-uri",
                place[1],
            ]
        )
        == 2
    )
    assert (
        MlflowStore(place[1]).client.get_model_version_by_alias("gpumemnet", "champion").version
        == 1
    )


def test_without_mlflow_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gpumemnet.site.mlflow.find_spec", lambda name: None)
    assert pull(place) == 2
    assert "pip install 'gpumemnet[mlflow]'" in capsys.readouterr().err


def test_an_address_is_shown_without_its_password() -> None:
    with pytest.raises(ValueError, match="not 'ftp://host/'"):
        check_store("ftp://me:secret@host/")


def eventually(holds: Callable[[], bool], seconds: float = 300.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.05)
    return holds()


def test_a_running_service_follows_the_alias(
    place: Place, tmp_path: Path, start_service: StartService
) -> None:
    """The whole way: MLflow's alias moves, a pull brings it to the folder, and the service swaps by
    itself."""
    pull(place)
    with start_service(
        GPUMEMNET_REGISTRY=str(place[2].folder), GPUMEMNET_RELOAD_SECONDS="0.1"
    ) as running:

        def release() -> str:
            return str(httpx.get(f"{running.url}/v1/models").json()["release"])

        assert release() == "first"
        second(place, tmp_path)
        pull(place)
        assert eventually(lambda: release() == "second")


def test_it_looks_again_and_again_and_a_store_that_is_down_is_a_warning(
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = tmp_path / "mlflow.db"

    def goes_down() -> None:
        store.rename(tmp_path / "away")

    def comes_back() -> None:
        (tmp_path / "away").rename(store)
        second(place, tmp_path)
        capsys.readouterr()

    def ends() -> None:
        raise KeyboardInterrupt

    happens = iter((lambda: None, goes_down, lambda: None, comes_back, ends))
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        next(happens)()

    monkeypatch.setattr("gpumemnet.cli.registry_mlflow.sleep", sleep)
    told: list[str] = []
    monkeypatch.setattr(
        "gpumemnet.cli.registry_mlflow.typer.echo", lambda text, err=False: told.append(text)
    )
    assert pull(place, "--every", "7") == 130
    assert waited == [7.0] * 5
    said = [line for line in told if "version" in line or "warning" in line]
    assert [
        line.partition(":")[0] for line in said if line.startswith(("first", "warning", "second"))
    ] == [
        "first is champion",
        "first is champion",
        "warning",
        "second is champion",
    ]
    assert place[2].aliases().champion == "second"
