"""A thread of the serving process that runs one function until it is told to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundThread:
    """Starts and stops the thread of a function.

    Args:
        name: name of the thread.
        run: the function; it returns soon after :attr:`stopping` is set.

    Attributes:
        stopping: set when the function must return.
    """

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self._name = name
        self._run = run
        self._thread: threading.Thread | None = None
        self.stopping = threading.Event()

    def start(self) -> None:
        """Start the thread; call it in the serving process, after any fork."""
        if self._thread is None:
            self.stopping.clear()
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait until it has ended."""
        self.stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
