"""The gate: whether a candidate is better than the champion, by paired differences on jobs that neither has learnt from.

Every judged job gives one loss for each measure, of the champion and of the candidate, and only their difference counts.  Whole
architectures are drawn anew in the bootstrap (cluster bootstrap; Field and Welsh, JRSS B 69, 2007), because jobs of one network
err alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.site.significance import binomial_tail
from gpumemnet.units import GIB

Array = NDArray[np.float64]

SUPERIOR: Final = ("error", "waste", "above safe")
"""Measures, at least one of which must be significantly better."""
MEASURES: Final = (*SUPERIOR, "wrong bin", "bin too low")
"""Measures, none of which may be worse."""
MOST_ERROR: Final = 0.2
"""Largest error in log-bytes that counts, so that a few outliers do not outweigh all other jobs."""
MOST_WASTE: Final = 1.0
"""Largest waste that counts: safe bytes of twice the memory."""
_SHARES: Final = ("above safe", "wrong bin", "bin too low")


@dataclass(frozen=True, slots=True)
class Rule:
    """The gate's numbers.

    Attributes:
        alpha: chance, for each track, that luck alone shows an improvement; shared out among the tests.
        least_gain: an improvement is one only from this share of the champion's loss on.
        most_error, most_waste: by this share of the champion's loss the candidate's may be larger,
        least_error, least_waste: and by this much where that is more: no scheduler would notice.
        most_share: so many of the jobs more may be above safe, in a wrong bin, or in one too low.
        luck: a larger loss stands against the candidate unless luck explains it with this chance.
        coverage: what safe bytes promise.
        coverage_alpha: a share above safe that is less likely than this under the promise breaks it;
        doubtful_coverage: one that is less likely than this, shared out among the parts, stands against a candidate if the
            champion has fewer.
        fewest_rows, fewest_architectures: judged jobs that a track needs to be promoted.
        fewest_guard_rows: jobs from which on a part can stand against it.
        draws, seed: of the bootstrap.
    """

    alpha: float = 0.05
    least_gain: float = 0.02
    most_error: float = 0.02
    most_waste: float = 0.1
    least_error: float = 0.0005
    least_waste: float = 0.02
    most_share: float = 0.01
    luck: float = 0.25
    coverage: float = 0.99
    coverage_alpha: float = 0.01
    doubtful_coverage: float = 0.05
    fewest_rows: int = 20
    fewest_architectures: int = 10
    fewest_guard_rows: int = 15
    draws: int = 2000
    seed: int = 0


RULE: Final = Rule()


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """The answers of champion and candidate for ``B`` jobs.

    Attributes:
        name: of the part, such as ``held-out architectures``.
        decides: whether an improvement here counts; elsewhere a loss does.
        label_bytes: measured, shape ``[B]``.
        architectures: of each job, shape ``[B]``.
        champion, candidate: expected and safe bytes, shape ``[2, B]``; where there are no safe bytes, the whole GPU.
    """

    name: str
    decides: bool
    label_bytes: Array
    architectures: NDArray[np.str_]
    champion: Array
    candidate: Array

    def __len__(self) -> int:
        return len(self.label_bytes)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure on one part: mean losses, and the chance that the candidate is no better, or no worse, by the bootstrap."""

    champion: float
    candidate: float
    p_not_better: float
    p_not_worse: float


@dataclass(frozen=True, slots=True)
class PartVerdict:
    """The gate's findings on one part.

    Attributes:
        name, decides, rows, architectures: of the part.
        measures: measure → its comparison.
        champion_keeps, candidate_keeps: whether the share above the safe bytes agrees with the promised coverage.
        better: measures shown to be better.
        against: sentences that stand against the candidate.
    """

    name: str
    decides: bool
    rows: int
    architectures: int
    measures: Mapping[str, Comparison]
    champion_keeps: bool
    candidate_keeps: bool
    better: tuple[str, ...]
    against: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the candidate takes the champion's place, and why, in sentences."""

    promote: bool
    reasons: tuple[str, ...]
    parts: tuple[PartVerdict, ...]

    def document(self) -> dict[str, Any]:
        """The verdict as a JSON-ready object."""
        return asdict(self)


def judge(parts: Sequence[Judged], rule: Rule | None = None) -> Verdict:
    """The verdict on a candidate.

    It is promoted when a part that decides, with enough jobs, shows one of :data:`SUPERIOR` to be better, no part shows any of
    :data:`MEASURES` to be worse, and its safe bytes keep their promise on every part that decides.
    """
    rule = rule or Rule()
    deciding = [part for part in parts if part.decides and _is_large(part, rule)]
    guards = [part for part in parts if part not in deciding and len(part) >= rule.fewest_guard_rows]
    if not deciding:
        found = ", ".join(f"{len(part)} of {part.name}" for part in parts if part.decides) or "none"
        needed = f"{rule.fewest_rows} jobs of {rule.fewest_architectures} architectures"
        return Verdict(False, (f"too few jobs to judge by ({found}): one part needs {needed}",), ())
    level = rule.alpha / (len(deciding) * len(SUPERIOR))
    doubt = max(rule.doubtful_coverage / len((*deciding, *guards)), rule.coverage_alpha)
    verdicts = tuple(_part_verdict(part, part in deciding, level, doubt, rule) for part in (*deciding, *guards))
    against = tuple(f"{verdict.name}: {sentence}" for verdict in verdicts for sentence in verdict.against)
    better = tuple(f"{verdict.name}: better {measure}" for verdict in verdicts for measure in verdict.better)
    if against:
        return Verdict(False, against, verdicts)
    if not better:
        return Verdict(False, ("no improvement that is more than luck",), verdicts)
    return Verdict(True, better, verdicts)


