"""Prediction ids: UUIDs of version 7 (RFC 9562, section 5.7), which sort by creation time.

The random part is read from the operating system in blocks, because one system call for each id
would dominate its cost.
"""

from __future__ import annotations

import os
from typing import Final

_BLOCK: Final = 512
"""Random parts that are read at a time."""
_RANDOM_BYTES: Final = 10
_VARIANTS: Final = "89ab"

_random_parts: list[str] = []


def prediction_id(now_nanoseconds: int) -> str:
    """A new id for a prediction made at ``now_nanoseconds`` since the epoch; safe across threads
    and forks."""
    while True:
        try:
            random_part = _random_parts.pop()
            break
        except IndexError:  # another thread took the last one
            _random_parts.extend(_fetch())
    stamp = f"{now_nanoseconds // 1_000_000:012x}"
    return f"{stamp[:8]}-{stamp[8:12]}-{random_part}"


def _fetch() -> list[str]:
    digits = os.urandom(_BLOCK * _RANDOM_BYTES).hex()
    parts = (digits[at : at + 2 * _RANDOM_BYTES] for at in range(0, len(digits), 2 * _RANDOM_BYTES))
    return [
        f"7{part[:3]}-{_VARIANTS[int(part[3], 16) % 4]}{part[4:7]}-{part[7:19]}" for part in parts
    ]


# Otherwise a forked worker would generate the same ids as its siblings.
os.register_at_fork(after_in_child=_random_parts.clear)
