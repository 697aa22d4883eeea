"""Processes that do not outlive the one that they work for."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from typing import Final

_LOOK_SECONDS: Final = 0.2
"""How often a program looks whether the one that started it is still there."""


def end_with_parent() -> None:
    """End this process when the one that started it has died, by whatever signal; for the initializer of a process pool.

    A worker waits for its next task on a pipe that the other workers hold open too, so a parent that was killed would leave them
    waiting for ever, each with its memory.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)  # from a thread there is no other way, and nobody is left to report to

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


def end_with_starter() -> None:
    """The same for a program that is no worker of a pool: it looks now and then whether who started it is still there."""
    starter = os.getppid()

    def look() -> None:
        while os.getppid() == starter:
            time.sleep(_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=look, name="end-with-starter", daemon=True).start()
