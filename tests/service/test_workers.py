"""Several workers: one socket, one set of metrics, replaced when they die, ended together."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from gpumemnet.site.releases import Registry
from service.api.predictions import Document
from tests.conftest import RunningService, StartService
from tests.nightly import nightly
from tests.registries import add_release
from tests.service.middleware.test_gate import send_head
from tests.service.middleware.test_metrics import scrape, value
from tests.service.run_service import run_service
from tests.service.test_process import wait_until_refused
from tests.waiting import wait_until


def workers_of(running: RunningService) -> list[psutil.Process]:
    return sorted(psutil.Process(running.process.pid).children(), key=lambda child: child.pid)


def test_a_killed_worker_is_replaced_and_its_counts_stay(
    start_service: StartService, job: Document, tmp_path: Path
) -> None:
    folder = tmp_path / "metrics"

    def has_gone(worker: psutil.Process) -> bool:
        return worker.pid not in [other.pid for other in workers_of(running)]

    def has_counted(number: int) -> bool:
        return counts_of(running) == number

    with start_service("--workers", "2", GPUMEMNET_METRICS_DIR=str(folder)) as running:
        assert f"listening on {running.url} with 2 workers" in running.log.read_text()
        before = workers_of(running)
        assert len(before) == 2
        for _ in range(20):  # a new connection each time: both workers answer some
            assert httpx.post(f"{running.url}/v1/predict", json={"job": job}).status_code == 200
        wait_until(lambda: counts_of(running) == 20)
        files = len(list(folder.iterdir()))
        for number, victim in enumerate(before, start=21):
            victim.kill()
            wait_until(partial(has_gone, victim))
            assert (
                httpx.post(f"{running.url}/v1/predict", json={"job": job}, timeout=300).status_code
                == 200
            )
            # An answer is counted when it is on its way: who is killed in between has answered and
            # not counted.
            wait_until(partial(has_counted, number))
        wait_until(lambda: len(workers_of(running)) == 2)
        wait_until(
            lambda: running.log.read_text().count("was killed by SIGKILL and is replaced") == 2
        )
        wait_until(lambda: counts_of(running) == 22)
        wait_until(
            lambda: value(scrape(running.url), "gpumemnet_model_info", **release_of(running)) == 2
        )
        assert len(list(folder.iterdir())) <= files + 2
        assert not {worker.pid for worker in before} & {
            worker.pid for worker in workers_of(running)
        }
    assert running.process.returncode == 0
    assert not list(folder.parent.glob("metrics/*.db"))
    for line in running.log.read_text().splitlines():
        json.loads(line)


def counts_of(running: RunningService) -> float:
    return value(scrape(running.url), "gpumemnet_requests_total", path="/v1/predict", status="200")


def release_of(running: RunningService) -> dict[str, str]:
    (labels,) = (
        dict(labels) for name, labels in scrape(running.url) if name == "gpumemnet_model_info"
    )
    return labels


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0)])
def test_a_signal_ends_all_after_what_they_accepted(
    start_service: StartService, job: Document, number: signal.Signals, code: int
) -> None:
    body = json.dumps({"job": job}).encode()
    with start_service("--workers", "2") as running:
        workers = workers_of(running)
        connections = [send_head(running.url, "/v1/predict", len(body), body[:9]) for _ in range(4)]
        wait_until(lambda: value(scrape(running.url), "gpumemnet_requests_in_work") == 4)
        running.process.send_signal(number)
        wait_until_refused(running.url)
        for connection in connections:
            connection.sendall(body[9:])
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
            connection.close()
        assert running.process.wait(timeout=300) == code
        assert not any(
            worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers
        )
        assert "Traceback" not in running.log.read_text()


def test_workers_end_when_the_process_that_watches_them_is_killed(
    start_service: StartService,
) -> None:
    with start_service("--workers", "2") as running:
        workers = workers_of(running)
        running.process.kill()
        gone, alive = psutil.wait_procs(workers, timeout=300)
        assert (len(gone), alive) == (2, [])


TWO_WORKERS = ("--port", "0", "--workers", "2")


def test_what_no_worker_can_start_with_is_said_once(tmp_path: Path) -> None:
    done = run_service(
        *TWO_WORKERS, GPUMEMNET_DATABASE_URL="off", GPUMEMNET_BUNDLES=str(tmp_path / "none")
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "none: no such bundle folder" in done.stderr


def test_a_metrics_folder_that_cannot_be_made_is_said_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run_service(
        *TWO_WORKERS,
        GPUMEMNET_DATABASE_URL="off",
        GPUMEMNET_METRICS_DIR=str(tmp_path / "file" / "folder"),
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "GPUMEMNET_METRICS_DIR" in done.stderr


DYING = """
import os, signal, sys
from service.listening import listen
from service.middleware.logs import configure_logs
from service.settings import read_settings
from service.supervisor import Supervisor

