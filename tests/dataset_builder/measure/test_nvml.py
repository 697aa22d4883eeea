"""Which GPUs a campaign may use, and the sentence where there is none."""

from __future__ import annotations

import pytest

from dataset_builder.measure.nvml import Gpu, select_visible, visible_meters
from gpumemnet.errors import MeasurementError
from gpumemnet.units import GIB

GPUS = [
    Gpu("GPU-aaaa-1", "one", "580", 80 * GIB, 0),
    Gpu("MIG-bbbb-1", "two 1g", "580", 10 * GIB, 1),
    Gpu("MIG-bbbb-2", "two 2g", "580", 20 * GIB, 1),
    Gpu("GPU-cccc-1", "three", "580", 80 * GIB, 2),
]


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, [0, 1, 2, 3]),
        ("0", [0]),
        ("2,0", [3, 0]),
        ("1", [1, 2]),
        ("GPU-c", [3]),
        ("MIG-bbbb-2", [2]),
        (" GPU-aaaa-1 , MIG-bbbb-1", [0, 1]),
        ("", []),
        ("-1", []),
        ("0,7,2", [0]),
        ("GPU-zzzz,0", []),
        ("0,0", [0]),
    ],
)
def test_cuda_visible_devices(visible: str | None, chosen: list[int]) -> None:
    assert select_visible(GPUS, visible) == [GPUS[index] for index in chosen]


@pytest.mark.parametrize(
    ("variable", "value"),
    [("LD_PRELOAD", "/usr/lib/libvgpu.so"), ("CUDA_DEVICE_MEMORY_LIMIT_0", "4g")],
)
def test_virtual_readings_are_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(MeasurementError, match="HAMi"):
        visible_meters()
