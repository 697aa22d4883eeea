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
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dataset_builder.measure.nvml import DeviceMemory, Gpu, NvmlMeter
from dataset_builder.planned_job import parse_planned
from gpumemnet.errors import MeasurementError
from gpumemnet.units import GIB, MIB

FOLDER_VARIABLE = "STAND_IN_FOLDER"
CONTEXT_BYTES = 400 * MIB
RESERVED_BYTES = 64 * MIB
SEARCH_BYTES = 32 * MIB
TRAINING_BYTES = 90 * MIB
TOTAL_BYTES = 80 * GIB
CONTAINER_OFFSET = 1_000_000


def measure(request: Mapping[str, Any], connection: Connection) -> None:
    """The stand-in of ``dataset_builder.measure.training.measure``: the same messages, no GPU."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    held = folder / "held" / str(os.getpid())
    behaviours = json.loads((folder / "behaviour.json").read_text())
    stack = {"torch": "stand-in", "cuda": "0", "cudnn": "0", "allocator_settings": ""}
    held.write_text(str(CONTEXT_BYTES))
    _phase(connection, "context", 0, stack=stack)
    reserved = 0
    for size_bytes in request.get("probe_bytes", ()):
        reserved += size_bytes
        held.write_text(str(CONTEXT_BYTES + reserved))
        _phase(connection, "probe", reserved)
    if reserved:
        _tell(connection, {"status": "ok"})
        return
    if "profile" in request:
        _profile(connection, held, behaviours.get("profile", "ok"))
        return
    key = parse_planned(request["planned"]).key
    behaviour = behaviours.get(key, "ok")
    with (folder / "runs.log").open("a") as log:
        log.write(f"{key}\n")
    held.write_text(str(CONTEXT_BYTES + RESERVED_BYTES))
    _phase(connection, "build", RESERVED_BYTES)
    if behaviour == "hang":
        time.sleep(3600)
    if behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "crash":
        os._exit(7)
    outcome: dict[str, Any] = {"status": "ok", "steps": 3, "allocator": {"alloc_retries": 0}}
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
        searched = SEARCH_BYTES if step == 1 else 0
        grown = step * MIB if behaviour == "grows" else 0
        _phase(connection, f"step_{step}", RESERVED_BYTES + grown, searched)
    _tell(connection, outcome)


def _profile(connection: Connection, held: Path, behaviour: str) -> None:
    if behaviour == "crash":
        os._exit(7)
    if behaviour == "error":
        reason = "no kernel for the stand-in card"
        _tell(connection, {"status": "error", "reason": reason})
        return
    grown = CONTEXT_BYTES + TRAINING_BYTES + RESERVED_BYTES
    held.write_text(str(MIB if behaviour == "lies" else grown))
    _phase(connection, "training", RESERVED_BYTES)
    workspace = 0 if behaviour == "no_workspace" else 32 * MIB
    found = {
        "compute_capability": [9, 0],
        "multiprocessors": 132,
        "blas_workspace_bytes": workspace,
    }
    _tell(connection, {"status": "ok", "found": found})


def _first_time(folder: Path, key: str) -> bool:
    return (folder / "runs.log").read_text().split().count(key) == 1


def _phase(
    connection: Connection, name: str, reserved: int, searched: int = 0, **details: Any
) -> None:
    peaks = dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes"), reserved + searched)
    now = dict.fromkeys(("allocated_bytes", "reserved_bytes"), reserved)
    _tell(connection, {"name": name, **now, **peaks, **details})


def _tell(connection: Connection, message: Mapping[str, Any]) -> None:
    connection.send(message)
    connection.recv()


def _living(folder: Path) -> Any:
    """Process id and amount of every stand-in child that lives."""
    for file in (folder / "held").iterdir():
        if (
            Path(f"/proc/{file.name}/status").exists()
            and "State:\tZ" not in Path(f"/proc/{file.name}/status").read_text()
        ):
            yield int(file.name), int(file.read_text() or 0)


class StandInMeter(NvmlMeter):
    """The stand-in of ``NvmlMeter``.

    Args:
        folder: where the children write what they hold.
        mode: ``process`` (ids as they are), ``container`` (the driver knows other ids), ``device``
            (no processes), ``blind`` (readings follow nothing) or ``lost`` (the GPU is lost after a
            while).
    """

    provenance = "stand_in"

    def __init__(self, folder: Path, mode: str) -> None:
        self.gpu = Gpu("GPU-stand-in", "stand-in", "0", TOTAL_BYTES, 0)
        self._folder = folder
        self._mode = mode

    def device(self) -> DeviceMemory:
        if self._mode == "lost" and (self._folder / "runs.log").exists():
            raise MeasurementError("the GPU stand-in was lost; every finished measurement is kept")
        used = 100 * MIB + (
            0 if self._mode == "blind" else sum(amount for _, amount in self._held())
        )
        return DeviceMemory(TOTAL_BYTES - used, used)

    def processes(self) -> dict[int, int | None]:
        if self._mode in ("device", "blind"):
            return {}
        offset = CONTAINER_OFFSET if self._mode == "container" else 0
        return {pid + offset: amount for pid, amount in self._held()}

    def _held(self) -> list[tuple[int, int]]:
        try:
            return list(_living(self._folder))
        except (FileNotFoundError, ProcessLookupError):  # a child ended meanwhile
            return self._held()
