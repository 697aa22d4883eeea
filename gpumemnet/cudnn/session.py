"""Asks cuDNN in a child process, so that no crash of it and no library that it needs reaches the
caller.

One child answers many questions, each once.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Final

from gpumemnet.atomic_files import Document, from_json
from gpumemnet.cudnn.execution_plans import (
    ConvolutionQuestion,
    ExecutionPlans,
    device_description,
)
from gpumemnet.cudnn.library import answer_questions
from gpumemnet.errors import InvalidRequestError
from gpumemnet.gpu import DeviceProfile
from gpumemnet.job.layers import describe
from gpumemnet.sandbox.process import start_child

AUTO: Final = "auto"
OFF: Final = "off"
LIBRARY: Final = "libcudnn.so.9"
_IN_SITE_PACKAGES: Final = "nvidia/cudnn/lib"
"""Where the wheels ``nvidia-cudnn-cu12`` and ``-cu13``, which every CUDA build of PyTorch requires,
put it."""
_SYSTEM_FOLDERS: Final = (
    f"/usr/lib/{platform.machine()}-linux-gnu",
    "/usr/lib64",
    "/usr/local/cuda/lib64",
)
FIRST_VERSION: Final = 90800
"""Earlier versions answer only on a GPU."""
_FIRST_WITHOUT_VOLTA: Final = 91100
"""From this version on, cuDNN supports compute capability 7.5 and above (release notes of 9.11)."""
_MAX_CRASHES: Final = 3


def find_library(cudnn: str) -> Path | None:
    """Return the file of cuDNN that ``cudnn`` means; ``None`` for ``off``, and for ``auto`` if
    there is none.

    Args:
        cudnn: ``auto`` for the one that is installed with this Python or on the system; ``off``; or
            the path of the library, of the folder that holds it, or of a ``site-packages`` folder
            with its wheel.

    Raises:
        InvalidRequestError: there is no cuDNN at this path.
    """
    if cudnn == OFF:
        return None
    if cudnn == AUTO:
        folders = [
            *(Path(entry) / _IN_SITE_PACKAGES for entry in sys.path if entry),
            Path(sys.prefix) / "lib",
        ]
        candidates = [folder / LIBRARY for folder in (*folders, *map(Path, _SYSTEM_FOLDERS))]
        return next((path for path in candidates if path.is_file()), None)
    path = Path(cudnn).expanduser().resolve()
    candidates = [path] if path.is_file() else [path / LIBRARY, path / _IN_SITE_PACKAGES / LIBRARY]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise InvalidRequestError(
            f"no {LIBRARY} at {describe(cudnn)}: give auto, off, or a folder that holds it, such as "
            f"…/site-packages/{_IN_SITE_PACKAGES}",
            "cudnn",
        )
    return found


class CudnnUnavailableError(Exception):
    """This cuDNN cannot answer; the message says why."""


class CudnnSession:
    """A cuDNN library that answers for any GPU.

    Args:
        library: the file ``libcudnn.so.9``.
        answer: what the child process does.

    Raises:
        CudnnUnavailableError: it cannot be loaded, or is older than 9.8.
    """

    def __init__(self, library: Path, answer: Callable[[str], None] = answer_questions) -> None:
        self._library, self._answer = str(library), answer
        self._answers: dict[tuple[str, ConvolutionQuestion], ExecutionPlans | None] = {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._crashes = 0
        self._start()

    @property
    def version(self) -> str:
        """The library's version, such as ``9.28.0``."""
        return f"{self._version // 10_000}.{self._version // 100 % 100}.{self._version % 100}"

    def supports(self, device: DeviceProfile) -> bool:
        """Whether this version knows GPUs of the compute capability of ``device``."""
        is_too_old = device.compute_capability < (7, 5) and self._version >= _FIRST_WITHOUT_VOLTA
        return device_description(device) is not None and not is_too_old

    def plans(self, device: DeviceProfile, question: ConvolutionQuestion) -> ExecutionPlans | None:
        """Return the plans for ``question`` on ``device``; ``None`` if this version does not
        support one of the two."""
        if not self.supports(device):
            return None
        described = device_description(device)
        key = json.dumps(described), question
        with self._lock:
            if key not in self._answers:
                answer = self._ask({"device": described, "question": asdict(question)})
                self._answers[key] = (
                    None
                    if answer is None or "error" in answer
                    else from_json(ExecutionPlans, answer)
                )
            return self._answers[key]

    def close(self) -> None:
        """End the child process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def __del__(self) -> None:
        self.close()

    def _ask(self, request: Document) -> Document | None:
        """Return the child's answer; ``None`` if it crashed."""
        if self._crashes >= _MAX_CRASHES:
            return None
        try:
            child = self._process or self._start()
            return _answer_of(child, json.dumps(request).encode() + b"\n")
        except (OSError, CudnnUnavailableError):
            self._crashes += 1
            self.close()
            return None

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the child, and ask it for the version of its library."""
        self._process = start_child(
            self._answer,
            self._library,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            greeting = _answer_of(self._process)
            if "error" in greeting:
                raise CudnnUnavailableError(f"cuDNN cannot be loaded: {greeting['error']}")
            self._version = int(greeting["version"])
            if self._version < FIRST_VERSION:
                raise CudnnUnavailableError(
                    f"cuDNN {self.version} is installed; from 9.8 on it answers without a GPU"
                )
        except CudnnUnavailableError:
            self.close()
            raise
        return self._process


def _answer_of(child: subprocess.Popen[bytes], question: bytes = b"") -> Document:
    """Return the next line of ``child``, after the line ``question``.

    Raises:
        OSError: it has ended.
        CudnnUnavailableError: it ends.
    """
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(question)
    child.stdin.flush()
    line = child.stdout.readline()
    if not line:
        raise CudnnUnavailableError("the process that asks cuDNN ended")
    return dict(json.loads(line))


@cache
def _session(library: Path, process: int) -> CudnnSession:
    """Return the session of this process with ``library``; a forked process must not write to its
    parent's child."""
    return CudnnSession(library)


def open_session(cudnn: str) -> tuple[CudnnSession | None, str]:
    """Return a session for the value of ``--cudnn``, or ``None`` and what is wrong with the cuDNN
    that is installed, if one is.

    Args:
        cudnn: as in :func:`find_library`.

    Raises:
        InvalidRequestError: a path was given, and there is no cuDNN that can answer.
    """
    library = find_library(cudnn)
    if library is None:
        return None, ""
    try:
        return _session(library, os.getpid()), ""
    except CudnnUnavailableError as error:
        if cudnn != AUTO:
            raise InvalidRequestError(str(error), "cudnn") from None
        return None, str(error)
