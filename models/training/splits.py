"""Splits by architecture: all jobs of one network are on the same side, which prevents data
leakage."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


def pieces(groups: NDArray[np.int64], count: int, seed: int) -> NDArray[np.int64]:
    """Assign each row to one of ``count`` pieces of nearly equal numbers of groups, shuffled; shape
    ``[B]``.

    Raises:
        ValueError: when there are fewer groups than pieces.
    """
    names, members = np.unique(groups, return_inverse=True)
    if len(names) < count:
        raise ValueError(f"{len(names)} architectures cannot be split into {count}: measure more")
    piece_of_group = np.random.default_rng(seed).permutation(len(names)) % count
    assigned: NDArray[np.int64] = piece_of_group[members]
    return assigned


def folds(groups: NDArray[np.int64], count: int, seed: int) -> list[tuple[Rows, Rows]]:
    """``count`` pairs of training and test rows; every row is tested once.

    Raises:
        ValueError: when there are fewer groups than folds.
    """
    assigned = pieces(groups, count, seed)
    return [
        (np.flatnonzero(assigned != fold), np.flatnonzero(assigned == fold))
        for fold in range(count)
    ]
