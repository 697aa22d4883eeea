"""Each worker follows the registry by itself: all workers, and all hosts that share the folder, change to the same release."""

from __future__ import annotations

import logging
import threading

from .champion import Serving

logger = logging.getLogger("gpumemnet.service")


class Watcher:
    """Looks at the registry's aliases every ``reload_seconds`` in a thread of its own, so that requests go on meanwhile."""

    def __init__(self, serving: Serving, reload_seconds: float) -> None:
        self._serving = serving
        self._reload_seconds = reload_seconds
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look; in the process that serves, after any fork."""
        if self._thread is None and self._serving.registry is not None:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._run, name="gpumemnet-watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop looking."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._stopping.wait(self._reload_seconds):
            try:
                self._serving.follow()
            except Exception:  # the watch must outlive whatever a broken disk makes of a file
                logger.exception("the registry could not be followed")
