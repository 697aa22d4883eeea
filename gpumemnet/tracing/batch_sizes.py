"""A job's memory at other batch sizes, and the largest batch size that fits.

:class:`BatchTraces` interpolates between traces: storage sizes are affine in the batch size.  Two
traces give each size as ``a + b·batch``, and a third trace checks it.  Final answers are traced
again.  Scratch memory of libraries is not affine; it is interpolated linearly between two traces
and is never below zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpumemnet.allocator import AllocatorSettings
from gpumemnet.gpu import YES, DeviceProfile, available_mib, verdict
from gpumemnet.tracing.memory import Memory, memory_of
from gpumemnet.tracing.result import BatchPoint
from gpumemnet.tracing.timeline import LongRun, Timeline, repeated
from gpumemnet.units import ceil_mib

Trace = Callable[[int], Timeline]
"""Returns the timeline at a batch size."""

Line = tuple[int, float]
"""Bytes at one batch size, and bytes per additional sample."""


@dataclass(frozen=True, slots=True, eq=False)
class AffineSizes:
    """Sizes as functions of the batch size.

    Attributes:
        timeline: the run at the larger of the two batch sizes.
        batch_size: that batch size.
        sizes, bounds: for each storage the line of its expected bytes, and of their upper bound.
    """

    timeline: Timeline
    batch_size: int
    sizes: tuple[Line, ...]
    bounds: tuple[Line, ...]

    def at(self, batch_size: int) -> tuple[list[int], list[int]]:
        """Return expected bytes and upper bounds of every storage at ``batch_size``."""
        further = batch_size - self.batch_size
        expected, most = (
            [max(0, round(a + b * further)) for a, b in lines]
            for lines in (self.sizes, self.bounds)
        )
        return expected, most

    def agrees_with(self, batch_size: int, timeline: Timeline) -> bool:
        """Whether a trace at ``batch_size`` has the predicted sizes, except for scratch memory."""
        if skeleton(self.timeline) != skeleton(timeline):
            return False
        predicted, _ = self.at(batch_size)
        tensors = [
            size
            for size, storage in zip(predicted, self.timeline.storages, strict=True)
            if not storage.is_scratch
        ]
        return tensors == [
            storage.size_bytes for storage in timeline.storages if not storage.is_scratch
        ]


def skeleton(timeline: Timeline) -> tuple[list[int], list[tuple[str, str, str]]]:
    """Return events and storages of a run without sizes and without scratch memory, which depends
    on sizes."""
    numbers: dict[int, int] = {}
    roles: list[tuple[str, str, str]] = []
    for index, storage in enumerate(timeline.storages):
        if not storage.is_scratch:
            numbers[index] = len(roles)
            roles.append((storage.memory_class, storage.operator, storage.module))
    events = []
    for event in timeline.events:
        index = event if event >= 0 else ~event
        if index in numbers:
            events.append(numbers[index] if event >= 0 else ~numbers[index])
    return events, roles


def affine_sizes(first: tuple[int, Timeline], second: tuple[int, Timeline]) -> AffineSizes | None:
    """Return the lines through two traces, ``None`` if the two runs differ.

    Scratch memory that only one of them has is assumed to be proportional to the batch size.
    """
    (low, lower), (high, upper) = sorted((first, second), key=lambda pair: pair[0])
    if low == high or skeleton(lower) != skeleton(upper):
        return None
    same = len(lower.storages) == len(upper.storages)
    before = iter([storage for storage in lower.storages if same or not storage.is_scratch])
    sizes: list[Line] = []
    bounds: list[Line] = []
    for storage in upper.storages:
        if storage.is_scratch and not same:
            sizes.append((storage.size_bytes, storage.size_bytes / high))
            bounds.append((storage.bound_bytes, storage.bound_bytes / high))
        else:
            other = next(before)
            sizes.append(
                (storage.size_bytes, (storage.size_bytes - other.size_bytes) / (high - low))
            )
            bounds.append(
                (storage.bound_bytes, (storage.bound_bytes - other.bound_bytes) / (high - low))
            )
    return AffineSizes(upper, high, tuple(sizes), tuple(bounds))


class BatchTraces:
    """Timelines at any batch size: interpolated between two traces if the run is the same, else
    traced.

    Args:
        trace: traces at a batch size.
        batch_size: the batch size of the job.
        timeline: the run at that batch size, if it is traced already.
    """

    def __init__(self, trace: Trace, batch_size: int, timeline: Timeline | None = None) -> None:
        self._trace = trace
        self._own = max(
            2, batch_size
        )  # at batch size 1 strides are ambiguous, and some operators run other code
        self._traced = {} if timeline is None else {batch_size: timeline}
        self._lines: dict[tuple[int, int], AffineSizes | None] = {}
        self._is_affine: bool | None = None

    @property
    def traced(self) -> tuple[int, ...]:
        """The batch sizes that were traced."""
        return tuple(sorted(self._traced))

    def exact(self, batch_size: int) -> Timeline:
        """Return the traced run at ``batch_size``."""
        if batch_size not in self._traced:
            self._traced[batch_size] = self._trace(batch_size)
        return self._traced[batch_size]

    def sizes(self, batch_size: int) -> tuple[Timeline, list[int], list[int]]:
        """Return a timeline, and the expected bytes and upper bounds of its storages at
        ``batch_size``."""
        lines = None
        if batch_size > 1 and batch_size not in self._traced and self._can_interpolate():
            lines = self._lines_around(batch_size)
        if lines is None:
            timeline = self.exact(batch_size)
            return timeline, timeline.sizes, timeline.bounds
        return lines.timeline, *lines.at(batch_size)

    def _can_interpolate(self) -> bool:
        if self._is_affine is None:
            lines = affine_sizes(
                (self._own, self.exact(self._own)), (self._own + 1, self.exact(self._own + 1))
            )
            guard = 2 * self._own + 1
            self._is_affine = lines is not None and lines.agrees_with(guard, self.exact(guard))
        return self._is_affine

    def _lines_around(self, batch_size: int) -> AffineSizes | None:
        known = [size for size in self.traced if size > 1]
        below, above = (
            [size for size in known if size < batch_size],
            [size for size in known if size > batch_size],
        )
        pair = (
            (below[-1], above[0])
            if below and above
            else (below[-2], below[-1])
            if below
            else (above[0], above[1])
        )
        if pair not in self._lines:
            self._lines[pair] = affine_sizes(
                (pair[0], self._traced[pair[0]]), (pair[1], self._traced[pair[1]])
            )
        return self._lines[pair]


MAX_BATCH_SIZE: Final = 2**20
"""Largest batch size that is searched."""


def largest_batch(traces: BatchTraces, fits: Callable[[int], bool]) -> int:
    """Return the largest batch size that ``fits``, 0 if none does.

    The answer and the next larger batch size are traced, not interpolated.

    Args:
        traces: the traces that ``fits`` uses.
        fits: whether a batch size fits, by :meth:`BatchTraces.sizes`.
    """
    while True:
        low, high = 0, 1
        while high <= MAX_BATCH_SIZE and fits(high):
            low, high = high, 2 * high
        high = min(high, MAX_BATCH_SIZE + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        news = [
            batch
            for batch in (low, high)
            if 1 <= batch <= MAX_BATCH_SIZE and batch not in traces.traced
        ]
        if not news:
            return low
        for batch in news:
            traces.exact(batch)
        if (low == 0 or fits(low)) and (high > MAX_BATCH_SIZE or not fits(high)):
            return low


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
    """Return whether the memory fits ``device``, one of :data:`~gpumemnet.gpu.VERDICTS`."""
    return verdict(
        ceil_mib(memory.expected_bytes), ceil_mib(memory.safe_bytes), available_mib(device)
    )
