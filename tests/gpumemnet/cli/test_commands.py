"""What all commands have in common: help, usage errors, suggestions, standard input."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpumemnet.cli import main
from gpumemnet.cli.commands import ENTRIES, Entry, LazyCommand

ROOT = Path(__file__).parents[3]
JOB = ROOT / "examples" / "mlp_job.json"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_help_has_no_markup_and_no_names_of_types(
    entry: Entry, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([entry.name, "--help"]) == 0
    shown = capfd.readouterr().out
    for name in getattr(LazyCommand(entry).loaded(), "commands", ()):
        assert main([entry.name, name, "--help"]) == 0
        shown += capfd.readouterr().out
    assert re.findall(r"<[a-z]+[^>]*>", shown) == []  # such as <bool> and <int range>
    assert "``" not in shown
    assert "--install-completion" not in shown  # gpumemnet itself has it
    assert f"gpumemnet {entry.name}" in shown


def test_help_loads_no_command() -> None:
    code = (
        "import sys\nfrom gpumemnet.cli import main\nassert main(['--help']) == 0\n"
        "assert not {'numpy', 'torch', 'pandas', 'onnxruntime', 'models', 'service', 'dataset_builder'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["predct"],
            "error: no such command 'predct': did you mean 'predict'? (see gpumemnet --help)",
        ),
        (
            ["predict", "--covrage", "1", "x"],
            "no such option --covrage: did you mean --coverage? (see gpumemnet predict --help)",
        ),
        (
            ["build", "campain"],
            "error: no such command 'campain': did you mean 'campaign'? (see gpumemnet build --help)",
        ),
        (
            ["predict", str(JOB), "--gpu", "H2000"],
            "error: --gpu: no profile of 'H2000': did you mean 'H200'?",
        ),
        (
            ["predict", str(JOB), "--bin-width", "3"],
            "error: --bin-width: gives 65537 bins: choose a width that needs between 1 and 4096",
        ),
        (["train"], "error: missing option '--out' (see gpumemnet train --help)"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.endswith(f"{sentence}\n")
    assert shown.err.count("\n") == 1


def test_a_package_that_is_missing_is_named_with_its_extra() -> None:
    code = (
        "import sys\nsys.modules['yaml'] = None\nfrom gpumemnet.cli import main\n"
        "sys.exit(main(['build', 'measure', '--out', 'x']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2
    assert done.stderr == (
        "error: gpumemnet build needs the package 'yaml': install it with  pip install 'gpumemnet[build]'\n"
    )


def test_a_dash_is_standard_input() -> None:
    job = JOB.read_text()
    lines = f"{json.dumps(json.loads(job))}\n" * 2
    for content, count in ((job, 1), (f"[{job}]", 1), (lines, 2)):
        command = [sys.executable, "-m", "gpumemnet", "predict", "-", "--json"]
        done = subprocess.run(
            command, input=content, capture_output=True, text=True, timeout=300, check=True
        )
        assert len(done.stdout.splitlines()) == count


def test_shells_complete_commands_and_options() -> None:
    command = [sys.executable, "-m", "gpumemnet"]
    environment = {
        "_GPUMEMNET_COMPLETE": "complete_zsh",
        "_TYPER_COMPLETE_ARGS": "gpumemnet predict --cov",
    }
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert "--coverage" in done.stdout


@pytest.mark.parametrize("package", ["models", "dataset_builder", "service"])
def test_the_packages_run_as_modules_in_a_checkout(package: str) -> None:
    command = [sys.executable, "-m", package, "--help"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=True, cwd=ROOT
    )
    assert re.search(rf"python -m {package}\b", done.stdout)


def test_every_command_is_imported_only_where_it_lies() -> None:
    """The target of each entry exists."""
    for entry in ENTRIES:
        assert LazyCommand(entry).loaded() is not None
