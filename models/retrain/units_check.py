"""Finds labels that are off by the ratio of two units: MB written for MiB, 1000 for 1024.

Memory grows with the closed form, from the context on.  Where slope and intercept of a file's line are both the known ones
times the same ratio of units, its labels are in another unit; a machine with another context changes the intercept alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from gpumemnet.data.measurement import Measurement

if TYPE_CHECKING:
    from ..networks.physics_line import PhysicsLine
    from .collect import Row

FEWEST: Final = 20
"""Rows, of the file and of those before it, from which a line can be told."""
RATIOS: Final = {
    "1000 for 1024": 1000 / 1024,
    "1024 for 1000": 1024 / 1000,
    "MB for MiB": 1000**2 / 1024**2,
    "MiB for MB": 1024**2 / 1000**2,
    "GB for GiB": 1000**3 / 1024**3,
    "GiB for GB": 1024**3 / 1000**3,
}
_LINE: Final = (("segment_bytes",),)
"""One term: of two that rise together neither slope is known well."""
TOLERANCE: Final = 0.006
"""How near, in logarithms, slope and intercept must both come to a ratio; the ratios lie 0.024 apart."""


def unit_error(rows: Sequence[Row], reference: Sequence[Measurement]) -> str | None:
    """What is wrong with the unit of ``rows``, beside ``reference`` of the same family, GPU and source; ``None`` for nothing."""
    own = [row.measurement for row in rows if _has_line(row.measurement)]
    known = [one for one in reference if _has_line(one)]
    if min(len(own), len(known)) < FEWEST:
        return None
    line, other = _line(known), _line(own)
    pairs = ((line.intercept_mib, other.intercept_mib), (line.slopes[0], other.slopes[0]))
    if any(min(pair) <= 0 for pair in pairs):
        return None
    changes = [math.log(found / expected) for expected, found in pairs]
    for words, ratio in RATIOS.items():
        if all(abs(change - math.log(ratio)) < TOLERANCE for change in changes):
            return f"all labels are {ratio:.3f} times those of the files before, context included: {words}"
    return None


def _has_line(one: Measurement) -> bool:
    return one.label_bytes is not None and one.job.has_layers


def _line(rows: Sequence[Measurement]) -> PhysicsLine:
    from ..networks.physics_line import fit_line  # loads scikit-learn
    from ..training.data import features_on

    labels = np.array([one.label_bytes for one in rows], dtype=np.float64)
    return fit_line(features_on(rows[0].gpu, [one.job for one in rows]), labels, _LINE)
