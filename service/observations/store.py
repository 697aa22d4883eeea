"""The store: one thread that writes observations and predictions, many in one transaction.

A request with an observation gets its response when the transaction is on the disk.  A prediction
is only queued; the thread writes the queue every quarter of a second.  When the queue is full,
predictions are dropped and counted, so that responses are never delayed.  While the database is
unavailable, observations are rejected at once and predictions continue.  The store reconnects by
itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from gpumemnet.errors import FieldError, first_line
from gpumemnet.job.job_table import JobTable
from gpumemnet.site.observations import Observation, content_hash

from ..api.prediction_id import prediction_id
from ..api.problems import CONFLICT, OVERLOADED, UNKNOWN, Refusal
from ..api.records import RecordBatch
from ..middleware.load import LOAD
from .database import DatabaseError, database_url, ensure_schema, make_engine, reading, shown
from .job_documents import job_documents
from .metrics import (
    ALARM,
    COVERAGE,
    DATABASE_UP,
    ERROR,
    OBSERVED,
    PREDICTIONS,
    PROMISED,
    QUEUE,
    REFUSED,
)
from .summary import SECONDS_PER_DAY, read_alarms, read_summary
from .tables import (
    ChallengeRecord,
    Incoming,
    KnownJobs,
    OtherContent,
    Result,
    Row,
    Stored,
    UnknownPrediction,
    challenge_row,
    prediction_rows,
    sweep,
    write_observations,
    write_predictions,
)

FLUSH_SECONDS: Final = 0.25
"""Longest time that a prediction waits to be written."""
MAX_GROUP: Final = 500
"""Most observations in one transaction."""
MAX_PENDING_PREDICTIONS: Final = 4000
MAX_PENDING_LAYERS: Final = 200_000
"""Most predictions, and layers of their jobs, in the queue: some 30 MB."""
YOUNG_SECONDS: Final = 2.0
"""A younger prediction may still be in another worker's queue, so an observation of it is tried
again."""
RETRY_SECONDS: Final = 1.0
"""Time between two attempts to reconnect."""
REFRESH_SECONDS: Final = 5.0
SWEEP_SECONDS: Final = 60.0

_SLICE: Final = 8
_PAUSE_SECONDS: Final = 0.0005
"""The thread pauses after every :data:`_SLICE` records; otherwise it would hold the interpreter's
lock for many milliseconds."""
_PAUSES_WHEN_BUSY: Final = 4
"""Length of the pause while requests are in progress, as a multiple of the slice's time: responses
have priority."""

logger = logging.getLogger("gpumemnet.service")

Reply = Stored | FieldError | Refusal


@dataclass(slots=True, eq=False)
class _Waiting:
    """An observation, and the future of its request."""

    incoming: Incoming
    future: asyncio.Future[Reply]
    loop: asyncio.AbstractEventLoop
    known_by: float  # monotonic time at which its prediction must be in the database


class _Held(NamedTuple):
    """Queued predictions: the first ``kept`` of ``records``, and the number of layers of each
    job."""

    records: RecordBatch
    layer_counts: Sequence[int]
    kept: int


@dataclass(slots=True, eq=False)
class _Query:
    """A query of the database, and the future of its request."""

    read: Callable[[Connection], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class ObservationStore:
    """Stores observations and the predictions that they are compared with.

    Create it before any fork, and :meth:`start` it in every process that serves.  Any thread may
    call :meth:`record` and :meth:`record_shadow`; the coroutines belong to the event loop.

    Args:
        address: the database's URL, of SQLite or PostgreSQL.
        queue_size: most observations that wait to be stored.
        record_predictions: whether predictions are stored; otherwise only observations with a job
            can be stored.
        prediction_retention_days: how long a prediction without an observation is kept.
        alarm_window: observations of a family that the alarm tests.
        busy_seconds: how long a write waits for a write of another process.
        answer_seconds: how long a request waits for its observation to be stored.

    Raises:
        DatabaseError: when the URL cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        queue_size: int = 1000,
        record_predictions: bool = True,
        prediction_retention_days: float = 30,
        alarm_window: int = 200,
        busy_seconds: float = 5.0,
        answer_seconds: float = 15.0,
    ) -> None:
        self._url = database_url(address)
        self._queue_size = queue_size
        self._record_predictions = record_predictions
        self._retention_seconds = prediction_retention_days * SECONDS_PER_DAY
        self._window = alarm_window
        self._busy_seconds = busy_seconds
        self._answer_seconds = answer_seconds
        self._known = KnownJobs(min(3600.0, self._retention_seconds / 4))
        self._lock = threading.Lock()
        self._predictions: list[_Held] = []
        self._pending = 0
        self._layers = 0
        self._challenges: list[ChallengeRecord] = []
        self._waiting: list[_Waiting] = []
        self._queries: list[_Query] = []
        self._dropped = 0
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._engine: Engine | None = None
        self._away: str | None = None
        self._complained = False
        self._retry_at = 0.0
        self._refresh_at = 0.0
        self._sweep_at = 0.0

    @property
    def queue_size(self) -> int:
        """Most observations that wait to be stored."""
        return self._queue_size

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
        if self._record_predictions:
            counts = records.jobs.layer_counts.tolist()
            with self._lock:
                self._hold(records, counts, len(records))

    def record_shadow(
        self, prediction_id: str, model_sha256: str, expected_bytes: int, safe_bytes: int | None
    ) -> None:
        """Queue the challenger's prediction; as :meth:`record`."""
        with self._lock:
            if self._record_predictions and len(self._challenges) < MAX_PENDING_PREDICTIONS:
                self._challenges.append(
                    ChallengeRecord(prediction_id, model_sha256, expected_bytes, safe_bytes)
                )

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
        answer = (await self.add_many([observation], key_name))[0]
        if isinstance(answer, Stored):
            return answer
        raise answer

    async def add_many(
        self, observations: Sequence[Observation], key_name: str = ""
    ) -> list[Reply]:
        """Store observations; returns a result for each, or the error that :meth:`add` would
        raise."""
        loop = asyncio.get_running_loop()
        waiting = [self._submit(observation, key_name, loop) for observation in observations]
        self._wake.set()
        futures = [entry for entry in waiting if isinstance(entry, asyncio.Future)]
        if futures:
            await asyncio.wait(futures, timeout=self._answer_seconds)
        return [self._answer(entry) for entry in waiting]

    async def summary(self, days: float = 30) -> dict[str, Any]:
        """Coverage and error of the predictions of the last ``days``.

        Raises:
            Refusal: 503 when the database is unavailable.
        """
        answer: dict[str, Any] = await self._query(
            lambda connection: read_summary(
                connection, now=time.time(), days=days, window=self._window
            )
        )
        return answer

    async def _query(self, read: Callable[[Connection], Any]) -> Any:
        loop = asyncio.get_running_loop()
        query = _Query(read, loop.create_future(), loop)
        with self._lock:
            if len(self._queries) >= 16:
                raise _busy("too many summaries are being made")
            self._queries.append(query)
        self._wake.set()
        await asyncio.wait([query.future], timeout=self._answer_seconds)
        if not query.future.done():
            raise _busy("the database did not answer in time")
        answer = query.future.result()
        if isinstance(answer, Refusal):
            raise answer
        return answer

    def _submit(
        self, observation: Observation, key_name: str, loop: asyncio.AbstractEventLoop
    ) -> asyncio.Future[Reply] | Refusal:
        digest = content_hash(observation)
        key = observation.idempotency_key or digest
        now = time.time_ns()
        incoming = Incoming(prediction_id(now), observation, key_name, key, digest, now / 1e9)
        age_seconds = now / 1e9 - _made_at_seconds(observation.prediction_id)
        patience = YOUNG_SECONDS - age_seconds if 0 <= age_seconds < YOUNG_SECONDS else 0.0
        with self._lock:
            if self._thread is None or self._stopping:
                return _busy("the service is stopping")
            if len(self._waiting) >= self._queue_size:
                REFUSED.labels("queue_full").inc()
                return _busy(
                    f"{self._queue_size} observations wait to be stored, and no more are taken on"
                )
            future: asyncio.Future[Reply] = loop.create_future()
            self._waiting.append(_Waiting(incoming, future, loop, time.monotonic() + patience))
            QUEUE.set(len(self._waiting))
        return future

    @staticmethod
    def _answer(entry: asyncio.Future[Reply] | Refusal) -> Reply:
        if isinstance(entry, Refusal):
            return entry
        if entry.done():
            return entry.result()
        REFUSED.labels("too_slow").inc()
        return _busy(
            "the database was too slow to confirm that the observation is stored; sent again, it is stored once all the same"
        )

    def _hold(self, records: RecordBatch, counts: Sequence[int], count: int) -> None:
        """Queue as many of the first ``count`` as fit, and count the others as dropped; the caller
        holds the lock."""
        kept, room, layers = 0, min(count, MAX_PENDING_PREDICTIONS - self._pending), self._layers
        while kept < room and layers + counts[kept] <= MAX_PENDING_LAYERS:
            layers += counts[kept]
            kept += 1
        if kept:
            self._predictions.append(_Held(records, counts, kept))
        self._pending += kept
        self._layers = layers
        self._dropped += count - kept

    # The methods below run in the thread.

    def _run(self) -> None:
        while True:
            self._wake.wait(FLUSH_SECONDS)
            self._wake.clear()
            stopping = self._stopping
            try:
                self._round(stopping)
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
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None

    def _round(self, stopping: bool) -> None:
        now = time.monotonic()
        if self._away is not None and now < self._retry_at and not stopping:
            self._refuse_all(self._away)
            return
        try:
            if self._engine is None:
                self._connect()
            self._flush_predictions(hurried=stopping)
            while self._flush_observations(last=stopping):
                pass
            self._answer_queries()
            self._look_after(now, stopping)
        except (SQLAlchemyError, DatabaseError) as error:
            self._lose(error)
            return
        if self._away is not None:
            self._away = None
            logger.info("the database %s is back", shown(self._url))
        DATABASE_UP.set(1)

    def _connect(self) -> None:
        ensure_schema(self._url)
        self._known.forget()
        self._engine = make_engine(self._url, busy_seconds=self._busy_seconds)

    def _lose(self, error: Exception) -> None:
        """Handle a database failure: log it once, reject the waiting observations, and schedule a
        reconnect."""
        cause = getattr(error, "orig", None) or error
        reason = first_line(cause)
        if self._away is None:
            logger.error(
                "the database %s cannot be used, observations are refused until it can: %s",
                shown(self._url),
                reason,
            )
        self._away = "observations cannot be stored just now: the database is away"
        self._retry_at = time.monotonic() + RETRY_SECONDS
        DATABASE_UP.set(0)
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None
        self._refuse_all(self._away)

    def _begin(self) -> Any:
        assert self._engine is not None
        return self._engine.begin()

    def _flush_predictions(self, *, hurried: bool) -> None:
        with self._lock:
            held, self._predictions = self._predictions, []
            count, self._pending, self._layers = self._pending, 0, 0
            challenges, self._challenges = self._challenges, []
            dropped, self._dropped = self._dropped, 0
        if dropped:
            PREDICTIONS.labels("dropped").inc(dropped)
        if not held and not challenges:
            return
        try:
            jobs, rows = self._rows(held, hurried)
            with self._begin() as connection:
                write_predictions(
                    connection, jobs, rows, [challenge_row(challenge) for challenge in challenges]
                )
        except (DataError, IntegrityError) as error:
            self._known.forget()
            PREDICTIONS.labels("dropped").inc(count)
            if not self._complained:  # log once until it works again
                logger.error("predictions are not kept, the database refuses them: %s", error)
            self._complained = True
            return
        except SQLAlchemyError:
            self._put_back(held, challenges)
            raise
        self._complained = False
        self._known.note(jobs)
        PREDICTIONS.labels("stored").inc(count)

    def _rows(self, held: Sequence[_Held], hurried: bool) -> tuple[dict[str, Row], list[Row]]:
        now = time.time()
        jobs: dict[str, Row] = {}
        rows: list[Row] = []
        for slices in _groups(held):
            began = time.thread_time()
            documents = iter(
                job_documents(
                    JobTable.concatenate(
                        [records.jobs[part.start : part.stop] for records, part in slices]
                    )
                )
            )
            for records, part in slices:
                rows += prediction_rows(
                    records, part, list(islice(documents, len(part))), self._known, jobs, now
                )
            if not hurried:
                took = time.thread_time() - began
                time.sleep(
                    max(_PAUSE_SECONDS, _PAUSES_WHEN_BUSY * took)
                    if LOAD.in_work
                    else _PAUSE_SECONDS
                )
        return jobs, rows

    def _put_back(self, held: list[_Held], challenges: list[ChallengeRecord]) -> None:
        with self._lock:
            later, self._predictions = self._predictions, []
            self._pending = self._layers = 0
            for batch in (*held, *later):
                self._hold(batch.records, batch.layer_counts, batch.kept)
            self._challenges = (challenges + self._challenges)[:MAX_PENDING_PREDICTIONS]

    def _flush_observations(self, *, last: bool) -> bool:
        """Write one group; returns whether more can be written now."""
        with self._lock:
            group = self._waiting[:MAX_GROUP]
        if not group:
            return False
        QUEUE.set(len(self._waiting))
        replies = self._write_group(group, last)
        with self._lock:
            gone = {id(entry) for entry, _ in replies}
            self._waiting = [entry for entry in self._waiting if id(entry) not in gone]
            more = bool(self._waiting)
        QUEUE.set(len(self._waiting))
        _resolve(replies)
        return more and len(replies) == len(group)

    def _write_group(self, group: list[_Waiting], last: bool) -> list[tuple[_Waiting, Reply]]:
        try:
            results = self._write([entry.incoming for entry in group])
        except (DataError, IntegrityError) as error:
            if len(group) == 1:
                logger.error("an observation cannot be stored: %s", error)
                return [
                    (
                        group[0],
                        _busy(
                            "the database refused the observation; the cause is in the log of the service"
                        ),
                    )
                ]
            return [replies for entry in group for replies in self._write_group([entry], last)]
        now = time.monotonic()
        replies: list[tuple[_Waiting, Reply]] = []
        for entry, result in zip(group, results, strict=True):
            if isinstance(result, UnknownPrediction):
                if now < entry.known_by and not last:
                    continue
                missing = f"there is no prediction {result.prediction_id}, or none any more"
                replies.append((entry, Refusal(UNKNOWN, f"{missing}: send the job itself")))
            elif isinstance(result, OtherContent):
                taken = f"the idempotency key '{result.key}' was used for another observation: give every observation its own"
                replies.append((entry, Refusal(CONFLICT, taken)))
            else:
                if isinstance(result, Stored) and result.created:
                    observation = entry.incoming.observation
                    OBSERVED.labels(observation.source, str(observation.oom).lower()).inc()
                replies.append((entry, result))
        return replies

    def _write(self, incoming: Sequence[Incoming]) -> list[Result]:
        with self._begin() as connection:
            results, jobs = write_observations(connection, incoming, self._known)
        self._known.note(jobs)
        return results

    def _answer_queries(self) -> None:
        with self._lock:
            queries, self._queries = self._queries, []
        for query in queries:
            assert self._engine is not None
            try:
                with reading(self._engine) as connection:
                    answer: Any = query.read(connection)
            except SQLAlchemyError:
                _tell(query.loop, [(query.future, _busy("the database is away"))])
                raise
            _tell(query.loop, [(query.future, answer)])

    def _look_after(self, now: float, stopping: bool) -> None:
        """Periodic work, every few seconds: update the gauges and delete old rows."""
        if stopping:
            return
        if now >= self._refresh_at:
            self._refresh_at = now + REFRESH_SECONDS
            assert self._engine is not None
            with reading(self._engine) as connection:
                for alarm, error in read_alarms(connection, self._window):
                    ALARM.labels(alarm.family).set(alarm.on)
                    if alarm.count:
                        COVERAGE.labels(alarm.family).set(alarm.covered / alarm.count)
                        PROMISED.labels(alarm.family).set(alarm.promised or 0.0)
                    if error is not None:
                        ERROR.labels(alarm.family).set(error)
        if now >= self._sweep_at:
            with self._begin() as connection:
                more = sweep(connection, time.time() - self._retention_seconds)
            self._sweep_at = now + (FLUSH_SECONDS if more else SWEEP_SECONDS)

    def _refuse_all(self, reason: str) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            queries, self._queries = self._queries, []
        if waiting:
            REFUSED.labels("database_away").inc(len(waiting))
        QUEUE.set(0)
        _resolve([(entry, _busy(reason)) for entry in waiting])
        for query in queries:
            _tell(query.loop, [(query.future, _busy(reason))])


