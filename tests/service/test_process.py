"""The service as a process: what it loads, how much memory it takes, how it starts, stops and
refuses to start."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from gpumemnet.predict.bundle import MODEL_FILE, shipped_bundles
from service.api.predictions import Document
from service.middleware.keys import new_key
from tests.conftest import StartService
from tests.nightly import nightly
from tests.service.run_service import run_service
from tests.service.sockets import connect
from tests.waiting import wait_until

MAX_RESIDENT_MIB = 200
HEAVY = ("torch", "pandas", "sklearn", "scipy", "matplotlib", "pyarrow", "httpx")


def resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def test_it_loads_neither_torch_nor_pandas() -> None:
    script = (
        "import sys\n"
        "from service.app import create_app\n"
        "from service.settings import Settings\n"
        "import uvicorn\n"
        "create_app(Settings(database_url='off'))\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_importing_it_loads_nothing() -> None:
    script = "import sys, service, service.settings; print('numpy' in sys.modules, 'fastapi' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads /proc, which only Linux has"
)
def test_memory_stays_small_under_large_batches(start_service: StartService, job: Document) -> None:
    with start_service() as running, httpx.Client(base_url=running.url, timeout=300) as client:
        for body in [
            {"jobs": [job] * 1000, "bin_width_mib": 1024},
            {"jobs": [job] * 60, "bin_width_mib": 49},
        ] * 5:
            assert client.post("/v1/predict/batch", json=body).status_code == 200
        assert resident_mib(running.process.pid) < MAX_RESIDENT_MIB


@pytest.fixture(autouse=True)
def hangups_are_not_ignored() -> Iterator[None]:
    """Under nohup the service would ignore SIGHUP, as it should."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def wait_until_refused(url: str) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            connect(url).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.02)
    raise AssertionError("the service goes on listening")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0)])
def test_a_signal_ends_it_after_the_accepted_requests(
    start_service: StartService, job: Document, number: signal.Signals, code: int
) -> None:
    body = json.dumps({"job": job}).encode()
    head = (
        "POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
    )
    with start_service() as running:
        with (
            connect(running.url),  # idle: must not hold the end up
            connect(running.url) as connection,
        ):
            connection.sendall(head.encode())
            assert connection.recv(65536).startswith(
                b"HTTP/1.1 100 "
            )  # the handler is waiting for the body
            running.process.send_signal(number)
            with pytest.raises(subprocess.TimeoutExpired):
                running.process.wait(timeout=0.5)
            wait_until_refused(running.url)
            connection.sendall(body)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b'"expected_bytes"' in answer
        assert running.process.wait(timeout=300) == code
        assert "Traceback" not in running.log.read_text()


def test_a_client_that_has_just_connected_is_still_answered(
    start_service: StartService, job: Document
) -> None:
    """Its request is late, because its machine is busy."""
    body = json.dumps({"job": job}).encode()
    head = f"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with start_service() as running:
        with connect(running.url) as connection:
            running.process.terminate()
            time.sleep(1)
            connection.sendall(head.encode() + body)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200 ")


def test_what_is_not_finished_in_time_is_refused_and_not_cut(start_service: StartService) -> None:
    head = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    with start_service(GPUMEMNET_SHUTDOWN_SECONDS="1") as running:
        with connect(running.url) as connection:
            connection.sendall(head)
            while "0.0" in re.findall(
                r"requests_in_work (\S+)", httpx.get(f"{running.url}/metrics").text
            ):
                time.sleep(0.1)
            running.process.terminate()
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after" in answer
        assert running.process.wait(timeout=300) == 0


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_clients_see_no_reset_when_it_ends(
    start_service: StartService, job: Document, number: signal.Signals, workers: str
) -> None:
    """Clients that go on asking, over kept and over new connections, are answered until they are
    told to go elsewhere."""
    answers: list[int] = []

    def ask(is_kept: bool) -> str:
        with httpx.Client(
            timeout=300, limits=httpx.Limits(max_keepalive_connections=1 if is_kept else 0)
        ) as client:
            while True:
                try:
                    response = client.post(f"{running.url}/v1/predict", json={"job": job})
                except httpx.ConnectError as error:
                    return (
                        "refused" if "refused" in str(error) else str(error)
                    )  # nobody listens any more
                except httpx.HTTPError as error:
                    return f"{type(error).__name__}: {error}"
                answers.append(response.status_code)

    with start_service("--workers", workers) as running:
        with ThreadPoolExecutor(8) as pool:
            clients = [pool.submit(ask, place % 2 == 0) for place in range(8)]
            while len(answers) < 100:
                time.sleep(0.01)
            running.process.send_signal(number)
            assert [client.result() for client in clients] == ["refused"] * 8
        assert set(answers) == {200}
        assert running.process.wait(timeout=300) == 0
        assert "Traceback" not in running.log.read_text()


