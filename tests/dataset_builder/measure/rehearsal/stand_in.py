"""Stand-ins for a GPU, so that the real parent, fork server, journal and deadlines run where there
is none.

Nothing here measures: the numbers are invented, every row is marked ``stand_in``, and no dataset
accepts such a row.
A stand-in child pretends to hold memory by writing an amount to a file named after its process; the
stand-in meter adds the files up.  What a child does is looked up in ``behaviour.json`` by the key
of its job.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataset_builder.measure import channel
from dataset_builder.measure.nvml import DeviceMemory, Gpu
from dataset_builder.recipe.planned_job import parse_planned
from gpumemnet.errors import MeasurementError
from gpumemnet.units import GIB, MIB

FOLDER_VARIABLE = "STAND_IN_FOLDER"
CONTEXT_BYTES = 400 * MIB
RESERVED_BYTES = 64 * MIB
TOTAL_BYTES = 80 * GIB
CONTAINER_OFFSET = 1_000_000


def measure(request: Mapping[str, Any], end: socket.socket) -> None:
    """The stand-in of ``dataset_builder.measure.child.measure``: the same messages, no GPU."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    held = folder / "held" / str(os.getpid())
    _tell(end, {"event": "started", "pids": [os.getpid()], "stack": {"torch": "stand-in"}})
    held.write_text(str(CONTEXT_BYTES))
    _phase(end, "context", 0)
    if request.get("probe_bytes"):
        held.write_text(str(CONTEXT_BYTES + request["probe_bytes"]))
        _phase(end, "probe", request["probe_bytes"])
        return
    key = parse_planned(request["planned"]).key
    behaviour = json.loads((folder / "behaviour.json").read_text()).get(key, "ok")
    with (folder / "runs.log").open("a") as log:
        log.write(f"{key}\n")
    held.write_text(str(CONTEXT_BYTES + RESERVED_BYTES))
    _phase(end, "build", RESERVED_BYTES)
    if behaviour == "hang":
        time.sleep(3600)
    if behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "crash":
        os._exit(7)
    outcome: dict[str, Any] = {
        "event": "result",
        "status": "ok",
        "steps": 3,
        "allocator": {"alloc_retries": 0},
    }
    if behaviour == "slow":
        time.sleep(0.3)
    if behaviour == "oom":
        outcome |= {"status": "oom", "reason": "the stand-in card is full"}
    if behaviour in ("crowded", "retries") and _first_time(folder, key):
        while len(list(_living(folder))) == 1:
            time.sleep(0.005)
        full = {"status": "oom", "reason": "the stand-in card is full of neighbours"}
        outcome |= full if behaviour == "crowded" else {"allocator": {"alloc_retries": 2}}
    for step in range(1, 4):
        _phase(end, f"step_{step}", RESERVED_BYTES)
    _tell(end, outcome)


def _first_time(folder: Path, key: str) -> bool:
    return (folder / "runs.log").read_text().split().count(key) == 1


def _phase(end: socket.socket, name: str, reserved: int) -> None:
    readings = ("allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "peak_reserved_bytes")
    _tell(end, {"event": "phase", "name": name, **dict.fromkeys(readings, reserved)})


def _tell(end: socket.socket, message: Mapping[str, Any]) -> None:
    channel.send(end, message)
    if channel.receive(end) is None:
        raise ConnectionResetError("the campaign is gone")


def _living(folder: Path) -> Any:
    """Process id and amount of every stand-in child that lives."""
    for file in (folder / "held").iterdir():
        if (
            Path(f"/proc/{file.name}/status").exists()
            and "State:\tZ" not in Path(f"/proc/{file.name}/status").read_text()
        ):
            yield int(file.name), int(file.read_text() or 0)


class StandInMeter:
    """The stand-in of ``NvmlMeter``.

    Args:
        folder: where the children write what they hold.
        mode: ``process`` (ids as they are), ``container`` (the driver knows other ids), ``device``
            (no processes), ``accounting``, ``blind`` (readings follow nothing) or ``lost`` (the GPU
            is lost after a while).
    """

    provenance = "stand_in"

    def __init__(self, folder: Path, mode: str) -> None:
        self.gpu = Gpu("GPU-stand-in", "stand-in", "0", TOTAL_BYTES)
        self._folder = folder
        self._mode = mode

    def device(self) -> DeviceMemory:
        if self._mode == "lost" and (self._folder / "runs.log").exists():
            raise MeasurementError("the GPU stand-in was lost; every finished measurement is kept")
        used = 100 * MIB + (
            0 if self._mode == "blind" else sum(amount for _, amount in self._held())
        )
        return DeviceMemory(TOTAL_BYTES, TOTAL_BYTES - used, used)

    def processes(self) -> dict[int, int | None]:
        if self._mode in ("device", "blind"):
            return {}
        offset = CONTAINER_OFFSET if self._mode == "container" else 0
        return {pid + offset: amount for pid, amount in self._held()}

    def accounted_peak(self, pid: int) -> int | None:
        return dict(self._held()).get(pid) if self._mode == "accounting" else None

    def enable_accounting(self) -> bool:
        return False

    def disable_accounting(self) -> None:
        raise AssertionError("nothing was switched on")

    def _held(self) -> list[tuple[int, int]]:
        try:
            return list(_living(self._folder))
        except (FileNotFoundError, ProcessLookupError):  # a child ended meanwhile
            return self._held()
