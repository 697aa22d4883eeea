"""Rows that no retraining trains on: architectures chosen by the hash of their key, and the newest
observations.

The hash gives the same choice always and on every machine.  So a champion of an earlier retraining
was not trained on the rows on which its successor is judged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .rows import Row

HELD_OUT_SHARE: Final = 0.15
HELD_OUT_RULE: Final = f"sha256('held-out/1 ' + architecture_key) < {HELD_OUT_SHARE:g}"
"""The rule as cards state it; a bundle with another rule, or none, may have been trained on these
rows."""
NEWEST_SHARE: Final = 0.2
"""Share of the observations, the newest, that the candidate is not trained on."""


def is_held_out(architecture_key: str) -> bool:
    """Whether an architecture is held out, for judging only."""
    digest = hashlib.sha256(f"held-out/1 {architecture_key}".encode()).digest()
    return int.from_bytes(digest[:8]) < HELD_OUT_SHARE * 2**64


def newest_after(rows: Sequence[Row], learned_until: float | None) -> float | None:
    """The time after which observations are for judging: the newest share, and none that the
    champion was trained on.

    ``None`` where no row has a time: then all of them may be trained on.
    """
    times = sorted(row.observed_at for row in rows if row.observed_at is not None)
    if not times:
        return None
    boundary = times[max(0, round(len(times) * (1.0 - NEWEST_SHARE)) - 1)]
    return boundary if learned_until is None else max(boundary, learned_until)
