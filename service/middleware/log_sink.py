"""Writes log lines in a thread, so that a blocked standard error never delays a response.

Lines wait at most 0.2 s, or until 64 kB have accumulated.  When the reader stalls, up to 4 MiB
wait; further lines are dropped and counted.  Blocks are at most 4,096 bytes and end with a line.  A
pipe takes such a block in one write (POSIX, ``PIPE_BUF``), so the lines of several workers do not
mix.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Final

FLUSH_SECONDS: Final = 0.2
FLUSH_BYTES: Final = 64 * 1024
MAX_WAITING_BYTES: Final = 4 * 1024 * 1024
MAX_BLOCK_BYTES: Final = 4096
CLOSE_SECONDS: Final = 1.0
"""How long the process waits at its end for a stalled reader."""

_RETRY_SECONDS: Final = 0.01


class LogSink:
    """Writes whole lines to a file descriptor: directly until :meth:`start`, and in a thread from
    then on.

    Attributes:
        dropped: lines that were lost because the reader had stalled or closed the pipe.
    """

    def __init__(self, descriptor: int, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self.dropped = 0
        self._descriptor = descriptor
        self._max_waiting_bytes = max_waiting_bytes
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._waiting_bytes = 0
        self._something = threading.Event()
        self._hurry = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; call it after any fork."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpumemnet-log", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def write(self, line: bytes, *, is_urgent: bool = False) -> None:
        """Write one line that ends with a newline; never blocks once :meth:`start` was called.

        Args:
            line: at most :data:`MAX_BLOCK_BYTES`, or it may mix with those of another worker.
            is_urgent: write it and all waiting lines at once.
        """
        if self._thread is None:
            self._write_all([line])
            return
        with self._lock:
            if self._waiting_bytes > self._max_waiting_bytes:
                self.dropped += 1
                return
            if not self._lines:
                self._something.set()
            self._lines.append(line)
            self._waiting_bytes += len(line)
            if is_urgent or self._waiting_bytes > FLUSH_BYTES:
                self._hurry.set()

    def close(self) -> None:
        """Write the waiting lines, for at most :data:`CLOSE_SECONDS`, and end the thread."""
        thread, self._is_closing = self._thread, True
        self._something.set()
        self._hurry.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_SECONDS)
            atexit.unregister(self.close)

    def _run(self) -> None:
        while True:
            self._something.wait()
            self._hurry.wait(FLUSH_SECONDS)
            with self._lock:
                lines, self._lines = self._lines, []
                self._something.clear()
                self._hurry.clear()
                if self._is_closing:  # the events must stay set
                    self._something.set()
                    self._hurry.set()
            if lines:
                self._write_all(lines)
                with self._lock:
                    self._waiting_bytes -= sum(map(len, lines))
            elif self._is_closing:
                return

    def _write_all(self, lines: Iterable[bytes]) -> None:
        for block, count in _blocks(lines):
            if not self._write_block(block):
                self.dropped += count

    def _write_block(self, block: bytes) -> bool:
        while block:
            try:
                block = block[os.write(self._descriptor, block) :]
            except BlockingIOError:  # another process made the descriptor non-blocking
                time.sleep(_RETRY_SECONDS)
            except OSError:  # the reader closed the pipe, or the disk is full
                return False
        return True


def _blocks(lines: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    """The lines in blocks, with the number of lines in each."""
    block: list[bytes] = []
    length = 0
    for line in lines:
        if block and length + len(line) > MAX_BLOCK_BYTES:
            yield b"".join(block), len(block)
            block, length = [], 0
        block.append(line)
        length += len(line)
    if block:
        yield b"".join(block), len(block)
