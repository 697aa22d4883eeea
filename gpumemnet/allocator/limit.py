"""The smallest memory limit under which a stream of allocations still succeeds.

Without a limit, PyTorch reserves cache that it would release under pressure, so a job may succeed
with less.  A replay of the same events under a limit finds how much less.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gpumemnet.allocator.caching_allocator import OutOfMemory
from gpumemnet.allocator.loops import Integers, Loop
from gpumemnet.allocator.replay import replay
from gpumemnet.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from gpumemnet.units import MIB


def smallest_limit(
    events: Integers,
    sizes: Integers,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    *,
    device_bytes: int | None = None,
    prefix: Integers = (),
    streams: Sequence[int] | None = None,
    loops: Sequence[Loop] = (),
    step_bytes: int = 2 * MIB,
) -> int:
    """Return the smallest capacity, in whole steps, under which ``events`` succeed; 0 if they need
    no memory.

    Bisection finds it: the stream succeeds with the answer and fails with one step less.  Smaller
        capacities may happen to work
    too, because the allocator then uses other blocks; they are not searched.

    Args:
        events, sizes, settings, device_bytes, prefix, streams, loops: as for
        :func:`~gpumemnet.allocator.replay.replay`.
        step_bytes: precision of the answer; the driver maps memory in pages of 2 MiB.

    Raises:
        OutOfMemory: the memory fraction of the settings is too small for any capacity.
        ValueError: the stream is malformed.
    """

    run = partial(
        replay,
        events,
        sizes,
        settings,
        device_bytes=device_bytes,
        prefix=prefix,
        streams=streams,
        loops=loops,
    )

    def runs(steps: int) -> bool:
        try:
            run(capacity_bytes=steps * step_bytes)
        except OutOfMemory:
            return False
        return True

    unlimited = run()
    works = -(-unlimited.peak_reserved_bytes // step_bytes)
    fails = (
        -(-unlimited.peak_requested_bytes // step_bytes) - 1
    )  # all requests alive at one moment must be reserved
    while works and not runs(
        works
    ):  # the range of an expandable segment ends with the device, and may be full of holes
        fails, works = works, 2 * works
    while works - fails > 1:
        middle = (works + fails) // 2
        fails, works = (fails, middle) if runs(middle) else (middle, works)
    return works * step_bytes
