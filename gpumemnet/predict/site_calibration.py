"""What ``gpumemnet calibrate`` writes into a bundle's card: how the same graph answers for one GPU of one site.

The shift moves every answer for that GPU by the difference of the CUDA contexts; the multiples replace the shipped bounds where
the site's own jobs carry a coverage.  For any other GPU the bundle answers as before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.units import MIB

Array = NDArray[np.float64]

UNIT_COVERAGES: Final = (0.5, 0.9)
"""The shipped bounds at these two, one less the other, are a job's unit of spread."""
UNIT_FLOOR_BYTES: Final = 2 * MIB
"""Readings are whole MiB, and no spread is known better than one to each side."""
MAX_SHIFT_BYTES: Final = 2**41


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCalibration:
    """A site's calibration of one bundle for one GPU.

    Attributes:
        gpu: the GPU's name; the calibration holds for it alone.
        shift_bytes: what the site's jobs take more than the graph says, which is mostly another CUDA context.
        shift_bound_bytes: the most that it can be; the shift itself where the multiples contain its error.
        multiples: for each coverage of the card the bound, in units of spread above the shifted expectation, or ``None`` where
            the site's jobs do not carry it.
        largest: the largest error among them, in the same units: a floor under the shipped bounds that stay; ``None`` without.
        unit_levels: positions, among the card's coverages, of the two bounds whose difference is the unit.
    """

    gpu: str
    shift_bytes: int
    shift_bound_bytes: int
    multiples: tuple[float | None, ...]
    largest: float | None
    unit_levels: tuple[int, int]

    def bounds(self, expected_bytes: Array, bounds_bytes: Array) -> Array:
        """The bounds of ``B`` jobs before the shift, shape ``[B, L]``, from what the graph says."""
        unit = spread_unit(bounds_bytes, self.unit_levels)
        site = bounds_bytes.copy()
        for level, multiple in enumerate(self.multiples):
            if multiple is not None:
                site[:, level] = expected_bytes + multiple * unit
            elif self.largest is not None:
                np.maximum(bounds_bytes[:, level], expected_bytes + self.largest * unit, out=site[:, level])
        return site


def unit_levels(coverages: Sequence[float]) -> tuple[int, int]:
    """Positions of the calibrated coverages nearest to :data:`UNIT_COVERAGES`: different ones where there are two."""

    def nearest(wanted: float) -> int:
        return min(range(len(coverages)), key=lambda at: abs(coverages[at] - wanted))

    low, high = map(nearest, UNIT_COVERAGES)
    return low, high


def spread_unit(bounds_bytes: Array, levels: tuple[int, int]) -> Array:
    """Each job's unit of spread in bytes, shape ``[B]``, from the shipped bounds, shape ``[B, L]``."""
    low, high = levels
    unit: Array = np.maximum(bounds_bytes[:, high] - bounds_bytes[:, low], UNIT_FLOOR_BYTES)
    return unit


def site_calibration_from_card(document: Any, levels: int) -> SiteCalibration | None:
    """The calibration in a card; ``None`` where it has none.

    Raises:
        KeyError, TypeError, ValueError: on anything else.
    """
    if document is None:
        return None
    gpu = document["gpu"]
    if not isinstance(gpu, str) or not gpu:
        raise ValueError("the site's calibration must name a GPU")
    multiples = tuple(None if value is None else _number(value) for value in document["multiples"])
    carried = [value for value in multiples if value is not None]
    largest = None if document["largest"] is None else _number(document["largest"])
    if len(multiples) != levels or carried != sorted(carried) or (carried and (largest is None or largest < carried[-1])):
        raise ValueError("the site's calibration needs a multiple or null for each coverage, rising up to the largest")
    if multiples[: len(carried)] != tuple(carried):
        raise ValueError("the site's calibration carries a coverage but not a smaller one")
    low, high = document["unit_levels"]
    if not all(type(level) is int and 0 <= level < levels for level in (low, high)):
        raise ValueError("the site's calibration must name two of the coverages for its unit")
    shift, bound = (_shift(document, name) for name in ("shift_bytes", "shift_bound_bytes"))
    if bound < shift:
        raise ValueError("the site's calibration bounds the shift below the shift")
    return SiteCalibration(
        gpu=gpu, shift_bytes=shift, shift_bound_bytes=bound, multiples=multiples, largest=largest, unit_levels=(low, high)
    )


def _shift(document: Mapping[str, Any], name: str) -> int:
    value = document[name]
    if type(value) is not int or abs(value) > MAX_SHIFT_BYTES:
        raise ValueError(f"{name} must be a whole number of at most {MAX_SHIFT_BYTES}")
    return int(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)
