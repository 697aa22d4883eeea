"""Keeps the C library's heap small: memory of a large batch or a former model returns to the
system.

glibc keeps freed memory for later, in a heap for every thread.  A worker that once predicted a
batch of a thousand jobs would hold 50 MiB more until it ends.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from typing import Final

GROWTH_BYTES: Final = 8 * 2**20
"""Growth of a worker's memory after which freed memory is returned."""

_M_ARENA_MAX: Final = -8
"""A parameter of ``mallopt``, from glibc's ``malloc.h``."""


def use_one_heap() -> None:
    """Use one heap for all threads; one for each costs 25 MiB and, under Python's lock, saves no
    time."""
    with suppress(OSError, AttributeError):  # musl and macOS have no mallopt
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def give_memory_back() -> None:
    """Return free heap memory to the system; takes milliseconds, and releases Python's lock
    meanwhile."""
    if os.name == "posix":
        with suppress(OSError, AttributeError):  # musl and macOS have no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
