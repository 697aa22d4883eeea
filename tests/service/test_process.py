"""The service as a process: what it loads, how it starts, stops and refuses to start, in one process
and with several workers."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from gpumemnet.atomic_files import Document
from service.api.access import new_key
from tests.conftest import RunningService, StartService
from tests.environments import environment_without_settings
from tests.nightly import nightly
from tests.service.api.test_metrics import scrape, value
from tests.service.run_service import run_service
from tests.service.sockets import connect, post_head
from tests.waiting import wait_until

HEAVY = ("torch", "pandas", "sklearn", "scipy", "matplotlib", "pyarrow", "httpx")


def test_it_loads_neither_torch_nor_pandas() -> None:
    script = (
        "import sys, service.app, service.settings\n"
        "service.app.create_app(service.settings.Settings(database_url='off'))\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


# Its end


@pytest.mark.parametrize(
    ("workers", "number"),
    [("2", signal.SIGTERM), *nightly([("1", signal.SIGTERM), ("2", signal.SIGINT)])],
)
def test_a_signal_ends_it_after_the_accepted_requests(
    start_service: StartService, job: Document, workers: str, number: signal.Signals
) -> None:
    body = json.dumps({"job": job}).encode()
    with start_service("--workers", workers) as running:
        with (
            connect(running.url),  # idle: must not hold the end up
            connect(running.url) as connection,
        ):
            connection.sendall(post_head(len(body), "Expect: 100-continue\r\n"))
            assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")  # it waits for the body
            running.process.send_signal(number)
            wait_until_refused(running.url)
            connection.sendall(body)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in answer
        assert running.process.wait(timeout=300) == 0
        assert "Traceback" not in running.log.read_text()


def wait_until_refused(url: str) -> None:
    def is_refused() -> bool:
        try:
            connect(url).close()
        except ConnectionError:
            return True
        return False

    wait_until(is_refused)


@pytest.mark.parametrize("workers", ["2", *nightly(["1"])])
def test_clients_on_kept_connections_see_no_reset_when_it_ends(
    start_service: StartService, job: Document, workers: str
) -> None:
    answers: list[int] = []

    def ask() -> str:
        with httpx.Client(timeout=300) as client:
            while True:
                try:
                    response = client.post(f"{running.url}/v1/predict", json={"job": job})
                except httpx.ConnectError:
                    return "nobody listens"
                except httpx.HTTPError as error:
                    return f"{type(error).__name__}: {error}"
                answers.append(response.status_code)
                if "connection" in response.headers:
                    return "told to go"

    with start_service("--workers", workers) as running:
        with ThreadPoolExecutor(8) as pool:
            clients = [pool.submit(ask) for _ in range(8)]
            wait_until(lambda: len(answers) > 100)
            running.process.terminate()
            assert {client.result() for client in clients} <= {"told to go", "nobody listens"}
        assert set(answers) == {200}
        assert running.process.wait(timeout=300) == 0


@pytest.mark.parametrize(
    ("workers", "seconds"),
    [("1", 0.1), ("2", 0.6), *nightly([("1", 0.6), ("2", 0.3), ("2", 0.9), ("2", 1.5)])],
)
def test_a_signal_before_it_is_ready_ends_it_cleanly(
    tmp_path: Path, workers: str, seconds: float
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "service", "--port", "0", "--workers", workers],
        stderr=subprocess.PIPE,
        text=True,
        env=environment_without_settings(GPUMEMNET_DATABASE_URL=f"sqlite:///{tmp_path}/db"),
    )
    wait_until(lambda: "service" in " ".join(psutil.Process(process.pid).cmdline()))
    time.sleep(seconds)
    process.terminate()
    _, said = process.communicate(timeout=300)
    # Python itself dies of the signal while it has not begun to run the program.
    assert process.returncode in (0, -signal.SIGTERM)
    assert "Traceback" not in said


# Several workers


def workers_of(running: RunningService) -> list[psutil.Process]:
    """The workers: children that answer requests."""
    found = []
    for child in psutil.Process(running.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # also a zombie
            found += [child] if "spawn_main" in " ".join(child.cmdline()) else []
    return found


def counts_of(running: RunningService) -> float:
    return value(scrape(running.url), "gpumemnet_requests_total", path="/v1/predict", status="200")


def test_a_killed_worker_is_replaced_and_its_counts_stay(
    start_service: StartService, job: Document
) -> None:
    def workers_in_metrics() -> float:
        samples = scrape(running.url).items()
        return sum(number for (name, _), number in samples if name == "gpumemnet_model_info")

    with start_service("--workers", "2") as running:
        wait_until(lambda: workers_in_metrics() == 2)
        for _ in range(20):  # a new connection each time: both workers answer some
            assert httpx.post(f"{running.url}/v1/predict", json={"job": job}).status_code == 200
        wait_until(lambda: counts_of(running) == 20)
        victim, survivor = workers_of(running)
        victim.kill()
        wait_until(lambda: len({each.pid for each in workers_of(running)} - {victim.pid}) == 2)
        wait_until(lambda: workers_in_metrics() == 2)
        assert survivor.is_running()
        assert counts_of(running) == 20
    assert running.process.returncode == 0


def test_workers_end_when_the_process_that_watches_them_is_killed(
    start_service: StartService,
) -> None:
    with start_service("--workers", "2") as running:
        workers = workers_of(running)
        running.process.kill()
        gone, alive = psutil.wait_procs(workers, timeout=300)
        assert (len(gone), alive) == (2, [])


# Its start


@pytest.mark.parametrize("workers", ["2", *nightly(["1"])])
def test_a_removed_key_stops_working_by_itself(
    start_service: StartService, tmp_path: Path, workers: str
) -> None:
    """As where a Secret is mounted: a link in the folder is moved, and nobody sends a signal."""
    (old, old_entry), (new, new_entry) = new_key("old", "predict"), new_key("new", "predict")
    file = tmp_path / "keys"

    def mount(text: str) -> None:
        version = tmp_path / f"version-{time.time_ns()}"
        version.write_text(f"# keys\n{text}\n")
        link = tmp_path / "next"
        link.symlink_to(version)
        link.rename(file)

    def statuses(key: str) -> set[int]:
        """Of several connections, so that every worker answers some."""
        return {
            httpx.get(
                f"{running.url}/v1/models", headers={"Authorization": f"Bearer {key}"}
            ).status_code
            for _ in range(8)
        }

    mount(old_entry)
    with start_service("--workers", workers, GPUMEMNET_API_KEYS_FILE=str(file)) as running:
        assert (statuses(old), statuses(new)) == ({200}, {401})
        mount(new_entry)
        wait_until(lambda: (statuses(old), statuses(new)) == ({401}, {200}))
        mount("nonsense")
        wait_until(lambda: "the keys stay as they were" in running.log.read_text())
        assert (statuses(old), statuses(new)) == ({401}, {200})
        assert running.process.poll() is None


def said_once(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    return done.stderr


def test_a_taken_port_is_said_in_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port}" in said_once(run_service("--port", str(port)))


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (("--host", "0.0.0.0"), {}, "GPUMEMNET_API_KEYS"),
        (
            ("--host", "999.1.1.1"),
            {"API_KEYS": f"a:predict:{'0' * 64}"},
            "cannot listen on 999.1.1.1",
        ),
        ((), {"API_KEYS": "my-secret-key"}, "GPUMEMNET_API_KEYS has an entry that cannot be used"),
        ((), {"BUNDLES": "/no/bundle"}, "no such bundle folder"),
        *nightly(
            [
                (
                    ("--host", "0.0.0.0"),
                    {"API_KEYS": "# nothing"},
                    "GPUMEMNET_API_KEYS holds no key",
                ),
                ((), {"API_KEYS_FILE": "/no/such/file"}, "GPUMEMNET_API_KEYS_FILE"),
                ((), {"PORT": "eighty"}, "GPUMEMNET_PORT must be a valid integer"),
                ((), {"ALLOWED_HOSTS": "http://example.org"}, "has an entry that is no host"),
            ]
        ),
    ],
)
def test_a_mistake_is_said_in_one_sentence(
    arguments: tuple[str, ...], variables: dict[str, str], said: str
) -> None:
    settings = {f"GPUMEMNET_{name}": text for name, text in variables.items()}
    port = () if "PORT" in variables else ("--port", "0")
    error = said_once(run_service(*port, "--database-url", "off", *arguments, **settings))
    assert said in error
    assert "my-secret-key" not in error
