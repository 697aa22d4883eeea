"""The fork server: a process that has imported torch but never touched CUDA, and forks one child
per job.

Importing torch takes seconds and forking takes milliseconds, so one import serves all jobs.  It is
a process of its own, with one thread, because a process that holds CUDA, NVML or threads cannot be
forked safely.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Final

from gpumemnet.errors import MeasurementError

from . import channel

CHILD: Final = f"{__package__}.child:measure"
"""The function that measures; with any other function, rows are marked as stand-ins."""

Child = Callable[[Mapping[str, Any], socket.socket], None]

_POLL_SECONDS: Final = 0.01
_START_SECONDS: Final = 120.0
_PR_SET_PDEATHSIG: Final = 1
_FORKABLE: Final = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Environment of the server.  Numerical libraries must not start threads at import, because a
process with threads must not be forked.  An import that calls ``torch.cuda.is_available()`` must
not initialise CUDA, because no child could use it afterwards."""


class ForkServer:
    """The campaign's handle of a fork server.

    Attributes:
        provenance: ``measured``, or ``stand_in`` when the children do not measure.
    """

    def __init__(self, child: str = CHILD, log: IO[bytes] | None = None) -> None:
        """Start the server and wait until it has imported what its children need.

        Args:
            child: ``module:function`` that every child runs.
            log: where the children's standard error goes.

        Raises:
            MeasurementError: when it does not start.
        """
        self.provenance = "measured" if child == CHILD else "stand_in"
        self._control, child_end = channel.channel_pair()
        command = [sys.executable, "-m", __name__, str(child_end.fileno()), child]
        environment = (
            os.environ
            | _FORKABLE
            | {"PYTHONPATH": os.pathsep.join(each or str(Path.cwd()) for each in sys.path)}
        )
        error = log if log is not None else subprocess.DEVNULL
        self._process = subprocess.Popen(
            command,
            pass_fds=(child_end.fileno(),),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=error,
            stderr=error,
        )
        child_end.close()
        self._control.settimeout(_START_SECONDS)
        try:
            ready = channel.receive(self._control)
        except TimeoutError:
            ready = None
        if ready is None or "ready" not in ready:
            self.close()
            raise MeasurementError(
                "the fork server did not start: see children.log in the campaign's folder"
            )
        self._control.settimeout(None)

    def start(self, request: Mapping[str, Any]) -> tuple[int, socket.socket]:
        """Fork a child for ``request``; returns its process id and the campaign's end of its
        channel.

        Raises:
            MeasurementError: when the server is gone.
        """
        parent_end, child_end = channel.channel_pair()
        with child_end:
            try:
                socket.send_fds(
                    self._control, [channel.encode({"start": request})], [child_end.fileno()]
                )
            except OSError:
                parent_end.close()
                raise _server_died() from None
        answer = channel.receive(parent_end)  # the child's first packet is its process id
        if answer is None:
            parent_end.close()
            raise _server_died()
        return int(answer["pid"]), parent_end

    def kill(self, pid: int) -> None:
        """Kill a child of the server; one that has ended is left alone."""
        with contextlib.suppress(OSError):
            channel.send(self._control, {"kill": pid})

    def exits(self) -> dict[int, int]:
        """Children that have ended since the last call: process id → exit code, negative for a
        signal.

        Raises:
            MeasurementError: when the server is gone.
        """
        ended: dict[int, int] = {}
        while select.select([self._control], [], [], 0)[0]:
            message = channel.receive(self._control)
            if message is None:
                raise _server_died()
            ended[int(message["exited"])] = int(message["code"])
        return ended

    def fileno(self) -> int:
        """For ``select``: readable when a child has ended."""
        return self._control.fileno()

    def close(self) -> None:
        """End the server; it kills its children first."""
        self._control.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _server_died() -> MeasurementError:
    return MeasurementError(
        "the fork server has died; every finished measurement is kept: run the same command again to continue"
    )


def serve(control: socket.socket, child: Child) -> None:
    """Fork children on request until the campaign closes its socket; then kill the remaining
    children."""
    children: set[int] = set()
    parent = os.getpid()
    while True:
        readable = select.select([control], [], [], _POLL_SECONDS if children else None)[0]
        if readable:
            packet, descriptors, _, _ = socket.recv_fds(control, channel.MAX_PACKET_BYTES, 1)
            if not packet:
                break
            message = channel.decode(packet)
            if "start" in message:
                pid = os.fork()
                if pid == 0:
                    control.close()
                    _run_child(
                        child, message["start"], socket.socket(fileno=descriptors[0]), parent
                    )
                os.close(descriptors[0])
                children.add(pid)
            elif message.get("kill") in children:
                os.kill(message["kill"], signal.SIGKILL)
        if not _reap(children, control):
            break
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _reap(children: set[int], control: socket.socket) -> bool:
    """Report the children that have ended; ``False`` when the campaign is gone."""
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            children.discard(pid)
            try:
                channel.send(control, {"exited": pid, "code": os.waitstatus_to_exitcode(status)})
            except OSError:
                return False
    return True


def _run_child(child: Child, request: Mapping[str, Any], end: socket.socket, parent: int) -> None:
    """Run a forked child from its first message to its exit; never returns."""
    code = 1
    try:
        die_with_parent(parent)
        channel.send(end, {"pid": os.getpid()})
        child(request, end)
        code = 0
    except OSError:
        code = 3  # the campaign is gone
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)  # no atexit handlers of the server, no slow teardown of CUDA


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when ``parent`` dies, so that no process is left that holds
    GPU memory."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os._exit(3)


def main(descriptor: str, child: str) -> None:
    """The server process."""
    control = socket.socket(fileno=int(descriptor))
    die_with_parent(os.getppid())
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the campaign decides
    module, _, function = child.partition(":")
    run: Child = getattr(importlib.import_module(module), function)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        sys.exit("an import has initialised CUDA: forked children could not use the GPU")
    channel.send(control, {"ready": True})
    serve(control, run)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
