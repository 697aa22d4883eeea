"""Calibrates the safe bytes by conformal prediction in units of the predicted spread.

A job's score is its log-error divided by its spread and a constant, both in log-bytes.  This is normalised
nonconformity with a constant added to the spread (Papadopoulos et al., IJCAI 2011, section 4; Lei
et al., JASA 113, 2018).  The constant is the typical error of the calibration jobs.  Without it, one
job with a far too small spread would set the bounds of all others: at 99 % of 167 jobs the bound is
the largest score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.predict.conformal import conformal_quantiles, conformal_rank

from ..networks.mlp import mode_name
from .data import LabelledJobs

Array = NDArray[np.float64]

COVERAGES: Final = (0.5, 0.8, 0.9, 0.95, 0.975, 0.98, 0.99, 0.995, 0.999)
FEWEST_SCORES: Final = 60
"""Fewest scores with which a group is calibrated separately."""
LEAST_DOUBLED_SCORE: Final = 1.0
"""Where all scores are smaller, this is doubled for coverages beyond them; it is one spread plus
the typical error."""


@dataclass(frozen=True, slots=True, eq=False)
class Errors:
    """Errors of a network on ``B`` held-out jobs, shape ``[B]`` each.

    Attributes:
        log_errors: label minus expectation in log-bytes.  The label of a job that ran out of memory
            is the card's capacity, a lower bound of what it needed.
        spreads: predicted spread in log-bytes.
        units: unit of the network's output, in log-bytes.
        is_measured: whether the job has a measured label.
    """

    log_errors: Array
    spreads: Array
    units: Array
    is_measured: NDArray[np.bool_]


def errors_of(data: LabelledJobs, expected: Array, spreads: Array, units: Array) -> Errors:
    """Return the errors of expectations in log-bytes, shape ``[B]``."""
    is_measured = ~np.isnan(data.label_bytes)
    labels = np.where(is_measured, data.label_bytes, data.lower_bytes)
    return Errors(np.log(labels) - expected, spreads, units, is_measured)


def added_spread(parts: Sequence[Errors]) -> float:
    """Return the typical error of measured jobs, in units of the network's output, averaged over
    ``parts``.

    If all jobs ran out of memory, it is 1, the typical error of the closed form.
    """
    typical = [
        float(np.mean(np.abs(part.log_errors / part.units)[part.is_measured]))
        for part in parts
        if part.is_measured.any()
    ]
    return float(np.mean(typical)) if typical else 1.0


def conformal_scores(errors: Errors, added: float) -> Array:
    """Return each job's log-error divided by the sum of its spread and the constant ``added``, shape ``[B]``."""
    scores: Array = errors.log_errors / (errors.spreads + added * errors.units)
    return scores


def calibrated_coverages(data: LabelledJobs) -> tuple[float, ...]:
    """Return the coverages whose conformal quantile is one of the scores of ``data``, even in the
    family with the fewest jobs.

    If fewer jobs than ``data`` are scored, as for the transformer-based classifier, the bounds of
    the highest coverages are twice the largest score instead (:func:`conformal_bounds`).
    """
    fewest = min(map(len, data.rows_by_family().values()))
    return tuple(level for level in COVERAGES if has_enough_rows(fewest, level))


def multiples_by_family(
    mode: str, scores: Array, data: LabelledJobs, coverages: Sequence[float]
) -> dict[str, tuple[float, ...]]:
    """Return the multiples of ``mode`` for the jobs of each family, without and with
    ``cudnn.benchmark``.

    Args:
        mode: ``layers`` or ``totals``: what is known of the jobs.
        scores: of the jobs of ``data``, shape ``[B]``.
        data: the jobs, held out from the training.
        coverages: from :func:`calibrated_coverages`.
    """
    multiples: dict[str, tuple[float, ...]] = {}
    for family, rows in data.rows_by_family().items():
        multiples |= grouped_multiples(
            mode_name(mode, family), scores[rows], data.take(rows), coverages
        )
    return multiples


def grouped_multiples(
    mode: str, scores: Array, data: LabelledJobs, coverages: Sequence[float]
) -> dict[str, tuple[float, ...]]:
    """Return the multiples of ``mode`` for jobs without and with ``cudnn.benchmark``.

    Both are equal if either group has fewer than :data:`FEWEST_SCORES` scores.
    """
    benchmark = data.jobs.option_column("cudnn_benchmark").astype(bool)
    parts = [scores[~benchmark], scores[benchmark]]
    if min(map(len, parts)) < FEWEST_SCORES:
        parts = [scores, scores]
    names = (mode, f"{mode}, cudnn_benchmark")
    return {
        name: conformal_bounds(part, coverages, LEAST_DOUBLED_SCORE)
        for name, part in zip(names, parts, strict=True)
    }


def conformal_bounds(
    errors: Array, coverages: Sequence[float], least: float = -math.inf
) -> tuple[float, ...]:
    """Return for each coverage the smallest of ``errors`` that covers that share of future rows.

    If there are too few errors for a coverage, its bound is twice the largest of them.

    Args:
        errors: of rows that were not fitted to, shape ``[B]``.
        coverages: shares below 1.
        least: what is doubled where all errors are below it.
    """
    doubled = 2.0 * max(float(errors.max()), least)
    return tuple(
        doubled if bound is None else bound for bound in conformal_quantiles(errors, coverages)
    )


def has_enough_rows(count: int, coverage: float) -> bool:
    """Whether the bound of ``count`` errors at ``coverage`` is one of them."""
    return conformal_rank(count, coverage) is not None
