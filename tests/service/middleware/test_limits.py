"""The body limit holds whatever the client announces, and the service lives on after it."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from service.api.predictions import Document
from service.middleware.limits import run_in_turn
from tests.conftest import StartService
from tests.service.sockets import connect

LIMIT_BYTES = 4096
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def small(start_service: StartService) -> Iterator[httpx.Client]:
    with (
        start_service(GPUMEMNET_MAX_BODY_BYTES=str(LIMIT_BYTES), GPUMEMNET_MAX_JOBS="3") as running,
        httpx.Client(base_url=running.url, timeout=300) as client,
    ):
        yield client


def padded(job: Document, length: int) -> bytes:
    return json.dumps({"job": job}).encode().ljust(length)


def in_chunks(content: bytes, size: int = 1000) -> Iterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


def assert_too_large(response: httpx.Response) -> None:
    assert response.status_code == 413
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["connection"] == "close"
    document = response.json()
    assert document["status"] == 413
    assert str(LIMIT_BYTES) in document["detail"]


@pytest.mark.parametrize("path", ["/v1/predict", "/v1/predict/batch"])
@pytest.mark.parametrize("excess", [1, 100_000, 20_000_000])
def test_an_announced_body_that_is_too_large(
    small: httpx.Client, job: Document, path: str, excess: int
) -> None:
    assert_too_large(small.post(path, content=padded(job, LIMIT_BYTES + excess), headers=JSON))


@pytest.mark.parametrize("excess", [1, 100_000])
def test_a_chunked_body_that_turns_out_too_large(
    small: httpx.Client, job: Document, excess: int
) -> None:
    assert_too_large(
        small.post(
            "/v1/predict", content=in_chunks(padded(job, LIMIT_BYTES + excess)), headers=JSON
        )
    )


def test_an_endless_body_is_cut_off(small: httpx.Client) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b" " * 65536

    with contextlib.suppress(
        httpx.WriteError, httpx.ReadError
    ):  # the close may overtake the answer
        assert_too_large(small.post("/v1/predict", content=endless(), headers=JSON))
    assert small.get("/healthz").status_code == 200


def test_a_body_of_exactly_the_limit_is_read(small: httpx.Client, job: Document) -> None:
    content = padded(job, LIMIT_BYTES)
    assert small.post("/v1/predict", content=content, headers=JSON).status_code == 200
    assert small.post("/v1/predict", content=in_chunks(content), headers=JSON).status_code == 200


def test_the_limit_of_a_batch_is_a_setting(small: httpx.Client) -> None:
    assert small.post("/v1/predict/batch", json={"jobs": [1] * 3}).status_code == 200
    assert (
        "at most 3 jobs" in small.post("/v1/predict/batch", json={"jobs": [1] * 4}).json()["detail"]
    )


@pytest.mark.parametrize("length", [b"-1", b"x", b"1e3", b"99999999999999999999999"])
def test_a_false_content_length_gets_no_answer_but_a_refusal(
    small: httpx.Client, length: bytes
) -> None:
    with connect(str(small.base_url)) as connection:
        head = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %b\r\n\r\n{}"
        connection.sendall(head % length)
        assert connection.recv(65536).startswith(b"HTTP/1.1 4")
    assert small.get("/healthz").status_code == 200


def test_a_client_that_leaves_in_the_middle_is_no_failure(start_service: StartService) -> None:
    head = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    with start_service() as running:
        for _ in range(20):
            with connect(running.url) as connection:
                connection.sendall(head)
        assert httpx.get(f"{running.url}/healthz").status_code == 200
    assert '"level":"error"' not in running.log.read_text()


def test_long_bodies_are_handled_one_after_the_other() -> None:
    """Each thread that computes takes a share of Python's lock from all short requests."""
    handled: list[tuple[str, int]] = []

    def handle(number: int) -> int:
        handled.append(("begun", number))
        time.sleep(0.01)
        handled.append(("done", number))
        assert threading.current_thread() is not threading.main_thread()
        return number

    async def handle_all() -> list[int]:
        return await asyncio.gather(*(run_in_turn(handle, number) for number in range(5)))

    for _ in range(2):  # a second event loop has a thread of its own
        handled.clear()
        assert asyncio.run(handle_all()) == [0, 1, 2, 3, 4]
        assert [word for word, _ in handled] == ["begun", "done"] * 5
