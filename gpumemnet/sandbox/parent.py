"""The parent's half: asks a child process a question that takes a user's code to answer, so that the code meets nothing of the
caller's and cannot harm it.

The child gets a deadline and sees no GPU; when it dies, hangs or leaves the program, the caller gets one sentence.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import IO, Any, Final

import gpumemnet
from gpumemnet.errors import ExtractError, InvalidRequestError, MissingExtraError

_MAX_DEADLINE_SECONDS: Final = 86_400.0
_GRACE_SECONDS: Final = 2.0
"""After the deadline the child has this long to say where it was; then it is killed."""
_POLL_SECONDS: Final = 0.1

Progress = Callable[[str], None]
"""Told in a few words what the child does now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A kind of child process.

    Attributes:
        module: what ``python -m`` runs; it calls :func:`gpumemnet.sandbox.child.serve`.
        wanted: what the child is to come up with, in words; for a sentence on its death.
        purpose: what torch is needed for; for a sentence on its absence.
    """

    module: str
    wanted: str
    purpose: str


def ask(
    child: Child,
    source: str,
    question: Mapping[str, Any],
    *,
    deadline_seconds: float,
    show_output: bool = False,
    progress: Progress | None = None,
) -> Any:
    """The child's answer to ``question``, both of them JSON.

    Args:
        child: the kind of child.
        source: what the question is about; sentences about the user's code begin with it.
        question: handed to the child.
        deadline_seconds: time for everything, the import of torch included.
        show_output: let what the user's code prints through to standard error.
        progress: told what the child does.

    Raises:
        ExtractError: one sentence on what is wrong with the user's code, and where.
        InvalidRequestError: when the deadline is no time, or the child found something wrong with the question itself.
        MissingExtraError: when torch is not installed.
    """
    if not (math.isfinite(deadline_seconds) and 0 < deadline_seconds <= _MAX_DEADLINE_SECONDS):
        raise InvalidRequestError(f"must be above 0 and at most {_MAX_DEADLINE_SECONDS:,.0f} seconds", "deadline")
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("torch", "extract", child.purpose)
    with tempfile.TemporaryFile() as output:
        try:
            text, status = _run(child, question, deadline_seconds, None if show_output else output, progress)
        except subprocess.TimeoutExpired:
            raise ExtractError(
                f"{source}: was not done after {deadline_seconds:g} seconds and was ended: give it more with --deadline"
            ) from None
        if not text:
            raise ExtractError(f"{source}: {_death(status, child.wanted)}{_last_line(output)}")
    answer = json.loads(text)
    if "field" in answer:
        raise InvalidRequestError(answer["error"], answer["field"])
    if "error" in answer:
        raise ExtractError(f"{source}: {answer['error']}")
    return answer["answer"]


def _run(
    child: Child, question: Mapping[str, Any], deadline_seconds: float, output: IO[bytes] | None, progress: Progress | None
) -> tuple[str, int]:
    """The child's answer, empty if it gave none, and its exit status; ``subprocess.TimeoutExpired`` when it overstays."""
    root = str(Path(gpumemnet.__path__[0]).parent)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",
    }
    # files, not pipes: a process that the user's code leaves behind would keep a pipe open
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as steps:
        request = {
            "question": question,
            "deadline_seconds": deadline_seconds,
            "pythonpath": os.environ.get("PYTHONPATH"),
            "steps": steps.fileno() if progress else None,
        }
        asked.write(json.dumps(request).encode())
        asked.seek(0)
        with subprocess.Popen(
            [sys.executable, "-P", "-m", child.module],
            env=environment,
            stdin=asked,
            stdout=answer,
            stderr=output,
            pass_fds=[steps.fileno()] if progress else [],
            start_new_session=True,
        ) as process:
            try:
                if progress:
                    _follow(process, deadline_seconds + _GRACE_SECONDS, steps.fileno(), progress)
                else:
                    process.wait(deadline_seconds + _GRACE_SECONDS)
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        answer.seek(0)
        return answer.read().decode(), process.returncode


def _follow(process: subprocess.Popen[bytes], seconds: float, steps: int, progress: Progress) -> None:
    """Wait for the child, and pass on what it writes to ``steps``."""
    end, read = monotonic() + seconds, 0
    while True:
        try:
            process.wait(max(0.0, min(_POLL_SECONDS, end - monotonic())))
            return
        except subprocess.TimeoutExpired:
            if monotonic() >= end:
                raise
        written = os.pread(steps, 65_536, read)  # the child's own position in the file stays where it is
        read += len(written)
        if lines := written.decode(errors="replace").split("\n")[:-1]:
            progress(lines[-1])


def _death(status: int, wanted: str) -> str:
    if status == -signal.SIGKILL:
        return "the system killed the process, most likely for its memory"
    if status < 0:
        return f"the code crashed the interpreter ({signal.Signals(-status).name})"
    return f"the code ended the program with exit code {status} before there was {wanted}"


def _last_line(output: IO[bytes]) -> str:
    end = output.seek(0, os.SEEK_END)
    output.seek(max(0, end - 4096))
    lines = output.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"; its last output was: {last[:200]}" if last else ""
