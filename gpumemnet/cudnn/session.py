"""Asks cuDNN in a child process, so that no crash of it and no library that it needs reaches the
caller.

One child answers many questions; it starts at the first.  Answers are kept in memory and on disk.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import gpumemnet
from gpumemnet.cudnn.cache import AnswerCache, default_cache_file
from gpumemnet.cudnn.devices import description
from gpumemnet.cudnn.libraries import AUTO, find_library
from gpumemnet.cudnn.plans import ConvolutionQuestion, Plans, plans_from_dict, question_to_dict
from gpumemnet.errors import InvalidRequestError
from gpumemnet.gpu.catalogue import DeviceProfile

FIRST_VERSION: Final = 90800
"""Earlier versions answer only on a GPU."""
_FIRST_WITHOUT_VOLTA: Final = 91100
"""From this version on, cuDNN supports compute capability 7.5 and above (release notes of 9.11)."""
_START_SECONDS: Final = 60.0
_ANSWER_SECONDS: Final = 60.0
_MAX_CRASHES: Final = 3


class CudnnUnavailableError(Exception):
    """This cuDNN cannot answer; the message says why."""


class CudnnSession:
    """A cuDNN library that answers for any GPU.

    Args:
        library: the file ``libcudnn.so.9``.
        cache: where answers are kept; the user's cache folder by default.
        command: the child process, for tests.

    Raises:
        CudnnUnavailableError: it cannot be loaded, or is older than 9.8.
    """

    def __init__(
        self, library: Path, cache: AnswerCache | None = None, command: Sequence[str] | None = None
    ) -> None:
        self._command = [
            *(command or (sys.executable, "-P", "-m", "gpumemnet.cudnn.child")),
            str(library),
        ]
        self._cache = cache or AnswerCache(default_cache_file())
        self._answers: dict[tuple[str, ConvolutionQuestion], Plans | None] = {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._crashes = 0
        self._version = self._start()
        if self._version < FIRST_VERSION:
            self.close()
            raise CudnnUnavailableError(
                f"cuDNN {self.version} is installed; from 9.8 on it answers without a GPU"
            )

    @property
    def version(self) -> str:
        """The library's version, such as ``9.28.0``."""
        return f"{self._version // 10_000}.{self._version // 100 % 100}.{self._version % 100}"

    def supports(self, device: DeviceProfile) -> bool:
        """Whether this version knows GPUs of the compute capability of ``device``."""
        is_too_old = device.compute_capability < (7, 5) and self._version >= _FIRST_WITHOUT_VOLTA
        return description(device) is not None and not is_too_old

    def plans(self, device: DeviceProfile, question: ConvolutionQuestion) -> Plans | None:
        """Return the plans for ``question`` on ``device``; ``None`` if this version does not
        support one of the two."""
        described = description(device)
        if described is None or not self.supports(device):
            return None
        key = (json.dumps(described), question)
        with self._lock:
            if key not in self._answers:
                self._answers[key] = self._cached_plans(described, question)
            return self._answers[key]

    def close(self) -> None:
        """End the child process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with suppress(OSError):
                    assert stream is not None
                    stream.close()

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None:
            self.close()

    def _cached_plans(self, device: dict[str, Any], question: ConvolutionQuestion) -> Plans | None:
        document = question_to_dict(question)
        answer = self._cache.get(self._version, device, document)
        if answer is None:
            answer = self._ask({"device": device, "question": document})
            if answer is None:
                return None
            self._cache.put(self._version, device, document, answer)
        return None if "error" in answer else plans_from_dict(answer)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the child's answer; ``None`` if it crashed."""
        if self._crashes >= _MAX_CRASHES:
            return None
        try:
            if self._process is None:
                self._start()
            assert self._process is not None
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            return self._read(_ANSWER_SECONDS)
        except (OSError, CudnnUnavailableError):
            self._crashes += 1
            self.close()
            return None

    def _start(self) -> int:
        """Start the child, and return the version of its library."""
        root = str(Path(gpumemnet.__path__[0]).parent)
        self._process = subprocess.Popen(
            self._command,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        try:
            greeting = self._read(_START_SECONDS)
        except CudnnUnavailableError:
            self.close()
            raise
        if "error" in greeting:
            self.close()
            raise CudnnUnavailableError(f"cuDNN cannot be loaded: {greeting['error']}")
        return int(greeting["version"])

    def _read(self, seconds: float) -> dict[str, Any]:
        """Return the child's next line.

        Raises:
            CudnnUnavailableError: it ended, or wrote nothing in time.
        """
        assert self._process is not None
        stream = self._process.stdout
        assert stream is not None
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([stream], [], [], seconds)
            part = os.read(stream.fileno(), 65_536) if readable else b""
            if not part:
                raise CudnnUnavailableError(
                    "the process that asks cuDNN " + ("ended" if readable else "does not answer")
                )
            line += part
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
        cudnn: as in :func:`~gpumemnet.cudnn.libraries.find_library`.

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
