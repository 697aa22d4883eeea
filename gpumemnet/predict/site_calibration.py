"""A site's calibration of a bundle for one GPU, which ``gpumemnet calibrate`` writes into the
bundle's card.

The shift adds the difference of the CUDA contexts to every prediction for that GPU.  The multiples
replace the shipped bounds for each coverage that the site's jobs support.  Predictions for other
GPUs do not change.
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
"""The difference of the shipped bounds at these two coverages is a job's unit of spread."""
UNIT_FLOOR_BYTES: Final = 2 * MIB
"""Smallest unit of spread: readings are whole MiB, so a spread is uncertain by 1 MiB on each
side."""
MAX_SHIFT_BYTES: Final = 2**41


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCalibration:
    """A site's calibration of one bundle for one GPU.

    Attributes:
        gpu: name of the GPU that the calibration is for.
        shift_bytes: how much more memory the site's jobs take than the graph predicts, mostly
            another CUDA context.
        shift_bound_bytes: upper bound of the shift; equal to the shift when the multiples include
            its error.
        multiples: for each coverage of the card, the bound in units of spread above the shifted
            expectation; ``None`` when the site has too few jobs for that coverage.
        largest: the largest error of the site's jobs, in units of spread: a lower limit for the
            shipped bounds that stay in use; ``None`` when there are no multiples.
        unit_levels: positions, among the card's coverages, of the two bounds whose difference is
            the unit of spread.
        context_bytes: the CUDA context at the site; ``None`` in cards that do not state it.
    """

    gpu: str
    shift_bytes: int
    shift_bound_bytes: int
    multiples: tuple[float | None, ...]
    largest: float | None
    unit_levels: tuple[int, int]
    context_bytes: int | None = None

    def bounds(self, expected_bytes: Array, bounds_bytes: Array) -> Array:
        """The site's bounds of ``B`` jobs before the shift, shape ``[B, L]``, from the graph's
        expected bytes and bounds."""
        unit = spread_unit(bounds_bytes, self.unit_levels)
        site = bounds_bytes.copy()
        for level, multiple in enumerate(self.multiples):
            if multiple is not None:
                site[:, level] = expected_bytes + multiple * unit
            elif self.largest is not None:
                np.maximum(
                    bounds_bytes[:, level], expected_bytes + self.largest * unit, out=site[:, level]
                )
        return site


def unit_levels(coverages: Sequence[float]) -> tuple[int, int]:
    """Positions of the calibrated coverages nearest to each of :data:`UNIT_COVERAGES`."""

    def nearest(wanted: float) -> int:
        return min(range(len(coverages)), key=lambda at: abs(coverages[at] - wanted))

    low, high = map(nearest, UNIT_COVERAGES)
    return low, high


def spread_unit(bounds_bytes: Array, levels: tuple[int, int]) -> Array:
    """Each job's unit of spread in bytes, shape ``[B]``, from the shipped bounds, shape ``[B,
    L]``."""
    low, high = levels
    unit: Array = np.maximum(bounds_bytes[:, high] - bounds_bytes[:, low], UNIT_FLOOR_BYTES)
    return unit


def site_calibration_from_card(document: Any, levels: int) -> SiteCalibration | None:
    """Reads the calibration from a card; ``None`` when it has none.

    Raises:
        KeyError, TypeError, ValueError: when the entry is not a valid calibration.
    """
    if document is None:
        return None
    gpu = document["gpu"]
    if not isinstance(gpu, str) or not gpu:
        raise ValueError("the site's calibration must name a GPU")
    multiples = tuple(None if value is None else _number(value) for value in document["multiples"])
    carried = [value for value in multiples if value is not None]
    largest = None if document["largest"] is None else _number(document["largest"])
    if (
        len(multiples) != levels
        or carried != sorted(carried)
        or (carried and (largest is None or largest < carried[-1]))
    ):
        raise ValueError(
            "the site's calibration needs a multiple or null for each coverage, rising up to the largest"
        )
    if multiples[: len(carried)] != tuple(carried):
        raise ValueError("the site's calibration carries a coverage but not a smaller one")
    low, high = document["unit_levels"]
    if not all(type(level) is int and 0 <= level < levels for level in (low, high)):
        raise ValueError("the site's calibration must name two of the coverages for its unit")
    shift, bound = (_shift(document, name) for name in ("shift_bytes", "shift_bound_bytes"))
    if bound < shift:
        raise ValueError("the site's calibration bounds the shift below the shift")
    return SiteCalibration(
        gpu=gpu,
        shift_bytes=shift,
        shift_bound_bytes=bound,
        multiples=multiples,
        largest=largest,
        unit_levels=(low, high),
        context_bytes=_shift(document, "context_bytes")
        if document.get("context_bytes") is not None
        else None,
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
