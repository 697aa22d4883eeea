"""Descriptions of the catalogue's GPUs for cuDNN."""

from __future__ import annotations

from gpumemnet.cudnn.devices import description
from gpumemnet.gpu.catalogue import device_profile, device_profiles


def test_every_gpu_of_the_catalogue_is_described() -> None:
    assert [device.name for device in device_profiles() if description(device) is None] == []


def test_the_description_holds_what_cudnn_reads() -> None:
    described = description(device_profile("T4"))
    assert described is not None
    assert (described["deviceVer"], described["multiProcessorCount"]) == (750, 40)
    assert (described["maxThreadsPerSM"], described["maxSharedMemoryPerBlockOptin"]) == (
        1024,
        65536,
    )
    assert "comment" not in described
