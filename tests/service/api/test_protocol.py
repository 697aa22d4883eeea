"""What a client sends on a connection: bodies, odd framings, and anything."""

import gzip
import io
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpumemnet.atomic_files import Document
from tests.conftest import RunningService, StartService
from tests.service.sockets import connect, post_head


@pytest.fixture(scope="module")
def strict(start_service: StartService) -> Iterator[RunningService]:
    """A service that reads no long bodies."""
    with start_service(GPUMEMNET_MAX_BODY_BYTES="100000") as running:
        yield running
        assert "Traceback" not in running.log.read_text()


def exchange(url: str, sent: bytes) -> bytes:
    """Everything that is answered until the service closes the connection."""
    with connect(url) as connection:
        answer = b""
        try:
            connection.sendall(sent)
            while chunk := connection.recv(65536):
                answer += chunk
        except ConnectionError:
            pass
        return answer


def statuses(answer: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d+) ", answer)]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [(b"", 400), (b"Host: localhost\r\nHost: localhost\r\n", 400), (b"Host: localhost\r\n", 200)],
)
def test_a_request_names_one_host(strict: RunningService, hosts: bytes, expected: int) -> None:
    head = b"GET /healthz HTTP/1.1\r\nConnection: close\r\n" + hosts + b"\r\n"
    assert statuses(exchange(strict.url, head)) == [expected]


# Bodies


def test_a_body_that_is_too_large_is_said_to_a_client_that_sends_all_of_it_first(
    strict: RunningService,
) -> None:
    request = urllib.request.Request(
        f"{strict.url}/v1/predict", b" " * 5_000_000, {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    assert caught.value.code == 413
    assert json.load(caught.value)["type"] == "urn:gpumemnet:problem:body-too-large"


def test_a_client_that_asks_first_need_not_send_what_is_too_large(strict: RunningService) -> None:
    answer = exchange(strict.url, post_head(5_000_000, "Expect: 100-continue\r\n"))
    assert statuses(answer) == [413]


def test_a_compressed_body_is_refused(strict: RunningService, job: Document) -> None:
    answer = httpx.post(
        f"{strict.url}/v1/predict",
        content=gzip.compress(json.dumps({"job": job}).encode()),
        headers={"Content-Type": "application/json", "Content-Encoding": "gzip"},
    )
    assert (answer.status_code, answer.json()["type"]) == (
        415,
        "urn:gpumemnet:problem:unsupported-media-type",
    )


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
def test_an_offer_to_upgrade_is_ignored(
    strict: RunningService, job: Document, upgrade: str
) -> None:
    body = json.dumps({"job": job}).encode()
    head = post_head(len(body), f"Upgrade: {upgrade}\r\nConnection: Upgrade\r\n")
    for parts in ((head + body,), (head, body)):
        with connect(strict.url) as connection:
            for part in parts:
                connection.sendall(part)
                time.sleep(0.05)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


# Anything


line = st.binary(max_size=30).map(lambda text: text.replace(b"\r", b"").replace(b"\n", b""))
names = st.sampled_from(
    b"Content-Length Transfer-Encoding Content-Type Accept Host Expect Authorization "
    b"X-Request-ID Traceparent Upgrade Connection".split()
)
values = line | st.sampled_from(
    [
        *(b"0", b"-1", b"9" * 30, b"chunked", b"gzip, chunked", b"100-continue", b"close", b"h2c"),
        *(b"application/json; charset=utf-16", b"text/plain;q=nan", b"Bearer ", b"Upgrade", b""),
    ]
)
targets = st.sampled_from(
    b"/v1/predict /v1/predict/batch /healthz /v1/predictions/%ED%A0%80 /%00 * // /%ff "
    b"/page/%2e%2e/%2e%2e/etc/passwd http://elsewhere/v1/predict".split()
) | line.map(lambda text: b"/" + text)
methods = st.sampled_from(b"POST POST POST GET HEAD OPTIONS CONNECT PRI x".split())


@settings(
    max_examples=int(os.environ.get("GPUMEMNET_FUZZ_CASES", "100")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    method=methods,
    target=targets,
    fields=st.lists(st.tuples(names, values), max_size=4),
    body=st.binary(max_size=50),
)
def test_any_bytes_are_refused_or_answered(
    service: RunningService,
    http: httpx.Client,
    method: bytes,
    target: bytes,
    fields: list[tuple[bytes, bytes]],
    body: bytes,
) -> None:
    head = b"".join(b"%s: %s\r\n" % field for field in fields)
    with connect(service.url) as connection:
        connection.sendall(
            method + b" " + target + b" HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n" + body
        )
        connection.settimeout(0.02)  # a request that promises more than it sends has no answer
        answer = io.BytesIO()
        try:
            while chunk := connection.recv(65536):
                answer.write(chunk)
        except (TimeoutError, ConnectionError):
            pass
    assert not [status for status in statuses(answer.getvalue()) if status >= 500]
    assert http.get("/healthz").status_code == 200
