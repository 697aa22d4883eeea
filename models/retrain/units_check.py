"""Finds labels in the wrong unit: MB written for MiB, or 1000 for 1024.

Memory is a line over the closed form, and the context is its intercept.  If slope and intercept of a file both differ from the
known ones by the same ratio of two units, the labels are in the other unit.  Another context changes the intercept only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from gpumemnet.data.measurement import Measurement

from .rows import Row

if TYPE_CHECKING:
    from ..networks.physics_line import PhysicsLine

FEWEST: Final = 20
"""Rows that a line needs, in the file and in those before it."""
RATIOS: Final = {
    "1000 for 1024": 1000 / 1024,
    "1024 for 1000": 1024 / 1000,
    "MB for MiB": 1000**2 / 1024**2,
    "MiB for MB": 1024**2 / 1000**2,
    "GB for GiB": 1000**3 / 1024**3,
    "GiB for GB": 1024**3 / 1000**3,
}
_LINE: Final = (("segment_bytes",),)
"""One term only: the slopes of two terms that grow together cannot be estimated well."""
TOLERANCE: Final = 0.006
"""Largest distance from a ratio, in logarithms; the ratios lie 0.024 apart."""


def unit_error(rows: Sequence[Row], reference: Sequence[Measurement]) -> str | None:
    """A sentence that names the wrong unit of ``rows``; ``None`` if it is that of ``reference`` (same family, GPU and source)."""
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
