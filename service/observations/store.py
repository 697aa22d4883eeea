"""The store: one thread that writes observations and predictions, many in one transaction.

A request with an observation gets its response when the transaction is on the disk.  A prediction
is only queued; the thread writes the queue every quarter of a second.  Observations come first: the
thread looks for them after every few predictions, and writes those that they name before the
others.  When the queue is full, predictions are dropped and counted, so that responses are never
delayed.  While the database is unavailable, observations are rejected at once and predictions
continue.  The store reconnects by itself.  Queries have a connection of their own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple
from uuid import UUID

from prometheus_client import Counter, Gauge
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from gpumemnet.site.observations import Observation, content_hash

from ..api.predictions import RecordBatch, prediction_id
from ..api.problems import OVERLOADED, UNKNOWN, Refusal
from .database import (
    DatabaseError,
    cause_text,
    database_url,
    ensure_schema,
    make_engine,
    reading,
    shown,
)
from .inserts import (
    Incoming,
    Reply,
    Row,
    Stored,
    prediction_rows,
    sweep,
    write_observations,
    write_predictions,
)
from .statistics import SECONDS_PER_DAY, read_alarms

FLUSH_SECONDS: Final = 0.25
"""Longest time that a prediction waits to be written."""
MAX_GROUP: Final = 500
"""Most observations in one transaction."""
MAX_WAITING: Final = 1000
"""Most observations that wait to be stored."""
ANSWER_SECONDS: Final = 15.0
"""How long a request waits for its observation to be stored."""
RETENTION_SECONDS: Final = 30 * SECONDS_PER_DAY
"""How long a prediction without an observation is kept."""
MAX_PENDING_PREDICTIONS: Final = 4000
MAX_PENDING_LAYERS: Final = 200_000
"""Most predictions, and layers of their jobs, in the queue: some 30 MB."""
ROWS_PER_TRANSACTION: Final = 256
"""Most predictions in one transaction."""
YOUNG_SECONDS: Final = 2.0
"""A younger prediction may still be in another worker's queue, so an observation of it is tried
again."""
RETRY_SECONDS: Final = 1.0
"""Time between two attempts to reconnect."""
REFRESH_SECONDS: Final = 5.0
SWEEP_SECONDS: Final = 60.0

_SLICE_SECONDS: Final = 0.0002
"""The thread pauses after so much work; otherwise it would hold the interpreter's lock for many
milliseconds."""
_PAUSES: Final = 4
"""Length of the pause as a multiple of the slice's time: responses have priority."""

OBSERVED: Final = Counter(
    "gpumemnet_observations",
    "Observations stored, by the source of the peak and whether memory ran out",
    ["source", "oom"],
)
REFUSED: Final = Counter(
    "gpumemnet_observations_refused",
    "Observations that were not stored because the queue was full or the database unavailable",
    ["reason"],
)
PREDICTIONS: Final = Counter(
    "gpumemnet_predictions_kept",
    "Predictions for a later comparison: stored, or dropped because there were too many",
    ["outcome"],
)
QUEUE: Final = Gauge(
    "gpumemnet_observation_queue",
    "Observations that wait to be stored",
    multiprocess_mode="livesum",
)
DATABASE_UP: Final = Gauge(
    "gpumemnet_database_up",
    "1 when the last write to the database succeeded, else 0",
    multiprocess_mode="livemin",
)
COVERAGE, PROMISED, ERROR, ALARM = (
    Gauge(name, text, ["family"], multiprocess_mode="livemostrecent")
    for name, text in (
        (
            "gpumemnet_observed_coverage_ratio",
            "Share of the last observations of a family that stayed within the safe bytes",
        ),
        ("gpumemnet_promised_coverage_ratio", "Mean requested coverage of the same jobs"),
        (
            "gpumemnet_observed_error_ratio",
            "Median of (expected - observed) / observed over the last observations of a family",
        ),
        (
            "gpumemnet_coverage_alarm",
            "1 when the observed coverage of a family is significantly too low (exact test)",
        ),
    )
)

logger = logging.getLogger("gpumemnet.service")


