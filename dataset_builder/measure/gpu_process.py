"""Processes on a GPU, as a campaign sees them, and probes of the GPU by such processes.

Every job runs in a fresh process.  A fork server has imported torch once but never touched CUDA, so
a process starts in milliseconds.  It waits after every phase until NVML has been read.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pkgutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

from gpumemnet.atomic_files import Document
from gpumemnet.errors import MeasurementError
from gpumemnet.gpu import PROFILE_FORMAT, PROFILE_VERSION
from gpumemnet.job.measurement import Phase
from gpumemnet.sandbox import end_with_parent
from gpumemnet.units import GIB, MIB

from .nvml import NvmlMeter

CHILD = f"{__package__}.training:measure"
"""The function that measures, given a request and its end of the connection."""

ONE_AT_A_TIME: Final = "nvml_device_difference"
"""Label source with which a job must have the GPU to itself."""
_PROBE_BYTES: Final = (256 * MIB, GIB)
_TOLERANCE_BYTES: Final = 64 * MIB
_PATIENCE_SECONDS: Final = 300.0
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
        meter: NvmlMeter,
        request: Mapping[str, Any],
        log: Path | None = None,
    ) -> None:
        """Start the process.

        Args:
            meter: readings of the GPU.  No other process may be about to make its context.
            request: what :func:`dataset_builder.measure.training.measure` is given.
            log: file to which its standard error is appended.
        """
        os.environ.update(_FORKABLE)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", CHILD.partition(":")[0]])
        self.meter = meter
        self.started = time.monotonic()
        self.stack: Document = {}
        self.phases: list[Phase] = []
        self.outcome: Document | None = None
        self._driver_pid: int | None = None
        self._others = set(meter.processes())
        self.connection, end = context.Pipe()
        request = {**request, "visible": meter.gpu.uuid}
        self._process = context.Process(target=_run, args=(CHILD, request, end, log), daemon=True)
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

    def _read_phase(self, message: Document) -> None:
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

    def kill(self, outcome: Document | None = None) -> None:
        """End the process; ``outcome`` is its result."""
        self.outcome = self.outcome or outcome
        self._process.kill()


def settle(meter: NvmlMeter, idle_bytes: int) -> None:
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
        pkgutil.resolve_name(child)(request, connection)
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


def find_label_source(meter: NvmlMeter) -> str:
    """Decide which reading of ``meter``'s GPU the labels are taken from.

    A process allocates known amounts.  If the driver's reading of the process follows, labels come
    from there; else, if that of the whole device does, from its difference to the idle GPU.
    Containers and sandboxes differ in this.

    Raises:
        MeasurementError: when a process cannot use the GPU, or no reading follows what it
            allocates.
    """
    idle_bytes = meter.device().used_bytes
    probe = _run_probe(meter, {"probe_bytes": _PROBE_BYTES})
    held = probe.phases[1:]
    if _follow(held, [phase.process_bytes for phase in held]):
        return "nvml_process"
    if _follow(held, [(phase.device_bytes or 0) - idle_bytes for phase in held]):
        return ONE_AT_A_TIME
    raise MeasurementError(
        f"no reading of {meter.gpu.name} can be trusted: the driver's numbers do not follow the allocations of a process"
    )


def _follow(phases: Sequence[Phase], readings: Sequence[int | None]) -> bool:
    """Whether the readings are above the reserved bytes by the same amount in every phase."""
    above = [
        reading - phase.reserved_bytes
        for phase, reading in zip(phases, readings, strict=True)
        if reading is not None
    ]
    spread = max(above, default=0) - min(above, default=0)
    return len(above) == len(phases) and min(above) >= 0 and spread <= _TOLERANCE_BYTES


def probe_device(meter: NvmlMeter) -> Document:
    """Measure the GPU of ``meter``.

    Returns:
        the profile's document, which :func:`gpumemnet.gpu.load_profile` reads.

    Raises:
        MeasurementError: when the GPU cannot be used, or the driver's readings cannot be trusted.
    """
    label_source = find_label_source(meter)
    idle_bytes = meter.device().used_bytes
    probe = _run_probe(meter, {"profile": True})
    last, found = probe.phases[-1], (probe.outcome or {})["found"]
    read = last.process_bytes
    if label_source == ONE_AT_A_TIME:
        read = (last.device_bytes or 0) - idle_bytes
    if read is None or read <= last.reserved_bytes:
        raise MeasurementError(
            f"the driver's reading of a process cannot be trusted: {read} bytes, with {last.reserved_bytes} reserved"
        )
    if found["blas_workspace_bytes"] < 1:
        raise MeasurementError(
            "the allocator did not grow with the first matrix product: unset CUBLAS_WORKSPACE_CONFIG"
        )
    stack = {"driver": meter.gpu.driver, **probe.stack}
    software = f"driver {stack['driver']}, CUDA {stack['cuda']}, cuDNN {stack['cudnn']}, torch {stack['torch']}"
    return {
        "format": PROFILE_FORMAT,
        "version": PROFILE_VERSION,
        "provenance": meter.provenance,
        "profile": {
            "name": meter.gpu.name,
            "aliases": [],
            "capacity_bytes": meter.gpu.total_bytes,
            "capacity_source": f"NVML, driver {meter.gpu.driver}",
            "context_bytes": read - last.reserved_bytes,
            "context_source": f"probe ({label_source}) after training steps; {software}",
            "blas_workspace_source": f"probe, the allocator's growth with the first matrix product; {software}",
            **found,
        },
        "stack": stack,
        "label_source": label_source,
    }


def _run_probe(meter: NvmlMeter, request: Mapping[str, Any]) -> GpuProcess:
    idle_bytes = meter.device().used_bytes
    probe = GpuProcess(meter, request)
    try:
        probe.run(_PATIENCE_SECONDS)
    finally:
        settle(meter, idle_bytes)
    outcome = probe.outcome or {}
    if outcome.get("status") != "ok":
        raise MeasurementError(f"a process could not use the GPU: {outcome.get('reason')}")
    return probe