def test_an_answer_says_that_the_connection_closes(
    start_service: StartService, job: Document
) -> None:
    with start_service() as running, httpx.Client(base_url=running.url, timeout=300) as client:
        assert "connection" not in client.post("/v1/predict", json={"job": job}).headers
        running.process.terminate()
        wait_until_refused(running.url)
        assert client.post("/v1/predict", json={"job": job}).headers["connection"] == "close"


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sighup_reads_the_keys_again(
    start_service: StartService, tmp_path: Path, workers: str
) -> None:
    (old, old_entry), (new, new_entry) = new_key("old", "predict"), new_key("new", "predict")
    file = tmp_path / "keys"
    file.write_text(old_entry)

    def statuses(key: str) -> set[int]:
        """Of several connections, so that every worker answers some."""
        return {
            httpx.get(f"{running.url}/v1/models", headers={"X-API-Key": key}).status_code
            for _ in range(12)
        }

    def change(text: str, said: str) -> None:
        count = running.log.read_text().count(said)
        file.write_text(text)
        running.process.send_signal(signal.SIGHUP)
        wait_until(
            lambda: (
                running.log.read_text().count(said) >= count + int(workers)
                or running.process.poll() is not None
            )
        )
        assert running.process.poll() is None

    with start_service("--workers", workers, GPUMEMNET_API_KEYS_FILE=str(file)) as running:
        assert (statuses(old), statuses(new)) == ({200}, {401})
        change(new_entry, "the keys were read again: 1")
        assert (statuses(old), statuses(new)) == ({401}, {200})
        change("nonsense", "the keys stay as they were")
        assert (statuses(old), statuses(new)) == ({401}, {200})
        assert running.process.poll() is None
    assert running.process.returncode == 0


def test_a_taken_port_is_said_in_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_service("--port", str(port))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"port {port}" in done.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_keys_it_does_not_listen_for_others(host: str) -> None:
    done = run_service("--host", host, "--port", "0")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "GPUMEMNET_API_KEYS" in done.stderr


@pytest.mark.parametrize("text", ["# nothing", *nightly([" ", ",", "\n"])])
def test_keys_that_are_none_do_not_open_the_service(tmp_path: Path, text: str) -> None:
    done = run_service("--host", "0.0.0.0", "--port", "0", GPUMEMNET_API_KEYS=text)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "GPUMEMNET_API_KEYS holds no key" in done.stderr
    file = tmp_path / "keys"
    file.write_text(text)
    done = run_service("--host", "0.0.0.0", "--port", "0", GPUMEMNET_API_KEYS_FILE=str(file))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "GPUMEMNET_API_KEYS_FILE holds no key" in done.stderr


@pytest.mark.parametrize("host", ["999.1.1.1", "no-such-host.invalid", "203.0.113.1"])
def test_a_host_that_is_not_ours_is_said_in_one_sentence(host: str) -> None:
    done = run_service("--host", host, "--port", "0", GPUMEMNET_API_KEYS=f"a:predict:{'0' * 64}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"cannot listen on {host}" in done.stderr


def test_a_bad_key_is_said_in_one_sentence_that_does_not_repeat_it() -> None:
    done = run_service("--port", "0", GPUMEMNET_API_KEYS="my-secret-key")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "GPUMEMNET_API_KEYS has an entry that cannot be used" in done.stderr
    assert "my-secret-key" not in done.stderr


def test_a_missing_bundle_is_said_in_one_sentence(tmp_path: Path) -> None:
    done = run_service("--port", "0", GPUMEMNET_BUNDLES=str(tmp_path / "none"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "none: no such bundle folder" in done.stderr


def test_an_altered_bundle_is_said_in_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(shipped_bundles()[0].source, folder)
    with (folder / MODEL_FILE).open("ab") as stream:
        stream.write(b"\0")
    done = run_service("--port", "0", "--bundles", str(folder))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "checksum" in done.stderr


def test_bundles_are_a_setting(start_service: StartService, tmp_path: Path) -> None:
    source = shipped_bundles()[0]
    folder = shutil.copytree(source.source, tmp_path / "mine")
    with start_service("--bundles", str(folder)) as running:
        models = httpx.get(f"{running.url}/v1/models").json()["models"]
    assert [model["sha256"] for model in models] == [source.sha256]


def test_a_bad_setting_is_said_in_one_sentence() -> None:
    done = run_service(GPUMEMNET_PORT="eighty")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == "gpumemnet service: GPUMEMNET_PORT must be a whole number between 0 and 65535, not 'eighty'\n"
    )


def test_help_names_the_variables() -> None:
    done = run_service("--help")
    assert done.returncode == 0
    assert "GPUMEMNET_PORT" in done.stdout
    assert "GPUMEMNET_WORKERS" in done.stdout
