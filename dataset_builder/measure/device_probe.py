"""Measures the memory that a GPU and its software add to a job's tensors, and writes a device
profile.

Every stage runs in a fresh process: the CUDA context grows with each library that a process uses.
The context is the driver's
reading of the process less what the caching allocator has reserved, which the process reports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpumemnet.atomic_files import replace_file
from gpumemnet.errors import MeasurementError
from gpumemnet.gpu import PROFILE_FORMAT, PROFILE_VERSION

from . import channel
from .fork_server import ForkServer
from .nvml import Meter
from .reading_probe import ReadingSource, expect, probe, recognise, settle, wait_for_exit

CONTEXT_STAGES: Final = ("allocation", "matmul", "convolution", "attention", "training")
"""Of :mod:`dataset_builder.measure.device_stages`; the profile's context is that of the last."""
WORKSPACE_STAGES: Final = ("blas_workspaces", "convolution_workspaces")
_PATIENCE_SECONDS: Final = 900.0
"""Benchmarking builds and times every algorithm of a hundred convolutions."""


@dataclass(frozen=True, slots=True)
class StageReading:
    """The readings at the end of one stage.

    Attributes:
        process_bytes: memory of its process, by the driver.
        reserved_bytes: the part that the caching allocator had reserved.
        found: the stage's findings.
        stack: versions of the software.
    """

    process_bytes: int
    reserved_bytes: int
    found: Mapping[str, Any]
    stack: Mapping[str, Any]

    @property
    def context_bytes(self) -> int:
        """Memory outside the allocator."""
        return self.process_bytes - self.reserved_bytes


def probe_device(server: ForkServer, meter: Meter) -> dict[str, Any]:
    """Measure the GPU of ``meter``.

    Args:
        server: forks children of :mod:`dataset_builder.measure.child`.
        meter: the GPU's readings.

    Returns:
        the profile's document: what :func:`gpumemnet.gpu.load_profile` reads, with every
        reading beside it.

    Raises:
        MeasurementError: when a stage cannot run, or the driver's readings cannot be trusted.
    """
    source = probe(server, meter)
    readings = {
        stage: run_stage(server, meter, source, stage)
        for stage in (*CONTEXT_STAGES, *WORKSPACE_STAGES)
    }
    bare, trained = readings[CONTEXT_STAGES[0]], readings[CONTEXT_STAGES[-1]]
    blas = readings["blas_workspaces"].found
    if blas["forward_bytes"] < 1:
        raise MeasurementError(
            "the allocator did not grow with the first matrix product: unset CUBLAS_WORKSPACE_CONFIG"
        )
    stack = {
        "driver": meter.gpu.driver,
        **bare.stack,
        "module_loading": bare.found["module_loading"],
    }
    software = f"driver {stack['driver']}, CUDA {stack['cuda']}, cuDNN {stack['cudnn']}, torch {stack['torch']}"
    return {
        "format": PROFILE_FORMAT,
        "version": PROFILE_VERSION,
        "provenance": "measured"
        if {server.provenance, meter.provenance} == {"measured"}
        else "stand_in",
        "profile": {
            "name": meter.gpu.name,
            "aliases": [],
            "capacity_bytes": meter.gpu.total_bytes,
            "capacity_source": f"NVML, driver {meter.gpu.driver}",
            "context_bytes": trained.context_bytes,
            "context_source": f"probe ({source.label_source}) after training steps; {software}",
            "blas_workspace_bytes": blas["forward_bytes"],
            "blas_workspace_source": f"probe, the allocator's growth with the first matrix product; {software}",
            "compute_capability": bare.found["compute_capability"],
            "multiprocessors": bare.found["multiprocessors"],
        },
        "stack": stack,
        "label_source": source.label_source,
        "contexts": [
            {
                "stage": stage,
                "context_bytes": readings[stage].context_bytes,
                "process_bytes": readings[stage].process_bytes,
                "reserved_bytes": readings[stage].reserved_bytes,
            }
            for stage in CONTEXT_STAGES
        ],
        "blas_workspaces": dict(blas),
        "convolutions": readings["convolution_workspaces"].found["convolutions"],
    }


def run_stage(server: ForkServer, meter: Meter, source: ReadingSource, stage: str) -> StageReading:
    """Run one stage in a fresh process, and read the process's memory at its end.

    Raises:
        MeasurementError: when it fails, or the driver's reading is not above what the allocator has
            reserved.
    """
    idle_bytes = meter.device().used_bytes
    pid, end = server.start({"stage": stage, "visible": meter.gpu.uuid, "seed": 0})
    try:
        with end:
            started = expect(end, "started")
            before = set(meter.processes())
            channel.send(end, {"go": True})
            expect(end, "phase")  # the context exists
            driver_pid = recognise(
                [int(each) for each in started["pids"]],
                set(meter.processes()) - before,
                source.by_pid,
            )
            channel.send(end, {"go": True})
            reached = expect(end, "phase", _PATIENCE_SECONDS)
            process_bytes = _process_bytes(meter, source, driver_pid, idle_bytes)
            channel.send(end, {"go": True})
            result = expect(end, "result")
            channel.send(end, {"go": True})
    finally:
        wait_for_exit(server, {pid})
        settle(meter, idle_bytes)
    reserved_bytes = int(reached["reserved_bytes"])
    if process_bytes is None or process_bytes <= reserved_bytes:
        raise MeasurementError(
            f"the driver's reading of a process cannot be trusted: {process_bytes} bytes, with {reserved_bytes} reserved"
        )
    return StageReading(process_bytes, reserved_bytes, result["found"], started["stack"])


def _process_bytes(
    meter: Meter, source: ReadingSource, driver_pid: int | None, idle_bytes: int
) -> int | None:
    if source.one_at_a_time:
        return meter.device().used_bytes - idle_bytes
    if driver_pid is None:
        return None
    listed = meter.processes().get(driver_pid)
    return meter.accounted_peak(driver_pid) if listed is None else listed


def write_profile(document: Mapping[str, Any], path: Path) -> None:
    """Write a profile's document as JSON, atomically.

    Raises:
        MeasurementError: when the file cannot be written.
    """
    try:
        replace_file(path, (json.dumps(document, indent=1) + "\n").encode())
    except OSError as error:
        raise MeasurementError(f"{path} cannot be written: {error.strerror}") from None
