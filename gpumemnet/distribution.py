"""A distribution over memory: a mixture of logistics over log-bytes.

One such distribution answers every question about a job: the probability of any bin is the difference of its cumulative
distribution at the bin's edges, its centre is what to expect, and its spread, calibrated, bounds what the job may take.
The head is that of PixelCNN++ (Salimans et al., ICLR 2017, section 2.1), used here for ordered bins of any width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_ROWS_AT_ONCE: Final = 128
"""Of more distributions than these the arrays with every component at every amount fall out of the processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
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

    def cdf(self, log_amounts: Array) -> Array:
        """P(memory ≤ amount) for ``E`` amounts given as ``log(bytes)``, shape ``[E]``; shape ``[B, E]``."""
        if len(self.weights) > _ROWS_AT_ONCE:
            parts = [
                MemoryDistribution(
                    self.weights[at : at + _ROWS_AT_ONCE],
                    self.locations[at : at + _ROWS_AT_ONCE],
                    self.scales[at : at + _ROWS_AT_ONCE],
                ).cdf(log_amounts)
                for at in range(0, len(self.weights), _ROWS_AT_ONCE)
            ]
            return np.concatenate(parts)
        # The logistic function as a hyperbolic tangent, which never overflows.
        tangents = log_amounts[:, None] - self.locations[:, None, :]
        tangents *= (0.5 / self.scales)[:, None, :]
        np.tanh(tangents, out=tangents)
        probabilities: Array = 0.5 + 0.5 * (tangents @ self.weights[:, :, None])[:, :, 0]
        return probabilities

    def bin_probabilities(self, log_inner_edges: Array) -> Array:
        """Probabilities of the ``E + 1`` bins that ``E`` inner edges separate; shape ``[B, E + 1]``, rows sum to one."""
        cumulative = np.empty((len(self.weights), len(log_inner_edges) + 2))
        cumulative[:, 0] = 0.0
        cumulative[:, -1] = 1.0
        # Weights in single precision do not quite add up to one.
        np.minimum(np.maximum(self.cdf(log_inner_edges), 0.0), 1.0, out=cumulative[:, 1:-1])
        return cumulative[:, 1:] - cumulative[:, :-1]

    def replaced(self, rows: NDArray[np.bool_], location: Array, scale: Array) -> MemoryDistribution:
        """The same distributions, but a single logistic (location and scale in log-bytes, shape ``[B]``) in the given rows."""
        chosen = rows[:, None]
        return MemoryDistribution(
            np.where(chosen, 1.0 / self.weights.shape[1], self.weights),
            np.where(chosen, location[:, None], self.locations),
            np.where(chosen, scale[:, None], self.scales),
        )

    def mixed(
        self, rows: NDArray[np.bool_], location: Array, weights: Sequence[float], scales: Sequence[float]
    ) -> MemoryDistribution:
        """The same distributions, but in the given rows logistics around one location (log-bytes, shape ``[B]``).

        Args:
            rows: which ones, shape ``[B]``.
            location: their centres; what stands in other rows does not matter.
            weights, scales: of the logistics, alike in all rows; scales in log-bytes.
        """
        count = max(len(weights), self.weights.shape[1])
        padded = [(weights[i], scales[i]) if i < len(weights) else (0.0, 1.0) for i in range(count)]
        own = [
            np.pad(part, ((0, 0), (0, count - part.shape[1])), constant_values=filler)
            for part, filler in ((self.weights, 0.0), (self.locations, 0.0), (self.scales, 1.0))
        ]
        chosen = rows[:, None]
        return MemoryDistribution(
            np.where(chosen, [weight for weight, _ in padded], own[0]),
            np.where(chosen, location[:, None], own[1]),
            np.where(chosen, [scale for _, scale in padded], own[2]),
        )
