"""Ids of predictions: UUIDs of version 7 (RFC 9562, section 5.7), which sort by the time at which they were made.

The random part comes from the operating system in blocks, because one call for each id would cost more than all the rest of it.
"""

from __future__ import annotations

import os
from typing import Final

_BLOCK: Final = 512
"""Random parts that are fetched at a time."""
_RANDOM_BYTES: Final = 10
_VARIANTS: Final = "89ab"

_random_parts: list[str] = []


def prediction_id(now_nanoseconds: int) -> str:
    """A new id for a prediction made at ``now_nanoseconds`` since the epoch; threads may share this, and so may forks."""
    while True:
        try:
            random_part = _random_parts.pop()
            break
        except IndexError:  # other threads may take what is fetched here
            _random_parts.extend(_fetch())
    stamp = f"{now_nanoseconds // 1_000_000:012x}"
    return f"{stamp[:8]}-{stamp[8:12]}-{random_part}"


def _fetch() -> list[str]:
    digits = os.urandom(_BLOCK * _RANDOM_BYTES).hex()
    parts = (digits[at : at + 2 * _RANDOM_BYTES] for at in range(0, len(digits), 2 * _RANDOM_BYTES))
    return [f"7{part[:3]}-{_VARIANTS[int(part[3], 16) % 4]}{part[4:7]}-{part[7:19]}" for part in parts]


# A forked worker would otherwise hand out the same ids as its siblings.
os.register_at_fork(after_in_child=_random_parts.clear)
