"""Child processes.

:mod:`~gpumemnet.sandbox.process` runs a user's code in one, for extraction, tracing and planning, and
has pools for work of our own.
:func:`end_with_parent` ends a worker with the process that started it.
:mod:`~gpumemnet.sandbox.user_code` says in one sentence what went wrong in the user's code.
"""

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
