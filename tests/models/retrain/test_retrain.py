"""``gpumemnet retrain`` as cron runs it: child processes, real files."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumemnet.atomic_files import locked
from gpumemnet.predict.bundle import load_bundle, save_bundle
from gpumemnet.site.releases import Registry
from gpumemnet.units import MIB
from models.retrain.release import Request, put_into_service
from tests.models.retraining import EPOCHS, GPU, dataset, measured, observed, relabelled
from tests.models.retraining_site import Forks, Promotion, Site, faulty_runs

SCRIPT = Path(__file__).parents[3] / "integrations/mlflow/log_retraining.py"
FAULTS = ("full disk", "killed after", "killed before", "killed after")
"""One at each step and one after it."""


@pytest.fixture(scope="module")
def promotion(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Promotion]:
    """A site with another context than its champion learned; the disk was full, or the run was
    killed, at every step."""
    folder = tmp_path_factory.mktemp("site")
    forks = Forks(folder)
    before = shutil.copytree(folder / "registry", folder / "before")
    export = dataset(folder / "site.parquet", observed(measured(200, 2, context_bytes=700 * MIB)))
    site = Site(forks, folder / "base.parquet", Registry(folder / "registry"), folder / "work")
    faults = faulty_runs(site, FAULTS, "--observations", export)
    yield Promotion(site, export, site.champion, before, faults)
    forks.close()


@pytest.fixture
def site(promotion: Promotion, tmp_path: Path) -> Site:
    """A site whose champion is "first"."""
    return promotion.before(tmp_path)


def report_of(said: str) -> Path:
    return Path(said.strip().splitlines()[-1].removeprefix("report: "))


def refused(site: Site, *more: str | Path) -> str:
    status, said = site.run(*more)
    assert status == 2, said
    assert "Traceback" not in said
    assert site.champion == "first"
    return said


def test_a_full_disk_or_a_kill_at_any_step_leaves_the_champion_and_no_partial_files(
    promotion: Promotion,
) -> None:
    *cut_short, last = promotion.faults
    assert {fault.status for fault in cut_short if fault.kind == "full disk"} == {1}
    assert {fault.status for fault in cut_short if fault.kind != "full disk"} == {-signal.SIGKILL}
    assert not [fault.problems for fault in promotion.faults if fault.problems]
    for fault in cut_short:
        if fault.kind == "full disk":
            assert "File too large: the champion is unchanged" in fault.said.replace(
                "[Errno 27] ", ""
            )
            assert "Traceback" not in fault.said
    steps = [Path(fault.step) for fault in cut_short if fault.kind == "killed after"]
    assert len(steps) == len({*steps})  # none of them was done twice
    promoted = [step.name for step in steps].index("aliases.json")
    champions = [fault.champion for fault in cut_short if fault.kind == "killed after"]
    assert set(champions[:promoted]) == {"first"}
    assert set(champions[promoted:]) == {promotion.release}
    assert {"candidates", "stand-ins", "bundles", "releases"} <= {
        step.parent.name for step in steps
    }
    assert last.status == 10


def test_a_better_candidate_is_promoted_with_its_lineage(promotion: Promotion) -> None:
    site = promotion.site
    release = site.registry.release(promotion.release)
    assert site.champion == release.name
    assert release.parent == "first"
    lineage = release.lineage
    assert {file["name"] for file in lineage["files"]} == {"base.parquet", "site.parquet"}
    assert all(len(file["sha256"]) == 64 for file in lineage["files"])
    assert lineage["seed"] == 0
    assert lineage["champion"] == "first"
    assert lineage["code"]["packages"]["torch"]
    assert [one["name"] for one in lineage["candidates"]] == ["mlp"]
    assert {part["name"] for part in lineage["parts"]} >= {
        "mlp, held-out architectures",
        "mlp, newest observations",
    }
    [bundle] = site.registry.load(release.name)
    assert abs(bundle.card.contexts[GPU] - 700 * MIB) < 80 * MIB
    assert "line" in bundle.card.document


def test_nothing_changed_is_noticed_before_any_training(promotion: Promotion) -> None:
    site = promotion.site
    files = site.registry.aliases_file.read_bytes()
    command = [
        sys.executable,
        "-m",
        "gpumemnet",
        *site.arguments("--observations", promotion.export),
    ]
    runs = sorted((site.work / "runs").iterdir())
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 10, done.stderr
    assert "nothing has changed" in done.stderr
    assert f"{promotion.release} stays champion" in done.stdout
    assert sorted((site.work / "runs").iterdir()) == runs
    assert site.registry.aliases_file.read_bytes() == files


def test_the_report_says_what_was_judged(promotion: Promotion) -> None:
    run = promotion.release.removeprefix("retrain-")
    path = promotion.site.work / "runs" / run / "report.json"
    document = json.loads(path.read_text("utf-8"))
    assert document["promote"]
    assert {part["name"]: part["rows"] for part in document["parts"]}[
        "mlp, newest observations"
    ] == 40


@pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None,
    reason="MLflow is not installed: pip install -e '.[mlflow]'",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SQLAlchemy, by MLflow
def test_mlflow_has_a_run_of_a_dry_run_and_a_version_with_the_alias_of_a_promotion(
    promotion: Promotion,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    site, uri = promotion.after(tmp_path), f"sqlite:///{tmp_path}/mlflow.db"
    report = site.work / "runs" / promotion.release.removeprefix("retrain-") / "report.json"
    command = [sys.executable, str(SCRIPT), str(report), "--uri", uri]
    variables = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all(" database tables" in line for line in done.stderr.splitlines()), done.stderr

    spec = importlib.util.spec_from_file_location("log_retraining", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, value in {**script._ENVIRONMENT, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}.items():
        monkeypatch.setenv(name, value)
    from mlflow import MlflowClient

    def log(*more: str, uri: str = uri) -> int:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(report), "--uri", uri, *more])
        status: int = script.main()
        return status

    client = MlflowClient(uri, uri)
    assert client.search_registered_models() == []
    registry = ("--registry", str(site.registry.folder))
    assert log(*registry) == 0
    [experiment] = client.search_experiments(filter_string="name = 'gpumemnet'")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["file/site.parquet"].startswith("sha256 ")
    assert run.data.params["verdict"].startswith("better: ")
    figures = {
        name.rpartition("/")[2]: value
        for name, value in run.data.metrics.items()
        if "newest observations/measures/error/" in name
    }
    assert figures["candidate"] < figures["champion"]

    artifacts = tmp_path / "mlflow-artifacts" / run.info.run_id / "artifacts"
    assert json.loads((artifacts / "report.json").read_text("utf-8"))["promote"]
    assert json.loads((artifacts / "release" / "release.json").read_text("utf-8"))["lineage"]
    bundles = [load_bundle(folder) for folder in (artifacts / "release" / "bundles").iterdir()]
    stored = site.registry.release(promotion.release).bundles
    assert {bundle.sha256 for bundle in bundles} == set(stored)

    version = client.get_model_version_by_alias("gpumemnet", "champion")
    assert version.run_id == run.info.run_id
    assert version.tags["gpumemnet.release"] == promotion.release
    site.registry.rollback(by="test", reason="")
    assert log(*registry) == 0
    own = "tags.`gpumemnet.run` != ''"
    assert len(client.search_runs([experiment.experiment_id], own)) == 1
    followed = client.get_model_version_by_alias("gpumemnet", "champion")
    assert followed.tags["gpumemnet.release"] == "first"

    capsys.readouterr()
    assert log(uri="http://me:secret@127.0.0.1:9") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the MLflow store http://127.0.0.1:9")
    assert "secret" not in said


def test_a_withdrawn_release_is_not_promoted_again_and_a_dry_run_says_so(
    promotion: Promotion, tmp_path: Path
) -> None:
    site = promotion.after(tmp_path)
    site.registry.rollback(by="test", reason="")
    for dry in ((), ("--dry-run",)):
        status, said = site.run("--observations", promotion.export, *dry)
        assert status == 10
        assert "was taken back" in said
    assert site.champion == "first"


def test_a_withdrawn_release_is_not_promoted_again_by_newer_code(
    promotion: Promotion, tmp_path: Path
) -> None:
    site = promotion.after(tmp_path)
    site.registry.rollback(by="test", reason="")
    report = (
        promotion.candidate(site).parents[1]
        / "runs"
        / promotion.release.removeprefix("retrain-")
        / "report.json"
    )
    document = json.loads(report.read_text("utf-8")) | {"champion": "first"}
    request = Request(datasets=(), observations=(), registry=site.registry.folder, work=site.work)
    outcome = put_into_service(request, document | {"release": "retrain-upgraded"}, report, "first")
    assert outcome.exit_code == 10
    assert f"{promotion.release} was champion since" in outcome.sentence
    outcome = put_into_service(
        request, document | {"release": "retrain-seed", "seed": 1}, report, "first"
    )
    assert outcome.exit_code == 0
    assert site.champion == "retrain-seed"


def test_a_dry_run_changes_nothing_and_without_promotion_the_champion_stays(
    promotion: Promotion, tmp_path: Path
) -> None:
    site = promotion.before(tmp_path)
    status, said = site.run("--observations", promotion.export, "--dry-run")
    assert status == 0, said
    assert f"else {promotion.release} would be champion" in said
    assert [release.name for release in site.registry.releases()] == ["shipped", "first"]
    status, said = site.run("--observations", promotion.export, "--without-promotion")
    assert status == 0, said
    assert site.registry.release(promotion.release).parent == "first"
    assert site.champion == "first"
    for dry in ((), ("--dry-run",)):
        status, said = site.run("--observations", promotion.export, "--without-promotion", *dry)
        assert status == 10
        assert "waits to be promoted already" in said


def test_a_champion_that_was_set_meanwhile_is_not_replaced(
    promotion: Promotion, tmp_path: Path
) -> None:
    site = promotion.before(tmp_path)
    status, said = site.run("--observations", promotion.export, fault="another champion")
    assert status == 1, said
    assert "'shipped' has become champion in place of 'first'" in said
    assert site.champion == "shipped"


def test_a_deleted_candidate_is_trained_again(promotion: Promotion, tmp_path: Path) -> None:
    site = promotion.before(tmp_path)
    folder = promotion.candidate(site)
    sha256 = load_bundle(folder).sha256
    (folder / "model.onnx").unlink()
    status, said = site.run("--observations", promotion.export)
    assert status == 0, said
    assert load_bundle(folder).sha256 == sha256
    assert site.champion == promotion.release


def test_the_promoted_bundle_is_the_judged_one(promotion: Promotion, tmp_path: Path) -> None:
    site = promotion.before(tmp_path)
    judged = load_bundle(promotion.candidate(site))
    another = save_bundle(
        promotion.candidate(site), judged.model, {**judged.card.document, "version": "another"}
    )
    status, said = site.run("--observations", promotion.export)
    assert status == 0, said
    assert "judging mlp" in said
    assert another.sha256 in site.registry.release(site.champion).bundles


def test_its_own_data_again_is_no_improvement(site: Site) -> None:
    status, said = site.run()
    assert status == 10, said
    assert "first stays champion" in said
    assert [release.name for release in site.registry.releases()] == ["shipped", "first"]


def test_too_few_observations_are_said_before_any_training(site: Site, tmp_path: Path) -> None:
    export = dataset(tmp_path / "site.parquet", observed(measured(1, 9)))
    status, said = site.run("--observations", export)
    assert status == 10
    assert "training" not in said.replace("to train on", "")
    assert (
        "1 observed rows to train on are too few: 20 are needed, which takes some 28 observations more"
        in said
    )
    assert "the champion was trained on all other files" in report_of(said).read_text("utf-8")
    new = dataset(tmp_path / "new.parquet", measured(200, 3))
    status, said = site.run("--observations", export, "--dataset", new)
    assert "training" in said  # there is something new beside the observations


def test_without_the_champion_s_dataset_nothing_is_promoted(site: Site, tmp_path: Path) -> None:
    status, said = site.run(
        "--dataset", dataset(tmp_path / "new.parquet", measured(200, 3)), base=False
    )
    assert status == 10
    assert "was trained on a dataset that is not among the files" in report_of(said).read_text(
        "utf-8"
    )
    assert site.champion == "first"


def test_the_champion_s_training_data_is_read_first(site: Site, tmp_path: Path) -> None:
    rows = [
        relabelled(one, (one.peak_device_bytes or 0) * 1000**2 / 1024**2) for one in measured(60, 5)
    ]
    wrong = dataset(tmp_path / "wrong.parquet", rows)
    status, said = site.run("--dataset", wrong, "--dataset", site.base, base=False)
    assert status == 10
    files = json.loads(report_of(said).read_text("utf-8"))["files"]
    assert (160, 160) in [(file["rows"], file["used"]) for file in files]


def test_a_truncated_file_is_one_sentence(site: Site, tmp_path: Path) -> None:
    (tmp_path / "half.parquet").write_bytes(site.base.read_bytes()[:3000])
    assert "half.parquet is no whole Parquet file" in refused(
        site, "--dataset", tmp_path / "half.parquet"
    )
    assert "half.parquet is no whole Parquet file" in refused(
        site, "--observations", tmp_path / "half.parquet"
    )


def test_an_empty_dataset_is_an_error_only_when_it_is_alone(site: Site, tmp_path: Path) -> None:
    empty = dataset(tmp_path / "empty.parquet", [])
    status, said = site.run("--dataset", empty, base=False)
    assert status == 2
    assert "empty.parquet: no row to learn from" in said
    status, said = site.run("--dataset", empty)
    assert status == 10
    [refusal] = json.loads(report_of(said).read_text("utf-8"))["refused"]
    assert (refusal["file"], refusal["rows"]) == ("empty.parquet", 0)
    assert "holds no row" in refusal["reason"]


def test_a_missing_file_is_one_sentence(site: Site, tmp_path: Path) -> None:
    assert "gone.parquet cannot be read: No such file" in refused(
        site, "--dataset", tmp_path / "gone.parquet"
    )


def test_a_damaged_registry_is_one_sentence(site: Site) -> None:
    site.registry.aliases_file.write_text("{", "utf-8")
    status, said = site.run()
    assert status == 2
    assert "aliases.json: no valid JSON" in said


def test_a_missing_registry_is_one_sentence() -> None:
    environment = {
        name: value for name, value in os.environ.items() if name != "GPUMEMNET_REGISTRY"
    }
    command = [sys.executable, "-m", "gpumemnet", "retrain", "--epochs", str(EPOCHS)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 2
    assert "--registry" in done.stderr


def test_two_runs_in_one_folder_are_refused(site: Site) -> None:
    site.work.mkdir(exist_ok=True)
    with locked(site.work / ".lock", 1.0, TimeoutError()):
        status, said = site.run()
    assert status == 1
    assert "another retraining is using" in said
