"""Requests of odd methods, targets, headers and framings over a raw socket: no 5xx, no traceback,
and the service lives on.

What is no HTTP at all is refused with a problem document, and so is everything else.
"""

import hashlib
import http.client
import io
import json
import socket
from collections.abc import Iterator
from typing import cast

import httpx
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from service.api.examples import EXAMPLE_JOBS
from service.api.schemas import Problem
from tests.conftest import StartService
from tests.fuzzing import fuzzed
from tests.service.sockets import connect

WAIT_SECONDS = 0.05
"""A request that promises more than it sends is not answered: so long we wait before we hang up."""
KEY = b"a-key-that-may-do-everything"
BODY = json.dumps({"job": EXAMPLE_JOBS["mlp"]}).encode()

bytes_of_a_line = st.binary(max_size=30).map(
    lambda value: value.replace(b"\r", b"").replace(b"\n", b"")
)
visible = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12).map(
    str.encode
)
methods = st.sampled_from(
    [b"POST"] * 6
    + [b"GET", b"PUT", b"HEAD", b"OPTIONS", b"TRACE", b"CONNECT", b"PATCH", b"post", b"PRI"]
)
targets = st.sampled_from(
    [
        *[b"/v1/predict"] * 6,
        *(
            b"/v1/predict/batch",
            b"/v1/models",
            b"/healthz",
            b"/readyz",
            b"/metrics",
            b"/openapi.json",
            b"/docs",
            b"/",
        ),
        *(
            b"*",
            b"//",
            b"/v1/predict?" + b"a" * 3000,
            b"/%",
            b"/%ff%fe",
            b"/%00",
            b"/v1/../healthz",
            b"/v1/predict#x",
            b"/\xff",
        ),
        *(
            b"http://elsewhere/v1/predict",
            b"/" + b"x" * 20_000,
        ),
        *(
            b"/v1/observations",
            b"/v1/admin/models",
            b"/page/%2e%2e/%2e%2e/etc/passwd",
            b"/page/..%5c..",
        ),
    ]
) | visible.map(lambda text: b"/" + text)
sizes = st.sampled_from(
    [
        b"0",
        b"5",
        b"-1",
        b"+5",
        b"5,5",
        b"0x10",
        b"1e3",
        b"9" * 18,
        b"9" * 30,
        b"9" * 5000,
        b"",
        b" ",
        "٣".encode(),
        b"5 5",
        b"5.0",
    ]
)
odd_values = bytes_of_a_line | st.sampled_from(
    [b"", b"\xff" * 3, b"a" * 9000, b'"', b"\x00", b"\t", b",,,;;;", b"=?utf-8?q??="]
)
KNOWN_HEADERS = {
    b"Content-Length": sizes,
    b"Content-Type": st.sampled_from(
        [
            b"text/plain",
            b"application/json; charset=utf-16",
            b"application/json;" + b";" * 500,
            b"APPLICATION/JSON",
            b"json",
            b"",
        ]
    ),
    b"Transfer-Encoding": st.sampled_from(
        [b"chunked", b"identity", b"gzip", b"gzip, chunked", b"chunked, chunked", b"xchunked"]
    ),
    b"Content-Encoding": st.sampled_from([b"gzip", b"br", b"identity", b"zstd, gzip"]),
    b"Accept": st.sampled_from(
        [
            b"text/plain",
            b"*/*;q=2",
            b"text/plain;q=nan",
            b"application/json;q=0, text/plain;q=-1",
            b",",
            b"q=1",
        ]
    ),
    b"Accept-Encoding": st.sampled_from([b"gzip", b"identity;q=0, *;q=0", b"br;q=1.0000000"]),
    b"Authorization": st.sampled_from(
        [
            b"Bearer",
            b"Bearer ",
            b"Bearer \xff\xfe",
            b"bearer a b c",
            b"Basic Og==",
            b"Bearer " + b"x" * 9000,
        ]
    ),
    b"X-API-Key": odd_values,
    b"X-Request-Id": odd_values,
    b"Idempotency-Key": odd_values,
    b"traceparent": odd_values,
    b"Connection": st.sampled_from(
        [b"close", b"upgrade", b"Upgrade, HTTP2-Settings", b"keep-alive, close", b"content-length"]
    ),
    b"Upgrade": st.sampled_from([b"websocket", b"h2c", b"\xff"]),
    b"Expect": st.sampled_from([b"100-continue", b"200-maybe"]),
    b"Host": st.sampled_from([b"", b"a b", b"\xff", b"[::1", b"x" * 9000, b"localhost:99999999"]),
    b"Origin": odd_values,
    b"Range": st.sampled_from([b"bytes=0-", b"bytes=9-1", b"lines=1"]),
    b"If-None-Match": odd_values,
    b"If-Modified-Since": odd_values,
    b"X-Forwarded-For": odd_values,
}
known_headers = st.one_of(
    [st.tuples(st.just(name), values) for name, values in KNOWN_HEADERS.items()]
)
odd_lines = bytes_of_a_line | st.sampled_from(
    [b" folded", b":", b": x", b"no colon", b"a:b:c", b"Name : x", b"\x00:\x00", b"x" * 20_000]
)
bodies = st.sampled_from(
    [*[BODY] * 4, b"", b"{}", b"5\r\n{\"a\":\r\n0\r\n\r\n", b"zz\r\n", b"5;x=\xff\r\nabcde\r\n0\r\nA: b\r\n\r\n", b"\xff" * 50]
) | st.binary(max_size=40)  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """The bytes of a request in which most is as it should be."""
    version = draw(
        st.sampled_from(
            [b"HTTP/1.1"] * 8
            + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.1 x", b"HTTP/99999999999.9"]
        )
    )
    body = draw(bodies)
    headers = {
        b"Host": b"localhost",
        b"Content-Type": b"application/json",
        b"Authorization": b"Bearer " + KEY,
        b"Content-Length": b"%d" % len(body),
    }
    for name in draw(st.lists(st.sampled_from(list(headers)), max_size=1)):
        del headers[name]
    lines = [name + b": " + value for name, value in headers.items()]
    for name, value in draw(st.lists(known_headers, max_size=3)):
        lines.insert(draw(st.integers(0, len(lines))), name + b": " + value)
    if draw(st.integers(0, 5)) == 5:
        line = draw(odd_lines)
        lines.insert(draw(st.integers(0, len(lines))), line)
    lines += [b"X-Filler: %d" % index for index in range(draw(st.sampled_from([0] * 20 + [300])))]
    start = b" ".join((draw(methods), draw(targets), version))
    return b"\r\n".join((start, *lines, b"", body))


