"""The C library's heap, kept small: what a large batch or a former model took goes back to the system.

glibc keeps freed memory for later, in a heap for every thread.  A worker that once answered a batch of a thousand jobs would hold
50 MiB more for good.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from typing import Final

GROWTH_BYTES: Final = 8 * 2**20
"""Growth of a worker after which it is worth looking for memory to give back."""

_M_ARENA_MAX: Final = -8
"""Of ``mallopt``, in glibc's ``malloc.h``."""


def use_one_heap() -> None:
    """One heap for all threads: the C library makes one for each, and under Python's lock they save no time and cost 25 MiB."""
    with suppress(OSError, AttributeError):  # musl and macOS have no mallopt
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def give_memory_back() -> None:
    """Return what is free in the heap to the system; takes milliseconds, without Python's lock."""
    if os.name == "posix":
        with suppress(OSError, AttributeError):  # musl and macOS have no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
