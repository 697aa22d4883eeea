"""Bins: the intervals of memory that a classifier predicts.

GPUMemNet's tables use bins of 1,000, 2,000 and 8,000 MiB and call them 1, 2 and 8 "GB" (arXiv
2602.17817, section 5).  They are available as named schemes.  Any other scheme is given by its
width in bytes; the default is 1 GiB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.units import GIB, MIB

MAX_BINS: Final = 4096
MAX_WIDTH_BYTES: Final = 2**62
DEFAULT_TOP_BYTES: Final = 192 * GIB
"""Upper edge of the last closed bin by default: the largest single GPU of today (B200, 192 GB)."""


@dataclass(frozen=True, slots=True)
class BinScheme:
    """Bins of equal width from zero: bin ``k`` is ``[k·width, (k+1)·width)``; the last bin has no
    upper edge.

    Attributes:
        width_bytes: width of a bin.
        count: number of bins, including the open one.
        name: the published name, or the width in MiB.

    Raises:
        InvalidRequestError: when the width is less than 1 MiB, or there are no bins or more than
            4,096.
    """

    width_bytes: int
    count: int
    name: str = ""

    def __post_init__(self) -> None:
        if type(self.width_bytes) is not int or self.width_bytes < MIB:
            raise InvalidRequestError(
                f"must be at least 1 MiB, not {describe(self.width_bytes)} bytes", "bin_width"
            )
        if type(self.count) is not int or not 1 <= self.count <= MAX_BINS:
            raise InvalidRequestError(
                f"gives {self.count} bins: choose a width that needs between 1 and {MAX_BINS}",
                "bin_width",
            )
        if not self.name:
            object.__setattr__(self, "name", f"{self.width_bytes / MIB:g} MiB")

    @property
    def log_inner_edges(self) -> NDArray[np.float64]:
        """Edges between neighbouring bins in ``log(bytes)``, shape ``[count - 1]``, read-only."""
        return _log_inner_edges(self.width_bytes, self.count)

    def bounds_bytes(self, index: int) -> tuple[int, int | None]:
        """Lower and upper edge of bin ``index`` in bytes; the upper edge of the last bin is
        ``None``."""
        lower = index * self.width_bytes
        return lower, None if index == self.count - 1 else lower + self.width_bytes

    def index(self, amount_bytes: NDArray[np.float64] | float) -> NDArray[np.int64]:
        """Index of the bin that holds each amount; amounts above the last edge fall into the open
        bin."""
        clipped = np.clip(amount_bytes, 0.0, float(self.width_bytes) * self.count)
        indices: NDArray[np.int64] = np.minimum(clipped // self.width_bytes, self.count - 1).astype(
            np.int64
        )
        return indices


@lru_cache(maxsize=64)
def _log_inner_edges(width_bytes: int, count: int) -> NDArray[np.float64]:
    edges: NDArray[np.float64] = np.log(np.arange(1, count) * float(width_bytes))
    edges.flags.writeable = False
    return edges


def bins_of_width(width_bytes: float, top_bytes: int = DEFAULT_TOP_BYTES) -> BinScheme:
    """Bins of the given width up to ``top_bytes``, and an open bin above.

    Raises:
        InvalidRequestError: when the width is not a finite positive number or gives more than 4,096
            bins.
    """
    if (
        isinstance(width_bytes, bool)
        or not isinstance(width_bytes, int | float)
        or not abs(width_bytes) <= MAX_WIDTH_BYTES
    ):
        raise InvalidRequestError(
            f"must be a number of bytes, not {describe(width_bytes)}", "bin_width"
        )
    width = int(width_bytes)
    return BinScheme(width, math.ceil(top_bytes / width) + 1 if width > 0 else 0)


def _published(width_mib: int, top_bytes: int = DEFAULT_TOP_BYTES) -> BinScheme:
    return BinScheme(
        width_mib * MIB, math.ceil(top_bytes / (width_mib * MIB)) + 1, f"published-{width_mib}mib"
    )


PUBLISHED_BINS: Final[dict[str, BinScheme]] = {
    scheme.name: scheme for scheme in (_published(1000), _published(2000), _published(8000))
}


def named_bins(name: str) -> BinScheme:
    """Looks up a published scheme by its name.

    Raises:
        InvalidRequestError: when the name is unknown; the message lists the names.
    """
    if not isinstance(name, str) or name not in PUBLISHED_BINS:
        raise InvalidRequestError(
            f"must be one of {', '.join(PUBLISHED_BINS)}, not {describe(name)}", "bins"
        )
    return PUBLISHED_BINS[name]
