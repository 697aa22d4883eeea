"""Estimates of many jobs as arrays that behave like a sequence: single ones are built where somebody asks for one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from gpumemnet.predict.bins import BinScheme
from gpumemnet.predict.distribution import Indices, MemoryDistribution
from gpumemnet.predict.estimate import Estimate

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Estimates(Sequence[Estimate]):
    """What one model answers for ``B`` jobs; see :class:`~gpumemnet.predict.estimate.Estimate`.

    Attributes:
        expected_bytes: whole numbers, shape ``[B]``.
        safe_bytes: whole numbers; not a number outside the model's support, shape ``[B]``.
        distribution: what the model predicts, less a shift of the amounts that is in ``log_edges``.
        log_edges: edges between neighbouring bins, for ``distribution``, in log-bytes, shape ``[bins.count - 1]``.
        reasons: job outside the support → why; jobs inside are not in it.
        coverage, bins, gpu, estimator, version, label_source: the same for all.
    """

    expected_bytes: Array
    safe_bytes: Array
    distribution: MemoryDistribution
    log_edges: Array
    reasons: Mapping[int, tuple[str, ...]]
    coverage: float
    bins: BinScheme
    gpu: str
    estimator: str
    version: str
    label_source: str
    _known: list[Array] = field(default_factory=list, init=False, repr=False)

    @property
    def probabilities(self) -> Array:
        """Probability of every bin, shape ``[B, bins.count]``; worked out where somebody asks."""
        if not self._known:
            self._known.append(self.distribution.bin_probabilities(self.log_edges))
        return self._known[0]

    @property
    def bin_indices(self) -> Indices:
        """The most probable bin of each job, shape ``[B]``."""
        if self._known:
            indices: Indices = self._known[0].argmax(axis=1)
            return indices
        return self.distribution.most_probable_bins(self.log_edges, self.bins.index(self.expected_bytes))

    def __len__(self) -> int:
        return len(self.expected_bytes)

    @overload
    def __getitem__(self, index: int) -> Estimate: ...

    @overload
    def __getitem__(self, index: slice) -> list[Estimate]: ...

    def __getitem__(self, index: int | slice) -> Estimate | list[Estimate]:
        """One estimate, built now, or a list of some."""
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        return self._estimate(row, self.expected_bytes[row], self.safe_bytes[row])

    def __iter__(self) -> Iterator[Estimate]:
        return map(self._estimate, count(), self.expected_bytes.tolist(), self.safe_bytes.tolist())

    def _estimate(self, row: int, expected_bytes: float, safe_bytes: float) -> Estimate:
        reasons = self.reasons.get(row, ())
        return Estimate(
            expected_bytes=int(expected_bytes),
            safe_bytes=None if reasons else int(safe_bytes),
            coverage=self.coverage,
            bins=self.bins,
            probabilities=self.probabilities[row],
            in_support=not reasons,
            reasons=reasons,
            gpu=self.gpu,
            estimator=self.estimator,
            version=self.version,
            label_source=self.label_source,
        )


class Part(NamedTuple):
    """Some of the jobs that were asked about, and what the model said that answers for them.

    Attributes:
        rows: positions of the jobs, rising.
        estimates: of those, in that order.
    """

    rows: Sequence[int]
    estimates: Estimates


def in_order(parts: Sequence[Part], job_count: int) -> list[Estimate]:
    """The estimates of all ``job_count`` jobs, one by one."""
    if len(parts) == 1:
        return list(parts[0].estimates)
    estimates: dict[int, Estimate] = {}
    for part in parts:
        estimates |= zip(part.rows, part.estimates, strict=True)
    return [estimates[row] for row in range(job_count)]
