"""The tensors of a training process in host memory: weights before they move, offloaded states, copies
of what is on the GPU, and those among them that are pinned.

PyTorch pins memory in blocks of a power of two (``CachingHostAllocator`` in
``aten/src/ATen/core/CachingHostAllocator.h``) and keeps a block that was freed for the next request.
"""

from __future__ import annotations

import weakref
from typing import Final

import torch

from gpumemnet.torch_private.names import id_of_storage

_LEAST_BYTES: Final = 2**16
"""Smaller tensors are not counted: batches' labels, counters, tables."""


class HostTensors:
    """Counts the bytes of tensors on the host.

    A storage counts once another follows: it may turn out to be on the GPU.
    """

    def __init__(self) -> None:
        self._peak_bytes = self._most_pinned_bytes = 0
        self._live: dict[int, tuple[int, weakref.finalize]] = {}  # type: ignore[type-arg]
        self._paged_bytes = self._used_bytes = 0
        self._pinned: set[int] = set()

    def peaks(self) -> tuple[int, int]:
        """Return the most bytes that all took so far, pinned blocks included, and that were pinned."""
        self._most_pinned_bytes = max(self._most_pinned_bytes, self._used_bytes)
        self._peak_bytes = max(self._peak_bytes, self._paged_bytes + self._most_pinned_bytes)
        return self._peak_bytes, self._most_pinned_bytes

    def allocated(self, storage: torch.UntypedStorage) -> None:
        """A tensor with this storage may be new on the host."""
        key, size = id_of_storage(storage), storage.nbytes()
        if size >= _LEAST_BYTES and key not in self._live:
            self.peaks()
            self._live[key] = size, weakref.finalize(storage, self._freed, key)
            self._paged_bytes += size

    def pinned(self, storage: torch.UntypedStorage) -> None:
        """A tensor with this storage is pinned: it moves to a block of a power of two."""
        self.allocated(storage)
        key = id_of_storage(storage)
        if key in self._live and key not in self._pinned:
            self._pinned.add(key)
            self._paged_bytes -= self._live[key][0]
            self._used_bytes += _block(self._live[key][0])

    def left(self, storage: torch.UntypedStorage) -> None:
        """The storage is on another device now."""
        key = id_of_storage(storage)
        if key in self._live:
            self._live[key][1].detach()
            self._freed(key)

    def _freed(self, key: int) -> None:
        size, _ = self._live.pop(key)
        if key in self._pinned:
            self._pinned.remove(key)
            self._used_bytes -= _block(size)
        else:
            self._paged_bytes -= size


def _block(size_bytes: int) -> int:
    """Return the bytes of the pinned block for so many."""
    return 1 << (size_bytes - 1).bit_length()
