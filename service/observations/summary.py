"""Joins predictions with the memory that their jobs used, for the summary and the gauges.

It compares only jobs that ran on the GPU of their prediction, and counts the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Final

from sqlalchemy import Connection, Select, func, select

from gpumemnet.job.training_job import FAMILIES

from .alarm import (
    ALARM_PROBABILITY,
    ALARM_RULE,
    Alarm,
    Outcome,
    alarm,
    median_error_ratio,
    summarise,
)
from .database_tables import CHALLENGES, OBSERVATIONS, PREDICTIONS

MAX_SUMMARISED: Final = 5000
"""Most observations in a summary; the newest are used."""
SECONDS_PER_DAY: Final = 86_400


def read_summary(connection: Connection, *, now: float, days: float, window: int) -> dict[str, Any]:
    """The response to ``GET /v1/observations/summary``."""
    since = now - days * SECONDS_PER_DAY
    counted = _counts(connection, since)
    outcomes = _outcomes(
        connection, _compared().where(OBSERVATIONS.c.received_at >= since).limit(MAX_SUMMARISED)
    )
    groups: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.family, outcome.gpu, outcome.release].append(outcome)
    return {
        "days": days,
        **counted,
        "compared": len(outcomes),
        "complete": len(outcomes) < MAX_SUMMARISED,
        "groups": [
            {"family": family, "gpu": gpu, "release": release, **summarise(group)}
            for (family, gpu, release), group in sorted(groups.items())
        ],
        "alarm": {
            "rule": ALARM_RULE,
            "threshold": ALARM_PROBABILITY,
            "window": window,
            "families": [_alarm_document(found) for found, _ in read_alarms(connection, window)],
        },
    }


def read_alarms(connection: Connection, window: int) -> list[tuple[Alarm, float | None]]:
    """For every family with observations: the alarm's state, and the median error ratio over the
    same window."""
    found = []
    for family in FAMILIES:
        # Some outcomes do not test their bound; twice the window leaves room for them.
        question = _compared().where(OBSERVATIONS.c.family == family).limit(2 * window)
        outcomes = _outcomes(connection, question)
        if outcomes:
            found.append((alarm(family, outcomes, window), median_error_ratio(outcomes[:window])))
    return found


def _compared() -> Select[Any]:
    observed, predicted, challenged = OBSERVATIONS.c, PREDICTIONS.c, CHALLENGES.c
    return (
        select(
            observed.family,
            observed.gpu,
            predicted.release,
            predicted.coverage,
            predicted.expected_bytes,
            predicted.safe_bytes,
            observed.peak_bytes,
            observed.oom,
            observed.limit_bytes,
            challenged.expected_bytes,
            challenged.safe_bytes,
            predicted.reason_codes,
        )
        .join(PREDICTIONS, predicted.id == observed.prediction_id)
        .outerjoin(CHALLENGES, challenged.prediction_id == observed.prediction_id)
        .where(predicted.gpu == observed.gpu)
        .order_by(observed.received_at.desc(), observed.id.desc())
    )


def _outcomes(connection: Connection, question: Select[Any]) -> list[Outcome]:
    return [Outcome(*row) for row in connection.execute(question)]


def _counts(connection: Connection, since: float) -> dict[str, Any]:
    observed, predicted = OBSERVATIONS.c, PREDICTIONS.c
    question = (
        select(
            observed.source,
            observed.oom,
            observed.prediction_id.is_not(None).label("predicted"),
            (predicted.gpu == observed.gpu).label("same_gpu"),
            func.count().label("number"),
        )
        .outerjoin(PREDICTIONS, predicted.id == observed.prediction_id)
        .where(observed.received_at >= since)
        .group_by(
            observed.source,
            observed.oom,
            observed.prediction_id.is_not(None),
            predicted.gpu == observed.gpu,
        )
    )
    rows = connection.execute(question).all()
    sources: Counter[str] = Counter()
    for row in rows:
        sources[row.source] += row.number
    return {
        "observations": _total(rows),
        "oom": _total(row for row in rows if row.oom),
        "without_prediction": _total(row for row in rows if not row.predicted),
        "on_another_gpu": _total(row for row in rows if row.predicted and not row.same_gpu),
        "sources": dict(sorted(sources.items())),
    }


def _total(rows: Iterable[Any]) -> int:
    return sum(row.number for row in rows)


def _alarm_document(found: Alarm) -> dict[str, Any]:
    return {
        "family": found.family,
        "on": found.on,
        "judged": found.count,
        "covered": found.covered,
        "coverage": found.covered / found.count if found.count else None,
        "promised_coverage": found.promised,
        "probability": found.probability,
    }
