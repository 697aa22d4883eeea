"""Conformal bounds from scores of rows that were not fitted to.

A job's score is its log-error divided by its spread and a constant.  This is normalised
nonconformity with a constant added to the spread (Papadopoulos et al., IJCAI 2011, section 4; Lei
et al., JASA 113, 2018).  The constant is the typical error of the calibration jobs.  Without it, one
job with a far too small spread would set the bounds of all others: at 99 % of 167 jobs the bound is
the largest score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.predict.conformal import conformal_quantiles

COVERAGES: Final = (0.5, 0.8, 0.9, 0.95, 0.975, 0.98, 0.99, 0.995, 0.999)
FEWEST_SCORES: Final = 60
"""Fewest scores with which a group is calibrated separately."""


def conformal_bounds(
    errors: NDArray[np.float64], coverages: Sequence[float], least: float = -math.inf
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
