"""Addresses of new segments.

PyTorch breaks ties between free blocks of one size by address, so the address of a segment can
decide which block is used. The driver's choice is not documented.  The simulation uses the lowest
free range that is large enough, aligned to 2 MiB.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, Protocol

ALIGNMENT_BYTES: Final = 2 * 2**20


class AddressSpace(Protocol):
    """Assigns address ranges to segments."""

    def take(self, size_bytes: int) -> int:
        """Return the address of a range of ``size_bytes`` that overlaps no other used range."""

    def give_back(self, address: int, size_bytes: int) -> None:
        """Release a range from :meth:`take`."""


class LowestFreeAddress:
    """First fit from ``start`` upwards.

    Args:
        start: the lowest address, a multiple of 2 MiB.
    """

    def __init__(self, start: int = ALIGNMENT_BYTES) -> None:
        self._end = start
        self._holes: list[
            tuple[int, int]
        ] = []  # (address, size) below the end, sorted, never adjacent

    def take(self, size_bytes: int) -> int:
        """Return the lowest free address with room for ``size_bytes``."""
        size = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for index, (address, room) in enumerate(self._holes):
            if room >= size:
                self._holes[index : index + 1] = (
                    [(address + size, room - size)] if room > size else []
                )
                return address
        address = self._end
        self._end += size
        return address

    def give_back(self, address: int, size_bytes: int) -> None:
        """Make the range free again and join it with free neighbours."""
        size = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        index = bisect_left(self._holes, (address, 0))
        if index < len(self._holes) and self._holes[index][0] == address + size:
            size += self._holes.pop(index)[1]
        if index and sum(self._holes[index - 1]) == address:
            index -= 1
            address, room = self._holes.pop(index)
            size += room
        if address + size == self._end:
            self._end = address
        else:
            self._holes.insert(index, (address, size))
