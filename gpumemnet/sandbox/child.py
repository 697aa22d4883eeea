"""The child process: reads a request, computes the answer, and writes the answer or an error
message.

User code runs only here.  Of this project it can import only ``gpumemnet``, so a ``models`` or
``service`` package of the user's own is the one that it imports.  Whatever user code prints goes to
standard error.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import struct
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Final, NoReturn

from gpumemnet.errors import CodeEndedError, GpumemnetError, InvalidRequestError
from gpumemnet.sandbox.checkout import checkout_folder
from gpumemnet.sandbox.faults import user_location

_REPEAT_SECONDS: Final = 0.5
"""The alarm repeats at this interval: Python only prints an exception that is raised in a callback,
of a weak reference say."""


_TERMINAL_SIZE: Final = (24, 80)
_END_OF_INPUT: Final = b"\x04" * 100
"""Each ends one read."""


class _DeadlineReached(BaseException):
    """Raised in user code at the deadline; ``except Exception`` does not catch it."""


def serve(compute: Callable[[dict[str, Any]], object]) -> NoReturn:
    """Answer one request and exit at once, even if user code has left threads running.

    Args:
        compute: returns a JSON value for the request, or raises a
            :class:`~gpumemnet.errors.GpumemnetError`.
    """
    envelope = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # its last line comes before a later one on stderr
    _give_terminal()
    _set_import_path(envelope["pythonpath"])
    if envelope["progress"] is not None:
        _report_progress(envelope["progress"])
    answer: dict[str, Any]
    try:
        _set_alarm(envelope["deadline_seconds"])
        answer = {"answer": compute(envelope["request"])}
    except InvalidRequestError as error:
        answer = {"error": error.reason, "field": error.field}
    except GpumemnetError as error:
        answer = {"error": str(error), "ended": isinstance(error, CodeEndedError)}
    except _DeadlineReached as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        where = user_location(error)
        within = f" (it was at {where})" if where else ""
        answer = {
            "error": f"was not done after {envelope['deadline_seconds']:g} seconds{within}: raise --deadline"
        }
    except SystemExit as error:
        answer = {
            "error": f"the code exited the program: {user_location(error)}: sys.exit({error.code!r})",
            "ended": True,
        }
    except KeyboardInterrupt:
        answer = {"interrupted": True}
    signal.setitimer(signal.ITIMER_REAL, 0)
    json.dump(answer, answers)
    for stream in (answers, sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(0)


def _give_terminal() -> None:
    """Let user code find a terminal of the usual size as its standard input: some ask for the size,
    with ``stty size`` say.

    Where it reads, it finds the end of input.  Where the system gives no terminal, it finds an
    empty file.
    """
    try:
        held, given = os.openpty()  # both stay open until this process ends
        fcntl.ioctl(given, termios.TIOCSWINSZ, struct.pack("4H", *_TERMINAL_SIZE, 0, 0))
        os.write(held, _END_OF_INPUT)
    except OSError:
        given = os.open(os.devnull, os.O_RDONLY)
    os.dup2(given, 0)


class _ProgressHandler(logging.Handler):
    """Writes the log records of this project to the parent, one line each."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(logging.INFO)
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message of ``record``."""
        os.write(self._descriptor, f"{record.getMessage()}\n".encode())


def _report_progress(descriptor: int) -> None:
    os.set_inheritable(descriptor, False)
    logger = logging.getLogger("gpumemnet")
    logger.addHandler(_ProgressHandler(descriptor))
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _set_import_path(pythonpath: str | None) -> None:
    """Give child processes the user's own ``PYTHONPATH``, and take a checkout off the import path.

    A checkout holds ``models`` and ``service`` beside ``gpumemnet``.  They would be found in place
    of a user's ``models/`` without an ``__init__.py``, even behind it on the path.  ``gpumemnet``
    is imported by now and needs no path.
    """
    os.environ.pop("PYTHONPATH", None)
    if pythonpath is not None:
        os.environ["PYTHONPATH"] = pythonpath
    if (checkout := checkout_folder()) is not None:
        sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != str(checkout)]


def _set_alarm(deadline_seconds: float) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _DeadlineReached

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, deadline_seconds, _REPEAT_SECONDS)
