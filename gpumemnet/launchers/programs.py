"""Programs that a script starts: every Python among them inherits the simulated GPU.

A folder in front of ``PATH`` has programs called ``python``, ``torchrun``, ``accelerate``, ``srun`` and
``nvidia-smi``, and ``sys.executable`` is the first of them.  A Python that runs a script traces it
as this process traces its own, and writes its answer into the folder; any other Python runs as it
is.  A process that is forked has the simulated GPU already.  Once one has trained for enough steps,
the script that started it is stopped, unless it has trained itself: the answer is for the first
process that trains.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from time import time
from typing import Any, Final, NoReturn
from unittest.mock import patch

import gpumemnet
from gpumemnet.atomic_files import replace_file
from gpumemnet.errors import CodeEndedError, GpumemnetError, InvalidRequestError
from gpumemnet.gpu import DeviceProfile, available_mib, context
from gpumemnet.launchers.launch_line import (
    VISIBLE,
    VISIBLE_ON_LINE,
    parse_launch,
    visible_gpus,
)
from gpumemnet.sandbox.process import DeadlineReached, set_alarm, take_off_import_path
from gpumemnet.units import MIB

_REQUEST: Final = "request.json"
_TRAINED: Final = signal.SIGUSR1
"""Sent to the process that a trace began with, once another has an answer."""


_WRITES: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_ENOUGH_ANSWERS: Final = 4
_SHARE_BEFORE_DEADLINE: Final = 0.8
"""After this share of the time a program answers with what it has seen."""


_OPEN: Final = os.open
"""As it is where no trace follows the files of a script."""


def write_own(file: Path, document: object) -> None:
    """Write a document that is no file of the script's: those are watched by name, and removed."""
    with os.fdopen(_OPEN(file, _WRITES, 0o600), "w") as stream:
        json.dump(document, stream)


