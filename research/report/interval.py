"""A 95 % interval of a share whose rows come in clusters: Wilson's interval with the effective
number of rows.

Errors of jobs of one architecture are correlated, so ten of them carry less information than ten of
different ones.  The rows are divided by the design effect (Kish, "Survey Sampling", 1965), and the
interval is that of Wilson (JASA 22, 1927), which also holds near 0 and 1. SciPy's and statsmodels'
intervals take whole numbers of rows only; the effective number is a fraction.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

NORMAL_QUANTILE: Final = 1.959964
"""Of 97.5 %."""

Interval = tuple[float, float]


def share_interval(hits: NDArray[np.bool_], clusters: NDArray[np.int64]) -> Interval:
    """Lower and upper end of the share of ``hits``, shape ``[B]``, whose rows belong to
    ``clusters``, shape ``[B]``.

    NaN without rows.
    """
    if not len(hits):
        return math.nan, math.nan
    return wilson(float(hits.mean()), independent_rows(hits, clusters))


def independent_rows(hits: NDArray[np.bool_], clusters: NDArray[np.int64]) -> float:
    """The effective number of rows: how many independent rows would give the same variance, at most
    ``B``.

    Where all rows agree, or there is one cluster, the variance between clusters is unknown: then
    each counts as one row.
    """
    _, members = np.unique(clusters, return_inverse=True)
    count, share = int(members.max()) + 1, float(hits.mean())
    if count < 2 or share in (0.0, 1.0):
        return float(count)
    residuals = np.bincount(members, weights=hits - share)
    variance = count / (count - 1) * float((residuals**2).sum()) / len(hits) ** 2
    return (
        float(min(max(share * (1 - share) / variance, 1.0), len(hits)))
        if variance > 0
        else float(len(hits))
    )


def wilson(share: float, rows: float) -> Interval:
    """Wilson's score interval of a ``share`` seen in ``rows`` independent rows."""
    square = NORMAL_QUANTILE**2
    middle = (share + square / (2 * rows)) / (1 + square / rows)
    half = (
        NORMAL_QUANTILE
        / (1 + square / rows)
        * math.sqrt(share * (1 - share) / rows + square / (4 * rows**2))
    )
    return max(0.0, middle - half), min(1.0, middle + half)