def _groups(held: Sequence[_Held]) -> Iterator[list[tuple[RecordBatch, range]]]:
    """The queued predictions, in order, in groups of at most :data:`_SLICE` rows; a batch may be in
    several groups."""
    group: list[tuple[RecordBatch, range]] = []
    room = _SLICE
    for batch in held:
        start = 0
        while start < batch.kept:
            part = range(start, min(batch.kept, start + room))
            group.append((batch.records, part))
            start, room = part.stop, room - len(part)
            if not room:
                yield group
                group, room = [], _SLICE
    if group:
        yield group


def _resolve(replies: Sequence[tuple[_Waiting, Reply]]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for entry, answer in replies:
        by_loop.setdefault(entry.loop, []).append((entry.future, answer))
    for loop, pairs in by_loop.items():
        _tell(loop, pairs)


def _tell(
    loop: asyncio.AbstractEventLoop, pairs: Sequence[tuple[asyncio.Future[Any], Any]]
) -> None:
    def tell() -> None:
        for future, answer in pairs:
            if not future.done():
                future.set_result(answer)

    if not loop.is_closed():
        loop.call_soon_threadsafe(tell)


def _busy(reason: str) -> Refusal:
    return Refusal(OVERLOADED, f"{reason}: try again later", {"Retry-After": "1"})


def _made_at_seconds(identity: str | None) -> float:
    """Creation time of a prediction, from its id (UUID version 7); 0 for other ids."""
    if identity is None or identity[14] != "7":
        return 0.0
    return int(identity[:8] + identity[9:13], 16) / 1000
