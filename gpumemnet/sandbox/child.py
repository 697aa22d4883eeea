"""The child's half: reads a question, has it answered, and writes the answer or the sentence that stands for it.

A user's file is run here and nowhere else.  Of this project only ``gpumemnet`` can be imported, so a user's own ``models`` or
``service`` package is the one that the file gets.  What the user's code prints goes to standard error.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Final, NoReturn

from gpumemnet.errors import GpumemnetError, InvalidRequestError
from gpumemnet.extract.faults import user_location
from gpumemnet.sandbox.checkout import checkout_folder

_AGAIN_SECONDS: Final = 0.5
"""The clock strikes again after this long: what a callback raises, such as a weak reference's, Python only prints."""


class _DeadlineReached(BaseException):
    """Raised in the user's code when its time is up; no ``except Exception`` swallows it."""


def serve(answer_to: Callable[[dict[str, Any]], object]) -> NoReturn:
    """Answer one question and leave at once, whatever threads the user's code has started.

    Args:
        answer_to: makes a JSON value of the question, or raises a :class:`~gpumemnet.errors.GpumemnetError`.
    """
    request = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _set_import_path(request["pythonpath"])
    if request["steps"] is not None:
        _write_steps(request["steps"])
    answer: dict[str, Any]
    try:
        _start_clock(request["deadline_seconds"])
        answer = {"answer": answer_to(request["question"])}
    except InvalidRequestError as error:
        answer = {"error": error.reason, "field": error.field}
    except GpumemnetError as error:
        answer = {"error": str(error)}
    except _DeadlineReached as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        where = user_location(error)
        within = f" (it was at {where})" if where else ""
        answer = {"error": f"was not done after {request['deadline_seconds']:g} seconds{within}: give it more with --deadline"}
    except SystemExit as error:
        answer = {"error": f"the code ended the program: {user_location(error)}: sys.exit({error.code!r})"}
    signal.setitimer(signal.ITIMER_REAL, 0)
    json.dump(answer, answers)
    for stream in (answers, sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(0)


class _Steps(logging.Handler):
    """Passes what this project's code logs on to the parent, one line a record."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(logging.INFO)
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message of ``record``."""
        os.write(self._descriptor, f"{record.getMessage()}\n".encode())


def _write_steps(descriptor: int) -> None:
    os.set_inheritable(descriptor, False)
    logger = logging.getLogger("gpumemnet")
    logger.addHandler(_Steps(descriptor))
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _set_import_path(pythonpath: str | None) -> None:
    """Give child processes the user's own ``PYTHONPATH``, and take a checkout off the import path.

    A checkout holds ``models`` and ``service`` beside ``gpumemnet``.  They would be found in place of a user's ``models/``
    without an ``__init__.py``, even behind it on the path.  ``gpumemnet`` is imported by now and needs no path.
    """
    os.environ.pop("PYTHONPATH", None)
    if pythonpath is not None:
        os.environ["PYTHONPATH"] = pythonpath
    if (checkout := checkout_folder()) is not None:
        sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != str(checkout)]


def _start_clock(deadline_seconds: float) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _DeadlineReached

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, deadline_seconds, _AGAIN_SECONDS)
