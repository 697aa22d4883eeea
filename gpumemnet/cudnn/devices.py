"""Describes a GPU of the catalogue to cuDNN: the properties that it would otherwise read from the
CUDA runtime.

What cuDNN answers depends on the compute capability; on 7.5 and 9.0 also on the other properties,
the number of multiprocessors among them.  The properties by compute capability are in
``compute_capabilities.json``.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from gpumemnet.gpu.catalogue import DeviceProfile


@cache
def _tables() -> dict[str, Any]:
    text = (
        resources.files("gpumemnet").joinpath("cudnn/compute_capabilities.json").read_text("utf-8")
    )
    return dict(json.loads(text))


def description(device: DeviceProfile) -> dict[str, Any] | None:
    """Return the properties of ``device`` by cuDNN's names; ``None`` if its compute capability is
    not in the table."""
    tables = _tables()
    major, minor = device.compute_capability
    by_capability = tables["compute_capabilities"].get(f"{major}.{minor}")
    if by_capability is None:
        return None
    not_read = {name: value for name, value in tables["not_read"].items() if name != "comment"}
    return {
        "deviceVer": 100 * major + 10 * minor,
        "totalGlobalMem": device.capacity_bytes,
        "multiProcessorCount": device.multiprocessors,
        **by_capability,
        **tables["all"],
        **not_read,
    }
