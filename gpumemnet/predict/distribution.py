"""Distributions over memory: mixtures of logistics over log-bytes.

The probability of a bin is the difference of the cumulative distribution function at the bin's two
edges.  The centre gives the expected memory, and the calibrated spread gives an upper bound.  The
head is that of PixelCNN++ (Salimans et al., ICLR 2017, section 2.1), applied to ordered bins of any
width.

Bins are the intervals of memory that a classifier predicts.  GPUMemNet's tables use bins of 1,000,
2,000 and 8,000 MiB and call them 1, 2 and 8 "GB" (arXiv 2602.17817, section 5).  A scheme is given by
its width; the default is 1 GiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.job_table import Array, Indices
from gpumemnet.job.layers import describe
from gpumemnet.units import GIB, MIB

_PAIRS_AT_ONCE: Final = 2**14
"""Pairs of a component and an edge in one step; arrays of more do not fit the processor's cache."""
MOST_LOG_BYTES: Final = 700.0
"""Upper limit of log-bytes, so that the exponential stays finite."""
_LEAST_SCALE: Final = 1e-300
"""Lower limit of a scale, so that dividing by it is safe."""


@dataclass(frozen=True, eq=False)
class MemoryDistribution:
    """Mixtures of logistics over ``log(bytes)`` for ``B`` jobs with ``K`` components.

    Attributes:
        weights: mixture weights that sum to one, shape ``[B, K]``.
        locations: component means in natural log of bytes, shape ``[B, K]``.
        scales: component scales in log-bytes, positive, shape ``[B, K]``.
    """

    weights: Array
    locations: Array
    scales: Array

    def bin_probabilities(self, log_inner_edges: Array) -> Array:
        """Probabilities of the ``E + 1`` bins between ``E`` increasing inner edges; shape ``[B, E +
        1]``, rows sum to one."""
        count = len(log_inner_edges)
        cumulative = np.ones((len(self.weights), count + 2))
        cumulative[:, 0] = 0.0
        halves = np.divide(0.5, self.scales, dtype=np.float64)[:, None]
        # float32 weights do not sum exactly to one
        shares = 0.5 / np.add.reduce(self.weights, axis=1, dtype=np.float64)[:, None]
        step = max(_PAIRS_AT_ONCE // max(count * self.weights.shape[1], 1), 1)
        for at in range(0, len(cumulative), step):
            own = slice(at, at + step)
            # The logistic function written as a hyperbolic tangent, which never overflows.
            tangents = log_inner_edges[:, None] - self.locations[own, None]
            np.tanh(np.multiply(tangents, halves[own], out=tangents), out=tangents)
            halved = (tangents @ self.weights[own, :, None])[:, :, 0]
            cumulative[own, 1:-1] = 0.5 + shares[own] * halved
        np.minimum(np.maximum(cumulative, 0.0), 1.0, out=cumulative)
        # Sums of the same numbers are rounded differently in products of other shapes.
        return np.maximum(cumulative[:, 1:] - cumulative[:, :-1], 0.0)

    def widened(self, factors: Array) -> MemoryDistribution:
        """Stretches each distribution around its centre by ``factors``, shape ``[B]``."""
        middle = (self.weights * self.locations).sum(axis=1, keepdims=True)
        stretch = factors[:, None]
        return MemoryDistribution(
            self.weights, middle + (self.locations - middle) * stretch, self.scales * stretch
        )

    def moved(self, amounts: Array) -> MemoryDistribution:
        """Shifts each distribution up by ``amounts`` bytes, shape ``[B]``; rows with 0 stay
        unchanged.

        To first order, widths in bytes stay the same.
        """
        chosen = amounts[:, None] > 0
        centres = np.exp(np.minimum(self.locations, MOST_LOG_BYTES, dtype=np.float64))
        higher = centres + amounts[:, None]
        return MemoryDistribution(
            self.weights,
            np.where(chosen, np.log(higher), self.locations),
            np.where(
                chosen, np.maximum(self.scales * (centres / higher), _LEAST_SCALE), self.scales
            ),
        )

    def mixed(
        self, rows: Indices, location: Array, weights: Sequence[float], scales: Array
    ) -> MemoryDistribution:
        """Replaces the given rows by mixtures of logistics, each around one location.

        Args:
            rows: the rows to replace, shape ``[R]``.
            location: their centres in log-bytes, shape ``[R]``.
            weights: of the ``N`` components, the same in all rows.
            scales: of the components in log-bytes, shape ``[R, N]``.
        """
        count = max(len(weights), self.weights.shape[1])
        parts = []
        for part, theirs, filler in (
            (self.weights, np.broadcast_to(weights, scales.shape), 0.0),
            (self.locations, np.broadcast_to(location[:, None], scales.shape), 0.0),
            (self.scales, scales, 1.0),
        ):
            wider = np.full((len(part), count), filler)
            wider[:, : part.shape[1]] = part
            wider[rows] = filler
            wider[rows, : theirs.shape[1]] = theirs
            parts.append(wider)
        return MemoryDistribution(*parts)


MAX_BINS: Final = 4096
MAX_WIDTH_BYTES: Final = 2**62
DEFAULT_TOP_BYTES: Final = 192 * GIB
"""Upper edge of the last closed bin by default: the largest single GPU of today (B200, 192 GB)."""


@dataclass(frozen=True)
class BinScheme:
    """Bins of equal width from zero: bin ``k`` is ``[k·width, (k+1)·width)``; the last bin has no
    upper edge.

    Attributes:
        width_bytes: width of a bin.
        count: number of bins, including the open one.

    Raises:
        InvalidRequestError: when the width is less than 1 MiB, or there are no bins or more than
            4,096.
    """

    width_bytes: int
    count: int

    def __post_init__(self) -> None:
        if type(self.width_bytes) is not int or self.width_bytes < MIB:
            raise InvalidRequestError(
                f"must be at least 1 MiB, not {describe(self.width_bytes)} bytes", "bin_width"
            )
        if type(self.count) is not int or not 1 <= self.count <= MAX_BINS:
            raise InvalidRequestError(
                f"gives {self.count} bins: choose a width that needs between 1 and {MAX_BINS}",
                "bin_width",
            )

    @property
    def name(self) -> str:
        """The width in MiB."""
        return f"{self.width_bytes / MIB:g} MiB"

    @property
    def log_inner_edges(self) -> Array:
        """Edges between neighbouring bins in ``log(bytes)``, shape ``[count - 1]``, read-only."""
        return _log_inner_edges(self.width_bytes, self.count)

    def bounds_bytes(self, index: int) -> tuple[int, int | None]:
        """Lower and upper edge of bin ``index`` in bytes; the upper edge of the last bin is
        ``None``."""
        lower = index * self.width_bytes
        return lower, None if index == self.count - 1 else lower + self.width_bytes

    def index(self, amount_bytes: Array | float) -> Indices:
        """Index of the bin that holds each amount; amounts above the last edge fall into the open
        bin."""
        clipped = np.clip(amount_bytes, 0.0, float(self.width_bytes) * self.count)
        return np.minimum(clipped // self.width_bytes, self.count - 1).astype(np.int64)


@lru_cache(maxsize=64)
def _log_inner_edges(width_bytes: int, count: int) -> Array:
    edges: Array = np.log(np.arange(1, count) * float(width_bytes))
    edges.flags.writeable = False
    return edges


def bins_of_width(width_bytes: float, top_bytes: int = DEFAULT_TOP_BYTES) -> BinScheme:
    """Bins of the given width up to ``top_bytes``, and an open bin above.

    Raises:
        InvalidRequestError: when the width is not a finite positive number or gives more than 4,096
            bins.
    """
    if (
        isinstance(width_bytes, bool)
        or not isinstance(width_bytes, int | float)
        or not abs(width_bytes) <= MAX_WIDTH_BYTES
    ):
        raise InvalidRequestError(
            f"must be a number of bytes, not {describe(width_bytes)}", "bin_width"
        )
    width = int(width_bytes)
    return BinScheme(width, math.ceil(top_bytes / width) + 1 if width > 0 else 0)


PUBLISHED_BINS: Final = {width: bins_of_width(width * MIB) for width in (1000, 2000, 8000)}
"""Width in MiB → GPUMemNet's scheme of that width."""
