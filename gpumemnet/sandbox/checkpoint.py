"""A checkpoint in the run of user code, from which a child process answers several requests.

Most of a script's time may be its imports.  So the process stops where the code is about to do
something that lasts outside of its memory, such as to write a file or to start a thread.  A copy of
it goes on and answers the request, and so does a further copy for each later one.
"""

from __future__ import annotations

import fcntl
import gc
import json
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread, active_count
from time import time
from types import FrameType
from typing import IO, Any, Final
from unittest.mock import patch

from gpumemnet.atomic_files import Document
from gpumemnet.sandbox.user_code import is_user_code

_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_LASTING: Final = frozenset(
    {
        *("os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"),
        *("os.system", "os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"),
        *("socket.connect", "sqlite3.connect", "open", "os.mkdir"),
    }
)
"""Python's audit events of what lasts."""
_BEGINNING: Final = (
    *((os, "pipe"), (socket, "socketpair")),
    *((Thread, "start"), (BaseProcess, "__init__")),
    (ThreadPoolExecutor, "submit"),  # within it, a lock is held that a fork waits for
)
"""The same where there is no event."""
_EXIT: Final = os._exit
_CLOCK_STEP_SECONDS: Final = 0.01
"""Files may be dated this much earlier than they are written."""
_own, _start = 0, 0.0
_left: list[int] = []
"""Descriptor of a file in memory, which names the folders that copies of this process have left."""


def take_process() -> None:
    """Let this process be the one that runs the user's code."""
    global _own, _start
    _own, _start = os.getpid(), time() - _CLOCK_STEP_SECONDS


def started() -> float:
    """When this process began to run the user's code: what changed before is not its own."""
    return _start


def leave(folder: Path) -> None:
    """Keep that this copy has made a folder, which may still be there at its end."""
    for descriptor in _left:
        os.write(descriptor, os.fsencode(folder) + b"\0")


def was_left(folder: Path) -> bool:
    """Whether a copy for an earlier request has left a folder that it had made."""
    texts = (os.pread(each, os.fstat(each).st_size, 0) for each in _left)
    return any(os.fsencode(folder) in text.split(b"\0") for text in texts)


def is_own_process() -> bool:
    """Whether this process runs the user's code, and is none that the code has forked."""
    return _own == os.getpid()


class _Requests:
    """Those of the parent of this child process.

    Args:
        lines: each a request in JSON.
    """

    def __init__(self, lines: IO[bytes]) -> None:
        self._process, self._lines = os.getpid(), lines
        self.envelope: Document = json.loads(lines.readline())
        os.set_inheritable(self.envelope["statuses"], False)

    @property
    def may_be_continued(self) -> bool:
        """Whether a copy of this process would be one of all of it: it has no other thread, and no
        process that it has started."""
        if os.getpid() != self._process or active_count() > 1:
            return False
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        return False

    def continued(self) -> Document:
        """Answer the request, and each later one, in a copy of this process; return it there."""
        left = signal.setitimer(signal.ITIMER_REAL, 0)
        positions = dict(_positions())
        positions.pop(self.envelope["input"][0], None)  # what was read of it is kept
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        held, drawn = list(_held_locks()), random.getstate()
        _left.append(os.memfd_create("folders"))
        while copy := os.fork():
            status = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
            os.write(self.envelope["statuses"], f"{status}\n".encode())
            for descriptor, position in positions.items():
                os.lseek(descriptor, position, os.SEEK_SET)
            line = self._lines.readline()
            if not line:
                _EXIT(0)
            self.envelope = json.loads(line)
        take_process()
        if "filelock" in sys.modules:  # a lock takes a copy of its process for another one
            for each in gc.get_objects():
                if isinstance(each, sys.modules["filelock"].BaseFileLock):
                    vars(each)["_creator_pid"] = os.getpid()
        for lock in held:
            lock.acquire()
        random.setstate(drawn)  # a copy has a new one
        # What earlier requests took is gone.
        seconds = min(left[0], self.envelope["deadline_seconds"])
        signal.setitimer(signal.ITIMER_REAL, seconds, left[1])
        return self.envelope["request"]  # as it was sent


_requests: list[_Requests] = []


def begin(lines: IO[bytes]) -> Document:
    """Return the first request to this child process, with how it is to be answered."""
    _requests.append(_Requests(lines))
    return _requests[-1].envelope


def _held_locks() -> Iterator[Any]:
    """Release the locks of ``logging`` that this thread holds, as where it opens a file, and yield
    each as often.  A fork makes them anew, so that what holds them could not release them."""
    given = vars(logging)
    for lock in (given["_lock"], *(each.lock for each in given["_at_fork_reinit_lock_weakset"])):
        with suppress(RuntimeError):  # it is not held, or no longer
            while True:
                lock.release()
                yield lock


def _positions() -> Iterator[tuple[int, int]]:
    """Yield the files that are read, and how far: copies of a process share that."""
    for path in list(Path("/dev/fd").iterdir()):
        with suppress(OSError):  # a pipe, say
            number = int(path.name)
            if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                yield number, os.lseek(number, 0, os.SEEK_CUR)


class Checkpoint:
    """Where the user's code does the first thing that lasts.

    Args:
        continues: called there with the request that is answered, in each copy of the process.
        is_wanted: whether there is to be one.
    """

    def __init__(self, continues: Callable[[Document], object], is_wanted: bool) -> None:
        self._continues = continues
        self._is_ahead = is_wanted and any(each.may_be_continued for each in _requests)

    def reach(self) -> None:
        """The code is about to do something that lasts."""
        if self._is_ahead:
            self._is_ahead = False
            if _requests[-1].may_be_continued:
                self._continues(_requests[-1].continued())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which most of what lasts is noticed."""
        if not self._is_ahead:
            yield
            return
        sys.addaudithook(self._noticed)  # which stays
        with ExitStack() as stack:
            for owner, name in _BEGINNING:
                stack.enter_context(patch.object(owner, name, self._before(owner, name)))
            yield
        self._is_ahead = False

    def _before(self, owner: Any, name: str) -> Callable[..., Any]:
        function = getattr(owner, name)

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if owner not in (os, socket) or not _imports_library():
                self.reach()
            return function(*args, **kwargs)

        return called

    def _noticed(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_ahead and event in _LASTING:
            if event == "open":
                path = str(arguments[0])
                is_own = path.startswith("/dev/") or "__pycache__" in path  # of Python, or a device
                if is_own or not arguments[2] & _WRITES:
                    return
            if event == "os.mkdir" and Path(os.fsdecode(arguments[0])).is_dir():
                return
            if not _imports_library():
                self.reach()


def _imports_library() -> bool:
    """Whether an installed package is imported: it may ask a program where another library is, or
    try whether it can write."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
