"""The store within one process: migrations, several stores on one database, limits, retention, the
alarm and its gauges."""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from gpumemnet.job.job_table import JobTable
from gpumemnet.job.json_codec import job_from_dict
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.prediction import PredictionTable
from gpumemnet.predict.predictor import Predictor
from gpumemnet.site.observations import Observation
from service.api.examples import EXAMPLE_JOBS
from service.api.predictions import RecordBatch, prediction_id
from service.api.problems import Refusal
from service.observations import store
from service.observations.database import (
    REVISIONS,
    VERSION_TABLE,
    DatabaseAwayError,
    DatabaseError,
    database_url,
    ensure_schema,
    make_engine,
)
from service.observations.inserts import Stored
from service.observations.statistics import miss_probability
from service.observations.store import ObservationStore
from tests.waiting import wait_until

MakeStore = Callable[..., ObservationStore]

MIB = 2**20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "observations.sqlite"


@pytest.fixture
def address(file: Path) -> str:
    return f"sqlite:///{file}"


@pytest.fixture
def make_store(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStore]:
    """Stores on one database, stopped after the test; patient, because on a busy machine any step
    may take seconds."""
    made: list[ObservationStore] = []

    def make(busy_seconds: float = 300.0, retention_seconds: float = 1e9) -> ObservationStore:
        engine = partial(make_engine, busy_seconds=busy_seconds)
        monkeypatch.setattr(store, "make_engine", engine)
        monkeypatch.setattr(store, "ANSWER_SECONDS", 300.0)
        monkeypatch.setattr(store, "RETENTION_SECONDS", retention_seconds)
        one = ObservationStore(address)
        one.prepare()
        one.start()
        made.append(one)
        return one

    yield make
    for one in made:
        one.drain()


@pytest.fixture(scope="module")
def estimate() -> PredictionTable:
    return Predictor.default().predict_many([job_from_dict(EXAMPLE_JOBS["mlp"])])


def record(
    estimate: PredictionTable,
    job: TrainingJob | None = None,
    *,
    age_seconds: float = 0.0,
    release: str = "r1",
) -> RecordBatch:
    made_at = time.time() - age_seconds
    job = job or job_from_dict(EXAMPLE_JOBS["mlp"])
    identity = prediction_id(int(made_at * 1e9))
    return RecordBatch([identity], made_at, JobTable.from_jobs([job]), estimate, "a" * 64, release)


def observed(identity: str, peak_bytes: int, **fields: Any) -> Observation:
    return Observation(
        prediction_id=identity, peak_bytes=peak_bytes, source="nvml_process", **fields
    )


def rows(file: Path, question: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(file)
    try:
        return connection.execute(question).fetchall()
    finally:
        connection.close()


def test_an_older_database_is_migrated(address: str, file: Path) -> None:
    ensure_schema(database_url(address))
    made = rows(file, "SELECT name FROM pragma_table_info('predictions')")
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE challenges (prediction_id VARCHAR(36))")
    connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '0001'")
    connection.commit()
    connection.close()
    ensure_schema(database_url(address))
    assert rows(file, "SELECT name FROM pragma_table_info('predictions')") == made
    assert not rows(file, "SELECT name FROM sqlite_master WHERE name = 'challenges'")
    assert rows(file, f"SELECT version_num FROM {VERSION_TABLE}") == [(REVISIONS[-1],)]


def test_many_may_start_at_once(address: str, file: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: ensure_schema(database_url(address)), range(4)))
    assert rows(file, f"SELECT version_num FROM {VERSION_TABLE}") == [(REVISIONS[-1],)]


def test_a_newer_database_is_refused(address: str, file: Path) -> None:
    ensure_schema(database_url(address))
    connection = sqlite3.connect(file)
    connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    connection.commit()
    connection.close()
    with pytest.raises(DatabaseError, match=r"written by a newer gpumemnet \(its schema is 9999"):
        ensure_schema(database_url(address))


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("mysql://localhost/x", "must be sqlite or postgresql"),
        ("sqlite://", "must be a file"),
        ("nonsense", "cannot be read"),
        ("sqlite:////proc/nowhere/x.sqlite", "cannot be made"),
    ],
)
def test_a_url_that_cannot_be_used_is_said(address: str, reason: str) -> None:
    with pytest.raises(DatabaseError, match=reason):
        ensure_schema(database_url(address))


def test_a_file_that_is_no_database_is_said(file: Path, address: str) -> None:
    file.write_text("not a database, by any means whatsoever\n" * 100)
    with pytest.raises(DatabaseError, match="not a database"):
        ensure_schema(database_url(address))


def test_an_unreachable_server_is_said_without_the_password() -> None:
    with pytest.raises(DatabaseAwayError, match="cannot be reached") as caught:
        ensure_schema(database_url("postgresql://user:s3cret@127.0.0.1:1/x"))
    assert "s3cret" not in str(caught.value)


