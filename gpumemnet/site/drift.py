"""Detects drift: recent jobs that differ from the training data, or that take more or less memory
than predicted.

Three things are tested for every family and GPU with enough jobs: the error, the coverage of the
safe bytes, and the share of jobs outside the support.
Something counts as drift when it is both too unlikely to be chance, corrected for the number of
tests, and large enough to matter: among many jobs some test always finds a difference.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from scipy import stats

from gpumemnet.errors import UnsupportedJobError
from gpumemnet.gpu import known_profile
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.physics.replicas import WITH_OTHERS
from gpumemnet.predict.conformal import binomial_tail, bounds_kept
from gpumemnet.predict.prediction import PredictionTable
from gpumemnet.predict.predictor import Predictor
from gpumemnet.site.observations import SiteRows

KINDS: Final = ("error", "coverage", "support")
ALPHA: Final = 0.01
WINDOW: Final = 200
MIN_JOBS: Final = 20
ERROR_MATTERS: Final = 0.05
"""Smallest relative error of the median that counts; the models' own spread explains less."""
TOLERATED_OUTSIDE: Final = 0.05
"""Share of jobs outside the support that is normal."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one test.

    Attributes:
        kind: one of :data:`KINDS`.
        family, gpu: of the jobs; the GPU is ``None`` where only jobs are known.
        jobs: number of jobs tested.
        effect: how far it is off: share of the median, or of jobs.
        matters: the effect from which it counts.
        probability: of such an effect, or a larger one, by chance.
        corrected: the same, by Bonferroni's correction for the number of tests.
        is_drift: whether it is both unlikely and large.
        sentence: in words.
    """

    kind: str
    jobs: int
    effect: float
    matters: float
    probability: float
    sentence: str
    family: str = ""
    gpu: str | None = None
    corrected: float = 1.0
    is_drift: bool = False


RULE: Final = (
    f"Retrain when a test of {', '.join(KINDS)} fails: its "
    f"probability is below {ALPHA:g} after Bonferroni's correction for all tests of the run, and its effect matters: a median "
    f"{ERROR_MATTERS:.0%} off, coverage below the promise, or more than {TOLERATED_OUTSIDE:.0%} of the jobs outside the "
    "support."
)


@dataclass(frozen=True)
class DriftReport:
    """The tests of one run and their results.

    Attributes:
        findings: every test: drift first, then in the order of :data:`KINDS`, the least likely
            first.
        causes: the findings that start a retraining, by :data:`RULE`.
        notes: what could not be tested, and why.
    """

    findings: tuple[Finding, ...]
    causes: tuple[Finding, ...]
    notes: tuple[str, ...]


def find_drift(rows: SiteRows, predictor: Predictor) -> DriftReport:
    """Test the newest :data:`WINDOW` rows of every family and GPU.

    Args:
        rows: recent jobs, with what they took where that is known; without times, the last rows of
            the files are the newest.
        predictor: what predicts now.
    """
    # A retraining, which a finding starts, does not learn from replicas.
    alone = rows.take(rows.jobs.column("ranks") <= 1)
    notes = [f"{len(rows) - len(alone)} jobs: {WITH_OTHERS}"] if len(alone) < len(rows) else []
    findings: list[Finding] = []
    for family, gpu, group in _groups(alone):
        name = f"{family} jobs on {gpu}" if gpu else f"{family} jobs"
        if len(group) < MIN_JOBS:
            notes.append(f"{name}: {len(group)} of them, and {MIN_JOBS} are needed to say anything")
            continue
        order = np.argsort(np.nan_to_num(group.observed_at), kind="stable")
        try:
            found, note = _group_findings(group.take(order[-WINDOW:]), family, gpu, predictor)
        except UnsupportedJobError as error:
            found, note = [], error.reason
        findings += found
        if note:
            notes.append(f"{name}: {note}")
    corrected = [
        replace(one, corrected=min(1.0, len(findings) * one.probability)) for one in findings
    ]
    findings = [
        replace(one, is_drift=one.corrected < ALPHA and one.effect >= one.matters)
        for one in corrected
    ]
    findings.sort(
        key=lambda one: (not one.is_drift, KINDS.index(one.kind), one.corrected, -one.effect)
    )
    causes = tuple(one for one in findings if one.is_drift)
    return DriftReport(tuple(findings), causes, tuple(notes))


