"""Models in service: exchanged under load without a failed request, refused when they fail,
followed by every worker."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from gpumemnet.predict.bundle import MODEL_FILE
from gpumemnet.site.releases import SHIPPED, Registry
from service.admin.schemas import AdminModels
from service.api.examples import EXAMPLE_JOBS
from service.api.predictions import Document
from service.serving.served_release import RETRY_ROUNDS
from tests.registries import add_release, shipped
from tests.waiting import wait_until

CHILD = Path(__file__).with_name("serving_child.py")
BODY = json.dumps({"job": EXAMPLE_JOBS["cnn"]}).encode()
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


@contextmanager
def serving(
    log: Path, registry: Registry | None = None, workers: int = 1, share: float = 0.0
) -> Iterator[httpx.Client]:
    """Clients' base address and the log of a service of models; started in its own process group,
    ended with all its workers."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GPUMEMNET_", "PROMETHEUS_"))
    }
    environment |= {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    command = [
        sys.executable,
        str(CHILD),
        str(workers),
        str(share),
        *([str(registry.folder)] if registry else []),
    ]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stderr=stream, env=environment, start_new_session=True)
    try:
        wait_until(lambda: "listening on" in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        url = log.read_text().partition("listening on ")[2].split()[0]
        with httpx.Client(base_url=url, timeout=300) as client:
            client.get("/state")
            yield client
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=300)


def predict(client: httpx.Client) -> Document:
    answer = client.post("/v1/predict", content=BODY, headers=JSON)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def put(client: httpx.Client, alias: str, release: object, **more: object) -> httpx.Response:
    return client.put(f"/v1/admin/models/{alias}", json={"release": release, **more})


def metric(client: httpx.Client, name: str) -> float:
    line = next(
        line for line in client.get("/metrics").text.splitlines() if line.startswith(name + " ")
    )
    return float(line.split()[-1])


def test_champions_are_exchanged_under_load_and_no_request_fails(
    registry: Registry, tmp_path: Path
) -> None:
    for name in ("r1", "r2"):
        add_release(registry, tmp_path, name)
    done = threading.Event()
    seen: list[tuple[str, str]] = []

    with serving(tmp_path / "log", registry) as admin:

        def load(_: int) -> None:
            with httpx.Client(base_url=admin.base_url, timeout=300) as client:
                while not done.is_set():
                    answer = predict(client)
                    seen.append((answer["release"], answer["model"]["version"]))

        with ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(load, number) for number in range(4)]
            try:
                for number in range(6):
                    wanted = ("r1", "r2", SHIPPED)[number % 3]
                    answer = put(admin, "champion", wanted, reason=f"round {number}")
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["serving"]["release"] == wanted
                    assert predict(admin)["release"] == wanted  # the very next answer
            finally:
                done.set()
            for client in clients:
                client.result()
        assert metric(admin, "gpumemnet_champion_swaps_total") == 6
    # an answer is of one release alone
    assert set(seen) == {("r1", "r1"), ("r2", "r2"), (SHIPPED, "1")}
    assert len(seen) > 50
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_memory_stays_flat_however_often_champions_change(
    registry: Registry, tmp_path: Path
) -> None:
    for name in ("r1", "r2"):
        add_release(registry, tmp_path, name)
    with serving(tmp_path / "log", registry) as client:
        resident: list[float] = []
        for number in range(16):
            put(client, "champion", ("r1", "r2")[number % 2])
            predict(client)
            resident.append(client.get("/state").json()["resident_mib"])
    assert (
        max(resident[12:]) - max(resident[4:8]) < 16
    )  # it settles near 140 MiB; eight kept releases would take far more
    assert max(resident) < 150


def test_every_worker_follows_the_registry(registry: Registry, tmp_path: Path) -> None:
    add_release(registry, tmp_path, "r1")
    with serving(tmp_path / "log", registry, workers=2) as client:

        def releases() -> list[str]:
            found: dict[int, str] = {}
            for _ in range(40):  # a connection each, which whoever is quicker takes
                state = httpx.get(f"{client.base_url}/state").json()
                found[state["pid"]] = state["release"]
                if len(found) == 2:
                    break
            return sorted(found.values())

        wait_until(lambda: releases() == [SHIPPED, SHIPPED])
        registry.set_champion("r1", by="", reason="")
        wait_until(lambda: releases() == ["r1", "r1"])
        assert put(client, "champion", SHIPPED).status_code == 200
        wait_until(lambda: releases() == [SHIPPED, SHIPPED])


