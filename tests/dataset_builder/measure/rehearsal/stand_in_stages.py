"""A stand-in for the stages of a device probe: the messages of ``dataset_builder.measure.child``,
invented numbers, no GPU.

What goes wrong, and in which stage, is looked up in ``behaviour.json``.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import stand_in
from stand_in import CONTEXT_BYTES, FOLDER_VARIABLE, RESERVED_BYTES

from gpumemnet.units import MIB

GROWTH_BYTES = {
    "allocation": 0,
    "matmul": 20 * MIB,
    "convolution": 60 * MIB,
    "attention": 10 * MIB,
    "training": 90 * MIB,
    "blas_workspaces": 20 * MIB,
    "convolution_workspaces": 60 * MIB,
}
FOUND: dict[str, dict[str, Any]] = {
    "allocation": {"compute_capability": [9, 0], "multiprocessors": 132, "module_loading": ""},
    "blas_workspaces": {
        "forward_bytes": 33_554_432,
        "backward_bytes": 33_554_432,
        "bias_epilogue_bytes": 0,
    },
    "convolution_workspaces": {"convolutions": [{"operation": "forward", "workspace_bytes": 0}]},
}


def measure(request: Mapping[str, Any], end: socket.socket) -> None:
    """The stand-in of ``dataset_builder.measure.child.measure`` for probes."""
    if request.get("probe_bytes"):
        stand_in.measure(request, end)
        return
    stage = request["stage"]
    folder = Path(os.environ[FOLDER_VARIABLE])
    behaviour = json.loads((folder / "behaviour.json").read_text()).get(stage, "ok")
    held = folder / "held" / str(os.getpid())
    stack = {"torch": "stand-in", "cuda": "0", "cudnn": "0", "allocator_settings": ""}
    stand_in._tell(end, {"event": "started", "pids": [os.getpid()], "stack": stack})
    held.write_text(str(CONTEXT_BYTES))
    stand_in._phase(end, "context", 0)
    if behaviour == "crash":
        os._exit(7)
    if behaviour == "error":
        stand_in._tell(
            end, {"event": "result", "status": "error", "reason": "no kernel for the stand-in card"}
        )
        return
    held.write_text(
        str(MIB if behaviour == "lies" else CONTEXT_BYTES + GROWTH_BYTES[stage] + RESERVED_BYTES)
    )
    stand_in._phase(end, stage, RESERVED_BYTES)
    found = FOUND.get(stage, {}) | ({"forward_bytes": 0} if behaviour == "no_workspace" else {})
    stand_in._tell(end, {"event": "result", "status": "ok", "found": found})
