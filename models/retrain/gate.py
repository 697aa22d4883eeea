"""The gate: whether a candidate is better than the champion, by paired differences on jobs that
neither was trained on.

Every judged job gives one loss for each measure, of the champion and of the candidate, and only
their difference counts.  The bootstrap draws whole architectures (cluster bootstrap; Field and
Welsh, JRSS B 69, 2007), because errors of jobs of one network are correlated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job.job_table import Array
from gpumemnet.predict.conformal import binomial_tail
from gpumemnet.units import GIB

SUPERIOR: Final = ("error", "waste", "above safe")
"""Measures, at least one of which must be significantly better."""
MEASURES: Final = (*SUPERIOR, "wrong bin", "bin too low")
"""Measures, none of which may be worse."""
MOST_ERROR: Final = 0.2
"""Largest error in log-bytes that counts, so that a few outliers do not outweigh all other jobs."""
MOST_WASTE: Final = 1.0
"""Largest waste that counts: safe bytes of twice the memory."""
_SHARES: Final = ("above safe", "wrong bin", "bin too low")


@dataclass(frozen=True)
class Rule:
    """The gate's numbers.

    Attributes:
        alpha: significance level of an improvement for each split, divided among the tests.
        least_gain: smallest improvement that counts, as a share of the champion's loss.
        most_error, most_waste: largest increase of error and waste that is allowed, as a share of
            the champion's loss.
        least_error, least_waste: an increase up to this amount is always allowed: no scheduler
            would notice it.
        most_share: largest increase that is allowed in the shares of jobs above safe, in a wrong
            bin, and in a bin too low.
        worse_alpha: a larger increase is an objection only if its p-value is at most this.
        coverage: coverage of the safe bytes.
        coverage_alpha: the coverage is broken where the share above safe has a p-value below this.
        doubtful_coverage: p-value, divided among the parts, below which more jobs above safe than
            the champion's are an objection.
        fewest_rows, fewest_architectures: jobs and architectures that a part needs to decide.
        fewest_guard_rows, fewest_guard_architectures: jobs and architectures that a guard needs: of
            three architectures the bootstrap calls almost any difference significant.
        draws, seed: number of bootstrap samples, and their seed.
    """

    alpha: float = 0.05
    least_gain: float = 0.02
    most_error: float = 0.02
    most_waste: float = 0.1
    least_error: float = 0.0005
    least_waste: float = 0.02
    most_share: float = 0.01
    worse_alpha: float = 0.25
    coverage: float = 0.99
    coverage_alpha: float = 0.01
    doubtful_coverage: float = 0.05
    fewest_rows: int = 20
    fewest_architectures: int = 10
    fewest_guard_rows: int = 15
    fewest_guard_architectures: int = 5
    draws: int = 2000
    seed: int = 0


RULE: Final = Rule()


@dataclass(frozen=True, eq=False)
class Judged:
    """The answers of champion and candidate for ``B`` jobs.

    Attributes:
        name: of the part, such as ``held-out architectures``.
        decides: whether an improvement here counts; elsewhere a loss does.
        label_bytes: measured, shape ``[B]``.
        architectures: of each job, shape ``[B]``.
        champion, candidate: expected and safe bytes, shape ``[2, B]``; where there are no safe
            bytes, the whole GPU.
    """

    name: str
    decides: bool
    label_bytes: Array
    architectures: NDArray[np.str_]
    champion: Array
    candidate: Array

    def __len__(self) -> int:
        return len(self.label_bytes)


@dataclass(frozen=True)
class Comparison:
    """One measure on one part: mean losses, and the chance that the candidate is not better, or not
    worse, by the bootstrap."""

    champion: float
    candidate: float
    p_not_better: float
    p_not_worse: float


@dataclass(frozen=True)
class PartVerdict:
    """The gate's findings on one part.

    Attributes:
        name, decides, rows, architectures: of the part.
        measures: measure → its comparison.
        champion_keeps_coverage, candidate_keeps_coverage: whether the share above the safe bytes
        agrees with the coverage.
        better: measures shown to be better.
        objections: sentences that speak against the candidate.
    """

    name: str
    decides: bool
    rows: int
    architectures: int
    measures: Mapping[str, Comparison]
    champion_keeps_coverage: bool
    candidate_keeps_coverage: bool
    better: tuple[str, ...]
    objections: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """Whether the candidate takes the champion's place, and why, in sentences."""

    promote: bool
    reasons: tuple[str, ...]
    parts: tuple[PartVerdict, ...]


