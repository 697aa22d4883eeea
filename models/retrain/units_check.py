"""Finds labels in the wrong unit: MB written for MiB, or 1000 for 1024.

Memory is a line over the closed form, and the context is its intercept.  If slope and intercept of
a file both differ from the known ones by the same ratio of two units, the labels are in the other
unit.  Another context changes the intercept only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from gpumemnet.job.measurement import Measurement

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
    """A sentence that names the wrong unit of ``rows``; ``None`` if it is that of ``reference``
    (same family, GPU and source)."""
    own_rows = [row.measurement for row in rows if _is_usable(row.measurement)]
    reference_rows = [row for row in reference if _is_usable(row)]
    if min(len(own_rows), len(reference_rows)) < FEWEST:
        return None
    reference_line, own_line = _line(reference_rows), _line(own_rows)
    pairs = (
        (reference_line.intercept_mib, own_line.intercept_mib),
        (reference_line.slopes[0], own_line.slopes[0]),
    )
    if any(min(pair) <= 0 for pair in pairs):
        return None
    changes = [math.log(found / expected) for expected, found in pairs]
    for name, ratio in RATIOS.items():
        if all(abs(change - math.log(ratio)) < TOLERANCE for change in changes):
            return f"all labels are {ratio:.3f} times those of the files before, context included: {name}"
    return None


def _is_usable(measurement: Measurement) -> bool:
    return measurement.label_bytes is not None and measurement.job.has_layers


def _line(rows: Sequence[Measurement]) -> PhysicsLine:
    from ..networks.physics_line import fit_line  # loads scikit-learn
    from ..training.data import features_on

    labels = np.array([row.label_bytes for row in rows], dtype=np.float64)
    return fit_line(features_on(rows[0].gpu, [row.job for row in rows]), labels, _LINE)
