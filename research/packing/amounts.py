"""The memory that each estimator reserves for every row of a trace, on every kind of GPU.

The exclusive "estimator" gives every job a card; the oracle knows the true peak.  Between them lie
the classifiers by their limit and by their request, what a trace says, the published formulas, and
whatever estimates the trace file itself holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import InvalidRequestError, UnsupportedJobError
from gpumemnet.gpu import DeviceProfile, context, device_profile
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.layers import describe
from gpumemnet.job.training_job import JOB_FIELDS, TrainingJob
from gpumemnet.predict.features import FEATURE_NAMES, feature_matrix
from gpumemnet.predict.prediction import DEFAULT_COVERAGE
from gpumemnet.units import MIB, ceil_mib
from research.estimators.formulas import horus, naive
from research.packing.trace import TraceRow

if TYPE_CHECKING:
    from gpumemnet.predict.prediction import Prediction
    from gpumemnet.predict.predictor import Predictor
    from research.packing.cluster import Inventory

NONE: Final = -1
"""Marks a row without an answer."""
EXCLUSIVE, ORACLE, LIMIT, REQUEST = "exclusive", "oracle", "limit", "request"
TRACED_LIMIT, TRACED_REQUEST, TRACED_PEAK = "traced-limit", "traced-request", "traced-peak"
CLOSED_FORM, NAIVE, HORUS, GIVEN = "closed-form", "naive", "horus", "given"
TITLES: Final = {
    EXCLUSIVE: "one job a GPU",
    ORACLE: "oracle (true peak)",
    LIMIT: "gpumemnet limit",
    REQUEST: "gpumemnet request",
    TRACED_LIMIT: "limit with a trace",
    TRACED_REQUEST: "request with a trace",
    TRACED_PEAK: "traced peak + context",
    CLOSED_FORM: "closed form alone",
    NAIVE: "naive formula",
    HORUS: "Horus formula",
    GIVEN: "estimates in the file",
}
"""Names of the estimators, in the order in which they are shown."""
_SEGMENTS: Final = FEATURE_NAMES.index("segment_bytes")
_LARGEST_MIB: Final = 2**40

Mib = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Amounts:
    """The memory that one estimator reserves for ``R`` rows on ``K`` kinds of GPU.

    Attributes:
        key: which estimator.
        title: what it is called.
        mib: shape ``[R, K]``; :data:`NONE` for a row without an answer.
        is_alone: rows that get a card to themselves: no answer, or more than any card has; shape
            ``[R]``.
        least_card_mib: rows that need a card with at least so much, shape ``[R]``.
        unanswered: rows without an answer.
        too_large: rows with an answer that no card holds.
        answered_by: models that answered, with the number of rows of each, for the first kind.
    """

    key: str
    title: str
    mib: Mib
    is_alone: NDArray[np.bool_]
    least_card_mib: Mib
    unanswered: int
    too_large: int
    answered_by: tuple[tuple[str, int], ...] = ()


def estimators(
    rows: Sequence[TraceRow],
    cards: Inventory,
    predictor: Predictor,
    *,
    only: Sequence[str] | None = None,
    coverage: float = DEFAULT_COVERAGE,
    encoder: str | None = None,
    unknown_mib: int | None = None,
    headroom_mib: int = 0,
) -> list[Amounts]:
    """Every estimator that has an answer for any row, in the order of :data:`TITLES`.

    Args:
        rows: the jobs.
        cards: the GPUs; each kind has estimates of its own.
        predictor: who answers for gpumemnet.
        only: keys of :data:`TITLES`; all of them unless given.
        coverage: share of jobs that the limit shall cover.
        encoder: ``mlp`` or ``transformer``; as the predictor chooses unless given.
        unknown_mib: what is set aside where an estimator has no answer; a whole card unless given.
        headroom_mib: added to every estimate but the oracle's.

    Raises:
        InvalidRequestError: on an unknown estimator, or as
            :meth:`gpumemnet.predict.predictor.Predictor.estimate`.
    """
    keys = tuple(TITLES) if only is None else tuple(only)
    for key in keys:
        if key not in TITLES:
            raise InvalidRequestError(
                f"must be among {', '.join(TITLES)}, not {describe(key)}", "estimator"
            )
    found = []
    for key, title, mib, answered_by in _answers(rows, cards, predictor, keys, coverage, encoder):
        if key not in (EXCLUSIVE, ORACLE):
            mib = np.where(
                mib == NONE, NONE if unknown_mib is None else unknown_mib, mib + headroom_mib
            )
        found.append(_amounts(key, title, mib, cards, answered_by))
    return found


def _amounts(
    key: str, title: str, mib: Mib, cards: Inventory, answered_by: tuple[tuple[str, int], ...]
) -> Amounts:
    capacities = np.array([kind.available_mib for kind in cards.kinds], dtype=np.int64)
    is_unanswered = (mib == NONE).any(axis=1)
    is_too_large = ~is_unanswered & (mib > capacities).all(axis=1)
    return Amounts(
        key=key,
        title=title,
        mib=mib,
        is_alone=is_unanswered | is_too_large,
        least_card_mib=np.where(is_too_large, cards.largest_mib, 0),
        unanswered=0 if key == EXCLUSIVE else int(is_unanswered.sum()),
        too_large=int(is_too_large.sum()),
        answered_by=answered_by,
    )


def _answers(
    rows: Sequence[TraceRow],
    cards: Inventory,
    predictor: Predictor,
    keys: Sequence[str],
    coverage: float,
    encoder: str | None,
) -> Iterator[tuple[str, str, Mib, tuple[tuple[str, int], ...]]]:
    """Key, title and amounts of each estimator in ``keys`` that has any answer."""
    jobs = [row.job for row in rows]
    profiles = [device_profile(kind.gpu) for kind in cards.kinds]
    shape = len(rows), len(profiles)
    is_traced = any(job.traced_peak_bytes for job in jobs)
    plain = [_untraced(job) for job in jobs] if is_traced else jobs
    if EXCLUSIVE in keys:
        yield EXCLUSIVE, TITLES[EXCLUSIVE], np.full(shape, NONE, dtype=np.int64), ()
    if ORACLE in keys:
        yield ORACLE, TITLES[ORACLE], _same([row.peak_mib for row in rows], shape), ()
    for limit, request, predicted in (
        (LIMIT, REQUEST, plain),
        (TRACED_LIMIT, TRACED_REQUEST, jobs if is_traced else []),
    ):
        if predicted and (limit in keys or request in keys):
            limits, requests, answered_by = _predicted(
                predictor, predicted, profiles, coverage, encoder
            )
            for key, mib in ((limit, limits), (request, requests)):
                if key in keys:
                    yield key, TITLES[key], mib, answered_by
    if TRACED_PEAK in keys and is_traced:
        traced = [[_traced_mib(job, profile) for profile in profiles] for job in jobs]
        yield TRACED_PEAK, TITLES[TRACED_PEAK], np.array(traced, dtype=np.int64), ()
    if CLOSED_FORM in keys and any(job.has_layers for job in jobs):
        yield CLOSED_FORM, TITLES[CLOSED_FORM], _closed_forms(plain, profiles), ()
    for key, formula in ((NAIVE, naive), (HORUS, horus)):
        if key in keys:
            yield (
                key,
                TITLES[key],
                _same([min(ceil_mib(amount), _LARGEST_MIB) for amount in formula(jobs)], shape),
                (),
            )
    if GIVEN in keys:
        for name in dict.fromkeys(name for row in rows for name in row.estimates_mib):
            stated = [row.estimates_mib.get(name, NONE) for row in rows]
            known = len(rows) - stated.count(NONE)
            title = name if known == len(rows) else f"{name} ({known:,} of {len(rows):,})"
            yield GIVEN, title, _same(stated, shape), ()


def _same(amounts: Sequence[int], shape: tuple[int, int]) -> Mib:
    """Amounts that are the same on every kind of card."""
    return np.broadcast_to(np.array(amounts, dtype=np.int64)[:, None], shape).copy()


def _untraced(job: TrainingJob) -> TrainingJob:
    if job.traced_peak_bytes is None:
        return job
    return TrainingJob(
        **{**{name: getattr(job, name) for name in JOB_FIELDS}, "traced_peak_bytes": None}
    )


def _traced_mib(job: TrainingJob, profile: DeviceProfile) -> int:
    traced = job.traced_peak_bytes
    return NONE if traced is None else ceil_mib(traced + context(profile).expected_bytes)


def _closed_forms(jobs: Sequence[TrainingJob], profiles: Sequence[DeviceProfile]) -> Mib:
    columns, table = [], JobTable.from_jobs(jobs)
    for profile in profiles:
        amounts = np.ceil(feature_matrix(table, profile.blas_workspace_bytes)[:, _SEGMENTS] / MIB)
        columns.append(
            np.where(table.layer_counts > 0, np.minimum(amounts, _LARGEST_MIB), NONE).astype(
                np.int64
            )
        )
    return np.stack(columns, axis=1)


def _predicted(
    predictor: Predictor,
    jobs: Sequence[TrainingJob],
    profiles: Sequence[DeviceProfile],
    coverage: float,
    encoder: str | None,
) -> tuple[Mib, Mib, tuple[tuple[str, int], ...]]:
    """Limits and requests, and who answered; families without a model have no answer."""
    limits, requests = (np.full((len(jobs), len(profiles)), NONE, dtype=np.int64) for _ in range(2))
    answered: dict[str, int] = {}
    known: dict[str, dict[int, Prediction]] = {}
    for kind, profile in enumerate(profiles):
        if profile.name not in known:
            known[profile.name] = _estimates(predictor, jobs, coverage, profile.name, encoder)
        for row, estimate in known[profile.name].items():
            requests[row, kind] = min(ceil_mib(estimate.expected_bytes), _LARGEST_MIB)
            if estimate.safe_bytes is not None:
                limits[row, kind] = min(ceil_mib(estimate.safe_bytes), _LARGEST_MIB)
            if not kind:
                answered[estimate.estimator] = answered.get(estimate.estimator, 0) + 1
    return limits, requests, tuple(answered.items())


def _estimates(
    predictor: Predictor,
    jobs: Sequence[TrainingJob],
    coverage: float,
    gpu: str,
    encoder: str | None,
) -> dict[int, Prediction]:
    found: dict[int, Prediction] = {}
    for family in dict.fromkeys(job.family for job in jobs):
        places = [row for row, job in enumerate(jobs) if job.family == family]
        try:
            table = JobTable.from_jobs([jobs[row] for row in places])
            estimates = predictor.predict_table(table, coverage=coverage, gpu=gpu, encoder=encoder)
        except UnsupportedJobError:
            continue
        found |= zip(places, estimates, strict=True)
    return found
