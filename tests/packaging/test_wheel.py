"""The built wheel, installed into an environment of its own and used from a folder that is no
checkout."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOB = ROOT / "examples" / "mlp_job.json"


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel.

    Attributes:
        folder: of the environment.
        site_packages: where the wheel lies.
        project: a user's project, with packages called ``models`` and ``service`` of its own.
    """

    folder: Path
    site_packages: Path
    project: Path

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        program, *arguments = map(str, command)
        return subprocess.run(
            [self.folder / "bin" / program, *arguments],
            capture_output=True,
            text=True,
            timeout=3000,
            check=False,
            cwd=self.project,
            env=clean_environment(),
        )

    def output(self, *command: str | Path) -> str:
        done = self.run(*command)
        assert done.returncode == 0, done.stderr
        return done.stdout


def clean_environment() -> dict[str, str]:
    left_out = ("GPUMEMNET_", "PYTHON", "PYTEST", "COVERAGE", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(left_out)}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel without compiled modules, which every Python can install."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    command = [sys.executable, "-m", "pip", "wheel", *options, str(ROOT)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=clean_environment() | {"GPUMEMNET_COMPILE": "0"},
    )
    assert done.returncode == 0, done.stderr
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(
        wheel,
        Path(sys.executable),
        Path(sysconfig.get_path("purelib")),
        tmp_path_factory.mktemp("environment"),
    )


def install(wheel: Path, python: Path, dependencies: Path, folder: Path) -> Installed:
    """Install ``wheel`` into a new environment that finds its dependencies in the site-packages of
    another."""
    subprocess.run(
        [python, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=3000
    )
    new = folder / "venv" / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(new),
        "--quiet",
        "--disable-pip-version-check",
    ]
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-compile", "--no-index", wheel],
        check=True,
        timeout=3000,
    )
    [site_packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    # Its own .pth files are not read, so the editable installation of the checkout is not found
    # through it.
    (site_packages / "dependencies.pth").write_text(f"{dependencies}\n")
    project = folder / "project"
    (project / "models").mkdir(parents=True)
    (project / "service").mkdir()
    (project / "models" / "net.py").write_text(
        "from torch import nn\n\n\ndef network():\n    return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))\n"
    )
    (project / "service" / "__init__.py").write_text("from models.net import network\n")
    (project / "train.py").write_text(
        "from models.net import network\nfrom service import network as build\n\nassert build is network\n"
    )
    return Installed(folder / "venv", site_packages, project)


def test_nothing_with_a_general_name_lands_in_site_packages(installed: Installed) -> None:
    names = {path.name for path in installed.site_packages.iterdir()} - {
        "dependencies.pth",
        "__pycache__",
    }
    [information] = (name for name in names if name.endswith(".dist-info"))
    assert names == {"gpumemnet", information}


def test_it_holds_all_three_packages_and_no_datasets_or_tests(wheel: Path) -> None:
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    assert {
        Path("gpumemnet") / each for each in ("dataset_builder/__main__.py", "service/__main__.py")
    } <= names
    assert not [name for name in names if "research" in name.parts]
    tracked = subprocess.run(
        ["git", "ls-files", "gpumemnet", "dataset_builder", "models", "service"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = {
        Path(name) if name.startswith("gpumemnet/") else Path("gpumemnet") / name
        for name in tracked.stdout.splitlines()
        if not name.startswith("dataset_builder/datasets/")
    }
    assert expected <= names
    assert not [name for name in names if {"tests", "datasets"} & set(name.parts)]
    assert not [name for name in names if name.suffix in (".so", ".pyc")]


def test_its_description_has_no_link_into_the_repository(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    [name] = (name for name in archive.namelist() if name.endswith("/METADATA"))
    metadata = archive.read(name).decode()
    assert "Author: " in metadata
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", metadata) == []


@pytest.mark.parametrize("command", ["serve", "build", "retrain"])  # one of each package
def test_every_command_has_its_help(installed: Installed, command: str) -> None:
    assert f"gpumemnet {command}" in installed.output("gpumemnet", command, "--help")


def test_the_dataset_builder_runs_as_a_module_under_its_name(installed: Installed) -> None:
    printed = installed.output("python", "-m", "gpumemnet.dataset_builder", "--help")
    assert "python -m gpumemnet.dataset_builder" in printed


def test_it_predicts(installed: Installed) -> None:
    answer = json.loads(installed.output("gpumemnet", "predict", JOB, "--json"))
    assert answer["expected_bytes"] > 0
    version = installed.output(
        "python", "-c", "import gpumemnet; print(gpumemnet.__version__)"
    ).strip()
    assert f"gpumemnet-{version}.dist-info" in {
        path.name for path in installed.site_packages.iterdir()
    }


def test_a_project_with_its_own_models_and_service_is_extracted_and_traced(
    installed: Installed,
) -> None:
    options = ("train.py:network", "--input", "784", "--batch-size", "64", "--json")
    assert json.loads(installed.output("gpumemnet", "extract", *options))["job"]["family"] == "mlp"
    assert json.loads(installed.output("gpumemnet", "trace", *options))["expected_bytes"] > 0


def test_the_service_answers(installed: Installed) -> None:
    command = [
        str(installed.folder / "bin" / "gpumemnet"),
        "serve",
        "--port",
        "0",
        "--database-url",
    ]
    command.append(f"sqlite:///{installed.folder}/observations.db")
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=installed.project, env=clean_environment()
    ) as process:
        try:
            assert process.stderr is not None
            address = next(
                found[0]
                for line in process.stderr
                if (found := re.findall(r"listening on (http://[\w.:]+)", line))
            )
            body = json.dumps({"job": json.loads(JOB.read_bytes())}).encode()
            request = urllib.request.Request(
                f"{address}/v1/predict", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=300) as answer:
                assert json.load(answer)["expected_bytes"] > 0
            with urllib.request.urlopen(f"{address}/", timeout=300) as page:
                assert b"<html" in page.read()
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=300) == 0
        finally:
            process.kill()


@pytest.fixture(scope="session", params=["3.12", "3.13"])
def installed_elsewhere(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Installed:
    python = shutil.which(f"python{request.param}")
    found = None
    if python is not None:
        script = "import numpy, onnxruntime, torch, typer, sysconfig; print(sysconfig.get_path('purelib'))"
        found = subprocess.run(
            [python, "-c", script], capture_output=True, text=True, timeout=3000, check=False
        )
    if python is None or found is None or found.returncode:
        pytest.skip(f"there is no python{request.param} with gpumemnet's dependencies")
    return install(
        wheel, Path(python), Path(found.stdout.strip()), tmp_path_factory.mktemp("elsewhere")
    )


def test_it_works_on_another_python(installed_elsewhere: Installed) -> None:
    test_it_predicts(installed_elsewhere)
    test_a_project_with_its_own_models_and_service_is_extracted_and_traced(installed_elsewhere)
