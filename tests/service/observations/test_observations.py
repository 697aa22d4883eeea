"""Observations over HTTP, in a process of their own, against SQLite and against a real
PostgreSQL."""

import concurrent.futures
import itertools
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from gpumemnet.atomic_files import Document
from gpumemnet.job.dataset import read_dataset
from gpumemnet.job.json_codec import job_from_dict
from service.api.examples import EXAMPLE_JOBS
from tests.service.databases import PostgreSQL, running_postgresql

APP = Path(__file__).with_name("observation_app.py")
GPU = "NVIDIA A100-SXM4-40GB"
UNKNOWN_ID = "01900000-0000-7000-8000-000000000000"

App = tuple[httpx.Client, subprocess.Popen[bytes]]


@dataclass
class Database:
    url: str
    connect: Callable[[], AbstractContextManager[Any]]
    server: PostgreSQL | None

    def count(self, table: str = "observations") -> int:
        with self.connect() as connection:
            return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    with running_postgresql() as server:
        yield server


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Database:
    if request.param == "sqlite":
        file = tmp_path_factory.mktemp("db") / "observations.sqlite"

        @contextmanager
        def connect() -> Iterator[sqlite3.Connection]:
            connection = sqlite3.connect(file, isolation_level=None)
            try:
                yield connection
            finally:
                connection.close()

        return Database(f"sqlite:///{file}", connect, None)
    server = request.getfixturevalue("postgresql")
    name = f"test_{uuid.uuid4().hex}"
    server.execute(f"CREATE DATABASE {name}")
    url = server.url(name)
    return Database(url, lambda: psycopg.connect(url, autocommit=True), server)


