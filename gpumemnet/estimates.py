"""Estimates of many jobs as arrays that behave like a sequence: single ones are built where somebody asks for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from gpumemnet.bins import BinScheme
from gpumemnet.estimate import Estimate

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Estimates(Sequence[Estimate]):
    """What one model answers for ``B`` jobs; see :class:`~gpumemnet.estimate.Estimate`.

    Attributes:
        expected_bytes: whole numbers, shape ``[B]``.
        safe_bytes: whole numbers; not a number outside the model's support, shape ``[B]``.
        probabilities: shape ``[B, bins.count]``.
        reasons: job outside the support → why; jobs inside are not in it.
        coverage, bins, gpu, estimator, version, label_source: the same for all.
    """

    expected_bytes: Array
    safe_bytes: Array
    probabilities: Array
    reasons: Mapping[int, tuple[str, ...]]
    coverage: float
    bins: BinScheme
    gpu: str
    estimator: str
    version: str
    label_source: str

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
        reasons = self.reasons.get(row, ())
        return Estimate(
            expected_bytes=int(self.expected_bytes[row]),
            safe_bytes=None if reasons else int(self.safe_bytes[row]),
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


def in_order(parts: Sequence[Part], count: int) -> list[Estimate]:
    """The estimates of all ``count`` jobs, one by one."""
    if len(parts) == 1:
        return list(parts[0].estimates)
    estimates: dict[int, Estimate] = {}
    for part in parts:
        estimates |= zip(part.rows, part.estimates, strict=True)
    return [estimates[row] for row in range(count)]
