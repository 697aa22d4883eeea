"""Splits a dataset by architecture, never by row: rows of one network that differ only in batch
size would leak the label.

Rows of real models are split by architecture family: a ResNet-50 tells much of a ResNet-101.

A fold is a hash of the architecture's key and a seed, so it never changes when rows are added, on
whatever host they were measured.  Real models (recipe ``zoo``) test how estimators generalise and
belong to no fold.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpumemnet.atomic_files import replace_file
from gpumemnet.errors import DatasetError
from gpumemnet.job.measurement import Measurement

TEST_ONLY_RECIPES: Final = frozenset({"zoo"})
SPLIT_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Split:
    """Which fold every architecture of a dataset belongs to.

    Attributes:
        folds: number of folds.
        seed: seed of the hash.
        fold_of: :attr:`~gpumemnet.job.measurement.Measurement.split_group` → fold, from 0.
        test_only: groups of architectures that occur in :data:`TEST_ONLY_RECIPES`; they are in no
            fold.
    """

    folds: int
    seed: int
    fold_of: dict[str, int]
    test_only: frozenset[str]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "version": SPLIT_VERSION,
            "folds": self.folds,
            "seed": self.seed,
            "fold_of": dict(sorted(self.fold_of.items())),
            "test_only": sorted(self.test_only),
        }


def split_by_architecture(measurements: Iterable[Measurement], folds: int, seed: int) -> Split:
    """The fold of every architecture; sizes are even only on average, because a fold is a hash.

    Args:
        measurements: rows of a dataset.
        folds: number of folds, at least 2.
        seed: seed of the hash.

    Raises:
        DatasetError: when there are fewer than two folds.
    """
    if folds < 2:
        raise DatasetError(f"a split needs at least 2 folds, not {folds}")
    keys: set[str] = set()
    test_only: set[str] = set()
    for measurement in measurements:
        (test_only if measurement.recipe in TEST_ONLY_RECIPES else keys).add(
            measurement.split_group
        )
    return Split(
        folds,
        seed,
        {key: fold_of(key, folds, seed) for key in keys - test_only},
        frozenset(test_only),
    )


def fold_of(split_group: str, folds: int, seed: int) -> int:
    """The fold of one architecture, or family of architectures, from 0."""
    digest = hashlib.sha256(f"{seed}:{split_group}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % folds


def write_split(split: Split, path: Path) -> None:
    """Write ``split`` as JSON, atomically.

    Raises:
        DatasetError: when it cannot be written.
    """
    try:
        replace_file(path, (json.dumps(split.to_dict(), indent=1) + "\n").encode())
    except OSError as error:
        raise DatasetError(f"{path} cannot be written: {error.strerror}") from None
