"""Passes that a stream of allocations and frees repeats, such as the batches of a validation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

EMPTY_CACHE: Final = -(2**62)
"""The event of ``torch.cuda.empty_cache()``."""

Integers = Sequence[int] | NDArray[np.int64]
_LEAST_PASSES: Final = 4
"""Fewer passes are replayed as fast without a comparison."""
_EMPTIES: Final = 2


@dataclass(frozen=True, slots=True)
class Loop:
    """A number of passes with the same events: each numbers its storages higher than the pass
    before, by the same amount.

    Attributes:
        start: index of the first event.
        events: number of events of a pass.
        passes: number of passes.
        first: the first storage that the first pass allocates.
        storages: number of storages that a pass allocates.
        reach: a pass frees storages of earlier passes; the first of them was allocated so many
            storages before the pass.
    """

    start: int
    events: int
    passes: int
    first: int
    storages: int
    reach: int

    @property
    def end(self) -> int:
        """Index of the event behind the last pass."""
        return self.start + self.passes * self.events

    def alike(self, values: NDArray[np.int64]) -> bool:
        """Whether ``values``, one for each storage of the stream, are the same in every pass, and
        in what a pass frees."""
        rows = values[self.first : self.first + self.passes * self.storages].reshape(
            self.passes, self.storages
        )
        return bool((rows == rows[0]).all())


def find_loops(events: Integers, passes: Sequence[int]) -> tuple[Loop, ...]:
    """Return the loops of a stream.

    Args:
        events: the stream; there are none if its storages are not numbered in the order of their
            allocation.
        passes: index of the event at which each pass begins; it ends where the next one begins.
    """
    if len(passes) <= _LEAST_PASSES:
        return ()
    order = np.asarray(events, dtype=np.int64)
    allocates = order >= 0
    if not np.array_equal(order[allocates], np.arange(np.count_nonzero(allocates))):
        return ()
    born = np.concatenate(([0], np.cumsum(allocates)))
    found: list[Loop] = []
    number = 0
    while number < len(passes) - 1:
        start, end = passes[number], passes[number + 1]
        own = _relative(order, start, end, int(born[start]))
        count = 1
        while number + count < len(passes) - 1:
            other, other_end = passes[number + count], passes[number + count + 1]
            if other_end - other != end - start:
                break
            if not np.array_equal(own, _relative(order, other, other_end, int(born[other]))):
                break
            count += 1
        if count >= _LEAST_PASSES and end > start:
            reach = max(0, -int(own[1].min()))
            found.append(
                Loop(
                    start, end - start, count, int(born[start]), int(born[end] - born[start]), reach
                )
            )
        number += count
    return tuple(found)


def _relative(order: NDArray[np.int64], start: int, end: int, first: int) -> NDArray[np.int64]:
    """The events of a pass, shape ``[2, events]``: what each does, and its storage, numbered from
    0; earlier ones are below."""
    window = order[start:end]
    empties, allocates = window == EMPTY_CACHE, window >= 0
    return np.stack(
        (
            np.where(empties, _EMPTIES, allocates),
            np.where(empties, 0, np.where(allocates, window, ~window) - first),
        )
    )


def replayable(
    loops: Sequence[Loop],
    sizes: Integers,
    streams: Sequence[int] | None,
    shrinkable: Collection[int],
    steady_from: int | None,
) -> list[Loop]:
    """Return those ``loops`` whose passes allocate the same sizes on the same streams; arguments as
    for ``replay``."""
    if not loops:
        return []
    values = [np.asarray(sizes, dtype=np.int64)]
    if streams:
        values.append(np.asarray(streams, dtype=np.int64))
    if shrinkable:
        shrinks = np.zeros(len(sizes), dtype=np.int64)
        shrinks[list(shrinkable)] = 1
        values.append(shrinks)
    return [
        loop
        for loop in loops
        if not (steady_from is not None and loop.start < steady_from < loop.end)
        and all(map(loop.alike, values))
    ]
