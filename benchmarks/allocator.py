"""Measures the replay speed of the simulated caching allocator on one core: ``python
benchmarks/allocator.py``.

Prints events per second, median and best of five replays, for three random streams of allocations
and frees under several settings.  Also prints the time of the bisection for the smallest limit on
the mixed stream.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

from gpumemnet.allocator import parse_settings, replay, smallest_limit  # noqa: E402 - after the process is pinned
from gpumemnet.units import MIB  # noqa: E402

EVENTS = 100_000
ROUNDS = 5
SETTINGS = ("", "roundup_power2_divisions:8", "max_split_size_mb:32", "expandable_segments:True")
STREAMS: dict[str, tuple[int, Callable[[random.Random], int]]] = {
    "small tensors, below 1 MiB": (500, lambda generator: int(2 ** generator.uniform(2, 20))),
    "large tensors, 1 to 256 MiB": (300, lambda generator: int(2 ** generator.uniform(20.001, 28))),
    "mixed, 4 bytes to 256 MiB": (500, lambda generator: int(2 ** generator.uniform(2, 28))),
}
"""Name of a stream → number of tensors alive at once, and the function that draws a size in
bytes."""


def random_stream(alive: int, draw: Callable[[random.Random], int]) -> tuple[list[int], list[int]]:
    """Return events and sizes, seeded; the number of live tensors is within a factor of two of
    ``alive``.

    Tensors are freed in random order.
    """
    generator = random.Random(0)
    events: list[int] = []
    sizes: list[int] = []
    live: list[int] = []
    while len(events) < EVENTS:
        if live and generator.random() < len(live) / (2 * alive):
            index = generator.randrange(len(live))
            live[index], live[-1] = live[-1], live[index]
            events.append(~live.pop())
        else:
            live.append(len(sizes))
            events.append(len(sizes))
            sizes.append(draw(generator))
    return events, sizes


def seconds_of(run: Callable[[], object]) -> tuple[float, float]:
    """Return median and minimum of five runs, in seconds."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times), min(times)


def main() -> None:
    print(f"one core, {EVENTS:,} events a stream; events per second, median (best) of {ROUNDS}")
    print(f"{'':30}" + "".join(f"{text or 'default settings':>30}" for text in SETTINGS))
    for name, (alive, draw) in STREAMS.items():
        events, sizes = random_stream(alive, draw)
        cells = []
        for text in SETTINGS:
            settings = parse_settings(text)
            median, best = seconds_of(lambda: replay(events, sizes, settings))  # noqa: B023 - run before the next turn
            cells.append(f"{EVENTS / median:,.0f} ({EVENTS / best:,.0f})")
        print(f"{name:30}" + "".join(f"{cell:>30}" for cell in cells))
    unlimited = replay(events, sizes).peak_reserved_bytes
    begin = time.perf_counter()
    limit = smallest_limit(events, sizes)
    seconds = time.perf_counter() - begin
    print(
        f"smallest limit of the mixed stream: {limit / MIB:,.0f} MiB of {unlimited / MIB:,.0f} MiB, found in {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
