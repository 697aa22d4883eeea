"""Follows the registry in each worker: all workers, and all hosts that share the folder, change to the same release."""

from __future__ import annotations

import logging
import threading

from .served_release import ServedRelease

logger = logging.getLogger("gpumemnet.service")


class Watcher:
    """Reads the registry's aliases every ``reload_seconds`` in a background thread, so that requests are not delayed."""

    def __init__(self, serving: ServedRelease, reload_seconds: float) -> None:
        self._serving = serving
        self._reload_seconds = reload_seconds
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; call it in the serving process, after any fork."""
        if self._thread is None and self._serving.registry is not None:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._run, name="gpumemnet-watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._stopping.wait(self._reload_seconds):
            try:
                self._serving.follow()
            except Exception:  # the thread must survive any error that a broken disk causes
                logger.exception("the registry could not be followed")
