"""Connections over real sockets: limits of heads, time and number, and that no response gets out of
step with its request."""

import asyncio
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from service.connections import ConnectionLimits, Connections, connection_type

LIMITS = ConnectionLimits(
    head_bytes=4096,
    head_fields=20,
    head_seconds=60,
    body_seconds=60,
    idle_seconds=60,
    connections=64,
    connections_per_address=0,
)
END = b"Host: a\r\n\r\n"
GET = b"GET /one HTTP/1.1\r\n" + END
LAST = b"GET /last HTTP/1.1\r\nConnection: close\r\n" + END
SMUGGLED = b"GET /smuggled HTTP/1.1\r\n" + END
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"


class Application:
    """Responds with the target and the body of a request; at ``/slow`` only once it is released, at
    ``/unread`` at once."""

    def __init__(self) -> None:
        self.targets: list[str] = []
        self.release = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.targets.append(scope["path"])
        body, more = b"", scope["path"] != "/unread"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if scope["path"] == "/slow":
            await asyncio.to_thread(self.release.wait, 60)
        content = scope["path"].encode() + b" " + body
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", b"%d" % len(content))],
            }
        )
        await send({"type": "http.response.body", "body": content})


class Running:
    """A server in a thread."""

    def __init__(self, port: int, application: Application) -> None:
        self.port, self.application = port, application

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(
            ("127.0.0.1", self.port), timeout=60, source_address=(source, 0)
        )

    def ask(self, *parts: bytes) -> bytes:
        """Send all parts, one packet each; returns everything until the server ends the
        connection."""
        with self.connect() as connection:
            for part in parts:
                try:
                    connection.sendall(part)
                except ConnectionError:
                    break
                time.sleep(0.002)
            return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    content = b""
    while True:
        try:
            some = connection.recv(65536)
        except ConnectionError:
            return content
        if not some:
            return content
        content += some


def read_some(connection: socket.socket, end: bytes) -> bytes:
    content = b""
    while not content.endswith(end):
        some = connection.recv(65536)
        assert some, content
        content += some
    return content


