"""The figures of a comparison: error in percent, under-prediction, waste, and accuracy of the
bins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpumemnet.units import GIB, MIB

from .estimates import Array, Estimates, TracedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Errors of one estimator on one group of rows; shares are of rows, errors relative to the
    label.

    Attributes:
        estimator, group, rows: the estimator, the group and its number of rows.
        median_error, p95_error: absolute error.
        median_error_mib: in MiB.
        within_5_percent: share within 5 %.
        under_predicted: share whose expected bytes lie below the label by more than 1 %.
        safe_missed: share above their safe bytes; ``None`` where there are none.
        median_over_allocation: safe over label, minus one.
        accuracy_1_gib, accuracy_8000_mib: share whose expected bytes lie in the label's bin.
    """

    estimator: str
    group: str
    rows: int
    median_error: float
    p95_error: float
    median_error_mib: float
    within_5_percent: float
    under_predicted: float
    safe_missed: float | None
    median_over_allocation: float | None
    accuracy_1_gib: float
    accuracy_8000_mib: float


UNDER_PREDICTED_BY = 0.01
"""Expected bytes that are lower than the label by more than this share count as under-predicted."""


def figures(group: str, labels: Array, estimator: Estimates, chosen: NDArray[np.bool_]) -> Figures:
    """Figures of ``estimator`` on the rows ``chosen`` (boolean, shape ``[B]``)."""
    label, expected, safe = (
        labels[chosen],
        estimator.expected_bytes[chosen],
        estimator.safe_bytes[chosen],
    )
    errors = np.abs(expected - label)
    bounded = not np.isnan(safe).any()
    return Figures(
        estimator=estimator.name,
        group=group,
        rows=len(label),
        median_error=float(np.median(errors / label)),
        p95_error=float(np.percentile(errors / label, 95)),
        median_error_mib=float(np.median(errors) / MIB),
        within_5_percent=float((errors <= 0.05 * label).mean()),
        under_predicted=float((expected < (1 - UNDER_PREDICTED_BY) * label).mean()),
        safe_missed=float((label > safe).mean()) if bounded else None,
        median_over_allocation=float(np.median(safe / label) - 1) if bounded else None,
        accuracy_1_gib=float((expected // GIB == label // GIB).mean()),
        accuracy_8000_mib=float((expected // (8000 * MIB) == label // (8000 * MIB)).mean()),
    )


def reserved_figures(group: str, rows: Sequence[TracedRow]) -> Figures | None:
    """Figures of the trace's reserved bytes against the measured ones, of the rows that have
    them."""
    known = [row for row in rows if row.measured_reserved_bytes is not None]
    if not known:
        return None
    labels = np.array([row.measured_reserved_bytes for row in known], dtype=np.float64)
    traced = np.array([row.reserved_bytes for row in known], dtype=np.float64)
    every = np.ones(len(known), dtype=bool)
    return figures(
        group,
        labels,
        Estimates("trace, reserved bytes", traced, np.full(len(known), np.nan)),
        every,
    )