@contextmanager
def running_app(database: Database, log: Path, *arguments: str) -> Iterator[App]:
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, str(APP), database.url, *arguments],
            stderr=stream,
            env={**os.environ, "PYTHONPATH": "."},
        )
    try:
        deadline = time.monotonic() + 300
        while not (found := re.search(r"listening on (http://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        with httpx.Client(base_url=found[1], timeout=300) as client:
            yield client, process
    finally:
        process.terminate()
        try:
            process.wait(timeout=300)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def app(database: Database, tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with running_app(database, tmp_path_factory.mktemp("app") / "log") as running:
        yield running


@pytest.fixture
def http(app: App) -> httpx.Client:
    return app[0]


def predict(http: httpx.Client, family: str = "mlp", **changes: object) -> Document:
    answer = http.post("/v1/predict", json={"job": {**EXAMPLE_JOBS[family], **changes}})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def observe(http: httpx.Client, **fields: object) -> httpx.Response:
    return http.post("/v1/observations", json={"source": "nvml_process", **fields})


def by_job(**fields: object) -> Document:
    return {
        "job": EXAMPLE_JOBS["mlp"],
        "gpu": GPU,
        "peak_bytes": 1700 * 2**20,
        "source": "nvml_process",
        **fields,
    }


def test_a_prediction_is_reported_on_at_once(http: httpx.Client) -> None:
    prediction = predict(http)
    answer = observe(http, prediction_id=prediction["prediction_id"], peak_bytes=1800 * 2**20)
    assert answer.status_code == 201
    stored = answer.json()
    assert stored["created"] is True
    assert (stored["prediction_id"], stored["gpu"]) == (
        prediction["prediction_id"],
        prediction["gpu"],
    )


def test_an_observation_is_stored_once(http: httpx.Client, database: Database) -> None:
    before = database.count()
    first = observe(http, **by_job(idempotency_key="run-1"))
    again = observe(http, **by_job(idempotency_key="run-1"))
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == {**first.json(), "created": False}
    assert database.count() == before + 1


def test_a_key_belongs_to_one_observation(http: httpx.Client) -> None:
    observe(http, **by_job(idempotency_key="run-2"))
    answer = observe(http, **by_job(idempotency_key="run-2", peak_bytes=1999 * 2**20))
    assert answer.status_code == 409
    assert answer.json()["type"] == "urn:gpumemnet:problem:conflict"
    assert "run-2" in answer.json()["detail"]


def test_an_unknown_prediction_is_said(http: httpx.Client) -> None:
    answer = observe(http, prediction_id=UNKNOWN_ID, peak_bytes=1700 * 2**20)
    assert answer.status_code == 404
    assert "send the job itself" in answer.json()["detail"]


def test_the_job_stands_in_for_a_forgotten_prediction(http: httpx.Client) -> None:
    answer = observe(http, **by_job(prediction_id=UNKNOWN_ID, peak_bytes=1711 * 2**20))
    assert (answer.status_code, answer.json()["prediction_id"]) == (201, None)


def test_a_peak_that_the_predictions_gpu_cannot_hold_is_refused(http: httpx.Client) -> None:
    prediction = predict(http)
    answer = observe(http, prediction_id=prediction["prediction_id"], peak_bytes=200_000 * 2**20)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "peak_bytes"


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"1", b"{}", b'{"observations": []}', b"{"],
)
def test_a_body_that_is_none_is_refused(http: httpx.Client, body: bytes) -> None:
    answer = http.post(
        "/v1/observations", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 422
    assert answer.headers["Content-Type"] == "application/problem+json"


def test_observations_join_the_dataset(
    http: httpx.Client, database: Database, tmp_path: Path
) -> None:
    observe(
        http,
        **by_job(idempotency_key="export-1", peak_bytes=1765 * 2**20, driver="570.1", torch="2.11"),
    )
    observe(
        http,
        **by_job(idempotency_key="export-2", peak_bytes=None, oom=True, limit_bytes=1500 * 2**20),
    )
    observe(http, **by_job(idempotency_key="export-3", peak_bytes=None, oom=True))
    out = tmp_path / "observations.parquet"
    command = [
        sys.executable,
        "-m",
        "gpumemnet",
        "observations",
        "export",
        "--database-url",
        database.url,
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "1 left out" in done.stdout
    rows = read_dataset(out)
    assert len(rows) == database.count() - 1
    [row] = [row for row in rows if row.driver == "570.1"]
    assert row.job == job_from_dict(EXAMPLE_JOBS["mlp"])
    assert (row.status, row.label_bytes, row.provenance, row.torch) == (
        "ok",
        1765 * 2**20,
        "observed",
        "2.11",
    )
    assert (row.recipe, row.architecture, row.gpu) == ("observations", "{}", GPU)
    lost = [row for row in rows if row.status == "oom" and row.capacity_bytes == 1500 * 2**20]
    assert len(lost) == 1
    later = subprocess.run(
        [*command, "--since", "2999-01-01"], capture_output=True, text=True, timeout=300
    )
    assert later.stdout.startswith("0 observations")


def test_what_was_accepted_survives_a_kill(database: Database, tmp_path: Path) -> None:
    before = database.count()
    accepted = []

    def report_until_killed(client: httpx.Client, sender: int) -> None:
        for number in itertools.count():
            key = f"kill-{sender}-{number}"
            try:
                answer = observe(client, **by_job(idempotency_key=key))
            except httpx.TransportError:
                return
            if answer.status_code == 201:
                accepted.append(key)

    with (
        running_app(database, tmp_path / "log") as (client, process),
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        senders = [pool.submit(report_until_killed, client, sender) for sender in range(8)]
        while len(accepted) < 100:
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        for sender in senders:
            sender.result()
    assert process.wait() == -signal.SIGKILL
    assert len(accepted) >= 100
    with database.connect() as connection:
        there = {
            row[0]
            for row in connection.execute("SELECT idempotency_key FROM observations").fetchall()
        }
    assert set(accepted) <= there
    assert database.count() >= before + len(accepted)


def test_a_full_queue_is_said_and_nothing_is_lost(database: Database, tmp_path: Path) -> None:
    with running_app(database, tmp_path / "log", "5") as (client, _):
        assert observe(client, **by_job(idempotency_key="full-first")).status_code in (200, 201)
        with database.connect() as connection, concurrent.futures.ThreadPoolExecutor(12) as pool:
            connection.execute("BEGIN IMMEDIATE" if database.server is None else "BEGIN")
            if database.server is not None:
                connection.execute("LOCK TABLE observations IN ACCESS EXCLUSIVE MODE")
            futures = [
                pool.submit(observe, client, **by_job(idempotency_key=f"full-{number}"))
                for number in range(12)
            ]
            done, _ = concurrent.futures.wait(
                futures, timeout=300, return_when=concurrent.futures.FIRST_COMPLETED
            )
            assert {future.result().status_code for future in done} == {503}
            assert predict(client)["expected_bytes"]
            connection.execute("COMMIT")
            answers = [future.result() for future in futures]
        refused = [answer for answer in answers if answer.status_code == 503]
        assert all(answer.headers["Retry-After"] == "1" for answer in refused)
        assert refused[0].json()["type"] == "urn:gpumemnet:problem:overloaded"
        assert [answer.status_code for answer in answers].count(201) == 12 - len(refused) >= 5


def test_predictions_are_written_when_the_service_stops(database: Database, tmp_path: Path) -> None:
    with running_app(database, tmp_path / "log") as (client, process):
        before = database.count("predictions")
        for batch_size in range(1, 21):
            predict(client, batch_size=batch_size)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=300)
    assert database.count("predictions") >= before + 20


def test_the_store_finds_its_way_back(postgresql: PostgreSQL, tmp_path: Path) -> None:
    name = f"test_{uuid.uuid4().hex}"
    postgresql.execute(f"CREATE DATABASE {name}")
    database = Database(
        postgresql.url(name), lambda: psycopg.connect(postgresql.url(name)), postgresql
    )
    log = tmp_path / "log"
    with running_app(database, log) as (client, _):
        assert observe(client, **by_job()).status_code == 201
        postgresql.stop()
        try:
            first = predict(client)["prediction_id"]
            refused = [
                observe(client, **by_job(idempotency_key=f"away-{number}")) for number in range(5)
            ]
            assert {answer.status_code for answer in refused} == {503}
            assert {answer.headers["Retry-After"] for answer in refused} == {"1"}
            assert predict(client)["prediction_id"]
        finally:
            postgresql.start()
        deadline = time.monotonic() + 300
        while (
            answer := observe(client, prediction_id=first, peak_bytes=1900 * 2**20)
        ).status_code == 503:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert answer.status_code == 201, "the prediction made while the database was away is known"
    said = log.read_text()
    assert said.count("cannot be used") == 1
    assert "Traceback" not in said
