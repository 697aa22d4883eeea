"""The compose file: what it mounts is there, what it opens is local, and its settings are settings
of the service."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.settings import PREFIX, Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text()))


def test_compose_accepts_it(compose: dict[str, Any]) -> None:
    """By docker itself, which needs no daemon for that."""
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("the compose plug-in of docker is not installed")
    done = subprocess.run(
        ["docker", "compose", "--profile", "postgres", "config", "--format", "json"],
        cwd=DEPLOY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["services"].keys() == compose["services"].keys()


def test_nothing_is_open_to_other_machines(compose: dict[str, Any]) -> None:
    ports = [port for part in compose["services"].values() for port in part.get("ports", [])]
    assert len(ports) == 3
    assert "ports" not in compose["services"]["gpumemnet"]  # the proxy is the way in
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_settings_are_those_of_the_service_and_no_key_is_in_the_file(
    compose: dict[str, Any],
) -> None:
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    assert compose["services"]["gpumemnet"]["environment"].keys() <= known
    for secret in compose["secrets"].values():
        assert secret["file"].startswith("./secrets/")
    assert "secrets/" in (DEPLOY / ".gitignore").read_text().splitlines()
