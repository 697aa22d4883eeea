"""The shipped nginx with the service behind it: what strangers send holds up nobody else."""

import contextlib
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from service.api.examples import EXAMPLE_JOBS
from tests.conftest import StartService
from tests.service.sockets import connect, post_head
from tests.waiting import wait_until

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CONFIGURATION = Path(__file__).parents[2] / "deploy" / "nginx" / "nginx.conf"
BODY = {"job": EXAMPLE_JOBS["mlp"]}
PATIENCE_SECONDS = 1
"""In place of the shipped ten seconds."""
STRANGER = "127.0.0.2"
"""Address of the strangers: each address has a limit of its own."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nginx") / "log"


@pytest.fixture(scope="module")
def proxy(start_service: StartService, log: Path) -> Iterator[str]:
    """URL of the proxy; its ports and its patience are the test's, the rest is as shipped."""
    if NGINX is None:
        pytest.skip("nginx is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with start_service() as running:
        text = CONFIGURATION.read_text()
        for old, new in (
            ("gpumemnet:8000", urlsplit(running.url).netloc),
            ("listen 8080", f"listen 127.0.0.1:{port}"),
            ("_timeout 10s", f"_timeout {PATIENCE_SECONDS}s"),
            ("/tmp/", f"{log.parent}/"),
            ("worker_processes auto", "worker_processes 1"),
        ):
            assert old in text
            text = text.replace(old, new)
        file = log.parent / "nginx.conf"
        file.write_text(text)
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [NGINX, "-c", str(file), "-p", str(log.parent), "-g", "daemon off;"],
                stderr=stream,
            )
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until(lambda: _answers(url), lambda: log.read_text())
            yield url
        finally:
            process.terminate()
            process.wait(timeout=300)
        assert "Traceback" not in running.log.read_text()


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/readyz").status_code == 200
    return False


def test_nginx_accepts_the_configuration_as_shipped(tmp_path: Path) -> None:
    if NGINX is None:
        pytest.skip("nginx is not installed")
    text = CONFIGURATION.read_text().replace("gpumemnet:8000", "127.0.0.1:8000")
    (tmp_path / "nginx.conf").write_text(text.replace("/tmp/", f"{tmp_path}/"))
    done = subprocess.run(
        [NGINX, "-t", "-c", str(tmp_path / "nginx.conf"), "-p", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_prediction_passes(proxy: str) -> None:
    answer = httpx.post(f"{proxy}/v1/predict", json=BODY, headers={"X-Request-ID": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
    assert answer.json()["expected_bytes"] > 0
    assert httpx.get(f"{proxy}/metrics").status_code == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", 400),
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: elsewhere\r\n\r\n", 400),
        (post_head(5_000_000), 413),
        (post_head(1000) + b"{", 408),
        (post_head(10, "Transfer-Encoding: chunked\r\n") + b"0\r\n\r\n", 400),
    ],
    ids=["large head", "large target", "no host", "two hosts", "large body", "slow body", "both"],
)
def test_what_is_not_in_order_never_reaches_the_service(
    proxy: str, sent: bytes, status: int
) -> None:
    with connect(proxy) as connection:
        connection.sendall(sent)
        answer = b""
        # nginx keeps the connection for seconds after it has refused a body
        with contextlib.suppress(ConnectionError):
            while b"\r\n\r\n" not in answer and (chunk := connection.recv(65536)):
                answer += chunk
    # nginx drops a body that stops without a word
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) in ([b"%d" % status], [])
    assert answer or status == 408
    assert httpx.get(f"{proxy}/healthz").status_code == 200


def test_strangers_hold_up_nobody_else(proxy: str) -> None:
    """Slow heads, silent connections, giant heads and slow bodies, all at once."""
    address = ("127.0.0.1", urlsplit(proxy).port or 0)
    stop = threading.Event()
    attackers: list[socket.socket] = []

    def attack() -> None:
        """Every stranger sends a byte now and then, and comes back when it is thrown out."""
        starts = (
            b"GET / HTTP/1.1\r\nX: ",
            b"",
            post_head(1000),
            b"GET / HTTP/1.1\r\nX: " + b"a" * 7000,
        )
        while not stop.is_set():
            while len(attackers) < 200:
                connection = socket.create_connection(address, source_address=(STRANGER, 0))
                connection.setblocking(False)
                attackers.append(connection)
                with contextlib.suppress(OSError):
                    connection.send(starts[len(attackers) % len(starts)])
            for connection in list(attackers):
                try:
                    connection.send(b"a")
                except OSError:
                    attackers.remove(connection)
                    connection.close()
            stop.wait(0.1)

    thread = threading.Thread(target=attack)
    thread.start()
    try:
        wait_until(lambda: len(attackers) >= 200)
        statuses = []
        end = time.monotonic() + 3 * PATIENCE_SECONDS
        while time.monotonic() < end:
            answer = httpx.post(f"{proxy}/v1/predict", json=BODY, timeout=300)
            statuses.append(answer.status_code)
        assert len(statuses) > 10
        assert set(statuses) == {200}
    finally:
        stop.set()
        thread.join()
        for connection in attackers:
            connection.close()
    wait_until(lambda: httpx.post(f"{proxy}/v1/predict", json=BODY).status_code == 200)