def judge(parts: Sequence[Judged], rule: Rule = RULE) -> Verdict:
    """The verdict on a candidate.

    It is promoted when a part that decides, with enough jobs, shows one of :data:`SUPERIOR` to be
    better, no part shows any of :data:`MEASURES` to be worse, and its safe bytes keep their promise
    on every part that decides.
    """
    least = (rule.fewest_rows, rule.fewest_architectures)
    deciding = [part for part in parts if part.decides and _has_at_least(part, *least)]
    least = (rule.fewest_guard_rows, rule.fewest_guard_architectures)
    guards = [part for part in parts if part not in deciding and _has_at_least(part, *least)]
    if not deciding:
        counts = (
            ", ".join(f"{len(part)} of {part.name}" for part in parts if part.decides) or "none"
        )
        needed = f"{rule.fewest_rows} jobs of {rule.fewest_architectures} architectures"
        return Verdict(
            False, (f"too few jobs to judge by ({counts}): one part needs {needed}",), ()
        )
    level = rule.alpha / (len(deciding) * len(SUPERIOR))
    doubtful_level = max(rule.doubtful_coverage / len((*deciding, *guards)), rule.coverage_alpha)
    verdicts = tuple(
        _part_verdict(part, part in deciding, level, doubtful_level, rule)
        for part in (*deciding, *guards)
    )
    objections = tuple(
        f"{verdict.name}: {sentence}" for verdict in verdicts for sentence in verdict.objections
    )
    better = tuple(
        f"{verdict.name}: better {measure}" for verdict in verdicts for measure in verdict.better
    )
    if objections:
        return Verdict(False, objections, verdicts)
    if not better:
        return Verdict(False, ("no significant improvement",), verdicts)
    return Verdict(True, better, verdicts)


def _has_at_least(part: Judged, rows: int, architectures: int) -> bool:
    return len(part) >= rows and len(np.unique(part.architectures)) >= architectures


def losses(label_bytes: Array, answers: Array) -> dict[str, Array]:
    """The loss of each job in each of :data:`MEASURES`, from expected and safe bytes, shape ``[2,
    B]``.

    The error is in log-bytes, up to :data:`MOST_ERROR`; waste is what safe bytes are above the
    memory, as a share of it, up to :data:`MOST_WASTE`; the others are 0 or 1.
    """
    expected, safe = answers
    bins, predicted = np.floor(label_bytes / GIB), np.floor(expected / GIB)
    return {
        "error": np.minimum(np.abs(np.log(expected / label_bytes)), MOST_ERROR),
        "waste": np.clip(safe / label_bytes - 1.0, 0.0, MOST_WASTE),
        "above safe": (label_bytes > safe).astype(np.float64),
        "wrong bin": (bins != predicted).astype(np.float64),
        "bin too low": (bins > predicted).astype(np.float64),
    }


