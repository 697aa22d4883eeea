"""Workers of a pool that do not outlive the process that they work for."""

from __future__ import annotations

import multiprocessing
import os
import threading


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
