"""Extracts a job from a user's file in a child process, so that the file meets nothing of the caller's and cannot harm it.

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, Unpack

import gpumemnet
from gpumemnet.errors import ExtractError, InvalidRequestError, MissingExtraError
from gpumemnet.extract.factory import split_source
from gpumemnet.extract.inputs import parse_input
from gpumemnet.extract.options import JobOptions, check_options
from gpumemnet.extract.result import Extraction, extraction_from_dict

DEADLINE_SECONDS: Final = 120.0
_MAX_DEADLINE_SECONDS: Final = 86_400.0
_GRACE_SECONDS: Final = 2.0
"""After the deadline the child has this long to say where it was; then it is killed."""


def extract_file(
    source: str,
    *,
    inputs: Sequence[str] = (),
    arguments: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    show_output: bool = False,
    **options: Unpack[JobOptions],
) -> Extraction:
    """The training job of the model that ``source`` builds.

    Args:
        source: ``path/to/file.py:factory``; the factory returns a ``torch.nn.Module`` or ``(model, inputs)``.
        inputs: one sample's shape for each of the model's inputs, as :func:`gpumemnet.extract.inputs.parse_input` reads them;
            none where the factory gives the inputs.
        arguments: keyword arguments for the factory; anything that JSON can hold.
        batch_size: samples per batch; needed unless the factory gives the inputs.
        deadline_seconds: time for everything, the import of torch included.
        show_output: let the file's own output through to standard error.
        options: the job's other fields, see :class:`JobOptions`.

    Raises:
        ExtractError: one sentence on what is wrong with the file, its factory or its model, and where.
        InvalidJobError, InvalidRequestError: when an option or an input has no such value.
        MissingExtraError: when torch is not installed.
    """
    check_options(options, batch_size)
    if not (math.isfinite(deadline_seconds) and 0 < deadline_seconds <= _MAX_DEADLINE_SECONDS):
        raise InvalidRequestError(f"must be above 0 and at most {_MAX_DEADLINE_SECONDS:,.0f} seconds", "deadline")
    file, name = split_source(source)
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("torch", "extract", "extracting a job from a model")
    request = {
        "file": str(file),
        "name": name,
        "arguments": dict(arguments or {}),
        "inputs": [str(parse_input(text)) for text in inputs],
        "batch_size": batch_size,
        "options": options,
        "deadline_seconds": deadline_seconds,
        "pythonpath": os.environ.get("PYTHONPATH"),
    }
    with tempfile.TemporaryFile() as output:
        try:
            answer, status = _ask_child(json.dumps(request), deadline_seconds, None if show_output else output)
        except subprocess.TimeoutExpired:
            raise ExtractError(
                f"{source}: was not done after {deadline_seconds:g} seconds and was ended: give it more with --deadline"
            ) from None
        if not answer:
            raise ExtractError(f"{source}: {_death(status)}{_last_line(output)}")
    document = json.loads(answer)
    if "error" in document:
        raise ExtractError(f"{source}: {document['error']}")
    return extraction_from_dict(document["extraction"])


def _ask_child(request: str, deadline_seconds: float, output: IO[bytes] | None) -> tuple[str, int]:
    """The child's answer, empty if it gave none, and its exit status; ``subprocess.TimeoutExpired`` when it overstays."""
    root = str(Path(gpumemnet.__path__[0]).parent)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",
    }
    # files, not pipes: a process that the user's code leaves behind would keep a pipe open
    with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as answer:
        question.write(request.encode())
        question.seek(0)
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "gpumemnet.extract.child"],
            env=environment,
            stdin=question,
            stdout=answer,
            stderr=output,
            start_new_session=True,
        ) as child:
            try:
                child.wait(deadline_seconds + _GRACE_SECONDS)
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        answer.seek(0)
        return answer.read().decode(), child.returncode


def _death(status: int) -> str:
    if status == -signal.SIGKILL:
        return "the system killed the process, most likely for its memory"
    if status < 0:
        return f"the code crashed the interpreter ({signal.Signals(-status).name})"
    return f"the code ended the program with exit code {status} before there was a model"


def _last_line(output: IO[bytes]) -> str:
    end = output.seek(0, os.SEEK_END)
    output.seek(max(0, end - 4096))
    lines = output.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"; its last output was: {last[:200]}" if last else ""
