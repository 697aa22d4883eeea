"""Prometheus and Grafana: their files are in order, and every metric that they name is one that the
service has."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.conftest import RunningService

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy/prometheus"
GRAFANA = ROOT / "deploy/grafana"
NAME = re.compile(r"\bgpumemnet_[a-z0-9_]+\b")
ALL_NAMES = """
import service.app
from prometheus_client import REGISTRY
for metric in REGISTRY.collect():
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(metric.type, [""])
    print(*(metric.name + suffix for suffix in suffixes), sep="\\n")
"""


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    [file] = (GRAFANA / "dashboards").glob("*.json")
    return dict(json.loads(file.read_text()))


@pytest.fixture(scope="module")
def expressions(rules: list[dict[str, Any]], dashboard: dict[str, Any]) -> list[str]:
    panels = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]
    return [rule["expr"] for rule in rules] + panels


@pytest.fixture(scope="module")
def known_names() -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", ALL_NAMES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return set(done.stdout.split())


def test_every_metric_named_is_one_that_the_service_has(
    expressions: list[str], known_names: set[str]
) -> None:
    named = {name for expression in expressions for name in NAME.findall(expression)}
    assert len(named) > 15
    assert named - known_names == set()


def test_every_metric_named_is_exposed(expressions: list[str], service: RunningService) -> None:
    """Those with labels of which none has been seen yet have their TYPE line alone."""
    job = {
        "family": "mlp",
        "batch_size": 8,
        "input_elements": 4,
        "optimizer": "adam",
        "precision": "fp32",
    }
    job |= {"total_activations": 100, "total_parameters": 100}
    httpx.post(f"{service.url}/v1/predict", json={"job": job}, timeout=300)
    text = httpx.get(f"{service.url}/metrics", timeout=300).text
    exposed = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    families = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for expression in expressions
        for name in NAME.findall(expression)
    }
    assert families - exposed == set()


def test_labels_named_are_labels_of_the_metric(
    expressions: list[str], service: RunningService
) -> None:
    text = httpx.get(f"{service.url}/metrics", timeout=300).text
    seen: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(\w+)\{(.*)\} ", text, re.MULTILINE):
        seen.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    added_by_prometheus = {"job", "instance"}
    for expression in expressions:
        for name, labels in re.findall(r"(\w+)\{([^}]*)\}", expression):
            if name in seen:
                assert set(re.findall(r"(\w+)\s*[=!]", labels)) <= seen[
                    name
                ] | added_by_prometheus | {"le"}


def test_every_alert_says_what_is_wrong_and_how_bad(rules: list[dict[str, Any]]) -> None:
    names = [rule["alert"] for rule in rules]
    assert len(set(names)) == len(names)
    assert {"GpumemnetCoverage", "GpumemnetErrors", "GpumemnetLatency", "GpumemnetQueue"} <= set(
        names
    )
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        assert rule["for"]


def test_prometheus_accepts_its_files() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: it comes with Prometheus")
    for arguments in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            [promtool, *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