@pytest.fixture(scope="module", params=["open", "with keys"])
def service_alone(request: pytest.FixtureRequest, start_service: StartService) -> Iterator[str]:
    """A service of its own, whose log holds these requests alone."""
    keys = (
        f"fuzz:predict+observe+admin:{hashlib.sha256(KEY).hexdigest()}"
        if request.param == "with keys"
        else ""
    )
    with start_service(GPUMEMNET_API_KEYS=keys) as running:
        yield running.url
        assert httpx.get(f"{running.url}/healthz").status_code == 200
        assert "Traceback" not in running.log.read_text()


def answer_to(url: str, request: bytes) -> bytes:
    """What comes back until the service closes the connection or waits for more."""
    received = []
    with connect(url) as connection:
        try:
            connection.sendall(request)
            connection.settimeout(WAIT_SECONDS)
            while part := connection.recv(65536):
                received.append(part)
                if is_whole(b"".join(received), request):
                    break
        except (TimeoutError, ConnectionError):
            pass
    return b"".join(received)


def is_whole(answer: bytes, request: bytes) -> bool:
    response = parsed(answer, request)
    return response is not None and len(response[2]) >= int(
        response[1].get("content-length", 0) or 0
    )


def parsed(answer: bytes, request: bytes) -> tuple[int, http.client.HTTPMessage, bytes] | None:
    """Status, headers and body so far of the first answer, or ``None`` when its head is not there
    yet."""

    class Source:
        def makefile(self, mode: str) -> io.BytesIO:
            return io.BytesIO(answer)

    if b"\r\n\r\n" not in answer:
        return None
    response = http.client.HTTPResponse(
        cast(socket.socket, Source()), method="HEAD" if request.startswith(b"HEAD ") else "POST"
    )
    try:
        response.begin()
        body = response.read()
    except http.client.RemoteDisconnected:  # nothing yet but '100 Continue'
        return None
    except http.client.IncompleteRead as error:
        body = error.partial
    return response.status, response.headers, body


@fuzzed
@given(request=requests())
def test_odd_requests(service_alone: str, request: bytes) -> None:
    answer = parsed(answer_to(service_alone, request), request)
    if answer is None:
        event("no answer: more was promised than sent")
        return
    status, headers, body = answer
    event(f"status {status}")
    assert status < 500, (request, body)
    if status >= 400 and body:
        if headers["content-type"] == "application/json":
            assert json.loads(body).keys() == {"error"}
        else:
            assert headers["content-type"] == "application/problem+json", (request, body)
            assert Problem.model_validate_json(body).status == status
    if body == b"":
        assert status < 400 or request.startswith(b"HEAD "), request


def test_what_is_sent_in_pieces_is_answered_as_a_whole(service_alone: str) -> None:
    lines = (
        b"POST /v1/predict HTTP/1.1",
        b"Host: localhost",
        b"Connection: close",
        b"X-API-Key: " + KEY,
        b"Content-Type: application/json",
    )
    request = b"\r\n".join((*lines, b"Content-Length: %d" % len(BODY), b"", BODY))
    with connect(service_alone) as connection:
        for at in range(0, len(request), 7):
            connection.sendall(request[at : at + 7])
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 200 ")
