"""What every request passes: request ids, the bound on what is in work, and failures."""

import asyncio
import json
import re
import time
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpumemnet.atomic_files import Document
from service.api.access import parse_keys
from service.api.admission import AccessControl
from tests.conftest import StartService
from tests.service.sockets import connect, post_head


async def receive_nothing() -> Message:
    return {"type": "http.disconnect"}


# Request ids


def test_a_request_id_is_echoed_or_made(http: httpx.Client, job: Document) -> None:
    answer = http.post("/v1/predict", json={"job": job}, headers={"X-Request-ID": "job-17.step_2"})
    assert answer.headers.get_list("x-request-id") == ["job-17.step_2"]
    made = [http.get("/healthz").headers["x-request-id"] for _ in range(3)]
    assert len(set(made)) == 3
    assert all(re.fullmatch(r"[0-9a-f]{24}", each) for each in made)


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, 'a"b', "a\tb", "ü", "{id}", "a\\n"])
def test_a_request_id_that_could_harm_a_log_is_replaced(http: httpx.Client, given: str) -> None:
    answer = http.get("/healthz", headers=[(b"X-Request-ID", given.encode())])
    assert re.fullmatch(r"[0-9a-f]{24}", answer.headers["x-request-id"])


def test_a_head_says_what_a_get_would_without_its_body(http: httpx.Client) -> None:
    answer = http.head("/metrics")
    assert (answer.status_code, answer.content) == (200, b"")
    assert http.head("/nothing").status_code == 404
    assert http.get("/healthz").status_code == 200  # on the same connection: nothing was left in it


def test_the_application_is_told_who_asks() -> None:
    states: list[dict[str, Any]] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        states.append(scope["state"])

    ring = parse_keys(f"ci:predict:{sha256(b'secret').hexdigest()}")
    run_through({"keys": ring}, application, headers=((b"authorization", b"Bearer secret"),))
    run_through({}, application)
    assert states == [{"request_id": "the-id", "key_name": "ci"}, {"request_id": "the-id"}]


# What is in work at once


def test_more_than_the_bound_is_refused_at_once_and_health_is_not(
    start_service: StartService, job: Document
) -> None:
    with (
        start_service(GPUMEMNET_MAX_CONCURRENCY="3") as running,
        httpx.Client(base_url=running.url, timeout=300) as client,
    ):
        body = json.dumps({"job": job}).encode()
        waiting = [connect(running.url) for _ in range(3)]
        for connection in waiting:
            connection.sendall(post_head(len(body)) + body[:5])
        deadline = time.monotonic() + 300
        while (
            answer := client.get("/v1/models")
        ).status_code != 503 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["type"] == "urn:gpumemnet:problem:overloaded"
        assert {client.get(path).status_code for path in ("/healthz", "/readyz", "/metrics")} == {
            200
        }
        for connection in waiting:
            connection.sendall(body[5:])
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
            connection.close()
        assert client.get("/v1/models").status_code == 200


def test_a_crowd_is_admitted_up_to_the_bound() -> None:
    """Sixty requests that arrive together: the first are answered, the others hear so before the
    work begins."""
    order: list[object] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        order.append("work")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(access: AccessControl) -> None:
        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                order.append(message["status"])

        await access(
            {
                "type": "http",
                "path": "/v1/predict",
                "method": "POST",
                "http_version": "1.0",
                "headers": [],
            },
            receive_nothing,
            send,
        )

    async def crowd() -> None:
        access = AccessControl(app=application, max_concurrency=20)
        await asyncio.gather(*(ask(access) for _ in range(60)))
        await asyncio.gather(*(ask(access) for _ in range(20)))

    asyncio.run(crowd())
    assert order[:40] == [503] * 40
    assert order[40:] == ["work", 200] * 40


# Failures


def run_through(
    arguments: dict[str, Any],
    application: ASGIApp,
    path: str = "/v1/predict",
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> list[Message]:
    """One request through the middleware; returns the messages that were sent."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def ask() -> None:
        scope = {
            "type": "http",
            "path": path,
            "method": "POST",
            "http_version": "1.0",
            "headers": [(b"x-request-id", b"the-id"), *headers],
        }
        await AccessControl(app=application, **arguments)(scope, receive_nothing, send)

    asyncio.run(ask())
    return sent


def test_a_failure_is_a_document_for_the_client_and_a_line_for_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("the secret cause")

    start, body = run_through({}, failing)
    assert start["status"] == 500
    assert (b"x-request-id", b"the-id") in start["headers"]
    assert b"secret" not in body["body"]
    assert b"the-id" in body["body"]
    assert json.loads(body["body"]).keys() == {"type", "title", "status", "detail"}
    assert [record.getMessage() for record in caplog.records] == [
        "a request failed: RuntimeError",
        "request",
    ]


def test_a_client_that_leaves_is_noted_as_such(caplog: pytest.LogCaptureFixture) -> None:
    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        return

    caplog.set_level("INFO")
    assert run_through({}, silent) == []
    assert vars(caplog.records[-1])["gpumemnet_event"]["status"] == 499