def _groups(rows: SiteRows) -> Iterator[tuple[str, str | None, SiteRows]]:
    families = rows.jobs.option_column("family")
    pairs = {*zip(families, rows.gpu, strict=True)}
    for family, gpu in sorted(pairs, key=lambda pair: (FAMILIES.index(pair[0]), pair[1] or "")):
        yield family, gpu, rows.take((families == family) & (rows.gpu == gpu))


def _group_findings(
    rows: SiteRows,
    family: str,
    gpu: str | None,
    predictor: Predictor,
) -> tuple[list[Finding], str | None]:
    is_known = gpu is None or known_profile(gpu) is not None
    predicted = predictor.predict_table(rows.jobs, gpu=gpu if is_known else None)
    findings = [_support(predicted)]
    note = None
    if is_known:
        findings += [*_error(rows, predicted), *_coverage(rows, predicted)]
    else:
        note = f"there is no profile of the {gpu}, so that nothing was predicted for it"
    return [replace(one, family=family, gpu=gpu) for one in findings], note


def _error(rows: SiteRows, predicted: PredictionTable) -> Iterator[Finding]:
    """Sign test, without jobs that took what was expected: about half of the jobs should take more than expected."""
    ratios = np.log(rows.label_bytes / predicted.expected_bytes)[
        predicted.in_support & ~np.isnan(rows.label_bytes)
    ]
    if len(ratios) < MIN_JOBS:
        return
    median = math.expm1(float(np.median(ratios)))
    above, below = int((ratios > 0).sum()), int((ratios < 0).sum())
    probability = float(stats.binomtest(above, above + below).pvalue) if above + below else 1.0
    sentence = f"half of {len(ratios)} jobs took {1 + median:.3g} times what was expected, or {'more' if median > 0 else 'less'}"
    yield Finding("error", len(ratios), abs(median), ERROR_MATTERS, probability, sentence)


def _coverage(rows: SiteRows, predicted: PredictionTable) -> Iterator[Finding]:
    """Exact binomial test: no more jobs should exceed their safe bytes than the coverage allows."""
    safe = np.ma.filled(predicted.safe_bytes.astype(np.float64), np.nan)
    kept = bounds_kept(rows.label_bytes, rows.is_oom, rows.limit_bytes, safe)
    kept = kept[~np.isnan(kept)]
    if len(kept) < MIN_JOBS:
        return
    misses = len(kept) - int(kept.sum())
    excess = misses / len(kept) - (1.0 - predicted.coverage)
    sentence = f"{misses} of {len(kept)} jobs took more than their safe bytes, which promise {predicted.coverage:.4g} coverage"
    yield Finding(
        "coverage",
        len(kept),
        excess,
        0.0,
        binomial_tail(misses, len(kept), 1.0 - predicted.coverage),
        sentence,
    )


def _support(predicted: PredictionTable) -> Finding:
    outside = [predicted.reasons(row)[0] for row in np.flatnonzero(~predicted.in_support).tolist()]
    share = len(outside) / len(predicted)
    why = f", most often: {Counter(outside).most_common(1)[0][0]}" if outside else ""
    sentence = f"{len(outside)} of {len(predicted)} jobs lie outside the support{why}"
    probability = binomial_tail(len(outside), len(predicted), TOLERATED_OUTSIDE)
    return Finding(
        "support",
        len(predicted),
        share,
        TOLERATED_OUTSIDE,
        probability,
        sentence,
    )