def _part_verdict(
    part: Judged, decides: bool, level: float, doubtful_level: float, rule: Rule
) -> PartVerdict:
    champion, candidate = (
        losses(part.label_bytes, part.champion),
        losses(part.label_bytes, part.candidate),
    )
    differences = np.stack([candidate[measure] - champion[measure] for measure in MEASURES])
    drawn = _bootstrap(differences, part.architectures, rule)
    measures = {
        measure: Comparison(
            champion=float(champion[measure].mean()),
            candidate=float(candidate[measure].mean()),
            p_not_better=float((1 + (drawn[row] >= 0.0).sum()) / (1 + rule.draws)),
            p_not_worse=float((1 + (drawn[row] <= 0.0).sum()) / (1 + rule.draws)),
        )
        for row, measure in enumerate(MEASURES)
    }
    keeps_coverage = [
        _coverage_p_value(losses_by_measure["above safe"], rule) >= rule.coverage_alpha
        for losses_by_measure in (champion, candidate)
    ]
    # the champion's safe bytes were too low, so the waste of correct ones is no loss
    ignored = {"waste"} if keeps_coverage[1] and not keeps_coverage[0] else set()
    if measures["wrong bin"].p_not_better <= rule.alpha:
        ignored.add(
            "bin too low"
        )  # a champion that predicts too much has few bins too low, and many wrong bins
    better = tuple(
        measure
        for measure in SUPERIOR
        if decides and _is_better(measure, measures[measure], level, keeps_coverage, rule)
    )
    if _coverage_p_value(candidate["above safe"], rule) >= doubtful_level:
        ignored.add(
            "above safe"
        )  # within the coverage: a champion with fewer has more waste instead
    objections = [
        _objection(measure, measures[measure], rule)
        for measure in MEASURES
        if measure not in ignored
    ]
    if not keeps_coverage[1] and (decides or keeps_coverage[0]):
        share = measures["above safe"].candidate
        objections.append(
            f"{share:.1%} of the jobs take more than the safe bytes, and {1.0 - rule.coverage:.0%} is promised"
        )
    return PartVerdict(
        name=part.name,
        decides=decides,
        rows=len(part),
        architectures=len(np.unique(part.architectures)),
        measures=measures,
        champion_keeps_coverage=keeps_coverage[0],
        candidate_keeps_coverage=keeps_coverage[1],
        better=better,
        objections=tuple(sentence for sentence in objections if sentence),
    )


def _is_better(
    measure: str, comparison: Comparison, level: float, keeps_coverage: Sequence[bool], rule: Rule
) -> bool:
    if measure == "above safe":  # fewer than the coverage allows is no merit: it costs waste
        return comparison.p_not_better <= level and keeps_coverage[1] and not keeps_coverage[0]
    if measure == "waste" and not keeps_coverage[1]:
        return False
    return (
        comparison.p_not_better <= level
        and comparison.candidate <= (1.0 - rule.least_gain) * comparison.champion
    )


def _objection(measure: str, comparison: Comparison, rule: Rule) -> str | None:
    """The objection to the candidate in one measure: a loss above the limit that chance does not
    explain."""
    if measure in _SHARES:
        allowed = rule.most_share
        text = f"{measure} {comparison.candidate:.1%} of the jobs, the champion {comparison.champion:.1%}"
    else:
        is_error = measure == "error"
        most_share, least_amount = (
            (rule.most_error, rule.least_error) if is_error else (rule.most_waste, rule.least_waste)
        )
        allowed = max(most_share * comparison.champion, least_amount)
        text = f"{measure} {comparison.candidate:.2%}, the champion {comparison.champion:.2%}"
    if (
        comparison.candidate - comparison.champion <= allowed
        or comparison.p_not_worse > rule.worse_alpha
    ):
        return None
    return f"{text}: worse by more than is allowed"


def _coverage_p_value(above: Array, rule: Rule) -> float:
    """Probability of at least this many jobs above their safe bytes if the coverage holds: exact
    binomial test."""
    return binomial_tail(int(above.sum()), len(above), 1.0 - rule.coverage)


def _bootstrap(differences: Array, architectures: NDArray[np.str_], rule: Rule) -> Array:
    """Sums of differences over architectures drawn with replacement, shape ``[M, draws]``.  Only
    their signs matter, so they are not divided by the number of jobs."""
    _, members = np.unique(architectures, return_inverse=True)
    count = int(members.max()) + 1
    sums = np.stack([np.bincount(members, weights=row, minlength=count) for row in differences])
    generator = np.random.default_rng(rule.seed)
    parts = []
    for first in range(0, rule.draws, 250):
        weights = generator.multinomial(
            count, np.full(count, 1.0 / count), size=min(250, rule.draws - first)
        ).astype(np.float64)
        parts.append(sums @ weights.T)
    return np.concatenate(parts, axis=1)
