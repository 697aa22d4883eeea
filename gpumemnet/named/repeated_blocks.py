"""Lengthens the timeline of a model of few equal blocks to that of many.

A run sweeps through the blocks: upwards when it builds the model, in the forward pass and in the
optimizer's step, downwards in the backward pass.  In each sweep the events of one inner block are
repeated for the blocks to come, with storages of their own.  Whether that is what a longer model
does is checked by the caller: lengthened by one block, the timeline of four must equal that of five.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Final

from gpumemnet.allocator import EMPTY_CACHE
from gpumemnet.tracing.timeline import Storage, Timeline

_Key = tuple[int | None, int]
"""A storage: its block, or ``None``, and its number there."""
_OUTSIDE: Final = -1


class _Sweeps:
    """Which block each event belongs to: the one that the run has reached."""

    def __init__(self, timeline: Timeline, prefix: str) -> None:
        self.timeline, self.prefix = timeline, f"{prefix}."
        blocks = [block_of(storage, self.prefix) for storage in timeline.storages]
        self.count = 1 + max((block for block in blocks if block is not None), default=0)
        self.keys: list[_Key] = [(None, 0)] * len(blocks)
        self.reached: list[int | None] = []
        self.downwards: list[bool] = []
        numbers: defaultdict[int | None, int] = defaultdict(int)
        starts = {phase.start: phase.name == "backward" for phase in timeline.phases}
        at, is_down = None, False
        for index, event in enumerate(timeline.events):
            if index in starts:
                at, is_down = None, starts[index]
            storage = event if event >= 0 else ~event
            block = None if event == EMPTY_CACHE else blocks[storage]
            at = self._next(at, block, is_down)
            self.reached.append(at)
            self.downwards.append(is_down)
            if event >= 0:
                owner = at if block is None else block
                self.keys[event] = owner, numbers[owner]
                numbers[owner] += 1

    def _next(self, at: int | None, block: int | None, is_down: bool) -> int | None:
        first, last = (self.count - 1, 0) if is_down else (0, self.count - 1)
        if block == first and at in (None, last):
            return first
        if at is not None and block == at + (-1 if is_down else 1):
            return block
        return at


def block_of(storage: Storage, prefix: str) -> int | None:
    """Number of the block that a storage belongs to, by its module."""
    if not storage.module.startswith(prefix):
        return None
    return int(storage.module.removeprefix(prefix).partition(".")[0])


def lengthened(timeline: Timeline, prefix: str, more: int) -> Timeline | None:
    """Return the timeline of a model with ``more`` further blocks; ``None`` if the sweeps are not
    clear.

    Args:
        timeline: of a model with at least four blocks.
        prefix: path of their list.
        more: number of blocks.
    """
    sweeps = _Sweeps(timeline, prefix)
    middle = sweeps.count // 2
    events: list[int] = []
    storages: list[Storage] = []
    ids: dict[_Key, int] = {}
    places: list[int] = []

    def emit(index: int, reached: int | None, now: int | None) -> None:
        """Append an event of block ``reached`` as one of block ``now``."""
        event = timeline.events[index]
        if event == EMPTY_CACHE:
            events.append(event)
            return
        origin = event if event >= 0 else ~event
        block, number = sweeps.keys[origin]
        if block is not None:
            if reached is not None and now is not None and abs(block - reached) <= 1:
                block += now - reached
            elif block > middle:
                block += more
        if event < 0:
            events.append(~ids.pop((block, number)))
            return
        ids[block, number] = len(storages)
        events.append(len(storages))
        storages.append(_moved(timeline.storages[origin], sweeps, block))

    length, index = len(timeline.events), 0
    try:
        while index < length:
            at = sweeps.reached[index]
            end = index + 1
            if at == middle:
                while end < length and sweeps.reached[end] == middle:
                    end += 1
            copies = range(more + 1) if at == middle else (more * (at is not None and at > middle),)
            places += [len(events)] * (end - index)
            for copy in reversed(copies) if sweeps.downwards[index] else copies:
                for each in range(index, end):
                    emit(each, at, None if at is None else at + copy)
            index = end
    except KeyError:  # freed without having been allocated
        return None
    places.append(len(events))
    return replace(
        timeline,
        storages=tuple(storages),
        events=tuple(events),
        phases=tuple(replace(each, start=places[each.start]) for each in timeline.phases),
        step_starts=tuple(places[start] for start in timeline.step_starts),
        passes=tuple(places[start] for start in timeline.passes),
    )


def _moved(storage: Storage, sweeps: _Sweeps, block: int | None) -> Storage:
    """The storage in another block."""
    if block is None or not storage.module.startswith(sweeps.prefix):
        return storage
    _, dot, rest = storage.module.removeprefix(sweeps.prefix).partition(".")
    return replace(storage, module=f"{sweeps.prefix}{block}{dot}{rest}")


def with_ordered_frees(timeline: Timeline, prefix: str) -> Timeline:
    """Order storages that are freed one after another by block and allocation: autocast drops its
    copies of weights in the order of their addresses.  The allocator's state afterwards is the same.
    """
    blocks = [block_of(storage, f"{prefix}.") for storage in timeline.storages]

    def order(event: int) -> tuple[int, int]:
        block = blocks[~event]
        return (_OUTSIDE if block is None else block), ~event

    events: list[int] = []
    freed: list[int] = []
    starts = {each.start for each in timeline.phases} | set(timeline.step_starts)
    for index, event in enumerate(timeline.events):
        if freed and (event >= 0 or event == EMPTY_CACHE or index in starts):
            events += sorted(freed, key=order)
            freed.clear()
        if event >= 0 or event == EMPTY_CACHE:
            events.append(event)
        else:
            freed.append(event)
    return replace(timeline, events=(*events, *sorted(freed, key=order)))


def is_equal(one: Timeline, other: Timeline) -> bool:
    """Whether two timelines have the same events and storages."""
    return (one.events, one.storages, one.phases, one.step_starts) == (
        other.events,
        other.storages,
        other.phases,
        other.step_starts,
    )
