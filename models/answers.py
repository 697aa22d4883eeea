"""What an estimator answers for many jobs: expected bytes, bounds and bins.

The published estimators and the evaluation both use this one type, so neither imports the other for
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

COVERAGE: Final = 0.99
"""Coverage of :attr:`Answers.safe_bytes`."""


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """A candidate's answers for ``B`` jobs.

    Attributes:
        expected_bytes: shape ``[B]``.
        safe_bytes: bound at 99 % coverage, NaN where the candidate gives none, shape ``[B]``.
        bins: bin scheme's name → predicted bins, shape ``[B]``.
        probabilities: of the bins of 1 GiB, shape ``[B, n_bins]``; ``None`` where the candidate has
            none.
        bounds_bytes: coverage → bound, shape ``[B]``, where the candidate gives more than the one.
    """

    expected_bytes: Array
    safe_bytes: Array
    bins: dict[str, NDArray[np.int64]]
    probabilities: Array | None = None
    bounds_bytes: Mapping[float, Array] = field(default_factory=dict)


def concatenated(parts: Sequence[Answers]) -> Answers:
    """Concatenate the answers of several folds; coverages and probabilities that some folds lack
    are left out."""
    levels = set.intersection(*(set(part.bounds_bytes) for part in parts))
    probabilities = [part.probabilities for part in parts]
    return Answers(
        np.concatenate([part.expected_bytes for part in parts]),
        np.concatenate([part.safe_bytes for part in parts]),
        {name: np.concatenate([part.bins[name] for part in parts]) for name in parts[0].bins},
        None
        if any(part is None for part in probabilities)
        else np.concatenate([p for p in probabilities if p is not None]),
        {
            level: np.concatenate([part.bounds_bytes[level] for part in parts])
            for level in sorted(levels)
        },
    )
