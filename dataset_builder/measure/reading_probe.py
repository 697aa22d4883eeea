"""Checks which readings of a GPU can be trusted, before jobs are labelled with them.

Two children with known allocations of different sizes hold the GPU at the same time.  If the
driver's accounting or its per-process readings follow each of them, labels come from there; else,
if the whole device's reading follows, from its difference with one job at a time; else nothing is
measured.  Containers and sandboxes differ in this.
"""

from __future__ import annotations

import select
import socket
import time
from dataclasses import dataclass
from typing import Any, Final

from gpumemnet.errors import MeasurementError
from gpumemnet.units import GIB, MIB

from . import channel
from .fork_server import ForkServer
from .nvml import Meter

_SIZES_BYTES: Final = (256 * MIB, GIB)
_TOLERANCE_BYTES: Final = 64 * MIB
_PATIENCE_SECONDS: Final = 120.0
_SETTLE_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class ReadingSource:
    """The readings that labels are taken from.

    Attributes:
        label_source: as in the dataset.
        by_pid: children appear under their own process id; else each is recognised as the one
            process that appears when its context is made.
    """

    label_source: str
    by_pid: bool

    @property
    def one_at_a_time(self) -> bool:
        """Whether jobs must have the GPU to themselves."""
        return self.label_source == "nvml_device_difference"


@dataclass(slots=True)
class _Probe:
    """A child that holds a known allocation."""

    pid: int
    end: socket.socket
    pids: list[int]
    appeared: set[int]
    reserved_bytes: int = 0


def probe(server: ForkServer, meter: Meter) -> ReadingSource:
    """Decide where the labels of ``meter``'s GPU come from.

    Raises:
        MeasurementError: when a child cannot use the GPU, or no reading follows what it allocates.
    """
    idle = meter.device()
    probes: list[_Probe] = []
    try:
        probes.append(_start_probe(server, meter, _SIZES_BYTES[0]))
        one = meter.device()
        probes.append(_start_probe(server, meter, _SIZES_BYTES[1]))
        two = meter.device()
        for label_source in ("nvml_accounting", "nvml_process"):
            for by_pid in (True, False):
                if _readings_follow(label_source, by_pid, probes, meter):
                    return ReadingSource(label_source, by_pid)
        device_follows = (
            one.used_bytes - idle.used_bytes >= probes[0].reserved_bytes
            and two.used_bytes - one.used_bytes >= probes[1].reserved_bytes
        )
        if not device_follows:
            raise MeasurementError(
                f"no reading of {meter.gpu.name} can be trusted: the driver's numbers do not follow the allocations of a process"
            )
        return ReadingSource("nvml_device_difference", by_pid=False)
    finally:
        for each in probes:
            each.end.close()  # the child then exits
        wait_for_exit(server, {each.pid for each in probes})
        settle(meter, idle.used_bytes)


def settle(meter: Meter, idle_bytes: int) -> None:
    """Wait for a limited time until the driver has reclaimed the memory of ended children."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while meter.device().used_bytes > idle_bytes + _TOLERANCE_BYTES and time.monotonic() < deadline:
        time.sleep(0.02)


def recognise(pids: list[int], appeared: set[int], by_pid: bool) -> int | None:
    """The process id under which the driver knows a child.

    Args:
        pids: the child's own ids, in every namespace that it can see.
        appeared: processes that the driver lists since the child made its context, and not before.
        by_pid: whether the driver uses the child's own ids here.
    """
    if by_pid:
        return pids[0]
    return next(iter(appeared)) if len(appeared) == 1 else None


def _start_probe(server: ForkServer, meter: Meter, size_bytes: int) -> _Probe:
    pid, end = server.start({"probe_bytes": size_bytes, "visible": meter.gpu.uuid, "seed": 0})
    started = expect(end, "started")
    before = set(meter.processes())
    channel.send(end, {"go": True})
    expect(end, "phase")
    appeared = set(meter.processes()) - before
    channel.send(end, {"go": True})
    held = expect(end, "phase")
    return _Probe(
        pid, end, [int(each) for each in started["pids"]], appeared, int(held["reserved_bytes"])
    )


def expect(
    end: socket.socket, event: str, patience_seconds: float = _PATIENCE_SECONDS
) -> dict[str, Any]:
    """The next message of a child, which must be of this kind; the child then waits for an answer.

    Raises:
        MeasurementError: when the message is of another kind, does not come in time, or the child
            has died.
    """
    if not select.select([end], [], [], patience_seconds)[0]:
        raise MeasurementError(
            f"a probing process on the GPU did not answer within {patience_seconds:.0f} s: check that the GPU responds"
        )
    message = channel.receive(end)
    if message is None or message["event"] != event:
        reason = "it died" if message is None else str(message.get("reason", "unexpected answer"))
        raise MeasurementError(f"a probing process could not use the GPU: {reason}")
    return message


def _readings_follow(label_source: str, by_pid: bool, probes: list[_Probe], meter: Meter) -> bool:
    """Whether readings from ``source`` are distinct for the two children and follow their sizes."""
    known = [recognise(each.pids, each.appeared, by_pid) for each in probes]
    if None in known or len(set(known)) != len(known):
        return False
    if label_source == "nvml_accounting":
        readings = [meter.accounted_peak(pid) for pid in known if pid is not None]
    else:
        listed = meter.processes()
        readings = [listed.get(pid) for pid in known if pid is not None]
    extra = [
        reading - each.reserved_bytes
        for reading, each in zip(readings, probes, strict=True)
        if reading is not None
    ]
    return (
        len(extra) == len(probes)
        and min(extra) >= 0
        and max(extra) - min(extra) <= _TOLERANCE_BYTES
    )


def wait_for_exit(server: ForkServer, pids: set[int]) -> None:
    """Wait for a limited time until children have ended; then kill them."""
    waiting = set(pids)
    deadline = time.monotonic() + _SETTLE_SECONDS
    while waiting and time.monotonic() < deadline:
        waiting -= set(server.exits())
        time.sleep(0.01)
    for pid in waiting:
        server.kill(pid)