def _is_large(part: Judged, rule: Rule) -> bool:
    return len(part) >= rule.fewest_rows and len(np.unique(part.architectures)) >= rule.fewest_architectures


def losses(label_bytes: Array, answers: Array) -> dict[str, Array]:
    """The loss of each job in each of :data:`MEASURES`, from expected and safe bytes, shape ``[2, B]``.

    The error is in log-bytes, up to :data:`MOST_ERROR`; waste is what safe bytes are above the memory, as a share of it, up to
    :data:`MOST_WASTE`; the others are 0 or 1.
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


def _part_verdict(part: Judged, decides: bool, level: float, doubt: float, rule: Rule) -> PartVerdict:
    champion, candidate = losses(part.label_bytes, part.champion), losses(part.label_bytes, part.candidate)
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
    keeps = [_chance(one["above safe"], rule) >= rule.coverage_alpha for one in (champion, candidate)]
    # safe bytes that broke their promise were too tight: what it costs to keep it is no loss
    ignored = {"waste"} if keeps[1] and not keeps[0] else set()
    if measures["wrong bin"].p_not_better <= rule.alpha:
        ignored.add("bin too low")  # a champion that errs upwards has few bins too low, and many wrong
    better = tuple(measure for measure in SUPERIOR if decides and _is_better(measure, measures[measure], level, keeps, rule))
    if _chance(candidate["above safe"], rule) >= doubt:
        ignored.add("above safe")  # within the promise: a champion with fewer has paid for it with waste
    against = [_loss(measure, measures[measure], rule) for measure in MEASURES if measure not in ignored]
    if not keeps[1] and (decides or keeps[0]):
        share = measures["above safe"].candidate
        against.append(f"{share:.1%} of the jobs take more than the safe bytes, and {1.0 - rule.coverage:.0%} is promised")
    return PartVerdict(
        name=part.name,
        decides=decides,
        rows=len(part),
        architectures=len(np.unique(part.architectures)),
        measures=measures,
        champion_keeps=keeps[0],
        candidate_keeps=keeps[1],
        better=better,
        against=tuple(sentence for sentence in against if sentence),
    )


def _is_better(measure: str, found: Comparison, level: float, keeps: Sequence[bool], rule: Rule) -> bool:
    if measure == "above safe":  # fewer than promised is no merit: that is what waste pays for
        return found.p_not_better <= level and keeps[1] and not keeps[0]
    if measure == "waste" and not keeps[1]:
        return False
    return found.p_not_better <= level and found.candidate <= (1.0 - rule.least_gain) * found.champion


def _loss(measure: str, found: Comparison, rule: Rule) -> str | None:
    """The objection to the candidate in one measure: a loss above the limit that chance does not explain."""
    if measure in _SHARES:
        allowed = rule.most_share
        words = f"{measure} {found.candidate:.1%} of the jobs, the champion {found.champion:.1%}"
    else:
        is_error = measure == "error"
        most, least = (rule.most_error, rule.least_error) if is_error else (rule.most_waste, rule.least_waste)
        allowed = max(most * found.champion, least)
        words = f"{measure} {found.candidate:.2%}, the champion {found.champion:.2%}"
    if found.candidate - found.champion <= allowed or found.p_not_worse > rule.luck:
        return None
    return f"{words}: worse by more than is allowed"


def _chance(above: Array, rule: Rule) -> float:
    """Probability of at least this many jobs above their safe bytes if the coverage holds: exact binomial test."""
    return binomial_tail(int(above.sum()), len(above), 1.0 - rule.coverage)


def _bootstrap(differences: Array, architectures: NDArray[np.str_], rule: Rule) -> Array:
    """Mean differences over architectures drawn with replacement, shape ``[M, draws]``."""
    _, members = np.unique(architectures, return_inverse=True)
    count = int(members.max()) + 1
    sizes = np.bincount(members, minlength=count).astype(np.float64)
    sums = np.stack([np.bincount(members, weights=row, minlength=count) for row in differences])
    generator = np.random.default_rng(rule.seed)
    parts = []
    for first in range(0, rule.draws, 250):
        weights = generator.multinomial(count, np.full(count, 1.0 / count), size=min(250, rule.draws - first)).astype(np.float64)
        parts.append((sums @ weights.T) / (sizes @ weights.T))
    return np.concatenate(parts, axis=1)
