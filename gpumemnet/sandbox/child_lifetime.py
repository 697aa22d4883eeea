"""Ends child processes when their parent dies."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from typing import Final

_POLL_SECONDS: Final = 0.2
"""Time between two checks whether the parent process still exists."""


def end_with_parent() -> None:
    """End this worker process when its parent dies, by whatever signal; for the initializer of a
    process pool.

    A worker waits for its next task on a pipe that the other workers hold open too.  If the parent
    were killed, all of them would wait forever and keep their memory.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)  # a thread cannot end the process otherwise, and no parent is left to report to

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


def end_with_starter() -> None:
    """End this process when its parent dies; for a program that is not a worker of a process
    pool."""
    parent = os.getppid()

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=poll, name="end-with-parent-process", daemon=True).start()
