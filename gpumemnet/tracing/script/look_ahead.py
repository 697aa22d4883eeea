"""The largest batch among those that are left of a training loop whose code makes them itself.

A loop over batches is asked for them, as the body does not make them.  Of a loop over a range, such as
one that joins graphs of different sizes, the rounds run as far as a model begins, which takes little;
one whose batch is larger than any before runs whole.  The body of such a loop is changed so that an
error can end its round alone (:mod:`~gpumemnet.tracing.script.changed_code`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from itertools import chain, takewhile
from typing import Any, Final

from gpumemnet.sandbox.user_code import is_user_code
from gpumemnet.tracing.recorder import Recorder
from gpumemnet.tracing.script.counters import Counters, Running
from gpumemnet.tracing.script.longest_batch import batch_size, time_to_read

_EPOCHS: Final = 32
"""Epochs whose batches are looked at, where an object of the user's makes them anew in each."""
READ_SECONDS: Final = 3.0
"""CPU time to make the batches that are left of a loop, of which the largest is wanted."""


class Looked(BaseException):
    """Raised as a model begins, to end a round that only makes its batch."""


class LookAhead:
    """The look ahead of a script's loops.

    Args:
        recorder: records what is on the GPU.
        counters: those of the script, which know how far it has come.
    """

    def __init__(self, recorder: Recorder, counters: Counters) -> None:
        self._recorder = recorder
        self._progress, self._running = counters.progress, counters.running
        self.met_longest = False
        """Whether a loop has given all its batches."""
        self._sized = 0, 0
        """The step whose batch was learnt from."""
        self._looking: Running | None = None
        """The loop that looks ahead."""
        self.is_whole = False
        """Whether a round of it goes on, as its batch is larger than any before."""

    def rounds(self, loop: Running, place: str, given: int) -> Iterator[int]:
        """Yield the numbers after the first ``given`` of a loop over a range whose batches differ in size: a
        round ends as a model begins, unless its batch is larger than any before."""
        has_time = time_to_read(READ_SECONDS)
        self._looking, self._progress.looks = loop, place
        try:
            for index in range(given, len(loop.numbers) - 2):
                if not has_time():
                    break
                if index not in loop.found:  # a condition on the number may change the network
                    self.is_whole = False
                    yield loop.numbers[index]
        finally:
            self._progress.looks, self._looking = "", None

    def looked(self, place: str) -> tuple[type[BaseException], ...]:
        """Return what ends a round of a loop that looks ahead, which may have no further batch; of one
        within it, it does not."""
        is_other = place != self._progress.looks
        return () if is_other or self.is_whole else (Looked, Exception)

    def ends_round(self, size: int) -> bool:
        """Whether a round ends as a model begins with ``size`` numbers, or moves them to the GPU."""
        if self._looking is not None:
            self.is_whole |= size > max(self._looking.moved)
            if not self.is_whole:
                return True
        if self._sized != (sized := self._progress.trained()):
            self._sized = sized
            for each in self._running:
                if each.numbers:
                    each.moved.add(size)
        return False

    def longest(
        self, loop: Running, left: Iterator[Any], shown: Callable[[Any], Any], items: Any
    ) -> Iterator[Any]:
        """Yield the largest batch that is left of a loop whose code makes them itself, or that a later
        epoch has, unless one that it has met was as large."""
        has_time = time_to_read(READ_SECONDS)
        before = self._recorder.now(), self._progress.trained()

        def is_plain(item: Any) -> bool:
            """Whether there is time, and nothing runs on the GPU to make a batch."""
            return has_time() and before == (self._recorder.now(), self._progress.trained())

        waits = type(left) is type(iter(int, 1))  # perhaps for what the body of the loop does
        begin = getattr(getattr(type(items), "__iter__", None), "__code__", None)
        epochs = _EPOCHS if begin is not None and is_user_code(begin.co_filename) else 0

        def later() -> Iterator[Any]:
            again = copy(items)  # whose place in an epoch is its own
            for _ in range(epochs):
                yield from shown(again)

        largest = None
        for source in (left, later() if epochs else iter(())):
            with suppress(Exception):  # of code that counts on the body
                batches = takewhile(is_plain, source if loop.most and not waits else ())
                largest = max(chain([largest], batches), key=batch_size)
                if has_time():
                    self.met(loop)
        if batch_size(largest) > loop.most:
            yield largest

    def met(self, loop: Running) -> None:
        """A loop has given all its batches; one within a loop that gives others is not meant."""
        outer = self._running[: self._running.index(loop)]
        self.met_longest |= bool(loop.most) and all(each.numbers for each in outer)