def serve(settings, listener, on_ready, channel):
    os.kill(os.getpid(), signal.SIGKILL)

configure_logs("json", "info")
settings = read_settings(port="0", workers="2")
try:
    Supervisor(settings, listen(settings.host, settings.port), serve, lambda: None).run()
except Exception as error:
    sys.exit(f"ended: {error}")
"""


def test_workers_that_die_at_once_end_the_service() -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", DYING], capture_output=True, text=True, timeout=300
    )
    assert (
        "ended: 5 workers in a row died before they were ready (the last one was killed by SIGKILL)"
        in done.stderr
    )
    assert 4 <= done.stderr.count("is replaced") <= 5
    assert time.monotonic() - began > 0.5  # it waits between attempts


def test_the_process_that_watches_loads_nothing_heavy(start_service: StartService) -> None:
    with start_service("--workers", "2") as running:
        process = Path(f"/proc/{running.process.pid}")
        assert not re.search(r"onnxruntime|numpy|uvloop", (process / "maps").read_text())
        assert len(list((process / "task").iterdir())) == 1
        with contextlib.suppress(psutil.NoSuchProcess):
            assert psutil.Process(running.process.pid).memory_info().rss < 80 * 2**20


@pytest.mark.parametrize("is_required", [True, *nightly([False])])
def test_workers_that_cannot_read_the_champion_say_so(
    start_service: StartService, job: Document, tmp_path: Path, is_required: bool
) -> None:
    registry = Registry(tmp_path / "registry")
    add_release(registry, tmp_path, "r1")
    registry.set_champion("r1", by="", reason="")
    hidden = registry.folder / "bundles"
    hidden.rename(tmp_path / "bundles")
    settings = {"GPUMEMNET_RELOAD_SECONDS": "0.05", "GPUMEMNET_REQUIRE_CHAMPION": str(is_required)}

    def seen(path: str) -> set[tuple[int, str | None]]:
        """Of several connections, so that both workers answer some: status and fallback."""
        answers = [httpx.get(f"{running.url}{path}", timeout=300) for _ in range(12)]
        return {
            (answer.status_code, answer.headers.get("gpumemnet-fallback")) for answer in answers
        }

    with start_service(
        "--workers", "2", GPUMEMNET_REGISTRY=str(registry.folder), **settings
    ) as running:
        answer = httpx.get(f"{running.url}/readyz", timeout=300)
        assert (answer.status_code, answer.headers["gpumemnet-fallback"]) == (
            503 if is_required else 200,
            "shipped",
        )
        assert seen("/v1/models") == {(200, "shipped")}
        answer = httpx.post(
            f"{running.url}/v1/predict",
            json={"job": job},
            headers={"Accept": "text/plain"},
            timeout=300,
        )
        assert (answer.status_code, answer.headers["gpumemnet-fallback"]) == (200, "shipped")
        assert (
            "the registry's champion cannot be served, shipped is served instead"
            in running.log.read_text()
        )
        (tmp_path / "bundles").rename(
            hidden
        )  # no alias changes: the workers try again by themselves
        wait_until(lambda: seen("/v1/models") == {(200, None)})
        assert httpx.get(f"{running.url}/readyz", timeout=300).status_code == 200
        assert (
            httpx.post(f"{running.url}/v1/predict", json={"job": job}, timeout=300).json()[
                "release"
            ]
            == "r1"
        )
