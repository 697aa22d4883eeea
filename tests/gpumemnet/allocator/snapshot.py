"""Compares the simulation with the history of PyTorch's allocator on a real GPU.

The history is what ``torch.cuda.memory._record_memory_history`` records.  It comes from
``torch.cuda.memory._snapshot()``, or from the file that the dataset builder writes for a job
(``--record-history``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from gpumemnet.allocator.caching_allocator import CachingAllocator
from gpumemnet.allocator.segments import Block, LowestFreeAddress
from gpumemnet.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from gpumemnet.errors import DatasetError

_NEW_MEMORY: Final = frozenset({"segment_alloc", "segment_map"})
_LESS_MEMORY: Final = frozenset({"segment_free", "segment_unmap"})
_ABOVE_ALL_GPUS: Final = 1 << 55
"""An address above all GPU addresses, for segments that only the simulation makes."""


class HistoryEvent(NamedTuple):
    """One entry of the history; the size of ``alloc`` and ``free_completed`` is the requested
    size."""

    action: str
    address: int
    size_bytes: int
    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The simulation compared with the GPU over one history.

    Attributes:
        reserved_bytes, recorded_reserved_bytes: segments after the last event, simulated and on the
            GPU.
        peak_reserved_bytes, recorded_peak_reserved_bytes: their maxima.
        peak_allocated_bytes: maximum of the simulated block sizes.
        first_difference: index of the first allocation with another address on the GPU, or
            ``None``.  Segments have the driver's addresses until then.
        different_addresses: number of allocations with other addresses.
        unknown_frees: frees of memory from before the recording; if there are any, reserved bytes
            are incomplete.
    """

    reserved_bytes: int
    recorded_reserved_bytes: int
    peak_reserved_bytes: int
    recorded_peak_reserved_bytes: int
    peak_allocated_bytes: int
    first_difference: int | None
    different_addresses: int
    unknown_frees: int


def snapshot_history(snapshot: Mapping[str, Any], device: int = 0) -> tuple[HistoryEvent, ...]:
    """Return the events of one device from the result of ``torch.cuda.memory._snapshot()``.

    Raises:
        DatasetError: the snapshot has no history of this device.
    """
    try:
        trace = snapshot["device_traces"][device]
        return tuple(
            _event(one["action"], one.get("addr", 0), one.get("size", 0), one.get("stream", 0))
            for one in trace
        )
    except (KeyError, IndexError, TypeError):
        raise DatasetError(
            f"the snapshot has no history of device {device}: record it before the job begins"
        ) from None


def compare(
    history: Sequence[HistoryEvent], settings: AllocatorSettings = DEFAULT_SETTINGS
) -> Comparison:
    """Replay the history in the simulation, with segments at the driver's addresses, and compare.

    Where the GPU's allocator returned memory to the driver, :meth:`CachingAllocator.empty_cache` is
    called.
    """
    places = _RecordedPlaces()
    allocator = CachingAllocator(settings, addresses=places)
    live: dict[int, Block | None] = {}
    recorded = recorded_peak = different = unknown_frees = 0
    first_difference = None
    for index, event in enumerate(history):
        if event.action in _LESS_MEMORY:
            recorded -= event.size_bytes
            allocator.empty_cache()
        elif event.action in _NEW_MEMORY:
            recorded += event.size_bytes
            recorded_peak = max(recorded_peak, recorded)
            places.offered = places.offered or event
        elif event.action == "alloc":
            block = live[event.address] = allocator.malloc(event.size_bytes, event.stream)
            places.offered = None
            if block is not None and block.address != event.address:
                different += 1
                first_difference = index if first_difference is None else first_difference
        elif event.action == "free_completed":
            if event.address in live:
                allocator.free(live.pop(event.address))
            else:
                unknown_frees += 1
    return Comparison(
        reserved_bytes=allocator.reserved_bytes,
        recorded_reserved_bytes=recorded,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        recorded_peak_reserved_bytes=recorded_peak,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        first_difference=first_difference,
        different_addresses=different,
        unknown_frees=unknown_frees,
    )


class _RecordedPlaces(LowestFreeAddress):
    """Assigns a segment the address that it has on the GPU, if the GPU got memory for the same
    allocation.

    Attributes:
        offered: the memory that the GPU's allocator got for the next allocation.
    """

    def __init__(self) -> None:
        self.offered: HistoryEvent | None = None
        super().__init__(_ABOVE_ALL_GPUS)

    def take(self, size_bytes: int) -> int:
        """Return the address of the offered memory; the first page of an expandable segment gives
        the segment's address."""
        offered, self.offered = self.offered, None
        if offered is not None and (
            offered.size_bytes == size_bytes or offered.action == "segment_map"
        ):
            return offered.address
        return super().take(size_bytes)

    def give_back(self, address: int, size_bytes: int) -> None:
        """Do nothing: the history decides which addresses are used."""
        if address >= _ABOVE_ALL_GPUS:
            super().give_back(address, size_bytes)


def _event(action: object, address: object, size_bytes: object, stream: object) -> HistoryEvent:
    if not (
        isinstance(action, str)
        and isinstance(address, int)
        and isinstance(size_bytes, int)
        and isinstance(stream, int)
    ):
        raise TypeError
    return HistoryEvent(action, address, size_bytes, stream)