@dataclass(slots=True, eq=False)
class _Waiting:
    """An observation, and the future of its request."""

    incoming: Incoming
    future: asyncio.Future[Reply]
    known_by: float  # monotonic time at which its prediction must be in the database


class _Queued(NamedTuple):
    """One prediction of those that were made at once."""

    records: RecordBatch
    row: int


class PredictionQueue:
    """The predictions that wait to be written; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queued: dict[str, _Queued] = {}
        self._layers = 0

    def add(self, records: RecordBatch) -> None:
        """Queue as many predictions as fit."""
        counts = records.jobs.layer_counts.tolist()
        with self._lock:
            for row, identity in enumerate(records.prediction_ids):
                layers = self._layers + counts[row]
                if len(self._queued) >= MAX_PENDING_PREDICTIONS or layers > MAX_PENDING_LAYERS:
                    PREDICTIONS.labels("dropped").inc(len(records) - row)
                    break
                self._layers = layers
                self._queued[identity] = _Queued(records, row)

    def take(self, most: int) -> list[_Queued]:
        """The oldest predictions, at most ``most``."""
        with self._lock:
            return self._pop(list(islice(self._queued, most)))

    def take_named(self, identities: Iterable[str]) -> list[_Queued]:
        """The predictions with these ids."""
        with self._lock:
            return self._pop([identity for identity in identities if identity in self._queued])

    def put_back(self, queued: Sequence[_Queued]) -> None:
        """Queue again what could not be written."""
        with self._lock:
            again = {one.records.prediction_ids[one.row]: one for one in queued}
            self._queued = again | self._queued
            self._layers += _layers(queued)

    def _pop(self, identities: Sequence[str]) -> list[_Queued]:
        taken = [self._queued.pop(identity) for identity in identities]
        self._layers -= _layers(taken)
        return taken


def _layers(queued: Sequence[_Queued]) -> int:
    return sum(int(one.records.jobs.layer_counts[one.row]) for one in queued)


class ObservationStore:
    """Stores observations and the predictions that they are compared with.

    Create it before any fork, and :meth:`start` it in every process that serves.  Any thread may
    call :meth:`record`; the coroutines belong to the event loop.

    Args:
        address: the database's URL, of SQLite or PostgreSQL.

    Raises:
        DatabaseError: when the URL cannot be used, or its driver is not installed.
    """

    def __init__(self, address: str) -> None:
        self._url = database_url(address)
        self._lock = threading.Lock()
        self._predictions = PredictionQueue()
        self._waiting: list[_Waiting] = []
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        # It connects when it is first used, which is after any fork.
        self._engine = make_engine(self._url)
        self._has_tables = False
        self._away: str | None = None
        self._complained = False
        self._retry_at = 0.0
        self._refresh_at = 0.0
        self._sweep_at = 0.0

    def prepare(self) -> None:
        """Create or migrate the tables; call it once, before the service listens.

        Raises:
            DatabaseAwayError: when the database cannot be reached; after :meth:`start` the store
                tries again by itself.
            DatabaseError: when it can never be used: its schema is newer, or the file cannot be
                written.
        """
        ensure_schema(self._url)

    def start(self) -> None:
        """Start the thread; call it in the serving process, after any fork."""
        if self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(
                target=self._run, name="gpumemnet-observations", daemon=True
            )
            self._thread.start()

    def drain(self) -> None:
        """Write everything that is queued, complete the waiting requests, and stop; blocks until
        that is done."""
        thread = self._thread
        if thread is not None:
            self._stopping = True
            self._wake.set()
            thread.join()
            self._thread = None

    def record(self, records: RecordBatch) -> None:
        """Queue predictions; never blocks, never raises, and drops those that exceed the queue."""
        self._predictions.add(records)

    async def add(self, observation: Observation, key_name: str = "") -> Stored:
        """Store one observation; returns when it is on the disk.

        Args:
            observation: the observation.
            key_name: name of the API key that sent it; idempotency keys are separate for each name.

        Raises:
            Refusal: 503 when the queue is full or the database unavailable, 404 when it names an
                unknown prediction, 409 when its idempotency key belongs to another observation.
            FieldError: when the prediction's GPU cannot hold its peak.
        """
        future = self._submit(observation, key_name)
        self._wake.set()
        await asyncio.wait([future], timeout=ANSWER_SECONDS)
        if not future.done():
            REFUSED.labels("too_slow").inc()
            raise _busy(
                "the database was too slow to confirm that the observation is stored; sent again, it is stored once all the same"
            )
        answer = future.result()
        if isinstance(answer, Stored):
            return answer
        raise answer

    def _submit(self, observation: Observation, key_name: str) -> asyncio.Future[Reply]:
        digest = content_hash(observation)
        key = observation.idempotency_key or digest
        now = time.time_ns()
        incoming = Incoming(prediction_id(now), observation, key_name, key, digest, now / 1e9)
        age_seconds = now / 1e9 - made_at_seconds(observation.prediction_id)
        patience = YOUNG_SECONDS - age_seconds if 0 <= age_seconds < YOUNG_SECONDS else 0.0
        with self._lock:
            if self._thread is None or self._stopping:
                raise _busy("the service is stopping")
            if len(self._waiting) >= MAX_WAITING:
                REFUSED.labels("queue_full").inc()
                raise _busy(
                    f"{MAX_WAITING} observations wait to be stored, and no more are taken on"
                )
            future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
            self._waiting.append(_Waiting(incoming, future, time.monotonic() + patience))
            QUEUE.set(len(self._waiting))
        return future

    # The methods below run in the thread.

    def _run(self) -> None:
        while True:
            self._wake.wait(FLUSH_SECONDS)
            self._wake.clear()
            stopping = self._stopping
            try:
                self._round()
            except (
                Exception
            ):  # the thread must survive: without it every observation would wait in vain
                logger.exception("the observation store failed")
                self._refuse_all(
                    "the observation store failed; the cause is in the log of the service"
                )
                time.sleep(RETRY_SECONDS)
            if stopping:
                break
        self._engine.dispose()

    def _round(self) -> None:
        now = time.monotonic()
        if self._away is not None and now < self._retry_at and not self._stopping:
            self._refuse_all(self._away)
            return
        try:
            if not self._has_tables:
                ensure_schema(self._url)
                self._has_tables = True
            self._write_waiting()
            while queued := self._predictions.take(ROWS_PER_TRANSACTION):
                self._write_predictions(queued)
                self._write_waiting()
            if not self._stopping:
                self._refresh_and_sweep(now)
        except (SQLAlchemyError, DatabaseError) as error:
            self._disconnect(error)
            return
        if self._away is not None:
            self._away = None
            logger.info("the database %s is back", shown(self._url))
        DATABASE_UP.set(1)

    def _disconnect(self, error: Exception) -> None:
        """Handle a database failure: log it once, reject the waiting observations, and schedule a
        reconnect."""
        if self._away is None:
            logger.error(
                "the database %s cannot be used, observations are refused until it can: %s",
                shown(self._url),
                cause_text(error),
            )
        self._away = "observations cannot be stored just now: the database is away"
        self._retry_at = time.monotonic() + RETRY_SECONDS
        DATABASE_UP.set(0)
        self._engine.dispose()
        self._has_tables = False
        self._refuse_all(self._away)

    def _write_waiting(self) -> None:
        """Write the observations that wait now."""
        self._wake.clear()
        while self._flush_observations():
            pass

    def _write_predictions(self, queued: Sequence[_Queued]) -> None:
        try:
            jobs, rows = self._rows(queued)
            with self._engine.begin() as connection:
                write_predictions(connection, jobs, rows)
        except (DataError, IntegrityError) as error:
            PREDICTIONS.labels("dropped").inc(len(queued))
            if not self._complained:  # log once until it works again
                logger.error("predictions are not kept, the database refuses them: %s", error)
            self._complained = True
            return
        except SQLAlchemyError:
            self._predictions.put_back(queued)
            raise
        self._complained = False
        PREDICTIONS.labels("stored").inc(len(queued))

    def _rows(self, queued: Sequence[_Queued]) -> tuple[dict[str, Row], list[Row]]:
        """The rows of predictions and of their jobs; pauses between slices unless something
        waits."""
        jobs: dict[str, Row] = {}
        rows: list[Row] = []
        began = time.thread_time()
        for records, row in queued:
            job, prediction = prediction_rows(records, row, time.time())
            jobs[job[0]] = job
            rows.append(prediction)
            used = time.thread_time() - began
            if used > _SLICE_SECONDS and not (self._stopping or self._waiting):
                self._wake.wait(_PAUSES * used)
                began = time.thread_time()
        return jobs, rows

    def _flush_observations(self) -> bool:
        """Write one group; returns whether more can be written now."""
        with self._lock:
            group = self._waiting[:MAX_GROUP]
        if not group:
            return False
        named = {entry.incoming.observation.prediction_id or "" for entry in group}
        if queued := self._predictions.take_named(named):
            self._write_predictions(queued)
        replies = self._write_group(group)
        with self._lock:
            gone = {id(entry) for entry, _ in replies}
            self._waiting = [entry for entry in self._waiting if id(entry) not in gone]
            more = bool(self._waiting)
        QUEUE.set(len(self._waiting))
        for entry, reply in replies:
            _set_result(entry.future, reply)
        return more and len(replies) == len(group)

    def _write_group(self, group: list[_Waiting]) -> list[tuple[_Waiting, Reply]]:
        """Write some observations; returns the results of those that need not be tried again."""
        try:
            with self._engine.begin() as connection:
                results = write_observations(connection, [entry.incoming for entry in group])
        except (DataError, IntegrityError) as error:
            if len(group) > 1:
                return [reply for entry in group for reply in self._write_group([entry])]
            logger.error("an observation cannot be stored: %s", error)
            results = [
                _busy(
                    "the database refused the observation; the cause is in the log of the service"
                )
            ]
        now = time.monotonic()
        replies: list[tuple[_Waiting, Reply]] = []
        for entry, result in zip(group, results, strict=True):
            if isinstance(result, Stored) and result.created:
                observation = entry.incoming.observation
                OBSERVED.labels(observation.source, str(observation.oom).lower()).inc()
            is_unknown = isinstance(result, Refusal) and result.kind is UNKNOWN
            if self._stopping or not is_unknown or now >= entry.known_by:
                replies.append((entry, result))
        return replies

    def _refresh_and_sweep(self, now: float) -> None:
        """Update the gauges and delete old rows, every few seconds."""
        if now >= self._refresh_at:
            self._refresh_at = now + REFRESH_SECONDS
            with reading(self._engine) as connection:
                for alarm in read_alarms(connection):
                    ALARM.labels(alarm.family).set(alarm.is_on)
                    for gauge, value in (
                        (COVERAGE, alarm.coverage),
                        (PROMISED, alarm.promised_coverage),
                        (ERROR, alarm.error_ratio),
                    ):
                        if value is not None:
                            gauge.labels(alarm.family).set(value)
        if now >= self._sweep_at:
            with self._engine.begin() as connection:
                more = sweep(connection, time.time() - RETENTION_SECONDS)
            self._sweep_at = now + (FLUSH_SECONDS if more else SWEEP_SECONDS)

    def _refuse_all(self, reason: str) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        if waiting:
            REFUSED.labels("database_away").inc(len(waiting))
        QUEUE.set(0)
        for entry in waiting:
            _set_result(entry.future, _busy(reason))


def _set_result(future: asyncio.Future[Any], answer: Any) -> None:
    """Set the result of a request's future, in the thread of its event loop."""

    def set_result() -> None:
        if not future.done():
            future.set_result(answer)

    if not future.get_loop().is_closed():
        future.get_loop().call_soon_threadsafe(set_result)


def _busy(reason: str) -> Refusal:
    return Refusal(OVERLOADED, f"{reason}: try again later")


def made_at_seconds(identity: str | None) -> float:
    """Creation time of a prediction, from its id (UUID version 7); 0 for other ids."""
    known = UUID(identity) if identity else None
    return (known.int >> 80) / 1000 if known and known.version == 7 else 0.0
