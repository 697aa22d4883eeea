"""A distribution over memory: a mixture of logistics over log-bytes.

One such distribution answers every question about a job: the probability of any bin is the difference of its cumulative
distribution at the bin's edges, the expected bytes are its median, and a quantile bounds what the job may take.  The head is
the one of PixelCNN++ (Salimans et al., ICLR 2017, section 2.1), used here for ordered bins of any width instead of pixel values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_GRID_POINTS: Final = 33
_GRID_ROUNDS: Final = 3


def _sigmoid(x: Array) -> Array:
    return 0.5 + 0.5 * np.tanh(0.5 * x)  # never overflows


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

    def cdf(self, amounts_bytes: Array) -> Array:
        """P(memory ≤ amount) for amounts of shape ``[E]`` (the same for all jobs) or ``[B, E]``; shape ``[B, E]``."""
        with np.errstate(divide="ignore"):  # log(0) = -inf has the right probability, zero
            log_amounts = np.log(amounts_bytes)
        return self._cdf_of_log(np.broadcast_to(log_amounts, (len(self.weights), log_amounts.shape[-1])))

    def _cdf_of_log(self, log_amounts: Array) -> Array:
        standardised = (log_amounts[:, :, None] - self.locations[:, None, :]) / self.scales[:, None, :]
        probabilities: Array = (_sigmoid(standardised) * self.weights[:, None, :]).sum(axis=2)
        return probabilities

    def bin_probabilities(self, inner_edges_bytes: Array) -> Array:
        """Probabilities of the ``E + 1`` bins that ``E`` inner edges separate; shape ``[B, E + 1]``, rows sum to one."""
        cumulative = np.empty((len(self.weights), len(inner_edges_bytes) + 2))
        cumulative[:, 0] = 0.0
        cumulative[:, -1] = 1.0
        if len(inner_edges_bytes):
            cumulative[:, 1:-1] = np.minimum(self.cdf(inner_edges_bytes), 1.0)  # float32 weights add up to a little more
        return np.diff(cumulative, axis=1)

    def quantile(self, probability: float) -> Array:
        """The bytes that memory stays below with ``probability``; shape ``[B]``.

        A mixture's quantile lies between the smallest and the largest quantile of its components; the interval is searched on
        a grid that is refined twice, which narrows it 32,768-fold: below a byte for any realistic spread of components.
        """
        component_quantiles = self.locations + self.scales * np.log(probability / (1.0 - probability))
        low, high = component_quantiles.min(axis=1), component_quantiles.max(axis=1)
        if self.weights.shape[1] == 1:
            single: Array = np.exp(low)
            return single
        rows = np.arange(len(low))
        steps = np.linspace(0.0, 1.0, _GRID_POINTS)
        for _ in range(_GRID_ROUNDS):
            grid = low[:, None] + (high - low)[:, None] * steps
            cell = (self._cdf_of_log(grid) < probability).sum(axis=1).clip(1, _GRID_POINTS - 1)
            low, high = grid[rows, cell - 1], grid[rows, cell]
        bytes_: Array = np.exp(0.5 * (low + high))
        return bytes_

    def spread(self) -> Array:
        """Standard deviation in log-bytes, shape ``[B]``; a logistic of scale ``s`` has variance ``(πs)²/3``."""
        mean = (self.weights * self.locations).sum(axis=1, keepdims=True)
        variance = self.weights * ((self.locations - mean) ** 2 + (np.pi * self.scales) ** 2 / 3.0)
        deviation: Array = np.sqrt(variance.sum(axis=1))
        return deviation

    def replaced(self, rows: NDArray[np.bool_], location: Array, scale: float) -> MemoryDistribution:
        """The same distributions, but a single logistic at ``location`` (log-bytes, shape ``[B]``) in the given rows."""
        chosen = rows[:, None]
        return MemoryDistribution(
            np.where(chosen, 1.0 / self.weights.shape[1], self.weights),
            np.where(chosen, location[:, None], self.locations),
            np.where(chosen, scale, self.scales),
        )