def statuses(content: bytes) -> list[int]:
    """The statuses of all responses in ``content``."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", content)]


@contextmanager
def running(limits: ConnectionLimits) -> Iterator[Running]:
    application = Application()
    config = uvicorn.Config(
        application,
        loop="uvloop",
        http=connection_type(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        port=0,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield Running(server.servers[0].sockets[0].getsockname()[1], application)
    finally:
        application.release.set()
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with running(LIMITS) as server:
        yield server


# Heads


@pytest.mark.parametrize(
    "parts",
    [
        [b"GET / HTTP/1.1\r\nA: " + b"a" * 5000 + b"\r\n\r\n"],
        [b"GET / HTTP/1.1\r\nA: ", *[b"a" * 100_000] * 5],
        [b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 30 + b"\r\n"],
        [b"GET /" + b"a" * 5000],
        [b"GET / HTTP/1.1\r\n", *[b"a: b\r\n"] * 30],
        [b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n4;", *[b"a" * 10_000] * 3],
    ],
    ids=[
        "field",
        "field in parts",
        "many fields",
        "target",
        "many fields in parts",
        "chunk extension",
    ],
)
def test_a_head_that_is_too_large_is_refused(shared: Running, parts: list[bytes]) -> None:
    answer = shared.ask(*parts)
    assert statuses(answer) in ([431], []), (
        answer
    )  # no response where the client went on sending for longer than we listen
    assert b"head-too-large" in answer or not answer


def test_a_head_just_within_the_limits_is_read(shared: Running) -> None:
    answer = shared.ask(b"GET / HTTP/1.1\r\nA: " + b"a" * 3900 + b"\r\nConnection: close\r\n" + END)
    assert statuses(answer) == [200]


# Time


def test_a_silent_connection_is_closed() -> None:
    with running(replace(LIMITS, head_seconds=0.2)) as server, server.connect() as connection:
        assert read_all(connection) == b""


@pytest.mark.parametrize("start", [b"G", b"GET / HTTP/1.1\r\nHost:", GET + b"GET /two HT"])
def test_a_head_that_does_not_end_is_refused(start: bytes) -> None:
    with running(replace(LIMITS, head_seconds=0.2)) as server:
        assert statuses(server.ask(start)) == ([200, 408] if start.startswith(GET) else [408])


def test_a_body_that_nobody_reads_does_not_keep_the_connection() -> None:
    with running(replace(LIMITS, body_seconds=0.2)) as server:
        answer = server.ask(b"POST /unread HTTP/1.1\r\nContent-Length: 100\r\n" + END + b"abc")
    assert statuses(answer) == [200]


@pytest.mark.parametrize("more", [b"", b"\r\n"])
def test_an_idle_connection_is_closed(more: bytes) -> None:
    with running(replace(LIMITS, idle_seconds=0.2)) as server:
        assert statuses(server.ask(GET, more)) == [200]


def test_a_request_in_work_is_never_cut_for_its_time() -> None:
    with (
        running(replace(LIMITS, head_seconds=0.1, body_seconds=0.1, idle_seconds=60)) as server,
        server.connect() as connection,
    ):
        connection.sendall(b"GET /slow HTTP/1.1\r\n" + END)
        time.sleep(2)
        server.application.release.set()
        assert statuses(read_some(connection, b"/slow ")) == [200]


# Number


def test_half_open_connections_give_way() -> None:
    with running(replace(LIMITS, connections=4)) as server:
        silent = [server.connect() for _ in range(10)]
        for connection in silent[5:]:
            connection.sendall(b"GET / HT")
        assert statuses(server.ask(LAST)) == [200]
        for connection in silent:
            connection.close()


def test_connections_in_work_do_not_give_way() -> None:
    with running(replace(LIMITS, connections=2)) as server:
        busy = [server.connect() for _ in range(2)]
        for connection in busy:
            connection.sendall(b"GET /slow HTTP/1.1\r\n" + END)
        while len(server.application.targets) < 2:
            time.sleep(0.01)
        answer = server.ask()
        assert statuses(answer) == [503]
        assert b"\r\nretry-after: 1\r\n" in answer
        server.application.release.set()
        for connection in busy:
            assert statuses(read_some(connection, b"/slow ")) == [200]
            connection.close()
        assert statuses(server.ask(LAST)) == [200]


def test_one_address_does_not_take_the_place_of_another() -> None:
    with running(replace(LIMITS, connections_per_address=2)) as server:
        other = server.connect("127.0.0.2")
        first, second, third = (server.connect() for _ in range(3))
        assert read_all(first) == b""
        for connection in (other, second, third):
            connection.sendall(LAST)
            assert statuses(read_all(connection)) == [200]
            connection.close()
        first.close()


def test_there_are_fewer_connections_than_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, 1000))
    assert Connections(LIMITS).most == 36


# Requests and responses in step


@pytest.mark.parametrize(
    "upgrade",
    [UPGRADE, b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"],
)
@pytest.mark.parametrize("framing", [b"Content-Length: 4\r\n", b"Transfer-Encoding: chunked\r\n"])
@pytest.mark.parametrize("size", [1, 60, 10_000])
def test_an_upgrade_is_ignored_and_the_body_read(
    shared: Running, upgrade: bytes, framing: bytes, size: int
) -> None:
    body = b"abcd" if b"Length" in framing else b"4\r\nabcd\r\n0\r\n\r\n"
    whole = b"POST /up HTTP/1.1\r\n" + framing + upgrade + END + body + LAST
    before = len(shared.application.targets)
    answer = shared.ask(*(whole[at : at + size] for at in range(0, len(whole), size)))
    assert statuses(answer) == [200, 200]
    assert b"/up abcd" in answer
    assert shared.application.targets[before:] == ["/up", "/last"]


def test_an_upgrade_without_a_body_is_ignored(shared: Running) -> None:
    assert statuses(shared.ask(b"GET /up HTTP/1.1\r\n" + UPGRADE + END + LAST)) == [200, 200]


POST = b"POST /first HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: 0\r\nContent-Length: 60\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: 0, 60\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: +0\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: -1\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: 0x10\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: 99999999999999999999\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length : 4\r\n\r\nabcd" + SMUGGLED,
        POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
        POST
        + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n"
        + SMUGGLED,
        POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding: chunked\r\n\r\n0x4\r\nabcd\r\n0\r\n\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding: chunked\r\n\r\n4\r\nabcdefgh\r\n0\r\n\r\n" + SMUGGLED,
        b"GET /first HTTP/1.1\r\nHost: a\r\nA: b\r\n folded\r\n\r\n" + SMUGGLED,
        b"GET /first HTTP/1.1\r\nHost: a\r\nA: b\x00c\r\n\r\n" + SMUGGLED,
        b"GET /first HTTP/1.1\r\nHost: a\rA: b\r\n\r\n" + SMUGGLED,
        b"GET /first HTTP/1.1\r\n: b\r\n\r\n" + SMUGGLED,
        b"GET /first HTTP/3.7\r\nHost: a\r\n\r\n" + SMUGGLED,
        b"GET http://[ HTTP/1.1\r\nHost: a\r\n\r\n" + SMUGGLED,
        b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n" + SMUGGLED,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SMUGGLED,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + SMUGGLED,
    ],
)
@pytest.mark.parametrize("size", [1, 10_000])
def test_what_two_readers_could_frame_in_two_ways_ends_the_connection(
    shared: Running, request_bytes: bytes, size: int
) -> None:
    before = len(shared.application.targets)
    answer = shared.ask(
        *(request_bytes[at : at + size] for at in range(0, len(request_bytes), size))
    )
    assert "/smuggled" not in shared.application.targets[before:]
    assert statuses(answer) == [400], answer
    assert b"application/problem+json" in answer


def test_a_body_that_looks_like_a_request_is_a_body(shared: Running) -> None:
    before = len(shared.application.targets)
    whole = POST + b"Content-Length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED + LAST
    for size in (7, 10_000):
        assert statuses(
            shared.ask(*(whole[at : at + size] for at in range(0, len(whole), size)))
        ) == [200, 200]
    assert shared.application.targets[before:] == ["/first", "/last"] * 2


def test_pipelined_requests_are_answered_in_their_order(shared: Running) -> None:
    answer = shared.ask(GET + POST + b"Content-Length: 2\r\n\r\nab" + LAST)
    assert statuses(answer) == [200] * 3
    assert answer.index(b"/one ") < answer.index(b"/first ab") < answer.index(b"/last ")


@pytest.mark.parametrize(
    ("second", "status"),
    [(b"NONSENSE\r\n\r\n", 400), (b"GET / HTTP/1.1\r\nA: " + b"a" * 5000 + b"\r\n\r\n", 431)],
    ids=["400", "431"],
)
def test_a_refusal_waits_for_the_responses_before_it(second: bytes, status: int) -> None:
    with running(LIMITS) as server, server.connect() as connection:
        connection.sendall(b"GET /slow HTTP/1.1\r\n" + END + GET)
        time.sleep(0.1)
        connection.sendall(second)
        time.sleep(0.3)
        server.application.release.set()
        assert statuses(read_all(connection)) == [200, 200, status]
