"""Which tests only ``make nightly`` runs: those whose minutes cost more in every change than what
they find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def nightly(values: Iterable[Any]) -> list[Any]:
    """Parameters of a test that only the nightly run takes; a tuple stands for several
    parameters."""
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.nightly)
        for one in values
    ]


def every_pair(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """All pairs as parameters: every change tries each value at least once, the nightly run tries
    every pair."""
    often = {
        (first[turn % len(first)], second[turn % len(second)])
        for turn in range(max(len(first), len(second)))
    }
    pairs = list(product(first, second))
    return [pair for pair in pairs if pair in often] + nightly(
        pair for pair in pairs if pair not in often
    )
