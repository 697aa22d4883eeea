"""One measuring process on a GPU, as its campaign sees it.

Every job runs in a fresh process.  A fork server has imported torch once but never touched CUDA, so
a process starts in milliseconds.  It waits after every phase until NVML has been read.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

from gpumemnet.errors import MeasurementError
from gpumemnet.job.measurement import Phase
from gpumemnet.sandbox.workers import end_with_parent
from gpumemnet.units import MIB

from .nvml import Meter

CHILD: Final = f"{__package__}.training:measure"
"""The function that measures, given a request and its end of the connection; with any other
function, rows are marked as stand-ins."""

SETTLE_SECONDS: Final = 5.0
SETTLE_BYTES: Final = 16 * MIB
_FORKABLE: Final = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Environment of the fork server.  Numerical libraries must not start threads at import, because a
process with threads must not be forked.  An import that calls ``torch.cuda.is_available()`` must
not initialise CUDA, because no process could use it afterwards."""


class GpuProcess:
    """A process on the GPU, and what has been read of it.

    Attributes:
        meter: readings of the GPU.
        connection: readable when the process has sent a message or has ended.
        started: time of the start, on the monotonic clock.
        stack: versions of its software, once it has a CUDA context.
        phases: the phases that have ended.
        outcome: its result, once it has ended.
    """

    def __init__(
        self,
        meter: Meter,
        request: Mapping[str, Any],
        child: str = CHILD,
        log: Path | None = None,
    ) -> None:
        """Start the process.

        Args:
            meter: readings of the GPU.  No other process may be about to make its context.
            request: what :func:`dataset_builder.measure.training.measure` is given.
            child: ``module:function`` that runs in the process.
            log: file to which its standard error is appended.
        """
        os.environ.update(_FORKABLE)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", child.partition(":")[0]])
        self.meter = meter
        self.started = time.monotonic()
        self.stack: dict[str, Any] = {}
        self.phases: list[Phase] = []
        self.outcome: dict[str, Any] | None = None
        self._driver_pid: int | None = None
        self._others = set(meter.processes())
        self.connection, end = context.Pipe()
        request = {**request, "visible": meter.gpu.uuid}
        self._process = context.Process(target=_run, args=(child, request, end, log), daemon=True)
        try:
            self._process.start()
        except (OSError, EOFError) as error:
            raise MeasurementError(f"no process can be started: {error}") from None
        end.close()

    @property
    def process_bytes(self) -> int:
        """Memory of the process, as last read; 0 before its first reading."""
        return (self.phases[-1].process_bytes or 0) if self.phases else 0

    def receive(self) -> bool:
        """Handle the next message; ``False`` when the process has ended."""
        try:
            message = self.connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            self.connection.close()
            if self.outcome is None:
                reason = _exit_reason(self._process.exitcode or 0)
                self.outcome = {"status": "error", "reason": reason}
            return False
        if "status" in message:
            self.outcome = message
        else:
            self._read_phase(message)
        with contextlib.suppress(OSError):
            self.connection.send(True)
        return True

    def _read_phase(self, message: dict[str, Any]) -> None:
        self.stack = message.pop("stack", self.stack)
        processes = self.meter.processes()
        if not self.phases:
            # In a container the driver knows a process by another id: it is the one that appeared.
            appeared = processes.keys() - self._others
            self._driver_pid = appeared.pop() if len(appeared) == 1 else None
        read = None if self._driver_pid is None else processes.get(self._driver_pid)
        used = self.meter.device().used_bytes
        self.phases.append(Phase(**message, process_bytes=read, device_bytes=used))

    def run(self, patience_seconds: float) -> None:
        """Handle every message until the process has ended.

        Raises:
            MeasurementError: when it sends nothing for ``patience_seconds``.
        """
        try:
            while wait([self.connection], patience_seconds):
                if not self.receive():
                    return
        finally:
            self._process.kill()
        raise MeasurementError(
            f"a process on the GPU did not answer within {patience_seconds:.0f} s: check that the GPU responds"
        )

    def kill(self, outcome: dict[str, Any] | None = None) -> None:
        """End the process; ``outcome`` is its result."""
        self.outcome = self.outcome or outcome
        self._process.kill()


def settle(meter: Meter, idle_bytes: int) -> None:
    """Wait for a limited time until the driver has taken back the memory of ended processes."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while meter.device().used_bytes > idle_bytes + SETTLE_BYTES and time.monotonic() < deadline:
        time.sleep(0.02)


def _run(child: str, request: Mapping[str, Any], connection: Connection, log: Path | None) -> None:
    """Run ``child`` from the first message to the exit of its process; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the campaign decides
    end_with_parent()  # no process is left that holds GPU memory
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 2)
    code = 1
    try:
        module, _, function = child.partition(":")
        getattr(importlib.import_module(module), function)(request, connection)
        code = 0
    except (EOFError, ConnectionError):
        code = 3  # the campaign is gone
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)  # no slow teardown of CUDA


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"the process ended with exit code {code} before its result"
    killer = ", perhaps by the kernel because host memory ran out" if code == -9 else ""
    return f"the process was killed by signal {-code}{killer}"
