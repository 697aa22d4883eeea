"""The served release follows the registry: a champion is swapped in without a lost request, and one
that cannot be served is reported."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from gpumemnet.atomic_files import Document
from gpumemnet.errors import BundleError
from gpumemnet.predict.bundle import MODEL_FILE
from gpumemnet.site.releases import SHIPPED, Registry
from service.served_release import STALE, ServedRelease
from tests.conftest import StartService
from tests.registries import add_release
from tests.service.api.test_metrics import scrape, value
from tests.waiting import wait_until


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    registry = Registry(tmp_path / "registry")
    for name in ("r1", "r2"):
        add_release(registry, tmp_path / name, name)
    return registry


def serve(registry: Registry, **options: Any) -> ServedRelease:
    return ServedRelease(registry=registry, **options)


def promote(registry: Registry, release: str) -> None:
    registry.set_champion(release, by="", reason="")


def break_release(registry: Registry, name: str) -> None:
    """Spoil a bundle that only this release has."""
    for digest in registry.release(name).bundles:
        with (registry.folder / "bundles" / digest / MODEL_FILE).open("ab") as stream:
            stream.write(b"\0")


def is_stale() -> float:
    [sample] = [one for metric in STALE.collect() for one in metric.samples]
    return sample.value


def test_it_follows_the_champion(registry: Registry) -> None:
    promote(registry, "r1")
    serving = serve(registry)
    assert serving.api.release == "r1"
    promote(registry, "r2")
    before = serving.api
    serving.follow()
    assert (serving.api.release, before.release) == ("r2", "r1")
    registry.rollback(by="", reason="")
    serving.follow()
    assert serving.api.release == "r1"


def test_a_champion_that_cannot_be_served_is_reported_and_the_release_before_stays(
    registry: Registry,
) -> None:
    promote(registry, "r1")
    serving = serve(registry)
    promote(registry, "r2")
    hidden = registry.folder / "bundles"
    hidden.rename(registry.folder / "away")
    serving.follow()
    assert serving.api.release == "r1"
    assert is_stale() == 1
    (registry.folder / "away").rename(hidden)
    for _ in range(40):  # nothing in the aliases changes: it is tried again all the same
        serving.follow()
    assert serving.api.release == "r2"
    assert is_stale() == 0


def test_a_damaged_champion_is_not_served_at_the_start(registry: Registry) -> None:
    promote(registry, "r1")
    promote(registry, "r2")
    break_release(registry, "r2")
    serving = serve(registry)
    assert serving.api.release in ("r1", SHIPPED)  # the two releases may share the damaged bundle
    assert serving.failure is not None
    assert "checksum" in serving.failure


def test_bundles_and_a_registry_are_one_too_many(registry: Registry) -> None:
    with pytest.raises(BundleError, match="only one of"):
        serve(registry, bundles=(registry.folder,))


def test_a_swap_loses_no_request(
    start_service: StartService, registry: Registry, job: Document
) -> None:
    promote(registry, "r1")
    with (
        start_service(GPUMEMNET_REGISTRY=str(registry.folder)) as running,
        httpx.Client(base_url=running.url, timeout=300) as client,
    ):
        seen: list[str] = []
        promote(registry, "r2")
        while "r2" not in seen:
            answer = client.post("/v1/predict", json={"job": job})
            assert answer.status_code == 200
            seen.append(answer.json()["release"])
        assert set(seen) <= {"r1", "r2"}
        assert client.get("/v1/models").json()["release"] == "r2"
        registry.aliases_file.unlink()
        wait_until(lambda: value(scrape(running.url), "gpumemnet_champion_stale") == 1)
        answer = client.post("/v1/predict", json={"job": job})
        assert (answer.status_code, answer.json()["release"]) == (200, "r2")
