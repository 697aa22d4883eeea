"""Runs several workers: this process binds the socket, starts the workers, and replaces those that
die.  It serves no request.

Workers are forked before anything heavy is loaded, and share the listening socket: the others
accept the waiting connections of a dead worker.  A worker that dies before it is ready is restarted
after a pause; five such failures in a row end the service.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from gpumemnet.errors import GpumemnetError

from .middleware.logs import configure_logs
from .middleware.worker_metrics import (
    count_in,
    forget_worker,
    make_metrics_folder,
    remove_metrics_folder,
)
from .settings import Settings, SettingsError

MAX_FAILED_STARTS: Final = 5
"""Consecutive failed starts of workers that end the service."""

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 5.0
KILL_SECONDS: Final = 5
"""Seconds after the shutdown time until a worker that is still alive is killed."""

_READY: Final = b"ready"
_USER_ERROR: Final = 2
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP)

logger = logging.getLogger("gpumemnet.service")


@dataclass(slots=True)
class Worker:
    """One worker process.

    Attributes:
        number: its number, from 0; its replacement has the same.
        pid: its process id.
        channel: through it the worker reports that it is ready, or why it failed; closing it ends
            the worker.
        is_ready: whether it serves requests.
        received: the messages received from the channel.
    """

    number: int
    pid: int
    channel: socket.socket
    is_ready: bool = False
    received: bytes = b""


class Supervisor:
    """Keeps ``settings.workers`` workers alive.

    Args:
        settings: of the service.
        listener: the socket that they share.
        serve: the work of a worker; as :func:`service.server.serve`.
        announce: called once, when all workers serve requests.
    """

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        serve: Callable[..., int],
        announce: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._serve = serve
        self._announce = announce
        self._workers: dict[int, Worker] = {}
        self._failed_starts = 0
        self._starts_at: dict[int, float] = dict.fromkeys(range(settings.workers), 0.0)
        self._received: list[int] = []
        self._is_announced = False

    def run(self) -> int:
        """Run until SIGTERM or SIGINT; returns the exit code.

        Raises:
            SettingsError: when a worker reports that it cannot start, or too many in a row die
                before they are ready.
        """
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        folder = make_metrics_folder(self._settings.metrics_dir)
        before = {number: signal.signal(number, self._note) for number in self._handled_signals()}
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        try:
            while not self._received:
                self._start_due(folder)
                self._wait(wake_read)
                self._listen_to_workers()
                self._bury(folder)
            return 0
        finally:
            self._stop()
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(wake_read)
            os.close(wake_write)
            remove_metrics_folder(folder)

    def _handled_signals(self) -> list[signal.Signals]:
        """All but a SIGHUP that is ignored, as under nohup, and would end the service."""
        ignores_hangup = (
            self._settings.api_keys_file is None
            and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        )
        return [number for number in _SIGNALS if number != signal.SIGHUP or not ignores_hangup]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self._settings.api_keys_file is not None:
            for pid in list(self._workers):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGHUP)
        elif number != signal.SIGCHLD:
            self._received.append(number)

    def _start_due(self, folder: Path) -> None:
        now_seconds = time.monotonic()
        for number in [
            number for number, at_seconds in self._starts_at.items() if at_seconds <= now_seconds
        ]:
            del self._starts_at[number]
            self._start(number, folder)

    def _start(self, number: int, folder: Path) -> None:
        ours, theirs = socket.socketpair()
        forget_worker(folder, number)
        signal.pthread_sigmask(
            signal.SIG_BLOCK, _SIGNALS
        )  # or the child could run the parent's handler and lose a signal
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._be_worker(number, folder, theirs)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        theirs.close()
        ours.setblocking(False)
        self._workers[pid] = Worker(number, pid, ours)

    def _be_worker(self, number: int, folder: Path, channel: socket.socket) -> NoReturn:
        """Run the worker in the child process; never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for each in _SIGNALS:
                signal.signal(each, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the worker has read its keys
            signal.signal(
                signal.SIGINT, signal.SIG_IGN
            )  # Ctrl-C reaches all; the supervisor stops the workers
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            for other in self._workers.values():
                other.channel.close()
            writer = configure_logs(self._settings.log_format, self._settings.log_level, number)
            count_in(folder, number)
            try:
                code = self._serve(
                    self._settings, self._listener, lambda: channel.sendall(_READY), channel
                )
            except GpumemnetError as error:
                channel.sendall(str(error).encode("utf-8", "replace")[:4000])
                code = _USER_ERROR
            except SystemExit as leaving:
                code = leaving.code if isinstance(leaving.code, int) else 1
            except BaseException:
                logger.exception("worker %d failed", number)
            writer.sink.close()
        finally:
            os._exit(code)

    def _wait(self, wake_read: int) -> None:
        """Sleep until a signal, a message from a worker, or the time to start one."""
        timeout_seconds = None
        if self._starts_at:
            timeout_seconds = max(0.0, min(self._starts_at.values()) - time.monotonic())
        waiting = [
            worker.channel.fileno() for worker in self._workers.values() if not worker.is_ready
        ]
        with suppress(InterruptedError):
            select.select([wake_read, *waiting], [], [], timeout_seconds)
        with suppress(BlockingIOError):
            os.read(wake_read, 4096)

    def _listen_to_workers(self) -> None:
        for worker in self._workers.values():
            if worker.is_ready:
                continue
            with suppress(BlockingIOError, ConnectionError):
                worker.received += worker.channel.recv(4096)
            if worker.received == _READY:
                worker.is_ready = True
                self._failed_starts = 0
        if (
            not self._is_announced
            and not self._starts_at
            and all(worker.is_ready for worker in self._workers.values())
        ):
            self._is_announced = True
            self._announce()

    def _bury(self, folder: Path) -> None:
        """Detect dead workers, and schedule their replacement."""
        for worker in list(self._workers.values()):
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid == 0:
                continue
            self._listen_to_workers()
            del self._workers[worker.pid]
            worker.channel.close()
            forget_worker(folder, worker.number)
            if self._received:
                continue
            code = os.waitstatus_to_exitcode(status)
            how = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"ended with exit code {code}"
            )
            if not worker.is_ready:
                is_last = not any(other.is_ready for other in self._workers.values())
                if code == _USER_ERROR and worker.received:
                    how += f": {worker.received.decode('utf-8', 'replace')}"
                if code == _USER_ERROR and worker.received and is_last:
                    raise SettingsError(worker.received.decode("utf-8", "replace"))
                self._failed_starts += 1
                if self._failed_starts >= MAX_FAILED_STARTS and is_last:
                    raise SettingsError(
                        f"{MAX_FAILED_STARTS} workers in a row died before they were ready (the last one {how}): "
                        "see the log above, and whether there is memory for so many"
                    )
            pause_seconds = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**self._failed_starts)
            if not self._failed_starts:
                pause_seconds = 0.0
            self._starts_at[worker.number] = time.monotonic() + pause_seconds
            logger.error(
                "worker %d (process %d) %s and is replaced", worker.number, worker.pid, how
            )

    def _stop(self) -> None:
        """Stop all workers, and wait until they have finished their accepted requests."""
        self._listener.close()
        for worker in self._workers.values():
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGTERM)
        deadline_seconds = time.monotonic() + self._settings.shutdown_seconds + KILL_SECONDS
        for worker in self._workers.values():
            while os.waitpid(worker.pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline_seconds:
                    logger.error(
                        "worker %d (process %d) does not end and is killed",
                        worker.number,
                        worker.pid,
                    )
                    os.kill(worker.pid, signal.SIGKILL)
                    os.waitpid(worker.pid, 0)
                    break
                time.sleep(0.02)
            worker.channel.close()
        self._workers.clear()
