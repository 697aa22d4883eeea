"""Probabilities of bins under mixtures of logistics, one bin after the other: fast for one job.

``MemoryDistribution.bin_probabilities`` (:mod:`gpumemnet.predict.distribution`) uses arrays for
many jobs.  Cython compiles this module with the types of ``bin_shares.pxd``.  Without a compiler it
runs as it is.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Amounts = MutableSequence[float] | NDArray[np.float64]
    Numbers = Sequence[float] | NDArray[np.float64]

IS_COMPILED: Final = not __file__.endswith(".py")
"""Whether this module is compiled."""
REACH: Final = 40.0
"""This many scales from its location, a logistic is 0 or 1 to double precision."""

_E: Final = 2.718281828459045
_REACH: Final = REACH


def fill_shares(mixtures: Numbers, components: int, log_edges: Numbers, answers: Amounts) -> None:
    """Add the probabilities of the ``E + 1`` bins between ``E`` rising edges to ``answers``.

    Args:
        mixtures: the weights of ``B`` mixtures with ``components`` logistics each, then their
            locations in log-bytes, then their
            scales: ``3 * B * components`` numbers.
        components: of each mixture.
        log_edges: the edges in log-bytes.
        answers: ``B * (E + 1)`` zeros.

    Raises:
        ValueError: when a buffer is too short.
    """
    edge_count = len(log_edges)
    count = len(mixtures) // 3
    rows = count // components if components > 0 else 0
    if rows * components * 3 != len(mixtures) or len(answers) < rows * (edge_count + 1):
        raise ValueError("too few numbers for the mixtures")
    for row in range(rows):
        answer = row * (edge_count + 1)
        total = 0.0
        for component in range(row * components, (row + 1) * components):
            total += mixtures[component]
        for component in range(row * components, (row + 1) * components):
            share = mixtures[component] / total
            location = mixtures[count + component]
            scale = mixtures[2 * count + component]
            # Below the first edge within reach, the logistic is 0.
            at, end = 0, edge_count
            while at < end:
                middle = (at + end) // 2
                if log_edges[middle] < location - _REACH * scale:
                    at = middle + 1
                else:
                    end = middle
            below = 0.0
            while at < edge_count and log_edges[at] < location + _REACH * scale:
                up_to = 1.0 / (1.0 + _E ** ((location - log_edges[at]) / scale))
                answers[answer + at] += share * (up_to - below)
                below = up_to
                at += 1
            answers[answer + at] += share * (1.0 - below)
