"""What a worker process does when the process that started it dies."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable


def end_with_parent(end: Callable[[], None] = lambda: os._exit(1)) -> None:
    """End this worker process, by ``end``, when its parent dies, by whatever signal; for the
    initializer of a process pool.

    A worker waits for its next task on a pipe that the other workers hold open too.  If the parent
    were killed, all of them would wait forever and keep their memory.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        end()  # by default at once, as no parent is left to report to

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()