class Programs:
    """The programs of one trace.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, request: dict[str, Any], device: DeviceProfile) -> None:
        """Let programs that this process starts be traced for ``request``, on ``device``."""
        for name in ("*.answer", "*.error"):  # of an earlier one
            for file in self._folder.glob(name):
                file.unlink()
        total_mib, used_mib = available_mib(device), context(device).expected_bytes // MIB
        card = {
            "name": device.name,
            "compute_cap": "{}.{}".format(*device.compute_capability),
            "memory.total": total_mib,
            "memory.used": used_mib,
            "memory.free": total_mib - used_mib,
        }
        left_seconds = signal.getitimer(signal.ITIMER_REAL)[0] * _SHARE_BEFORE_DEADLINE
        document = {
            "request": request,
            "card": card,
            "process": os.getpid(),
            "ends": time() + left_seconds if left_seconds else None,
        }
        write_own(self._folder / _REQUEST, document)

    def seen(self, answer: dict[str, Any]) -> None:
        """Write the answer for this process, which the trace did not begin with."""
        replace_file(self._folder / f"{os.getpid()}.answer", json.dumps(answer).encode())

    def report(self, answer: dict[str, Any]) -> None:
        """Write the answer for this process, and tell the one that the trace began with."""
        self.seen(answer)
        with suppress(ProcessLookupError):
            os.kill(json.loads((self._folder / _REQUEST).read_text())["process"], _TRAINED)

    def failed(self, error: GpumemnetError) -> None:
        """Write why this process, which the trace did not begin with, cannot be traced."""
        write_own(self._folder / f"{os.getpid()}.error", str(error))

    def answers(self) -> list[dict[str, Any]]:
        """The answers for the processes that have one."""
        return [json.loads(file.read_text()) for file in self._folder.glob("*.answer")]

    def error(self) -> str:
        """Why a process that was started could not be traced; empty if all could."""
        return next((json.loads(file.read_text()) for file in self._folder.glob("*.error")), "")


@contextmanager
def inheriting(
    request: dict[str, Any],
    device: DeviceProfile,
    trace: Callable[[dict[str, Any], Programs], None],
) -> Iterator[Programs]:
    """Context in which programs that this process starts inherit its simulated GPU.

    Args:
        request: what traces a script, as a JSON document, but for the script; its ``programs`` is an empty folder.
        device: the simulated GPU.
        trace: a function of a module that loads no torch; called in each program that runs a
            script, with the request and its programs, it traces that script and reports the answer.
    """
    signal.signal(_TRAINED, signal.SIG_IGN)
    folder = Path(request["programs"])
    programs = Programs(folder)
    programs.begin(request, device)
    python = {"python", "python3", Path(sys.executable).name}
    for program in (*python, "torchrun", "accelerate", "deepspeed", "srun", "nvidia-smi"):
        _write_program(folder / program, "python" if program in python else program, trace)
    path = os.pathsep.join((str(folder), os.environ.get("PATH", os.defpath)))
    with (
        patch.dict(os.environ, {"PATH": path}),
        patch.object(sys, "executable", str(folder / "python")),
    ):
        yield programs


def _write_program(file: Path, name: str, trace: Callable[..., None]) -> None:
    """Write a program that calls :func:`_started` with its arguments."""
    program = f"import sys; sys.path.insert(0, {str(Path(gpumemnet.__path__[0]).parent)!r}); "
    program += f"from {__name__} import _started as function; "
    program += f"from {trace.__module__} import {trace.__qualname__} as trace; function(trace, *sys.argv[1:])"
    words = [sys.executable, "-P", "-c", program, str(file.parent), name, sys.executable]
    file.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    file.chmod(0o755)


def _started(
    trace: Callable[[dict[str, Any], Programs], None],
    name: str,
    program: str,
    python: str,
    *words: str,
) -> NoReturn:
    """Run one of the programs.

    Args:
        trace: as in :func:`inheriting`.
        name: their folder.
        program: its name.
        python: the interpreter.
        words: its arguments.
    """
    folder = Path(name)
    visible = os.environ.get(VISIBLE, "")
    several = "," in visible and visible_gpus(os.environ)  # one is what is simulated anyway
    # a program sees the simulated GPU alone
    os.environ.update({VISIBLE: "", VISIBLE_ON_LINE: visible})
    document = json.loads((folder / _REQUEST).read_text())
    if program == "nvidia-smi":
        if {"-x", "--xml-format"} & {*words}:
            sys.exit(9)  # as where no driver is loaded: codes that ask for so much do without
        sys.stdout.write(f"{nvidia_smi(document['card'], words)}\n")
        sys.exit()
    try:
        launch = parse_launch([program, *words], document["request"]["ranks"] or several or None)
    except InvalidRequestError as error:
        if program == "python":
            _run_as_it_is(python, words)
        sys.exit(str(error))
    if launch.is_module and launch.script in ("pip", "venv"):
        _run_as_it_is(python, words)
    take_off_import_path()
    os.environ.update(launch.variables)
    request = {
        **document["request"],
        "script": launch.script,
        "is_module": launch.is_module,
        "arguments": list(launch.arguments),
        "ranks": launch.ranks,
    }
    programs, status = Programs(folder), 0
    try:
        if document["ends"] is not None:
            set_alarm(max(1.0, document["ends"] - time()))
        trace(request, programs)
    except CodeEndedError as error:  # it has not trained on the GPU, which may be its purpose
        programs.failed(error)
    except DeadlineReached:  # nothing was on the GPU; the process that started it says so
        signal.pause()
    except GpumemnetError as error:
        programs.failed(error)
        sys.stderr.write(f"{error}\n")
        status = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _run_as_it_is(python: str, words: Sequence[str]) -> NoReturn:
    os.execv(python, [python, *words])  # noqa: S606 - what the script wanted to start


@contextmanager
def stopped_by_answer(stop: Callable[[], None], seconds: float) -> Iterator[None]:
    """Context in which ``stop`` is called once other processes have enough answers, or one has and
    ``seconds`` bring no other."""
    answers, is_over = 0, False

    def over() -> None:
        nonlocal is_over
        is_over = True
        os.kill(os.getpid(), _TRAINED)

    timer = Timer(seconds, over)

    def answered(number: int, frame: object) -> None:
        nonlocal answers, timer
        answers += 1
        timer.cancel()
        if is_over or answers == _ENOUGH_ANSWERS:
            stop()
        else:
            timer = Timer(seconds, over)
            timer.start()

    before = signal.signal(_TRAINED, answered)
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(_TRAINED, before)


DRIVER: Final = "580.0"
_UNITS: Final = {"memory": "MiB", "utilization": "%"}


def nvidia_smi(card: dict[str, Any], words: Sequence[str]) -> str:
    """Return what ``nvidia-smi`` prints for a card.

    Args:
        card: its name and its memory in MiB.
        words: the arguments of ``nvidia-smi``.
    """
    options = dict(word.partition("=")[::2] for word in words)
    asked = options.get("--query-gpu")
    if asked is None and "-L" in words:
        return f"GPU 0: {card['name']} (UUID: GPU-0)"
    if asked is None:
        rows = (("Total", "total"), ("Used", "used"), ("Free", "free"))
        memory = (f"        {title:<34}: {card[f'memory.{key}']} MiB" for title, key in rows)
        return "\n".join((f"GPU 0: {card['name']}", "    FB Memory Usage", *memory))
    form = options.get("--format", "csv").split(",")
    names = [name.strip() for name in asked.split(",")]
    known = {
        **card,
        "gpu_name": card["name"],
        "index": 0,
        "count": 1,
        "uuid": "GPU-0",
        "driver_version": DRIVER,
        **dict.fromkeys(
            ("utilization.gpu", "utilization.memory", "temperature.gpu", "power.draw"), 0
        ),
    }
    units = [_UNITS.get(name.partition(".")[0], "") if name in known else "" for name in names]
    values = [
        f"{known.get(name, '[N/A]')}{f' {unit}' if unit and 'nounits' not in form else ''}"
        for name, unit in zip(names, units, strict=True)
    ]
    titles = [f"{name} [{unit}]" if unit else name for name, unit in zip(names, units, strict=True)]
    return "\n".join([*([] if "noheader" in form else [", ".join(titles)]), ", ".join(values)])


if __name__ == "__main__":  # traced in place of a program that is not of Python
    sys.exit(subprocess.call(sys.argv[1:]))
