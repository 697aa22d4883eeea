"""The result of a search."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The result of a search.

    Attributes:
        choices: option of each unit, shape ``[n]``; ``None`` if the search found nothing that fits.
        bound_seconds: proven lower bound on the seconds of a step within the limit; ``None`` if the
            search proves none.
        others: further plans that fit, the fastest first.
    """

    choices: NDArray[np.int64] | None
    bound_seconds: float | None = None
    others: tuple[NDArray[np.int64], ...] = ()
