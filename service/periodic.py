"""A thread of the serving process that does something every now and then."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

STOP_SECONDS: Final = 1.0
"""How long the service waits for a thread when it ends: a folder in the network may hang."""

logger = logging.getLogger("gpumemnet.service")


class Repeated:
    """Calls a function in a thread of its own until it is stopped; the thread survives errors.

    Args:
        name: name of the thread.
        seconds: pause before each call.
        action: the function.

    Attributes:
        stopping: set when a function that waits should return.
    """

    def __init__(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        self.stopping = threading.Event()
        self._name = name
        self._seconds = seconds
        self._action = action
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; call it in the process that serves."""
        self.stopping.clear()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait a moment until it has ended."""
        self.stopping.set()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while not self.stopping.wait(self._seconds):
            try:
                self._action()
            except Exception:
                logger.exception("%s failed", self._name)
