"""Compares predictions with the memory that their jobs used, for the summary and the gauges, and
tests whether the safe bytes reach their nominal coverage.

Only jobs that ran on the GPU of their prediction are compared; the others are counted.

The alarm is an exact one-sided test.  Null hypothesis: every job stays within its safe bytes with
its nominal coverage.  The p-value is the probability of as many misses as observed, or more.  Below
:data:`ALARM_PROBABILITY` the alarm is on.  Jobs may have different coverages, so the number of
misses is Poisson-binomial; with one coverage for all it is binomial.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Row, Select, func, select

from gpumemnet.atomic_files import Document
from gpumemnet.job.job_table import Array
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.predict.conformal import bounds_kept

from .database import OBSERVATIONS, PREDICTIONS

ALARM_PROBABILITY: Final = 0.001
"""Of 200 jobs with 99 % nominal coverage, 9 misses raise the alarm (95.5 % coverage).
At nominal coverage, less than one window in a thousand raises a false alarm.
"""
MAX_SUMMARISED: Final = 5000
"""Most observations in a summary; the newest are used."""
SECONDS_PER_DAY: Final = 86_400


def miss_probability(promised: Iterable[float], misses: int) -> float:
    """Probability of ``misses`` or more among jobs that are each covered with the probability in
    ``promised``."""
    if misses <= 0:
        return 1.0
    fewer = np.zeros(misses)  # [k]: probability of k misses among the jobs so far, k < ``misses``
    fewer[0] = 1.0
    for coverage in promised:
        missed = fewer * (1 - coverage)
        fewer *= coverage
        fewer[1:] += missed[:-1]
    return float(max(0.0, 1.0 - fewer.sum()))


class Alarm(NamedTuple):
    """How well a family's safe bytes held over its last observations.

    Attributes:
        family: of the jobs.
        is_on: whether the coverage is significantly below what was promised.
        coverage: share of the jobs that stayed within their safe bytes; ``None`` where none tests it.
        promised_coverage: mean nominal coverage of the same jobs.
        error_ratio: median of (expected - observed) / observed.
    """

    family: str
    is_on: bool
    coverage: float | None
    promised_coverage: float | None
    error_ratio: float | None


def summarise(rows: Sequence[Row[Any]]) -> Document:
    """Coverage, error and waste of a group of predictions."""
    reasons = Counter(
        code for row in rows if row.reason_codes for code in row.reason_codes.split(",")
    )
    return {
        "observations": len(rows),
        "oom": sum(row.oom for row in rows),
        "without_limit": dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
        "champion": _worth(rows),
    }


def error_ratios(rows: Sequence[Row[Any]]) -> Array:
    """(expected - observed) / observed of the jobs whose peak is known."""
    peak = np.where(_column(rows, "oom") > 0, np.nan, _column(rows, "peak_bytes"))
    ratios = _column(rows, "expected_bytes") / peak - 1
    return ratios[~np.isnan(ratios)]


def _worth(rows: Sequence[Row[Any]]) -> Document:
    safe_bytes = _column(rows, "safe_bytes")
    kept = _kept(rows, safe_bytes)
    judged = ~np.isnan(kept)
    errors = error_ratios(rows)
    unused = (safe_bytes - _column(rows, "peak_bytes"))[kept == 1]
    return {
        "judged": int(judged.sum()),
        "covered": int(kept[judged].sum()),
        "coverage": _mean(kept[judged]),
        "promised_coverage": _mean(_column(rows, "coverage")[judged]),
        "median_error_percent": median(100 * errors),
        "median_absolute_error_percent": median(100 * np.abs(errors)),
        "under_prediction_rate": _mean(errors < 0),
        "waste_share": float(unused.sum() / safe_bytes[kept == 1].sum()) if len(unused) else None,
    }


def _kept(rows: Sequence[Row[Any]], safe_bytes: Array) -> Array:
    """Whether each job stayed within its safe bytes: 1, 0, or NaN where that is not known."""
    peak_bytes, limit_bytes = _column(rows, "peak_bytes"), _column(rows, "limit_bytes")
    had_bytes = np.where(np.isnan(limit_bytes), np.nan, np.fmax(limit_bytes, peak_bytes))
    return bounds_kept(peak_bytes, _column(rows, "oom") > 0, had_bytes, safe_bytes)


def _column(rows: Sequence[Row[Any]], name: str) -> Array:
    """A column of numbers, NaN where there is none."""
    return np.array([getattr(row, name) for row in rows], dtype=np.float64)


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None


def median(values: Array) -> float | None:
    """The median; ``None`` of no values."""
    return float(np.median(values)) if len(values) else None


def read_summary(connection: Connection, *, now: float, days: float) -> Document:
    """The response to ``GET /v1/observations/summary``."""
    since = now - days * SECONDS_PER_DAY
    counted = _counts(connection, since)
    compared = connection.execute(
        _compared().where(OBSERVATIONS.c.received_at >= since).limit(MAX_SUMMARISED)
    ).all()
    groups: dict[tuple[str, str, str], list[Row[Any]]] = defaultdict(list)
    for row in compared:
        groups[row.family, row.gpu, row.release].append(row)
    return {
        "days": days,
        **counted,
        "compared": len(compared),
        "complete": len(compared) < MAX_SUMMARISED,
        "groups": [
            {"family": family, "gpu": gpu, "release": release, **summarise(group)}
            for (family, gpu, release), group in sorted(groups.items())
        ],
    }


def read_alarms(connection: Connection, window: int) -> list[Alarm]:
    """The alarm of every family with observations, over the last ``window`` of them."""
    alarms = []
    for family in FAMILIES:
        # Some observations do not test their bound; twice the window leaves room for them.
        question = _compared().where(OBSERVATIONS.c.family == family).limit(2 * window)
        if rows := connection.execute(question).all():
            is_judged = ~np.isnan(_kept(rows, _column(rows, "safe_bytes")))
            judged = list(compress(rows, is_judged))[:window]
            worth = _worth(judged)
            misses = worth["judged"] - worth["covered"]
            probability = miss_probability((row.coverage for row in judged), misses)
            alarms.append(
                Alarm(
                    family,
                    probability < ALARM_PROBABILITY,
                    worth["coverage"],
                    worth["promised_coverage"],
                    median(error_ratios(rows[:window])),
                )
            )
    return alarms


def _compared() -> Select[Any]:
    observed, predicted = OBSERVATIONS.c, PREDICTIONS.c
    return (
        select(
            *(observed.family, observed.gpu, observed.peak_bytes, observed.oom),
            *(observed.limit_bytes, predicted.release, predicted.coverage),
            *(predicted.expected_bytes, predicted.safe_bytes, predicted.reason_codes),
        )
        .join(PREDICTIONS, predicted.id == observed.prediction_id)
        .where(predicted.gpu == observed.gpu)
        .order_by(observed.received_at.desc(), observed.id.desc())
    )


def _counts(connection: Connection, since: float) -> Document:
    observed, predicted = OBSERVATIONS.c, PREDICTIONS.c
    kinds = (
        observed.source,
        observed.oom,
        observed.prediction_id.is_not(None).label("predicted"),
        (predicted.gpu == observed.gpu).label("same_gpu"),
    )
    question = (
        select(*kinds, func.count().label("number"))
        .outerjoin(PREDICTIONS, predicted.id == observed.prediction_id)
        .where(observed.received_at >= since)
        .group_by(*kinds)
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
