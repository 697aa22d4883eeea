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

from gpumemnet.predict.bin_shares import IS_COMPILED, REACH, fill_shares

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]

_FEW_PAIRS: Final = 4096 if IS_COMPILED else 0
"""Mixtures with so few pairs of a component and an edge are gone through one by one, where that is compiled."""
_PAIRS_AT_ONCE: Final = 2048
"""Of more pairs than these the arrays with every component fall out of the processor's cache."""
_PROBABILITIES_AT_ONCE: Final = 2**18
"""So many are held at a time where only the largest of each are asked for."""
MOST_LOG_BYTES: Final = 700.0
"""However large a graph's amounts are, they stay numbers."""
_LEAST_SCALE: Final = 1e-300
"""Widths that vanish beside what is added stay ones to divide by."""
_REACHES: Final = (0, 2, 12)
"""So many bins to both sides of a guess are looked at for the most probable one, before all are."""
_NEAR_TANGENTS: Final = 8192
"""So many edges, with all components at each, fit the processor's cache."""
_DOUBT: Final = 1e-4
"""Twice a probability: by less than this no bin outweighs another for sure, as here it is worked out in single precision."""


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

    def _half_shares(self) -> Array:
        """Half of what makes the weights of each add up to one: in single precision they do not quite."""
        shares: Array = 0.5 / np.add.reduce(self.weights, axis=1, dtype=np.float64)
        return shares

    def bin_probabilities(self, log_inner_edges: Array) -> Array:
        """Probabilities of the ``E + 1`` bins that ``E`` rising inner edges separate; shape ``[B, E + 1]``, rows sum to one."""
        count = len(log_inner_edges)
        if self.weights.size * count <= _FEW_PAIRS:
            shares = np.zeros((len(self.weights), count + 1))
            mixtures = np.array((self.weights, self.locations, self.scales), dtype=np.float64)
            log_edges = np.ascontiguousarray(log_inner_edges, dtype=np.float64)
            fill_shares(mixtures.reshape(-1), self.weights.shape[1], log_edges, shares.reshape(-1))
            return shares
        # Most edges lie where the distribution has not begun yet, or has ended.
        reaches = REACH * self.scales
        first = np.searchsorted(log_inner_edges, (self.locations - reaches).min(axis=1))
        last = np.searchsorted(log_inner_edges, (self.locations + reaches).max(axis=1))
        cumulative = (np.arange(count + 2) > last[:, None]).astype(np.float64)
        counts = last - first
        rows = np.repeat(np.arange(len(counts)), counts)
        places = np.arange(len(rows)) + np.repeat(first - (counts.cumsum() - counts), counts)
        cumulative[rows, places + 1] = self._cdf_of(rows, log_inner_edges[places])
        np.minimum(np.maximum(cumulative, 0.0), 1.0, out=cumulative)
        probabilities: Array = cumulative[:, 1:] - cumulative[:, :-1]
        return probabilities

    def _cdf_of(self, rows: Indices, log_amounts: Array) -> Array:
        """P(memory ≤ amount) of pairs of a distribution and an amount, shape ``[P]`` both."""
        halves, shares = np.divide(0.5, self.scales, dtype=np.float64), self._half_shares()
        answer = np.empty(len(rows))
        for at in range(0, len(rows), _PAIRS_AT_ONCE):
            own = rows[at : at + _PAIRS_AT_ONCE]
            # The logistic function as a hyperbolic tangent, which never overflows.
            tangents = log_amounts[at : at + _PAIRS_AT_ONCE, None] - self.locations[own]
            tangents *= halves[own]
            np.tanh(tangents, out=tangents)
            answer[at : at + _PAIRS_AT_ONCE] = 0.5 + shares[own] * np.einsum("pk,pk->p", tangents, self.weights[own])
        return answer

    def most_probable_bins(self, log_inner_edges: Array, near: Indices) -> Indices:
        """The most probable bin of each, the first of the largest :meth:`bin_probabilities`; shape ``[B]``.

        Most distributions lie within a few bins.  Those around a first guess are looked at, and where one of them outweighs the
        rest of them as well as everything beyond, no other can be the largest.

        Args:
            log_inner_edges: as for :meth:`bin_probabilities`.
            near: a guess at each, which costs time where it is far off and changes nothing; shape ``[B]``.
        """
        answer = np.empty(len(near), dtype=np.int64)
        left = np.arange(len(near))
        edges = np.concatenate(((-np.inf,), log_inner_edges, (np.inf,)))
        for reach in _REACHES:
            width = 2 * reach + 1
            if not len(left) or width >= len(edges) - 1:
                break
            step = _NEAR_TANGENTS // (width + 1)
            doubtful = []
            for at in range(0, len(left), step):
                rows = left[at : at + step]
                first = np.clip(near[rows] - reach, 0, len(edges) - 1 - width)
                best, is_sure = self._take(rows)._outweighing(edges[first + np.arange(width + 1)[:, None]])
                answer[rows] = first + best
                doubtful.append(rows[~is_sure])
            left = np.concatenate(doubtful)
        step = max(1, _PROBABILITIES_AT_ONCE // len(edges))
        for at in range(0, len(left), step):
            rows = left[at : at + step]
            answer[rows] = self._take(rows).bin_probabilities(log_inner_edges).argmax(axis=1)
        return answer

    def _outweighing(self, log_edges: Array) -> tuple[Indices, Flags]:
        """The largest of the bins between each one's own edges, ``[E, B]``, and whether it is the largest of all for sure."""
        # Single precision will do, counted from a point nearby: the logarithms themselves need double.
        middle = self.locations[:, 0].astype(np.float64)
        edges = (log_edges - middle).astype(np.float32)
        locations = (self.locations - middle[:, None]).astype(np.float32).T.copy()
        tangents = edges - locations[:, None, :]
        tangents *= (0.5 / self.scales).astype(np.float32).T.copy()[:, None, :]
        np.tanh(tangents, out=tangents)
        tangents *= self.weights.astype(np.float32).T.copy()[:, None, :]
        doubled = tangents.sum(axis=0)
        shares = doubled[1:] - doubled[:-1]
        best = shares.argmax(axis=0)
        largest = shares.max(axis=0) - _DOUBT
        beyond = 2.0 - (doubled[-1] - doubled[0])
        return best, (largest > beyond) & ((shares >= largest).sum(axis=0) == 1)

    def _take(self, rows: Indices) -> MemoryDistribution:
        return MemoryDistribution(self.weights[rows], self.locations[rows], self.scales[rows])

    def replaced(self, rows: NDArray[np.bool_], location: Array, scale: Array) -> MemoryDistribution:
        """The same distributions, but a single logistic (location and scale in log-bytes, shape ``[B]``) in the given rows."""
        chosen = rows[:, None]
        return MemoryDistribution(
            np.where(chosen, 1.0 / self.weights.shape[1], self.weights),
            np.where(chosen, location[:, None], self.locations),
            np.where(chosen, scale[:, None], self.scales),
        )

    def moved(self, amounts: Array) -> MemoryDistribution:
        """The same distributions, each of memory that is so many bytes more, shape ``[B]``; those of 0 stay as they are.

        Widths in bytes stay what they are, to first order.
        """
        chosen = amounts[:, None] > 0
        centres = np.exp(np.minimum(self.locations, MOST_LOG_BYTES, dtype=np.float64))
        higher = centres + amounts[:, None]
        return MemoryDistribution(
            self.weights,
            np.where(chosen, np.log(higher), self.locations),
            np.where(chosen, np.maximum(self.scales * (centres / higher), _LEAST_SCALE), self.scales),
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
