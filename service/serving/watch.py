"""Follows the registry in each worker: all workers, and all hosts that share the folder, change to
the same release."""

from __future__ import annotations

import logging

from .background import BackgroundThread
from .served_release import ServedRelease

logger = logging.getLogger("gpumemnet.service")


class Watcher:
    """Reads the registry's aliases every ``reload_seconds`` in a background thread, so that
    requests are not delayed."""

    def __init__(self, serving: ServedRelease, reload_seconds: float) -> None:
        self._serving = serving
        self._reload_seconds = reload_seconds
        self._thread = BackgroundThread("gpumemnet-watch", self._run)

    def start(self) -> None:
        """Start the thread; call it in the serving process, after any fork."""
        if self._serving.registry is not None:
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._thread.stop()

    def _run(self) -> None:
        while not self._thread.stopping.wait(self._reload_seconds):
            try:
                self._serving.follow()
            except Exception:  # the thread must survive any error that a broken disk causes
                logger.exception("the registry could not be followed")
