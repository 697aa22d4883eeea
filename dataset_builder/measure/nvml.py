"""Readings of GPUs and processes from the driver, through NVML; no other module reads it.

Design facts: version 1 of the memory call counts driver-reserved memory as used, so one version is
kept for a whole dataset;
inside containers the process ids are the host's; a MIG parent's handle gives aggregates and is
never used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from gpumemnet.errors import MeasurementError

T = TypeVar("T")

STAND_IN_DRIVER: Final = "stand-in"
"""Driver version that a stand-in for NVML reports (``tests/dataset_builder/measure/null_gpu``): its
readings are no measurements."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or one instance of a GPU in MIG mode.

    Attributes:
        uuid: what ``CUDA_VISIBLE_DEVICES`` is set to for its children.
        name: the driver's name.
        driver: the driver's version.
        total_bytes: its memory.
    """

    uuid: str
    name: str
    driver: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One reading of a whole device."""

    free_bytes: int
    used_bytes: int


class NvmlMeter:
    """Readings of one GPU, as the driver gives them.

    Attributes:
        gpu: the GPU.
        provenance: ``measured``, or ``stand_in`` when the readings are invented.
    """

    def __init__(self, nvml: Any, handle: Any, gpu: Gpu) -> None:
        self.gpu = gpu
        self.provenance = "stand_in" if gpu.driver == STAND_IN_DRIVER else "measured"
        self._nvml = nvml
        self._handle = handle
        self._memory_version = _memory_version(nvml, handle)

    def device(self) -> DeviceMemory:
        """The whole device.

        Raises:
            MeasurementError: when the GPU is lost.
        """
        memory = self._call(self._nvml.nvmlDeviceGetMemoryInfo, self._handle, self._memory_version)
        return DeviceMemory(int(memory.free), int(memory.used))

    def processes(self) -> dict[int, int | None]:
        """Process id → used bytes; empty where the driver does not list processes.

        Raises:
            MeasurementError: when the GPU is lost.
        """
        try:
            listed = self._call(self._nvml.nvmlDeviceGetComputeRunningProcesses_v3, self._handle)
        except _NotAvailableError:
            return {}
        return {
            int(each.pid): None if each.usedGpuMemory is None else int(each.usedGpuMemory)
            for each in listed
        }

    def _call(self, function: Callable[..., T], *arguments: object) -> T:
        nvml = self._nvml
        try:
            return function(*arguments)
        except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired) as error:
            raise MeasurementError(
                f"the GPU {self.gpu.name} was lost ({error}); every finished measurement is kept: "
                "run the same command again when the GPU is back"
            ) from None
        except nvml.NVMLError as error:
            raise _NotAvailableError(str(error)) from None


class _NotAvailableError(MeasurementError):
    """The driver does not offer a reading here."""


def visible_meters() -> list[NvmlMeter]:
    """A meter for every GPU and MIG instance that ``CUDA_VISIBLE_DEVICES`` lets this process use.

    Raises:
        MeasurementError: when there is no GPU, no NVML, or when readings cannot be trusted on this
            machine.
    """
    if "libvgpu" in os.environ.get("LD_PRELOAD", "") or any(
        name.startswith("CUDA_DEVICE_MEMORY_LIMIT") for name in os.environ
    ):
        raise MeasurementError(
            "nothing can be measured under HAMi: its NVML shows virtual values; use a whole GPU"
        )
    try:
        import pynvml as nvml
    except ImportError:
        raise MeasurementError(
            "nothing can be measured: the package nvidia-ml-py is not installed"
        ) from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise MeasurementError(
            f"nothing can be measured here: no NVIDIA GPU can be reached (NVML: {error})"
        ) from None
    driver = str(nvml.nvmlSystemGetDriverVersion())
    found = list(_devices(nvml, driver))
    chosen = select_visible(
        [gpu for _, gpu, _ in found],
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        [p for _, _, p in found],
    )
    meters = [NvmlMeter(nvml, handle, gpu) for handle, gpu, _ in found if gpu in chosen]
    if not meters:
        raise MeasurementError(
            "nothing can be measured here: there is no GPU, CUDA_VISIBLE_DEVICES hides it, or it is in MIG mode without instances"
        )
    return sorted(meters, key=lambda meter: chosen.index(meter.gpu))


def select_visible(gpus: list[Gpu], visible: str | None, parents: list[int]) -> list[Gpu]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` names, in its order: indices, UUIDs or their
    beginnings, MIG UUIDs.

    As in CUDA, a name that fits nothing hides itself and all that follow.

    Args:
        gpus: every GPU and MIG instance.
        visible: the variable's value, ``None`` where it is not set.
        parents: index of the physical GPU of each entry of ``gpus``.
    """
    if visible is None:
        return gpus
    chosen: list[Gpu] = []
    for name in (each.strip() for each in visible.split(",")):
        if name.isdigit():
            matches = [
                gpu for gpu, parent in zip(gpus, parents, strict=True) if parent == int(name)
            ]
        else:
            matches = [gpu for gpu in gpus if name and gpu.uuid.startswith(name)]
        if not matches:
            break
        chosen += [gpu for gpu in matches if gpu not in chosen]
    return chosen


def _devices(nvml: Any, driver: str) -> Iterator[tuple[Any, Gpu, int]]:
    """Every GPU that is not in MIG mode, and the instances of those that are, with the index of the
    physical GPU."""
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        instances = list(_mig_instances(nvml, handle)) if _in_mig_mode(nvml, handle) else None
        for each in [handle] if instances is None else instances:
            total = int(nvml.nvmlDeviceGetMemoryInfo(each).total)
            uuid, name = str(nvml.nvmlDeviceGetUUID(each)), str(nvml.nvmlDeviceGetName(each))
            yield each, Gpu(uuid, name, driver, total), index


def _in_mig_mode(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
    except nvml.NVMLError:
        return False


def _mig_instances(nvml: Any, handle: Any) -> Iterator[Any]:
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError_NotFound:
            continue


def _memory_version(nvml: Any, handle: Any) -> int | None:
    """Version 2 of the memory call where the driver has it; ``None`` is version 1."""
    try:
        nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
    except nvml.NVMLError:
        return None
    return int(nvml.nvmlMemory_v2)