def test_an_altered_champion_is_reported_once_and_the_one_before_answers_on(
    registry: Registry, tmp_path: Path
) -> None:
    hashes = {name: add_release(registry, tmp_path, name) for name in ("r1", "r2", "r3")}
    registry.set_champion("r1", by="", reason="")
    log = tmp_path / "log"
    with serving(log, registry) as client:
        assert predict(client)["release"] == "r1"
        registry.set_champion("r2", by="", reason="")
        wait_until(lambda: predict(client)["release"] == "r2")
        chosen = registry.aliases_file.read_text()
        alter(registry, hashes["r3"])
        registry.aliases_file.write_text(chosen.replace('"champion": "r2"', '"champion": "r3"', 1))
        began_seconds = time.monotonic()
        wait_until(lambda: metric(client, "gpumemnet_champion_stale") == 1)
        time.sleep(
            0.5
        )  # ten looks at the registry; a look every 0.05 s at most, whose every thirtieth tries again
        most = 1 + (time.monotonic() - began_seconds) / 0.05 / RETRY_ROUNDS
        assert (
            1 <= metric(client, 'gpumemnet_release_load_failures_total{alias="champion"}') <= most
        )
        assert 1 <= log.read_text().count("cannot be served, r2 stays") <= 1 + most
        assert predict(client)["release"] == "r2"
        state = client.get("/v1/admin/models").json()
        assert (state["champion"], state["serving"]["release"]) == ("r3", "r2")
        assert "checksum differs" in state["serving"]["failure"]
        assert {release["name"]: release["is_whole"] for release in state["releases"]} == {
            **dict.fromkeys((SHIPPED, "r1", "r2"), True),
            "r3": False,
        }
        registry.set_champion("r1", by="", reason="")
        wait_until(lambda: predict(client)["release"] == "r1")
        assert metric(client, "gpumemnet_champion_stale") == 0
        registry.aliases_file.unlink()  # as when a shared folder is away
        wait_until(lambda: metric(client, "gpumemnet_champion_stale") == 1)
        assert predict(client)["release"] == "r1"
    assert "Traceback" not in log.read_text()


def test_a_service_that_starts_with_a_damaged_champion_answers_from_the_one_before(
    registry: Registry, tmp_path: Path
) -> None:
    hashes = {name: add_release(registry, tmp_path, name) for name in ("r1", "r2")}
    for name in ("r1", "r2"):
        registry.set_champion(name, by="", reason="")
    alter(registry, hashes["r2"])
    with serving(tmp_path / "log", registry) as client:
        assert predict(client)["release"] == "r1"
        assert metric(client, "gpumemnet_champion_stale") == 1
    alter(registry, hashes["r1"])
    with serving(tmp_path / "log", registry) as client:
        assert predict(client)["release"] == SHIPPED
    registry.aliases_file.write_text("{")
    with serving(tmp_path / "log", registry) as client:
        assert predict(client)["release"] == SHIPPED


def alter(registry: Registry, sha256: str) -> None:
    model = registry.folder / "bundles" / sha256 / MODEL_FILE
    model.chmod(0o644)
    with model.open("ab") as stream:
        stream.write(b"\0")


