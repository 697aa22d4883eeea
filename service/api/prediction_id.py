"""Ids of predictions: UUIDs of version 7 (RFC 9562, section 5.7), which sort by the time at which they were made.

The random part comes from the operating system in blocks, because one call for each id would cost more than all the rest of it.
"""

from __future__ import annotations

import os
from typing import Final

import numpy as np

_BLOCK: Final = 512
"""Random parts that are fetched at a time."""
_RANDOM_BYTES: Final = 10
_LENGTH: Final = 36
_PLACES: Final = [place for place in range(_LENGTH) if place not in (8, 13, 18, 23)]
"""Of the digits: a dash stands at the others."""
_VARIANTS: Final = "89ab"

_random_parts: list[str] = []


def prediction_id(now_nanoseconds: int) -> str:
    """A new id for a prediction made at ``now_nanoseconds`` since the epoch; threads may share this, and so may forks."""
    try:
        random_part = _random_parts.pop()
    except IndexError:
        _random_parts.extend(_fetch())
        random_part = _random_parts.pop()
    stamp = f"{now_nanoseconds // 1_000_000:012x}"
    return f"{stamp[:8]}-{stamp[8:12]}-{random_part}"


def prediction_ids(now_nanoseconds: int, count: int) -> list[str]:
    """So many new ids of one moment, as :func:`prediction_id` gives one."""
    numbers = np.empty((count, 16), dtype=np.uint8)
    numbers[:, :6] = np.frombuffer((now_nanoseconds // 1_000_000).to_bytes(6, "big"), dtype=np.uint8)
    numbers[:, 6:] = np.frombuffer(os.urandom(count * _RANDOM_BYTES), dtype=np.uint8).reshape(count, _RANDOM_BYTES)
    numbers[:, 6] = numbers[:, 6] & 0x0F | 0x70
    numbers[:, 8] = numbers[:, 8] & 0x3F | 0x80
    letters = np.full((count, _LENGTH), ord("-"), dtype=np.uint8)
    letters[:, _PLACES] = np.frombuffer(numbers.tobytes().hex().encode(), dtype=np.uint8).reshape(count, 32)
    text = letters.tobytes().decode()
    return [text[at : at + _LENGTH] for at in range(0, len(text), _LENGTH)]


def _fetch() -> list[str]:
    digits = os.urandom(_BLOCK * _RANDOM_BYTES).hex()
    parts = (digits[at : at + 2 * _RANDOM_BYTES] for at in range(0, len(digits), 2 * _RANDOM_BYTES))
    return [f"7{part[:3]}-{_VARIANTS[int(part[3], 16) % 4]}{part[4:7]}-{part[7:19]}" for part in parts]


# A forked worker would otherwise hand out the same ids as its siblings.
os.register_at_fork(after_in_child=_random_parts.clear)