def test_an_observation_may_come_before_its_prediction_is_written(
    make_store: MakeStore, estimate: PredictionTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker has made the prediction, and will write it within the next moments."""
    monkeypatch.setattr(store, "YOUNG_SECONDS", 300.0)
    here, there = make_store(), make_store()
    made = record(estimate)

    async def run() -> Stored:
        waiting = asyncio.create_task(here.add(observed(made.prediction_ids[0], 1800 * MIB)))
        await asyncio.sleep(0.2)
        there.record(made)
        return await waiting

    assert asyncio.run(run()).prediction_id == made.prediction_ids[0]


def test_keys_of_different_clients_never_meet(
    make_store: MakeStore, estimate: PredictionTable
) -> None:
    one = make_store()
    made = record(estimate)
    one.record(made)

    async def run() -> tuple[Stored, Stored]:
        first = await one.add(
            observed(made.prediction_ids[0], 1800 * MIB, idempotency_key="1"), "site-a"
        )
        second = await one.add(
            observed(made.prediction_ids[0], 1900 * MIB, idempotency_key="1"), "site-b"
        )
        return first, second

    first, second = asyncio.run(run())
    assert first.created
    assert second.created
    assert first.observation_id != second.observation_id


def test_too_many_predictions_are_dropped_and_counted(
    address: str, estimate: PredictionTable, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_PENDING_PREDICTIONS", 10)
    before = dropped()
    one = ObservationStore(address)
    one.prepare()
    for _ in range(25):
        one.record(record(estimate))
    one.start()
    one.drain()
    assert rows(file, "SELECT count(*) FROM predictions") == [(10,)]
    assert dropped() == before + 15


def dropped() -> float:
    return (
        REGISTRY.get_sample_value("gpumemnet_predictions_kept_total", {"outcome": "dropped"}) or 0.0
    )


def test_observations_go_before_the_predictions_that_wait(
    make_store: MakeStore, estimate: PredictionTable, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_PAUSES", 1e6)  # the predictions would take an hour
    one = make_store()
    made = [record(estimate) for _ in range(2000)]
    for each in made:
        one.record(each)
    time.sleep(0.5)  # the thread has begun to write them

    stored = asyncio.run(one.add(observed(made[-1].prediction_ids[0], 1800 * MIB)))
    assert (stored.created, stored.prediction_id) == (True, made[-1].prediction_ids[0])
    [(written,)] = rows(file, "SELECT count(*) FROM predictions")
    assert written < len(made)
    one.drain()
    assert rows(file, "SELECT count(*) FROM predictions") == [(len(made),)]


def test_old_predictions_that_nobody_reports_on_go(
    make_store: MakeStore, estimate: PredictionTable, file: Path
) -> None:
    first = make_store()
    kept = record(estimate, age_seconds=40 * 86_400)
    recent = record(estimate, job_from_dict({**EXAMPLE_JOBS["mlp"], "batch_size": 3}))
    old = [
        record(
            estimate,
            job_from_dict({**EXAMPLE_JOBS["mlp"], "batch_size": 5 + n}),
            age_seconds=40 * 86_400,
        )
        for n in range(20)
    ]
    for made in (kept, recent, *old):
        first.record(made)
    asyncio.run(first.add(observed(kept.prediction_ids[0], 1800 * MIB)))
    first.drain()
    connection = sqlite3.connect(file)
    connection.execute("UPDATE jobs SET seen_at = seen_at - 40 * 86400")
    connection.commit()
    connection.close()
    second = make_store(retention_seconds=30 * 86_400)
    wait_until(lambda: rows(file, "SELECT count(*) FROM jobs") == [(2,)])
    second.drain()
    left = {identity for (identity,) in rows(file, "SELECT id FROM predictions")}
    assert left == {kept.prediction_ids[0], recent.prediction_ids[0]}


def test_a_locked_database_is_away_and_comes_back(
    make_store: MakeStore, estimate: PredictionTable, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = make_store(busy_seconds=0.1)
    made = record(estimate)
    one.record(made)

    async def run() -> Stored:
        await one.add(observed(made.prediction_ids[0], 1800 * MIB))
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        for number in range(3):
            with pytest.raises(Refusal, match="away") as caught:
                await one.add(
                    observed(made.prediction_ids[0], 1801 * MIB, idempotency_key=str(number))
                )
            assert caught.value.headers == {"Retry-After": "1"}
        other.execute("COMMIT")
        other.close()
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            try:
                return await one.add(observed(made.prediction_ids[0], 1801 * MIB))
            except Refusal:
                await asyncio.sleep(0.1)
        raise AssertionError("the store did not come back")

    with caplog.at_level(logging.INFO):
        assert asyncio.run(run()).created
    said = [
        word
        for entry in caplog.records
        for word in ("cannot be used", "is back")
        if word in entry.message
    ]
    assert said[0] == "cannot be used"
    assert all(word != following for word, following in pairwise(said)), (
        "logged once each time, not for every observation"
    )


def test_the_alarm_goes_on_and_the_gauges_say_it(
    make_store: MakeStore, estimate: PredictionTable
) -> None:
    one = make_store()
    made = [record(estimate) for _ in range(60)]
    for entry in made:
        one.record(entry)

    async def run() -> None:
        over = int(estimate.safe_bytes[0]) + MIB
        await asyncio.gather(*(one.add(observed(entry.prediction_ids[0], over)) for entry in made))

    asyncio.run(run())
    second = make_store()  # its first round refreshes the gauges, from the database
    wait_until(
        lambda: REGISTRY.get_sample_value("gpumemnet_coverage_alarm", {"family": "mlp"}) == 1
    )
    second.drain()
    assert REGISTRY.get_sample_value("gpumemnet_observed_coverage_ratio", {"family": "mlp"}) == 0
    error = REGISTRY.get_sample_value("gpumemnet_observed_error_ratio", {"family": "mlp"})
    assert error is not None
    assert error < 0


@pytest.mark.parametrize("misses", [0, 1, 2, 5, 9])
def test_with_one_coverage_it_is_the_binomial_test(misses: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(misses, 200, 0.01, alternative="greater").pvalue
    assert miss_probability([0.99] * 200, misses) == pytest.approx(expected, rel=1e-6)
