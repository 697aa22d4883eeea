"""Compares predictions with the memory that their jobs used, for the summary and the gauges, and
tests whether the safe bytes reach their nominal coverage.

Only jobs that ran on the GPU of their prediction are compared; the others are counted.

The alarm is an exact one-sided test.  Null hypothesis: every job stays within its safe bytes with
its nominal coverage.  The p-value is the probability of as many misses as observed, or more.  Below
:data:`ALARM_PROBABILITY` the alarm is on.  Jobs may have different coverages, so the number of
misses is Poisson-binomial; with one coverage for all it is binomial.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection, Select, func, select

from gpumemnet.job.training_job import FAMILIES
from gpumemnet.units import MIB

from .database import CHALLENGES, JOBS, OBSERVATIONS, PREDICTIONS

ALARM_PROBABILITY: Final = 0.001
"""Of 200 jobs with 99 % nominal coverage, 9 misses raise the alarm (95.5 % coverage).
At nominal coverage, less than one window in a thousand raises a false alarm.
"""
ALARM_RULE: Final = (
    "Over the last observations of a family: the exact one-sided probability of as many misses of the safe bytes or more, if "
    f"every job kept within them with the coverage promised to it. Below {ALARM_PROBABILITY:g} the alarm is on."
)
_NORMAL_95: Final = 1.959964


@dataclass(frozen=True, slots=True)
class Outcome:
    """A prediction and the memory that its job used.

    Attributes:
        family, gpu, release: of the job and of the prediction.
        coverage: nominal coverage of the safe bytes.
        expected_bytes, safe_bytes: as predicted; safe bytes are ``None`` outside the model's
            support.
        peak_bytes: as observed; ``None`` when the job ran out of memory and its peak is unknown.
        oom: whether the job ran out of memory.
        limit_bytes: the memory available to the job; ``None`` when unknown.
        challenger_expected_bytes, challenger_safe_bytes: as the challenger predicted; ``None``
        without its prediction.
        reason_codes: why there are no safe bytes: short names, separated by commas.
    """

    family: str
    gpu: str
    release: str
    coverage: float
    expected_bytes: int
    safe_bytes: int | None
    peak_bytes: int | None
    oom: bool
    limit_bytes: int | None = None
    challenger_expected_bytes: int | None = None
    challenger_safe_bytes: int | None = None
    reason_codes: str | None = None

    def covered(self, safe_bytes: int | None) -> bool | None:
        """Whether the job stayed within ``safe_bytes``; ``None`` when that is unknown.

        A job that ran out of memory needed more than its limit.  With a limit below the safe bytes,
        the bound was not tested. With a limit of at least the safe bytes, or an unknown limit, the
        bound counts as missed.
        """
        if safe_bytes is None:
            return None
        if not self.oom:
            return self.peak_bytes is not None and self.peak_bytes <= safe_bytes
        had_bytes = max(self.limit_bytes or 0, self.peak_bytes or 0)
        if self.limit_bytes is not None and had_bytes < safe_bytes:
            return None
        return False


def miss_probability(promised: Sequence[float], misses: int) -> float:
    """Probability of ``misses`` or more among jobs that are each covered with the probability in
    ``promised``."""
    if misses <= 0:
        return 1.0
    fewer = np.zeros(
        misses
    )  # [k]: probability of k misses among the jobs so far, k below ``misses``
    fewer[0] = 1.0
    for coverage in promised:
        missed = fewer * (1 - coverage)
        fewer *= coverage
        fewer[1:] += missed[:-1]
    return float(max(0.0, 1.0 - fewer.sum()))


def interval(successes: int, count: int) -> tuple[float, float] | None:
    """Wilson's 95 % interval of a share; ``None`` for a count of zero."""
    if not count:
        return None
    z2 = _NORMAL_95**2
    centre = (successes + z2 / 2) / (count + z2)
    half = _NORMAL_95 / (count + z2) * math.sqrt(successes * (count - successes) / count + z2 / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True, slots=True)
class Alarm:
    """Whether a family's coverage is below its nominal coverage.

    Attributes:
        family: of the jobs.
        count: observations that tested a safe bound, at most the window.
        covered: of these, the jobs that stayed within the bound.
        promised: mean nominal coverage; ``None`` for a count of zero.
        probability: of as many misses or more, at nominal coverage.
    """

    family: str
    count: int
    covered: int
    promised: float | None
    probability: float

    @property
    def on(self) -> bool:
        """Whether the probability is below :data:`ALARM_PROBABILITY`."""
        return self.probability < ALARM_PROBABILITY


