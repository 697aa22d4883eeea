"""The Kubernetes manifests: built as kubectl builds them, valid by the schemas of old and new
clusters, and locked down."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from service.settings import PREFIX, Settings
from tests.conftest import RunningService

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "deploy/kubernetes"
TARGETS = ("base", "overlays/sqlite", "overlays/postgres")
VERSIONS = ("1.28", "1.34")
"""The oldest and the newest Kubernetes that the manifests are checked for; admission match
conditions came in 1.30."""

pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed, and it builds the manifests"
)

Manifest = dict[str, Any]


def built(folder: Path) -> list[Manifest]:
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def targets() -> dict[str, list[Manifest]]:
    return {name: built(MANIFESTS / name) for name in TARGETS} | {
        "webhook": built(ROOT / "integrations/kubernetes")
    }


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def test_all_are_valid(targets: dict[str, list[Manifest]]) -> None:
    for manifests in targets.values():
        assert manifests
        for manifest in manifests:
            oldest = "1.30" if manifest["kind"] == "MutatingWebhookConfiguration" else VERSIONS[0]
            for version in (oldest, VERSIONS[1]):
                kubernetes_validate.validate(manifest, version, strict=True)


def test_pods_are_locked_down(targets: dict[str, list[Manifest]]) -> None:
    workloads = [
        manifest
        for manifests in targets.values()
        for manifest in of_kind(manifests, "Deployment", "StatefulSet")
    ]
    assert len(workloads) == 5
    for workload in workloads:
        pod = workload["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert not container["image"].endswith(":latest")
            assert ":" in container["image"]
            assert {"readinessProbe", "livenessProbe"} <= container.keys()
        mounted = {mount["name"] for one in pod["containers"] for mount in one["volumeMounts"]}
        claims = {
            claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])
        }
        assert mounted == {volume["name"] for volume in pod["volumes"]} | claims


def service_container(manifests: list[Manifest]) -> Manifest:
    [deployment] = of_kind(manifests, "Deployment")
    containers: list[Manifest] = deployment["spec"]["template"]["spec"]["containers"]
    return next((one for one in containers if one["name"] == "gpumemnet"), containers[0])


def test_nobody_reaches_the_service_but_through_the_proxy(
    targets: dict[str, list[Manifest]],
) -> None:
    for name in TARGETS:
        container = service_container(targets[name])
        assert "ports" not in container
        assert container["args"][:4] == ["gpumemnet", "serve", "--host", "127.0.0.1"]
        configurations = [
            one["data"]["nginx.conf"]
            for one in of_kind(targets[name], "ConfigMap")
            if "nginx.conf" in one["data"]
        ]
        assert configurations == [(ROOT / "deploy/nginx/nginx.conf").read_text()]


def test_observations_go_where_the_overlay_says(targets: dict[str, list[Manifest]]) -> None:
    def database(name: str) -> Any:
        environment = {entry["name"]: entry for entry in service_container(targets[name])["env"]}
        return {
            key: value
            for key, value in environment["GPUMEMNET_DATABASE_URL"].items()
            if key != "name"
        }

    assert database("base") == {"value": "off"}
    assert database("overlays/sqlite") == {"value": ""}
    assert database("overlays/postgres") == {
        "valueFrom": {"secretKeyRef": {"name": "gpumemnet-database", "key": "url"}}
    }


def test_sqlite_has_one_writer_on_a_volume(targets: dict[str, list[Manifest]]) -> None:
    manifests = targets["overlays/sqlite"]
    [deployment] = of_kind(manifests, "Deployment")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    [claim] = of_kind(manifests, "PersistentVolumeClaim")
    volumes = {
        volume["name"]: volume for volume in deployment["spec"]["template"]["spec"]["volumes"]
    }
    assert volumes["state"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert of_kind(manifests, "HorizontalPodAutoscaler", "PodDisruptionBudget") == []


def test_environment_variables_are_settings_of_the_service(
    targets: dict[str, list[Manifest]],
) -> None:
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    for name in TARGETS:
        assert {entry["name"] for entry in service_container(targets[name])["env"]} <= known


def test_probes_ask_paths_that_are_open_to_all(
    targets: dict[str, list[Manifest]], service: RunningService
) -> None:
    import httpx

    for name in TARGETS:
        container = service_container(targets[name])
        [deployment] = of_kind(targets[name], "Deployment")
        [proxy] = [
            one
            for one in deployment["spec"]["template"]["spec"]["containers"]
            if one["name"] == "proxy"
        ]
        [port] = proxy["ports"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container[probe]["httpGet"]
            assert asked["port"] == port["containerPort"]
            assert httpx.get(service.url + asked["path"], timeout=300).status_code == 200
