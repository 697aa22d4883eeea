"""Does the safe bound hold what it promises?  What predictions said against what their jobs really used.

The alarm is an exact one-sided test: if every job stayed within its safe bytes with the probability promised to it, how likely
would be as many misses as were seen, or more?  Below :data:`ALARM_PROBABILITY` it is too unlikely to be chance.  Jobs may have
been promised different coverages, so the number of misses is Poisson-binomial; with one coverage for all it is binomial.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpumemnet.units import MIB

ALARM_PROBABILITY: Final = 0.001
"""Of 200 jobs promised 99 %, 9 misses raise the alarm (95.5 % coverage); a service that keeps its word sees less than one false
alarm in a thousand windows."""
ALARM_RULE: Final = (
    "Over the last observations of a family: the exact one-sided probability of as many misses of the safe bytes or more, if "
    f"every job kept within them with the coverage promised to it. Below {ALARM_PROBABILITY:g} the alarm is on."
)
_NORMAL_95: Final = 1.959964


@dataclass(frozen=True, slots=True)
class Outcome:
    """A prediction and what its job used.

    Attributes:
        family, gpu, release: of the job and of the prediction.
        coverage: promised for the safe bytes.
        expected_bytes, safe_bytes: as predicted; safe bytes are ``None`` outside the model's support.
        peak_bytes: as observed; ``None`` where memory ran out and nobody knows at what.
        oom: whether memory ran out.
        limit_bytes: the memory that the job could have had, where that is known.
        challenger_expected_bytes, challenger_safe_bytes: what the challenger said, where it was asked.
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

    def covered(self, safe_bytes: int | None) -> bool | None:
        """Whether the job stayed within ``safe_bytes``; ``None`` where that cannot be said.

        A job that ran out of memory needed more than it had.  Had it less than the safe bytes, the bound was not put to the
        test; had it as much or more, or does nobody know, then the bound failed.
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
    """Probability of ``misses`` or more among jobs that are each covered with the probability in ``promised``."""
    if misses <= 0:
        return 1.0
    fewer = np.zeros(misses)  # [k]: probability of k misses among the jobs so far, k below ``misses``
    fewer[0] = 1.0
    for coverage in promised:
        missed = fewer * (1 - coverage)
        fewer *= coverage
        fewer[1:] += missed[:-1]
    return float(max(0.0, 1.0 - fewer.sum()))


def interval(successes: int, count: int) -> tuple[float, float] | None:
    """Wilson's 95 % interval of a share; ``None`` of nothing."""
    if not count:
        return None
    z2 = _NORMAL_95**2
    centre = (successes + z2 / 2) / (count + z2)
    half = _NORMAL_95 / (count + z2) * math.sqrt(successes * (count - successes) / count + z2 / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True, slots=True)
class Alarm:
    """Whether a family's coverage is below what was promised.

    Attributes:
        family: of the jobs.
        count: observations that put a safe bound to the test, at most the window.
        covered: of these, those that stayed within.
        promised: mean of the promised coverages; ``None`` of nothing.
        probability: of as many misses or more, if all promises held.
    """

    family: str
    count: int
    covered: int
    promised: float | None
    probability: float

    @property
    def on(self) -> bool:
        """Whether it is too unlikely to be chance."""
        return self.probability < ALARM_PROBABILITY


def alarm(family: str, newest_first: Iterable[Outcome], window: int) -> Alarm:
    """The alarm's state over the first ``window`` outcomes that tested their bound."""
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
    """What a group of predictions was worth: coverage, error and waste, and the challenger's beside where it was asked."""
    asked = [outcome for outcome in outcomes if outcome.challenger_expected_bytes is not None]
    return {
        "observations": len(outcomes),
        "oom": sum(outcome.oom for outcome in outcomes),
        "champion": _worth(outcomes, lambda outcome: (outcome.expected_bytes, outcome.safe_bytes)),
        "challenger": None
        if not asked
        else {
            "champion": _worth(asked, lambda outcome: (outcome.expected_bytes, outcome.safe_bytes)),
            "challenger": _worth(asked, lambda outcome: (outcome.challenger_expected_bytes, outcome.challenger_safe_bytes)),
        },
    }


def median_error_ratio(outcomes: Iterable[Outcome]) -> float | None:
    """Median of (expected - observed) / observed; ``None`` where no peak is known."""
    errors = [(one.expected_bytes - one.peak_bytes) / one.peak_bytes for one in outcomes if one.peak_bytes and not one.oom]
    return statistics.median(errors) if errors else None


def _worth(outcomes: Sequence[Outcome], said: Any) -> Mapping[str, Any]:
    kept = 0
    judged = 0
    errors: list[tuple[int, int]] = []
    unused: list[tuple[int, int]] = []
    promised: list[float] = []
    for outcome in outcomes:
        expected_bytes, safe_bytes = said(outcome)
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
        "under_prediction_rate": sum(error < 0 for error, _ in errors) / len(errors) if errors else None,
        "median_waste_mib": _median(waste / MIB for waste, _ in unused),
        "waste_share": sum(waste for waste, _ in unused) / sum(safe for _, safe in unused) if unused else None,
    }


def _median(values: Iterable[float]) -> float | None:
    listed = list(values)
    return statistics.median(listed) if listed else None
