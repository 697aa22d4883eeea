"""Ends the processes that a test session left behind, however the session itself ended: ``python
tests/watchdog.py PID MARK``.

A test that fails, or a session that is killed, must not leave a service or a database running.
Every process that a session starts inherits an environment variable whose value belongs to this
session, so that a process beside the session finds them all.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Final

VARIABLE: Final = "TEST_SESSION_MARK"
_LOOK_SECONDS: Final = 0.5


def start() -> None:
    """Start a watchdog for this process.  Only Linux lists the environment of other processes;
    elsewhere nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    mark = uuid.uuid4().hex
    unmarked = {name: value for name, value in os.environ.items() if name != VARIABLE}
    os.environ[VARIABLE] = mark
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark]
    os.posix_spawn(sys.executable, command, unmarked, setsid=True)


def marked_processes(mark: str) -> list[int]:
    """Process ids of all that inherited the mark."""
    entry = f"{VARIABLE}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # it has ended, or it is another user's
            continue
    return found


def _watch(starter: int, mark: str) -> None:
    while os.getppid() == starter:
        time.sleep(_LOOK_SECONDS)
    while processes := marked_processes(mark):
        for process in processes:
            try:
                os.kill(process, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
