"""The parent process: sends a request to a child process that runs user code, and returns the
child's answer.

User code cannot affect the caller.  The child has a deadline and sees no GPU.  If it crashes, hangs
or exits, the caller gets one error message.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
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
from gpumemnet.errors import CodeEndedError, ExtractError, InvalidRequestError, MissingExtraError

_MAX_DEADLINE_SECONDS: Final = 86_400.0
_GRACE_SECONDS: Final = 2.0
"""Time that the child has after the deadline to report where it was, before it is killed."""
_POLL_SECONDS: Final = 0.1

Progress = Callable[[str], None]
"""Called with a few words on what the child does now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A kind of child process.

    Attributes:
        module: the module that ``python -m`` runs; it calls :func:`gpumemnet.sandbox.child.serve`.
        result: what the child computes, in words; for the error message when it exits early.
        purpose: what torch is needed for; for the error message when it is not installed.
    """

    module: str
    result: str
    purpose: str


def ask(
    child: Child,
    source: str,
    request: Mapping[str, Any],
    *,
    deadline_seconds: float,
    variables: Mapping[str, str] | None = None,
    show_output: bool = False,
    progress: Progress | None = None,
) -> Any:
    """Return the child's answer to ``request``; both are JSON.

    Args:
        child: the kind of child.
        source: the user's file; error messages about its code begin with it.
        request: what the child is to compute.
        deadline_seconds: time for everything, including the import of torch.
        variables: further environment variables of the child.
        show_output: whether to pass what user code prints on to standard error.
        progress: called with what the child does.

    Raises:
        CodeEndedError: the code ended before there was an answer; its last line of output is
            quoted.
        ExtractError: says what is wrong with the user's code, and where.
        InvalidRequestError: the deadline is out of range, or the child rejected the request.
        KeyboardInterrupt: the child was interrupted.
        MissingExtraError: torch is not installed.
    """
    if not (math.isfinite(deadline_seconds) and 0 < deadline_seconds <= _MAX_DEADLINE_SECONDS):
        raise InvalidRequestError(
            f"must be above 0 and at most {_MAX_DEADLINE_SECONDS:,.0f} seconds", "deadline"
        )
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("torch", "extract", child.purpose)
    with tempfile.TemporaryFile() as output:
        try:
            text, status = _run(
                child,
                request,
                deadline_seconds,
                variables or {},
                None if show_output else output,
                progress,
            )
        except subprocess.TimeoutExpired:
            raise ExtractError(
                f"{source}: was not done after {deadline_seconds:g} seconds and was stopped: raise --deadline"
            ) from None
        last_line = _last_line(output)
    if not text:
        raise CodeEndedError(f"{source}: {_exit_reason(status, child.result)}{last_line}")
    answer = json.loads(text)
    if "interrupted" in answer:
        raise KeyboardInterrupt
    if answer.get("ended"):
        raise CodeEndedError(f"{source}: {answer['error']}{last_line}")
    if "field" in answer:
        raise InvalidRequestError(answer["error"], answer["field"])
    if "error" in answer:
        raise ExtractError(f"{source}: {answer['error']}")
    return answer["answer"]


def _run(
    child: Child,
    request: Mapping[str, Any],
    deadline_seconds: float,
    variables: Mapping[str, str],
    output: IO[bytes] | None,
    progress: Progress | None,
) -> tuple[str, int]:
    """Run the child; return its answer, empty if there is none, and its exit status.

    Raises:
        subprocess.TimeoutExpired: the child did not end in time.
    """
    root = str(Path(gpumemnet.__path__[0]).parent)
    users = {**os.environ, **variables}
    environment = {
        **users,
        "PYTHONPATH": os.pathsep.join(filter(None, (root, users.get("PYTHONPATH")))),
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",
    }
    # Files, not pipes: a process that user code leaves running would keep a pipe open.
    with (
        tempfile.TemporaryFile() as sent,
        tempfile.TemporaryFile() as answer,
        tempfile.TemporaryFile() as steps,
    ):
        envelope = {
            "request": request,
            "deadline_seconds": deadline_seconds,
            "pythonpath": users.get("PYTHONPATH"),
            "progress": steps.fileno() if progress else None,
        }
        sent.write(json.dumps(envelope).encode())
        sent.seek(0)
        with subprocess.Popen(
            [sys.executable, "-P", "-m", child.module],
            env=environment,
            stdin=sent,
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


def _follow(
    process: subprocess.Popen[bytes], seconds: float, steps: int, progress: Progress
) -> None:
    """Wait for the child, and report what it writes to ``steps``."""
    end, read = monotonic() + seconds, 0
    while True:
        try:
            process.wait(max(0.0, min(_POLL_SECONDS, end - monotonic())))
            return
        except subprocess.TimeoutExpired:
            if monotonic() >= end:
                raise
        written = os.pread(steps, 65_536, read)  # pread leaves the child's own position in the file
        read += len(written)
        if lines := written.decode(errors="replace").split("\n")[:-1]:
            progress(lines[-1])


def _exit_reason(status: int, result: str) -> str:
    if status == -signal.SIGKILL:
        return "the system killed the process, most likely because it used too much memory"
    if status < 0:
        return f"the code crashed the interpreter ({signal.Signals(-status).name})"
    return f"the code exited the program with exit code {status} before there was {result}"


def _last_line(output: IO[bytes]) -> str:
    end = output.seek(0, os.SEEK_END)
    output.seek(max(0, end - 4096))
    lines = re.split(
        "[\n\r]", output.read().decode(errors="replace")
    )  # progress bars return to the start of their line
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"; its last output was: {last[:200]}" if last else ""
