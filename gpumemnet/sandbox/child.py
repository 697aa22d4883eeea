"""The child's half: reads a question, has it answered, and writes the answer or the sentence that stands for it.

A user's file is run here and nowhere else, with nothing of this project importable but ``gpumemnet``, so a ``models`` or
``service`` package of the user's is the one that the file gets.  What the user's code prints goes to standard error.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final, NoReturn

import gpumemnet
from gpumemnet.errors import GpumemnetError, InvalidRequestError
from gpumemnet.extract.faults import user_location

_HIDDEN: Final = frozenset({"dataset_builder", "models", "service"})
_AGAIN_SECONDS: Final = 0.5
"""The clock strikes again after this long: what a callback raises, such as a weak reference's, Python only prints."""


class _DeadlineReached(BaseException):
    """Raised in the user's code when its time is up; no ``except Exception`` swallows it."""


class _HideOwnPackages:
    """Keeps installed packages of this project from being found in place of a user's of the same name."""

    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find ``name`` anywhere but next to ``gpumemnet``."""
        if path is not None or name not in _HIDDEN:
            return None
        spec = PathFinder.find_spec(name, [entry for entry in sys.path if os.path.realpath(entry) != self._root])
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return spec


def serve(answer_to: Callable[[dict[str, Any]], object]) -> NoReturn:
    """Answer one question and leave at once, whatever threads the user's code has started.

    Args:
        answer_to: makes a JSON value of the question, or raises a :class:`~gpumemnet.errors.GpumemnetError`.
    """
    request = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _hide_this_project(request["pythonpath"])
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


def _hide_this_project(pythonpath: str | None) -> None:
    """Take the folder that holds ``gpumemnet`` off the path, and what else lies in it out of reach."""
    root = os.path.realpath(Path(gpumemnet.__path__[0]).parent)
    os.environ.pop("PYTHONPATH", None)
    if pythonpath is not None:
        os.environ["PYTHONPATH"] = pythonpath
    installed = {os.path.realpath(sysconfig.get_path(scheme)) for scheme in ("purelib", "platlib")}
    if root in installed:
        sys.meta_path.insert(0, _HideOwnPackages(root))
    else:
        sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != root]


def _start_clock(deadline_seconds: float) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _DeadlineReached

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, deadline_seconds, _AGAIN_SECONDS)
