"""The measuring child: one fresh process that makes a CUDA context, trains one job and reports
every phase to its parent.

It reports the caching allocator's statistics and never reads NVML.  After each phase it waits until
the parent has read NVML.
"""

from __future__ import annotations

import gzip
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch._dynamo  # every optimizer loads it on first use: loaded once here, before the fork, it costs the children nothing
import torch.utils.checkpoint

from gpumemnet.errors import first_line

from ..recipe.planned_job import parse_planned
from . import channel
from .device_stages import run_stage
from .training import train

_PHASE_READINGS: Final = {
    "allocated_bytes": "allocated_bytes.all.current",
    "reserved_bytes": "reserved_bytes.all.current",
    "peak_allocated_bytes": "allocated_bytes.all.peak",
    "peak_reserved_bytes": "reserved_bytes.all.peak",
}
_PEAKS: Final = {
    "requested_bytes.all.peak": "peak_requested_bytes",
    "active_bytes.all.peak": "peak_active_bytes",
    "inactive_split_bytes.all.peak": "peak_inactive_split_bytes",
}
"""Peaks are reset with every phase, so the maximum over the run is kept here."""
_COUNTERS: Final = {
    "num_alloc_retries": "alloc_retries",
    "num_ooms": "ooms",
    "inactive_split_bytes.all.current": "inactive_split_bytes",
    "allocation.all.allocated": "allocations",
    "segment.all.current": "segments",
    "segment.small_pool.current": "small_segments",
    "segment.large_pool.current": "large_segments",
}


class ParentGoneError(ConnectionError):
    """The parent has closed the channel."""


def measure(request: Mapping[str, Any], end: socket.socket) -> None:
    """Measure the job of ``request`` and report over ``end``.

    Args:
        request: ``planned`` (or ``probe_bytes``, an amount to allocate, or ``stage``, see
            :mod:`dataset_builder.measure.device_stages`), ``seed``, ``visible`` (the GPU's UUID),
            and ``history`` (a file for the allocator's history, or ``None``).
        end: the child's end of a channel; the parent answers every message when it has read NVML.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = request["visible"]
    allocator: dict[str, int] = {}
    try:
        stack = software_stack()
    except RuntimeError as error:  # PyTorch refuses a cuDNN that is not the one it was built for
        _send_and_wait(
            end,
            {
                "event": "result",
                "status": "error",
                "reason": first_line(error),
                "allocator": allocator,
            },
        )
        return
    _send_and_wait(end, {"event": "started", "pids": process_ids(), "stack": stack})
    try:
        outcome = _measure_on_gpu(request, end, allocator)
    except torch.OutOfMemoryError as error:
        outcome = {"status": "oom", "reason": first_line(error)}
    except RuntimeError as error:
        outcome = {
            "status": "oom" if _is_out_of_memory(error) else "error",
            "reason": first_line(error),
        }
    except ParentGoneError:
        raise
    except Exception as error:
        outcome = {"status": "error", "reason": f"{type(error).__name__}: {first_line(error)}"}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        note_statistics(torch.cuda.memory_stats(), allocator)
    _send_and_wait(end, outcome | {"event": "result", "allocator": allocator})


def _measure_on_gpu(
    request: Mapping[str, Any], end: socket.socket, allocator: dict[str, int]
) -> dict[str, Any]:
    """Run the job; ``allocator`` takes up the allocator's statistics, also of a job that fails."""
    device = torch.device("cuda", 0)
    phases: list[tuple[str, int]] = []

    def observe(name: str) -> int:
        torch.cuda.synchronize(device)
        statistics = torch.cuda.memory_stats(device)
        note_statistics(statistics, allocator)
        phase = {reading: int(statistics.get(key, 0)) for reading, key in _PHASE_READINGS.items()}
        phases.append((name, time.time_ns() // 1000))
        _send_and_wait(end, {"event": "phase", "name": name, **phase})
        torch.cuda.reset_peak_memory_stats(device)
        return phase["reserved_bytes"]

    torch.cuda.init()  # type: ignore[no-untyped-call]
    observe("context")
    if request.get("probe_bytes"):
        held = torch.empty(request["probe_bytes"], dtype=torch.uint8, device=device).zero_()
        observe("probe")
        del held
        return {"status": "ok", "steps": 0}
    if request.get("stage"):
        found = run_stage(request["stage"], device)
        observe(request["stage"])
        return {"status": "ok", "steps": 0, "found": found}
    if request.get("history"):
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=10_000_000)
    steps = train(parse_planned(request["planned"]), device, request["seed"], observe)
    if request.get("history"):
        try:
            _write_history(Path(request["history"]), phases)
        except OSError as error:  # the label is good without it
            sys.stderr.write(f"{request['history']} cannot be written: {error.strerror}\n")
    return {"status": "ok", "steps": steps}


def _send_and_wait(end: socket.socket, message: Mapping[str, Any]) -> None:
    try:
        channel.send(end, message)
        answer = channel.receive(end)
    except OSError:
        raise ParentGoneError from None
    if answer is None:
        raise ParentGoneError


def process_ids() -> list[int]:
    """This process's id in each of its process namespaces that it can see."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return [int(number) for number in line.split()[1:]]
    except OSError:
        pass
    return [os.getpid()]


def software_stack() -> dict[str, str | None]:
    """Versions that a label depends on, and the allocator's settings."""
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    settings = (
        os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    )
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "allocator_settings": settings,
    }


def note_statistics(statistics: Mapping[str, int], totals: dict[str, int]) -> None:
    """Write the caching allocator's statistics to ``noted``, under the names of the dataset."""
    for key, name in _COUNTERS.items():
        if key in statistics:
            totals[name] = int(statistics[key])
    for key, name in _PEAKS.items():
        if key in statistics:
            totals[name] = max(totals.get(name, 0), int(statistics[key]))


def _write_history(path: Path, phases: list[tuple[str, int]]) -> None:
    """Every allocator event as ``[action, address, size, stream, microseconds]``, gzipped JSON,
    written atomically."""
    snapshot = torch.cuda.memory._snapshot()
    events = [
        [
            event["action"],
            event.get("addr", 0),
            event.get("size", 0),
            event.get("stream", 0),
            event.get("time_us", 0),
        ]
        for event in snapshot["device_traces"][0]
    ]
    document = {"version": 1, "phases": phases, "events": events}
    partial = path.with_suffix(".partial")
    with gzip.open(partial, "wt", compresslevel=6) as file:
        json.dump(document, file, separators=(",", ":"))
    partial.replace(path)


_OUT_OF_MEMORY: Final = (
    *("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED",
)
"""Failures that mean a full card: of CUDA libraries that do not ask the allocator, and of the
allocator's message about a full card where NVML does not list processes, as in some containers
(``reportProcessMemoryInfo`` in ``CUDACachingAllocator.cpp``)."""


def _is_out_of_memory(error: RuntimeError) -> bool:
    text = str(error)
    return any(each in text for each in _OUT_OF_MEMORY)
