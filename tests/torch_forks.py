"""Processes forked from one that has loaded PyTorch: a new interpreter would need seconds for that."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any, Final

FORKS: Final = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *("torch", "torch.utils.data", "gpumemnet.tracing.script.run"),
        *("torch.fx.experimental.symbolic_shapes", "gpumemnet.planner.plan_choice"),
    ]
)


class _Descriptor:
    """A file descriptor that the child gets, too."""

    def __init__(self, file: IO[bytes] | int) -> None:
        self._number = file if isinstance(file, int) else file.fileno()

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _received, (DupFd(self._number),)


def _received(descriptor: Any) -> int:
    return int(descriptor.detach())


class ForkedChild:
    """What :func:`gpumemnet.sandbox.process.start_child` returns, as far as it is used; arguments as
    there."""

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: str,
        stdin: IO[bytes],
        stdout: IO[bytes],
        stderr: IO[bytes] | None,
        variables: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = True,
    ) -> None:
        streams = [_Descriptor(each) for each in (stdin, stdout, 2 if stderr is None else stderr)]
        passed = {number: _Descriptor(number) for number in pass_fds}
        environment = {**os.environ, **(variables or {})}
        self._process = FORKS.Process(
            target=_run, args=(function, arguments, streams, passed, environment, Path.cwd())
        )
        self._process.start()
        self.pid = self._process.pid
        self.returncode: int | None = None

    def __enter__(self) -> ForkedChild:
        return self

    def __exit__(self, *error: object) -> None:
        self.wait()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        self.returncode = self._process.exitcode
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked child", timeout or 0.0)
        return self.returncode


def _run(
    function: Callable[..., object],
    arguments: Sequence[str],
    streams: Sequence[int],
    passed: Mapping[int, int],
    environment: Mapping[str, str],
    folder: Path,
) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = (
        environment["PYTHONPATH"].split(os.pathsep) if "PYTHONPATH" in environment else []
    )
    for name in [each for each in sys.modules if each.partition(".")[0] == "tests"]:
        del sys.modules[name]  # a user's code finds none
    targets = {**dict(enumerate(streams)), **passed}
    # first out of the way: one's number may be another's target
    received = {number: fcntl.fcntl(each, fcntl.F_DUPFD, 200) for number, each in targets.items()}
    for number, descriptor in received.items():
        os.dup2(descriptor, number)
    sys.stdin = os.fdopen(0, closefd=False)
    multiprocessing.set_start_method("fork", force=True)  # as in a process of the user's
    function(*arguments)
