"""The memory of a job at batch sizes that are asked for, and the largest batch size that fits."""

from __future__ import annotations

from collections.abc import Callable

from gpumemnet.allocator import AllocatorSettings
from gpumemnet.gpu.available import YES, available_mib, verdict
from gpumemnet.gpu.catalogue import DeviceProfile
from gpumemnet.tracing.batch_sizes import BatchTraces, largest_batch
from gpumemnet.tracing.memory import Memory, memory_of
from gpumemnet.tracing.report.answer import BatchPoint
from gpumemnet.tracing.timeline import LongRun, Timeline, repeated
from gpumemnet.units import ceil_mib


class BatchMemory:
    """The memory at any batch size on one GPU.

    Args:
        traces: the traces of the job.
        device: the GPU.
        settings: settings of the caching allocator.
        long_run: returns a run with its last step repeated.
    """

    def __init__(
        self,
        traces: BatchTraces,
        device: DeviceProfile,
        settings: AllocatorSettings,
        long_run: Callable[[Timeline], LongRun] = repeated,
    ) -> None:
        self._traces = traces
        self._device = device
        self._settings = settings
        self._long_run = long_run

    def point(self, batch_size: int) -> BatchPoint:
        """Return the memory at ``batch_size``."""
        memory = self._memory_at(batch_size)
        return BatchPoint(
            batch_size=batch_size,
            expected_bytes=memory.expected_bytes,
            safe_bytes=memory.safe_bytes,
            verdict=verdict_of(memory, self._device),
            traced=batch_size in self._traces.traced,
        )

    def largest(self) -> int:
        """Return the largest batch size that fits, 0 if none does."""
        return largest_batch(
            self._traces, lambda size: verdict_of(self._memory_at(size), self._device) == YES
        )

    def _memory_at(self, batch_size: int) -> Memory:
        timeline, sizes, bounds = self._traces.sizes(batch_size)
        return memory_of(self._long_run(timeline), sizes, bounds, self._device, self._settings)


def verdict_of(memory: Memory, device: DeviceProfile) -> str:
    """Return whether the memory fits ``device``, one of :data:`~gpumemnet.gpu.available.VERDICTS`."""
    return verdict(
        ceil_mib(memory.expected_bytes), ceil_mib(memory.safe_bytes), available_mib(device)
    )
