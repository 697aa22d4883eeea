"""Compares predictions with the memory that their jobs used, for the gauges, and tests whether the
safe bytes reach their nominal coverage.

Only jobs that ran on the GPU of their prediction are compared.

The alarm is an exact one-sided test.  Null hypothesis: every job stays within its safe bytes with
its nominal coverage.  The p-value is the probability of as many misses as observed, or more.  Below
:data:`ALARM_PROBABILITY` the alarm is on.  Jobs may have different coverages, so the number of
misses is Poisson-binomial; with one coverage for all it is binomial.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from sqlalchemy import Connection, Row, Select, select

from gpumemnet.job.job_table import Array
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.predict.conformal import bounds_kept

from .database import OBSERVATIONS, PREDICTIONS

ALARM_PROBABILITY: Final = 0.001
"""Of 200 jobs with 99 % nominal coverage, 9 misses raise the alarm (95.5 % coverage).
At nominal coverage, less than one window in a thousand raises a false alarm.
"""
WINDOW: Final = 200
"""Observations of a family that the alarm tests."""
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


def error_ratios(rows: Sequence[Row[Any]]) -> Array:
    """(expected - observed) / observed of the jobs whose peak is known."""
    peak = np.where(_column(rows, "oom") > 0, np.nan, _column(rows, "peak_bytes"))
    ratios = _column(rows, "expected_bytes") / peak - 1
    return ratios[~np.isnan(ratios)]


def _kept(rows: Sequence[Row[Any]]) -> Array:
    """Whether each job stayed within its safe bytes: 1, 0, or NaN where that is not known."""
    peak_bytes, limit_bytes = _column(rows, "peak_bytes"), _column(rows, "limit_bytes")
    had_bytes = np.where(np.isnan(limit_bytes), np.nan, np.fmax(limit_bytes, peak_bytes))
    return bounds_kept(peak_bytes, _column(rows, "oom") > 0, had_bytes, _column(rows, "safe_bytes"))


def _column(rows: Sequence[Row[Any]], name: str) -> Array:
    """A column of numbers, NaN where there is none."""
    return np.array([getattr(row, name) for row in rows], dtype=np.float64)


def _mean(values: Array) -> float | None:
    return float(values.mean()) if len(values) else None


def median(values: Array) -> float | None:
    """The median; ``None`` of no values."""
    return float(np.median(values)) if len(values) else None


def read_alarms(connection: Connection) -> list[Alarm]:
    """The alarm of every family with observations, over the last :data:`WINDOW` of them."""
    alarms = []
    for family in FAMILIES:
        # Some observations do not test their bound; twice the window leaves room for them.
        question = _compared().where(OBSERVATIONS.c.family == family).limit(2 * WINDOW)
        if rows := connection.execute(question).all():
            kept = _kept(rows)
            is_judged = ~np.isnan(kept)
            kept, promised = (
                values[is_judged][:WINDOW] for values in (kept, _column(rows, "coverage"))
            )
            probability = miss_probability(promised, int((1 - kept).sum()))
            alarms.append(
                Alarm(
                    family,
                    probability < ALARM_PROBABILITY,
                    _mean(kept),
                    _mean(promised),
                    median(error_ratios(rows[:WINDOW])),
                )
            )
    return alarms


def _compared() -> Select[Any]:
    observed, predicted = OBSERVATIONS.c, PREDICTIONS.c
    return (
        select(
            *(observed.peak_bytes, observed.oom, observed.limit_bytes),
            *(predicted.coverage, predicted.expected_bytes, predicted.safe_bytes),
        )
        .join(PREDICTIONS, predicted.id == observed.prediction_id)
        .where(predicted.gpu == observed.gpu)
        .order_by(observed.received_at.desc(), observed.id.desc())
    )
