"""Readings of GPUs and processes from the driver, through NVML; no other module reads it.

Design facts: version 1 of the memory call counts driver-reserved memory as used, so version 2 is
called, which all drivers for CUDA 12 have; inside containers the process ids are the host's; a MIG parent's handle gives aggregates and is
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


@dataclass(frozen=True)
class Gpu:
    """A GPU, or one instance of a GPU in MIG mode.

    Attributes:
        uuid: what ``CUDA_VISIBLE_DEVICES`` is set to for its children.
        name: the driver's name.
        driver: the driver's version.
        total_bytes: its memory.
        index: the driver's number of the physical GPU.
    """

    uuid: str
    name: str
    driver: str
    total_bytes: int
    index: int


@dataclass(frozen=True)
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

    def device(self) -> DeviceMemory:
        """The whole device.

        Raises:
            MeasurementError: when the GPU is lost.
        """
        nvml = self._nvml
        memory = self._call(nvml.nvmlDeviceGetMemoryInfo, self._handle, nvml.nvmlMemory_v2)
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
    handles = dict(_devices(nvml))
    chosen = select_visible([*handles], os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not chosen:
        raise MeasurementError(
            "nothing can be measured here: there is no GPU, CUDA_VISIBLE_DEVICES hides it, or it is in MIG mode without instances"
        )
    return [NvmlMeter(nvml, handles[gpu], gpu) for gpu in chosen]


def select_visible(gpus: list[Gpu], visible: str | None) -> list[Gpu]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` names, in its order: indices, UUIDs or their
    beginnings, MIG UUIDs.

    As in CUDA, a name that fits nothing hides itself and all that follow.

    Args:
        gpus: every GPU and MIG instance.
        visible: the variable's value, ``None`` where it is not set.
    """
    if visible is None:
        return gpus
    chosen: list[Gpu] = []
    for name in map(str.strip, visible.split(",")):
        matches = [gpu for gpu in gpus if name in (str(gpu.index), gpu.uuid[: len(name)])]
        if not name or not matches:
            break
        chosen += [gpu for gpu in matches if gpu not in chosen]
    return chosen


def _devices(nvml: Any) -> Iterator[tuple[Gpu, Any]]:
    """Every GPU that is not in MIG mode, and the instances of those that are, with their
    handles."""
    driver = str(nvml.nvmlSystemGetDriverVersion())
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        instances = list(_mig_instances(nvml, handle)) if _in_mig_mode(nvml, handle) else None
        for each in [handle] if instances is None else instances:
            total = int(nvml.nvmlDeviceGetMemoryInfo(each).total)
            uuid, name = str(nvml.nvmlDeviceGetUUID(each)), str(nvml.nvmlDeviceGetName(each))
            yield Gpu(uuid, name, driver, total, index), each


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