def test_releases_are_chosen_over_http(registry: Registry, tmp_path: Path) -> None:
    job = EXAMPLE_JOBS["cnn"]
    device = dict(shipped().card.document["device"])
    hashes = {name: add_release(registry, tmp_path, name) for name in ("r1", "r2", "damaged")}
    add_release(registry, tmp_path, "senseless", device={**device, "context_bytes": 10**12})
    add_release(
        registry,
        tmp_path,
        "forgetful",
        golden=[{"job": job, "expected_bytes": 1, "safe_bytes": None}],
    )
    alter(registry, hashes["damaged"])
    with serving(tmp_path / "log", registry) as client:
        url = "/v1/admin/models"
        answer = client.post(f"{url}/rollback", json={})
        assert (answer.status_code, answer.json()["type"]) == (
            409,
            "urn:gpumemnet:problem:conflict",
        )
        for release in ("r1", "r2", "r2"):
            assert put(client, "champion", release, reason="better").status_code == 200
        state = client.get(url).json()
        AdminModels.model_validate(state)
        assert (state["champion"], state["previous"], len(state["history"])) == ("r2", "r1", 3)
        refused: list[tuple[object, int, str]] = [
            ("senseless", 422, "times of what context and tensors take"),
            ("forgetful", 422, "golden job 0"),
            ("damaged", 422, "checksum differs"),
            ("none", 404, "there is no release 'none'"),
            ("../r1", 422, "cannot be the name of a release"),
            (7, 422, "release: must be a text"),
            (None, 422, "release: must be a text"),
        ]
        for unfit, status, says in refused:
            for alias in ("champion", "challenger"):
                if unfit is not None or alias == "champion":
                    answer = put(client, alias, unfit)
                    assert (answer.status_code, says in answer.text) == (status, True), answer.text
        assert put(client, "challenger", "r2").status_code == 409
        assert client.get(url).json()["history"] == state["history"]
        assert predict(client)["release"] == "r2"
        answer = client.post(f"{url}/rollback", json={"reason": "too high"})
        assert (answer.status_code, predict(client)["release"]) == (200, "r1")
        last = answer.json()["history"][-1]
        assert (last["champion"], last["by"], last["reason"], last["is_rollback"]) == (
            "r1",
            "",
            "too high",
            True,
        )
        assert (
            client.post(f"{url}/rollback").status_code == 200
        )  # neither a body nor its media type is needed
        assert predict(client)["release"] == SHIPPED
        for body, field in (
            (b"", "body"),
            (b"[]", "body"),
            (b"{", "body"),
            (b"{}", "release"),
            (b'{"release": "r1", "reason": 1}', "reason"),
            (b'{"release": "r1", "reason": "\\ud800"}', "body"),
            (b'{"release": "r1", "reason": "a\\nb"}', "reason"),
            (b'{"release": "r1", "why": ""}', "why"),
        ):
            answer = client.put(f"{url}/champion", content=body, headers=JSON)
            assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field), (
                answer.text
            )
        assert client.put(f"{url}/champion", content=b"{}").status_code == 415
        assert client.get(f"{url}/champion").status_code == 405
    log = (tmp_path / "log").read_text()
    assert '/v1/admin/models/rollback {"reason": "too high"} by nobody named' in log
    assert "Traceback" not in log


def test_without_a_registry_the_answer_says_which_setting_to_give(tmp_path: Path) -> None:
    with serving(tmp_path / "log") as client:
        state = client.get("/v1/admin/models").json()
        AdminModels.model_validate(state)
        assert (state["has_registry"], state["serving"]["release"], state["releases"]) == (
            False,
            SHIPPED,
            [],
        )
        for method, path in (("PUT", "champion"), ("PUT", "challenger"), ("POST", "rollback")):
            answer = client.request(method, f"/v1/admin/models/{path}", json={"release": "r1"})
            assert answer.status_code == 409
            assert "GPUMEMNET_REGISTRY" in answer.json()["detail"]


def test_the_challenger_is_asked_about_what_the_champion_answered(
    registry: Registry, tmp_path: Path
) -> None:
    sha256 = add_release(registry, tmp_path, "r1")
    with serving(tmp_path / "log", registry, share=1.0) as client:
        predict(client)
        assert put(client, "challenger", "r1").json()["serving"]["challenger"] == "r1"
        answers = {(answer := predict(client))["prediction_id"]: answer for _ in range(5)}
        wait_until(lambda: client.get("/state").json()["shadowed"].keys() == answers.keys())
        for identity, (champion, challenger, expected_bytes, safe_bytes) in (
            client.get("/state").json()["shadowed"].items()
        ):
            assert (champion, challenger) == (answers[identity]["model"]["sha256"], sha256)
            assert (expected_bytes, safe_bytes) == (
                answers[identity]["expected_bytes"],
                answers[identity]["safe_bytes"],
            )
        assert metric(client, 'gpumemnet_shadow_predictions_total{outcome="compared"}') == 5
        assert metric(client, "gpumemnet_shadow_log_ratio_count") == 5
        assert metric(client, "gpumemnet_shadow_log_ratio_sum") == 0
        assert put(client, "challenger", None).json()["serving"]["challenger"] is None
        predict(client)
        registry.set_challenger("r1")
        wait_until(lambda: client.get("/v1/admin/models").json()["serving"]["challenger"] == "r1")
        promoted = put(
            client, "champion", "r1"
        ).json()  # a challenger that is promoted is one no longer
        assert (promoted["challenger"], promoted["serving"]["challenger"]) == (None, None)
        assert len(client.get("/state").json()["shadowed"]) == 5