def alarm(family: str, newest_first: Iterable[Outcome], window: int) -> Alarm:
    """The state of the alarm over the first ``window`` outcomes that tested their bound."""
    promised: list[float] = []
    covered = 0
    for outcome in newest_first:
        kept = outcome.covered(outcome.safe_bytes)
        if kept is None:
            continue
        promised.append(outcome.coverage)
        covered += kept
        if len(promised) == window:
            break
    count = len(promised)
    mean = sum(promised) / count if count else None
    return Alarm(family, count, covered, mean, miss_probability(promised, count - covered))


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Coverage, error and waste of a group of predictions, and the same for the challenger where it
    predicted."""
    compared = [outcome for outcome in outcomes if outcome.challenger_expected_bytes is not None]
    return {
        "observations": len(outcomes),
        "oom": sum(outcome.oom for outcome in outcomes),
        "without_limit": _counted_reasons(outcomes),
        "champion": _worth(outcomes, lambda outcome: (outcome.expected_bytes, outcome.safe_bytes)),
        "challenger": None
        if not compared
        else {
            "champion": _worth(
                compared, lambda outcome: (outcome.expected_bytes, outcome.safe_bytes)
            ),
            "challenger": _worth(
                compared,
                lambda outcome: (outcome.challenger_expected_bytes, outcome.challenger_safe_bytes),
            ),
        },
    }


def _counted_reasons(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Why predictions had no limit, the most frequent reason first."""
    reasons = Counter(
        code
        for outcome in outcomes
        if outcome.reason_codes
        for code in outcome.reason_codes.split(",")
    )
    return dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))


def median_error_ratio(outcomes: Iterable[Outcome]) -> float | None:
    """Median of (expected - observed) / observed; ``None`` when no peak is known."""
    errors = [
        (one.expected_bytes - one.peak_bytes) / one.peak_bytes
        for one in outcomes
        if one.peak_bytes and not one.oom
    ]
    return statistics.median(errors) if errors else None


def _worth(outcomes: Sequence[Outcome], amounts: Any) -> Mapping[str, Any]:
    kept = 0
    judged = 0
    errors: list[tuple[int, int]] = []
    unused: list[tuple[int, int]] = []
    promised: list[float] = []
    for outcome in outcomes:
        expected_bytes, safe_bytes = amounts(outcome)
        covered = outcome.covered(safe_bytes)
        if covered is not None:
            judged += 1
            kept += covered
            promised.append(outcome.coverage)
        if outcome.oom or not outcome.peak_bytes:
            continue
        errors.append((expected_bytes - outcome.peak_bytes, outcome.peak_bytes))
        if covered:
            unused.append((safe_bytes - outcome.peak_bytes, safe_bytes))
    bounds = interval(kept, judged)
    return {
        "judged": judged,
        "covered": kept,
        "coverage": kept / judged if judged else None,
        "coverage_interval": None if bounds is None else list(bounds),
        "promised_coverage": sum(promised) / judged if judged else None,
        "median_error_mib": _median(error / MIB for error, _ in errors),
        "median_error_percent": _median(100 * error / peak for error, peak in errors),
        "median_absolute_error_percent": _median(100 * abs(error) / peak for error, peak in errors),
        "under_prediction_rate": sum(error < 0 for error, _ in errors) / len(errors)
        if errors
        else None,
        "median_waste_mib": _median(waste / MIB for waste, _ in unused),
        "waste_share": sum(waste for waste, _ in unused) / sum(safe for _, safe in unused)
        if unused
        else None,
    }


def _median(values: Iterable[float]) -> float | None:
    listed = list(values)
    return statistics.median(listed) if listed else None


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


def read_prediction(connection: Connection, *, identity: str) -> dict[str, Any] | None:
    """The response to ``GET /v1/predictions/{prediction_id}``; ``None`` without such a prediction."""
    predicted, observed = PREDICTIONS.c, OBSERVATIONS.c
    question = (
        select(PREDICTIONS, JOBS.c.document, observed.peak_bytes, observed.oom)
        .join(JOBS, JOBS.c.hash == predicted.job_hash)
        .outerjoin(OBSERVATIONS, observed.prediction_id == predicted.id)
        .where(predicted.id == identity)
        .order_by(observed.received_at.desc())
    )
    row = connection.execute(question).first()
    if row is None:
        return None
    return {
        "prediction_id": row.id,
        "made_at": datetime.fromtimestamp(row.made_at, UTC).isoformat(),
        "job": row.document,
        "gpu": row.gpu,
        "release": row.release,
        "model": row.model_name,
        "model_sha256": row.model_sha256,
        "coverage": row.coverage,
        "expected_bytes": row.expected_bytes,
        "safe_bytes": row.safe_bytes,
        "in_support": row.in_support,
        "reason_codes": row.reason_codes.split(",") if row.reason_codes else [],
        "observed_bytes": row.peak_bytes,
        "oom": row.oom,
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
