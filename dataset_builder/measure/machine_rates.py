"""Measures the rates of a GPU and its host from which ``gpumemnet plan --machine`` models times.

Large matrix products give the rate of each element type, copies within the GPU that of its memory,
and copies to and from pinned memory that of the link to the host.  Each rate is the median of
several rounds, after rounds that do not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

from gpumemnet.errors import MeasurementError
from gpumemnet.planner.costs import HOST_MEMORY_BYTES, Machine
from gpumemnet.units import MIB

MATRIX_SIZE: Final = 8192
COPIED_BYTES: Final = 512 * MIB
_WARM_UP_ROUNDS: Final = 3
_ROUNDS: Final = 9
_ELEMENT_TYPES: Final = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def measure_machine(
    device: torch.device,
    *,
    matrix_size: int = MATRIX_SIZE,
    copied_bytes: int = COPIED_BYTES,
    rounds: int = _ROUNDS,
) -> Machine:
    """Return the measured rates of ``device``; takes a few seconds on a GPU.

    Args:
        device: a CUDA device, which nothing else should use meanwhile.
        matrix_size: rows and columns of the matrices that are multiplied.
        copied_bytes: size of each copy.
        rounds: measurements of each rate.

    Raises:
        MeasurementError: the clock of the device does not advance, or its memory is too small.
    """
    clock = _Clock(device, rounds)
    try:
        flops = {
            name: 2 * matrix_size**3 / clock.seconds(_product(name, matrix_size, device))
            for name in _types_of(device)
        }
        first, second = (
            torch.empty(copied_bytes, dtype=torch.uint8, device=device) for _ in range(2)
        )
        host = torch.empty(copied_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        within = (
            2 * copied_bytes / clock.seconds(lambda: first.copy_(second))
        )  # each byte is read and written
        to_host = copied_bytes / clock.seconds(lambda: host.copy_(first, non_blocking=True))
        from_host = copied_bytes / clock.seconds(lambda: first.copy_(host, non_blocking=True))
    except torch.OutOfMemoryError:
        raise MeasurementError(
            "the GPU has too little free memory to measure its rates: end other jobs on it"
        ) from None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Machine(
        name=name,
        flops_per_second=flops,
        memory_bytes_per_second=within,
        to_host_bytes_per_second=to_host,
        from_host_bytes_per_second=from_host,
        host_memory_bytes=HOST_MEMORY_BYTES,
        efficiency=1.0,
        source=f"modelled from rates measured on {name} with PyTorch {torch.__version__}",
    )


def _types_of(device: torch.device) -> list[str]:
    if device.type != "cuda":
        return ["fp32"]
    has_tf32 = torch.cuda.get_device_capability(device) >= (8, 0)  # and bf16 in tensor cores
    return list(_ELEMENT_TYPES) if has_tf32 else ["fp32", "fp16"]


def _product(name: str, matrix_size: int, device: torch.device) -> Callable[[], object]:
    first, second = (
        torch.randn(matrix_size, matrix_size, device=device, dtype=_ELEMENT_TYPES[name])
        for _ in range(2)
    )
    out = torch.empty_like(first)

    def multiply() -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        try:
            torch.mm(first, second, out=out)
        finally:
            torch.set_float32_matmul_precision(before)

    return multiply


class _Clock:
    """Takes the time of work on a device."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self._device = device
        self._rounds = rounds

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median seconds of ``work``."""
        for _ in range(_WARM_UP_ROUNDS):
            work()
        found = statistics.median(self._seconds_once(work) for _ in range(self._rounds))
        if found <= 0:
            raise MeasurementError(
                "the clock of the GPU does not advance: its rates cannot be measured"
            )
        return found

    def _seconds_once(self, work: Callable[[], object]) -> float:
        if self._device.type != "cuda":
            started = time.perf_counter()
            work()
            return time.perf_counter() - started
        stream = torch.cuda.current_stream(self._device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
