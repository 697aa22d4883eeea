"""Several workers behind one socket: forked, watched, started again when they die, and stopped together.

The parent loads the code once and forks, so that workers share what does not change.  They share the listening socket too: a
connection that a dead worker had not yet accepted is accepted by another.  The parent answers nothing and holds no model.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

QUICK_DEATH_SECONDS: Final = 2.0
"""A worker that lived shorter than this did not die of its work."""
MAX_QUICK_DEATHS: Final = 5
BACK_OFF_SECONDS: Final = 0.2
"""Before a worker that died quickly is started again; doubled each time."""
GRACE_SECONDS: Final = 5.0
"""Beyond the time that workers give their requests, before they are killed."""
USER_ERROR: Final = 2
_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
_PR_SET_PDEATHSIG: Final = 1

logger = logging.getLogger("gpumemnet.service")

Serve = Callable[[Callable[[], None]], int]
"""What a worker does: called with a function to call when it is ready, it returns the exit code."""


@dataclass(frozen=True, slots=True)
class _Worker:
    pid: int
    started_seconds: float
    """On the monotonic clock."""
    ready: int
    """Reading end of a pipe: a byte when the worker is ready, nothing when it ended before."""


def supervise(
    count: int,
    serve: Serve,
    *,
    on_ready: Callable[[], None],
    on_death: Callable[[int], None],
    shutdown_seconds: float,
) -> int:
    """Keep ``count`` workers alive until SIGTERM or SIGINT; returns the exit code of the service.

    Args:
        count: workers.
        serve: what each does, in a process of its own.
        on_ready: called once, when all answer.
        on_death: called with the process id of each worker that has ended.
        shutdown_seconds: how long workers may take to stop.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    workers: dict[int, _Worker] = {}
    try:
        for _ in range(count):
            worker = _fork(serve)
            workers[worker.pid] = worker
            if not _becomes_ready(worker):  # it has said why itself; the others would say the same
                workers.pop(worker.pid)
                return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1]) or 1
        on_ready()
        return _watch(workers, count, serve, on_death)
    finally:
        _stop(workers, on_death, shutdown_seconds)


def _fork(serve: Serve) -> _Worker:
    reading, writing = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writing)
        return _Worker(pid, time.monotonic(), reading)
    code = 1
    try:
        os.close(reading)
        _end_with(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        code = serve(lambda: _say_ready(writing))
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 0
    except BaseException:
        logger.exception("a worker failed")
    finally:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)  # what the parent registered to do at its end is the parent's


def _say_ready(pipe: int) -> None:
    os.write(pipe, b"1")
    os.close(pipe)


def _becomes_ready(worker: _Worker) -> bool:
    """Wait until the worker is ready, or has ended, or the service is to stop."""
    while True:
        readable, _, _ = select.select([worker.ready], [], [], 0.05)
        if readable:
            return os.read(worker.ready, 1) == b"1"
        if signal.sigpending() & {signal.SIGTERM, signal.SIGINT}:
            return True


def _watch(workers: dict[int, _Worker], count: int, serve: Serve, on_death: Callable[[int], None]) -> int:
    quick_deaths = 0
    while True:
        number = signal.sigwait(_SIGNALS)
        if number != signal.SIGCHLD:
            return 0 if number == signal.SIGTERM else 130
        for worker, status in _ended(workers):
            on_death(worker.pid)
            os.close(worker.ready)
            is_quick = time.monotonic() - worker.started_seconds < QUICK_DEATH_SECONDS
            quick_deaths = quick_deaths + 1 if is_quick else 0
            how = os.waitstatus_to_exitcode(status)
            logger.error("worker %d ended with %s and is started again", worker.pid, signal.Signals(-how).name if how < 0 else how)
            if quick_deaths >= MAX_QUICK_DEATHS:
                logger.critical("%d workers in a row ended as soon as they were started: the service stops", quick_deaths)
                return 1
            if is_quick:
                time.sleep(BACK_OFF_SECONDS * 2 ** (quick_deaths - 1))
        while len(workers) < count:
            worker = _fork(serve)
            workers[worker.pid] = worker


def _ended(workers: dict[int, _Worker]) -> list[tuple[_Worker, int]]:
    ended = []
    for pid in list(workers):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended.append((workers.pop(pid), status))
    return ended


def _stop(workers: dict[int, _Worker], on_death: Callable[[int], None], shutdown_seconds: float) -> None:
    """Let all workers finish what they accepted, and kill those that take too long."""
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + shutdown_seconds + GRACE_SECONDS
    while workers:
        for worker, _ in _ended(workers):
            on_death(worker.pid)
        if workers and time.monotonic() > deadline:
            for pid in workers:
                logger.error("worker %d did not stop in time and is killed", pid)
                os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.02)


def _end_with(parent: int) -> None:
    """End this process when the parent is gone, whatever killed it; Linux alone can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(0)
