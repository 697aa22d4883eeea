"""Inserts predictions, their jobs and observations, few statements for many rows; deletes old ones.

One statement holds many rows, so the database works without the interpreter's lock and the event
loop continues; with a statement for each row the thread would wait for the lock as often.  Each job
is stored once, by the hash of its content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np
import orjson
from sqlalchemy import Connection, Table, delete, exists, select, text

from gpumemnet.errors import FieldError
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.training_job import (
    FIELD_DEFAULTS,
    NUMBER_FIELDS,
    OPTION_FIELDS,
    UNSTATED_AS_ZERO,
)
from gpumemnet.site.observations import Observation, check_capacity

from ..api.predictions import RecordBatch
from ..api.problems import CONFLICT, UNKNOWN, Refusal
from .database import JOBS, OBSERVATIONS, PREDICTIONS

ROWS_PER_STATEMENT: Final = (64, 8, 1)
SWEEP_ROWS: Final = 1000
SWEEP_LOCK: Final = 0x6770756D7377
_LARGEST: Final = 2**63 - 1
_SEEN_AGAIN: Final = (
    "(hash) DO UPDATE SET seen_at = excluded.seen_at WHERE jobs.seen_at < excluded.seen_at - 3600"
)
"""What happens to a job that is stored already: most often nothing."""

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Incoming:
    """An observation to be stored.

    Attributes:
        observation_id: its new id, unless it is stored already.
        observation: the observation.
        key_name: name of the API key that sent it.
        key: its idempotency key; without one, the hash of its content.
        content_hash: over its whole content.
        received_at: seconds since the epoch.
    """

    observation_id: str
    observation: Observation
    key_name: str
    key: str
    content_hash: str
    received_at: float


@dataclass(frozen=True)
class Stored:
    """An observation that is in the database.

    Attributes:
        observation_id: its id.
        created: whether this request stored it; false when the same was stored before.
        prediction_id, job_sha256, gpu: its prediction, its job and its GPU.
    """

    observation_id: str
    created: bool
    prediction_id: str | None
    job_sha256: str
    gpu: str


Reply = Stored | FieldError | Refusal


def prediction_rows(records: RecordBatch, row: int, now: float) -> tuple[Row, Row]:
    """The row of a job, and the row of its prediction.

    Args:
        records: predictions that were made at once.
        row: one of them.
        now: seconds since the epoch.
    """
    jobs, made = records.jobs, records.estimates
    document = job_document(jobs, row)
    job_hash = hashlib.sha256(document).hexdigest()
    is_unbounded = np.ma.getmaskarray(made.safe_bytes)[row]
    safe_bytes = None if is_unbounded else made.safe_bytes.data[row]
    return (
        (job_hash, jobs.options("family")[jobs.option_codes[row]], document.decode(), now),
        (
            *(records.prediction_ids[row], records.made_at_seconds, job_hash),
            *(records.model_sha256, made.model.name[:200], records.release[:200]),
            *(made.model.prediction_gpu.gpu[:100], float(made.coverage)),
            *(_stored_bytes(made.expected_bytes[row]), _stored_bytes(safe_bytes)),
            not made.reasons(row),
        ),
    )


def _stored_bytes(amount: int | None) -> int | None:
    """The amount, or the largest that a column holds."""
    return None if amount is None else min(int(amount), _LARGEST)


def write_predictions(
    connection: Connection, jobs: Mapping[str, Row], predictions: Sequence[Row]
) -> None:
    """Write predictions and their jobs."""
    _insert(connection, JOBS, sorted(jobs.values()), _SEEN_AGAIN)
    _insert(connection, PREDICTIONS, predictions)


def write_observations(connection: Connection, incoming: Sequence[Incoming]) -> list[Reply]:
    """Write observations; returns the result of each, in order."""
    predicted = _predictions_by_id(
        connection, {one.observation.prediction_id for one in incoming} - {None}
    )
    replies: dict[int, Reply] = {}
    jobs: dict[str, Row] = {}
    rows: dict[int, Row] = {}
    for index, one in enumerate(incoming):
        observation = one.observation
        found = predicted.get(observation.prediction_id or "")
        if found is not None:
            job_hash, family, gpu = found
            gpu = observation.gpu or gpu
        elif observation.job is not None and observation.gpu is not None:
            document = job_document(JobTable.from_jobs((observation.job,)), 0)
            job_hash = hashlib.sha256(document).hexdigest()
            family, gpu = observation.job.family, observation.gpu
            jobs[job_hash] = (job_hash, family, document.decode(), one.received_at)
        else:
            missing = f"there is no prediction {observation.prediction_id}, or none any more"
            replies[index] = Refusal(UNKNOWN, f"{missing}: send the job itself")
            continue
        try:
            check_capacity(observation, gpu)
        except FieldError as error:
            replies[index] = error
            continue
        prediction_id = None if found is None else observation.prediction_id
        rows[index] = _observation_row(one, prediction_id, job_hash, family, gpu)
    _insert(connection, JOBS, sorted(jobs.values()), _SEEN_AGAIN)
    # The same order in every process: otherwise two processes that store the same observations
    # could deadlock.
    ordered = sorted(rows.values(), key=lambda row: (row[-2], row[-3]))
    _insert(connection, OBSERVATIONS, ordered)
    keys = [incoming[index].key for index in rows]
    question = select(OBSERVATIONS).where(OBSERVATIONS.c.idempotency_key.in_(keys))
    stored = {(row.key_name, row.idempotency_key): row for row in connection.execute(question)}
    for index in rows:
        one = incoming[index]
        there = stored[one.key_name, one.key]
        if there.content_hash == one.content_hash:
            created = there.id == one.observation_id
            replies[index] = Stored(
                there.id, created, there.prediction_id, there.job_hash, there.gpu
            )
        else:
            taken = f"the idempotency key '{one.key}' was used for another observation"
            replies[index] = Refusal(CONFLICT, f"{taken}: give every observation its own")
    return [replies[index] for index in range(len(incoming))]


def sweep(connection: Connection, before: float) -> bool:
    """Delete some old predictions without an observation, and jobs without references.

    Returns:
        Whether there may be more.
    """
    if connection.dialect.name == "postgresql":
        alone = connection.execute(
            text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": SWEEP_LOCK}
        ).scalar()
        if not alone:
            return False
    observed = exists().where(OBSERVATIONS.c.prediction_id == PREDICTIONS.c.id)
    milliseconds = f"{int(before * 1000):012x}"  # an id begins with its time
    earlier = PREDICTIONS.c.id < f"{milliseconds[:8]}-{milliseconds[8:]}-7000-8000-000000000000"
    old = select(PREDICTIONS.c.id).where(earlier, ~observed).order_by(PREDICTIONS.c.id)
    identities = connection.execute(old.limit(SWEEP_ROWS)).scalars().all()
    if identities:
        connection.execute(delete(PREDICTIONS).where(PREDICTIONS.c.id.in_(identities)))
    if len(identities) == SWEEP_ROWS:
        return True
    used = exists().where(PREDICTIONS.c.job_hash == JOBS.c.hash)
    reported = exists().where(OBSERVATIONS.c.job_hash == JOBS.c.hash)
    unused = select(JOBS.c.hash).where(JOBS.c.seen_at < before, ~used, ~reported).limit(SWEEP_ROWS)
    hashes = connection.execute(unused).scalars().all()
    if hashes:
        connection.execute(delete(JOBS).where(JOBS.c.hash.in_(hashes)))
    return len(hashes) == SWEEP_ROWS


def _insert(
    connection: Connection, table: Table, rows: Sequence[Row], conflict: str = "DO NOTHING"
) -> None:
    """Insert rows with all columns of the table."""
    columns = table.columns.keys()
    mark = "%s" if connection.dialect.name == "postgresql" else "?"
    row = f"({', '.join([mark] * len(columns))})"
    start = 0
    for count in ROWS_PER_STATEMENT:
        statement = f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES {', '.join([row] * count)} ON CONFLICT {conflict}"  # noqa: S608
        while len(rows) - start >= count:
            values = tuple(chain.from_iterable(rows[start : start + count]))
            connection.exec_driver_sql(statement, values)
            start += count


def _observation_row(
    one: Incoming, prediction_id: str | None, job_hash: str, family: str, gpu: str
) -> Row:
    observation = one.observation
    return (
        one.observation_id,
        prediction_id,
        job_hash,
        family,
        gpu,
        observation.peak_bytes,
        observation.oom,
        observation.limit_bytes,
        observation.source,
        observation.driver,
        observation.cuda,
        observation.torch,
        None if observation.observed_at is None else observation.observed_at.timestamp(),
        one.received_at,
        one.key_name,
        one.key,
        one.content_hash,
    )


def _predictions_by_id(
    connection: Connection, identities: Iterable[str | None]
) -> dict[str, tuple[str, str, str]]:
    """Id → hash and family of the job, and GPU."""
    columns = (PREDICTIONS.c.id, PREDICTIONS.c.job_hash, JOBS.c.family, PREDICTIONS.c.gpu)
    question = (
        select(*columns)
        .join(JOBS, JOBS.c.hash == PREDICTIONS.c.job_hash)
        .where(PREDICTIONS.c.id.in_(identities))
    )
    return {row.id: (row.job_hash, row.family, row.gpu) for row in connection.execute(question)}


def job_document(jobs: JobTable, row: int) -> bytes:
    """The JSON document of one job, with what is known of each layer."""
    numbers = zip(NUMBER_FIELDS, jobs.numbers[:, row].tolist(), strict=True)
    return orjson.dumps(
        FIELD_DEFAULTS
        | dict(zip(OPTION_FIELDS, jobs.option_sets[jobs.option_codes[row]], strict=True))
        | {
            name: int(number) if number or name not in UNSTATED_AS_ZERO else None
            for name, number in numbers
        }
        | {
            "layers": [
                layer[:3] if layer.trains is None and layer.block is None else tuple(layer)
                for layer in jobs.layers(row)
            ]
        }
    )
