"""Searches are answered by a process of their own beside each worker: predictions do not wait for
it, nor for its death."""

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import orjson
import psutil
import pytest

from gpumemnet.predict.predictor import Predictor
from gpumemnet.site.releases import Registry
from service.api.predictions import Document, PredictionApi
from tests.conftest import RunningService, StartService
from tests.registries import add_release
from tests.waiting import wait_until


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def search_process_of(worker: int) -> psutil.Process:
    (child,) = psutil.Process(worker).children()
    return child


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def ask(running: RunningService, path: str, body: Document) -> httpx.Response:
    return httpx.post(f"{running.url}{path}", json=body, timeout=300)


def waiting_search(
    running: RunningService, job: Document, pool: ThreadPoolExecutor
) -> Future[httpx.Response]:
    """A search that the stopped process has received, and does not answer."""
    search = pool.submit(ask, running, "/v1/batch-sizes", {"job": job, "gpu": "A100"})

    def has_arrived() -> bool:
        return (
            "gpumemnet_requests_in_work 1" in httpx.get(f"{running.url}/metrics", timeout=300).text
        )

    wait_until(has_arrived)
    return search


def test_predictions_do_not_wait_for_a_search(
    start_service: StartService, job: Document, predictor: Predictor, pool: ThreadPoolExecutor
) -> None:
    with start_service() as running:
        process = search_process_of(running.process.pid)
        assert process.nice() == min(
            19, psutil.Process(running.process.pid).nice() + 10
        )  # 19 is the highest
        assert not [each for each in process.net_connections() if each.status == psutil.CONN_LISTEN]
        process.suspend()
        search = waiting_search(running, job, pool)
        assert ask(running, "/v1/predict", {"job": job}).status_code == 200
        assert not search.done()
        process.resume()
        body = orjson.dumps({"job": job, "gpu": "A100"})
        assert search.result().json() == PredictionApi(predictor, 1).batch_sizes(body)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(timeout=300) == 0
        assert has_ended(process)


def test_a_worker_is_replaced_when_its_search_process_dies(
    start_service: StartService, job: Document, pool: ThreadPoolExecutor
) -> None:
    with start_service("--workers", "2") as running:
        workers = psutil.Process(running.process.pid).children()
        processes = [search_process_of(worker.pid) for worker in workers]
        for process in processes:
            process.suspend()
        search = waiting_search(running, job, pool)
        for process in processes:
            process.kill()
        refused = search.result()
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert "has ended" in refused.json()["detail"]
        psutil.wait_procs(workers, timeout=300)
        wait_until(
            lambda: running.log.read_text().count("ended with exit code 1 and is replaced") == 2
        )
        assert ask(running, "/v1/batch-sizes", {"job": job, "gpu": "A100"}).status_code == 200


def test_a_search_process_ends_with_its_worker(start_service: StartService) -> None:
    with start_service() as running:
        process = search_process_of(running.process.pid)
        running.process.kill()
        wait_until(lambda: has_ended(process))


def test_a_search_is_answered_by_the_release_that_is_served(
    start_service: StartService, job: Document, tmp_path: Path
) -> None:
    registry = Registry(tmp_path / "registry")
    add_release(registry, tmp_path, "r1", name="mlp-a100-published")
    with start_service(GPUMEMNET_REGISTRY=str(registry.folder)) as running:

        def released() -> tuple[int, str | None]:
            answer = ask(running, "/v1/batch-sizes", {"job": job, "gpu": "A100"})
            return answer.status_code, answer.json().get("release")

        champion = {"release": "r1", "reason": "test"}
        assert released() == (200, "shipped")
        assert (
            httpx.put(
                f"{running.url}/v1/admin/models/champion", json=champion, timeout=300
            ).status_code
            == 200
        )
        bundles = registry.folder / "bundles"
        bundles.rename(tmp_path / "hidden")
        assert ask(running, "/v1/predict", {"job": job}).json()["release"] == "r1"
        assert released() == (503, None)  # rather than from another release than predictions
        (tmp_path / "hidden").rename(bundles)
        assert released() == (200, "r1")
