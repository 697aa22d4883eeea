"""Probes of a GPU: which readings of its driver can be trusted, and the memory that the GPU and its
software add to a job's tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gpumemnet.atomic_files import replace_file
from gpumemnet.errors import MeasurementError
from gpumemnet.gpu import PROFILE_FORMAT, PROFILE_VERSION
from gpumemnet.job.measurement import Phase
from gpumemnet.units import GIB, MIB

from .gpu_process import CHILD, GpuProcess, settle
from .nvml import Meter

ONE_AT_A_TIME: Final = "nvml_device_difference"
"""Label source with which a job must have the GPU to itself."""
_PROBE_BYTES: Final = (256 * MIB, GIB)
_TOLERANCE_BYTES: Final = 64 * MIB
_PATIENCE_SECONDS: Final = 300.0


def find_label_source(meter: Meter, child: str = CHILD) -> str:
    """Decide which reading of ``meter``'s GPU the labels are taken from.

    A process allocates known amounts.  If the driver's reading of the process follows, labels come
    from there; else, if that of the whole device does, from its difference to the idle GPU.
    Containers and sandboxes differ in this.

    Raises:
        MeasurementError: when a process cannot use the GPU, or no reading follows what it
            allocates.
    """
    idle_bytes = meter.device().used_bytes
    probe = _run_probe(meter, {"probe_bytes": _PROBE_BYTES}, child)
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


def probe_device(meter: Meter, child: str = CHILD) -> dict[str, Any]:
    """Measure the GPU of ``meter``.

    Returns:
        the profile's document, which :func:`gpumemnet.gpu.load_profile` reads.

    Raises:
        MeasurementError: when the GPU cannot be used, or the driver's readings cannot be trusted.
    """
    label_source = find_label_source(meter, child)
    idle_bytes = meter.device().used_bytes
    probe = _run_probe(meter, {"profile": True}, child)
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
        "provenance": provenance(meter, child),
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


def provenance(meter: Meter, child: str) -> str:
    """``measured`` only when process and readings are both real."""
    is_real = child == CHILD and meter.provenance == "measured"
    return "measured" if is_real else "stand_in"


def _run_probe(meter: Meter, request: Mapping[str, Any], child: str) -> GpuProcess:
    idle_bytes = meter.device().used_bytes
    probe = GpuProcess(meter, request, child)
    try:
        probe.run(_PATIENCE_SECONDS)
    finally:
        settle(meter, idle_bytes)
    outcome = probe.outcome or {}
    if outcome.get("status") != "ok":
        raise MeasurementError(f"a process could not use the GPU: {outcome.get('reason')}")
    return probe


def write_profile(document: Mapping[str, Any], path: Path) -> None:
    """Write a profile's document as JSON, atomically.

    Raises:
        MeasurementError: when the file cannot be written.
    """
    try:
        replace_file(path, (json.dumps(document, indent=1) + "\n").encode())
    except OSError as error:
        raise MeasurementError(f"{path} cannot be written: {error.strerror}") from None
