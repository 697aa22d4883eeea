"""The loops of a user's code, which a trace may leave early.

The code is changed as it is compiled: each ``for`` and ``while`` asks after a round whether it goes
on.  Evaluation, generation and steps of an environment repeat thousands of rounds.  Where the last
ones reached no new peak on the GPU, left nothing there, and trained nothing there, the loop is left
after some seconds; a note says so where that is before the first steps.  A loop that trains is left
once the script has trained for long enough and its last rounds brought nothing new: what the script
does after it is traced too, such as an evaluation or another network.

Conditions on counters, such as ``step % 1000 == 0``, ``epoch in milestones`` and ``epoch > 50``, are
asked for, too.  Where the counter is the number of a loop over a range, that loop goes on with the
numbers at which one of them is other than it was so far, and ends with its last two, as does a
``while`` loop that counts up to a number.  Another one that was never so in the steps that were traced
is taken the other way then, because the run goes on, if a later number makes it so.  A position in
data, such as ``start`` in ``data[start:end]``, is no such counter: the rest of the data would be one
batch.

A statement of an evaluation, say, may end with an error, because a value that was read cannot be. Once
the script has trained, the run then goes on with the next one.

Before the first steps, a loop may wait for so many rounds, as one does that fills a buffer of what an
agent has met.  After some seconds its conditions on numbers hold whose code leads to ``backward``,
and those do not that leave code which does.
"""

from __future__ import annotations

import ast
import builtins
import sys
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from itertools import count, islice, pairwise, takewhile
from math import inf
from pathlib import Path
from threading import current_thread, main_thread
from time import process_time
from traceback import walk_stack, walk_tb
from types import CodeType, GeneratorType
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.utils.data import get_worker_info

from gpumemnet.sandbox.user_code import fault_sentence, is_user_code
from gpumemnet.torch_private.names import Function, sees_functions
from gpumemnet.torch_private.script import FETCHING_FILE, TRAINING_FILES
from gpumemnet.tracing.recorder import Recorder
from gpumemnet.tracing.script import changed_code as code
from gpumemnet.tracing.script.branches import is_guarded
from gpumemnet.tracing.script.gathered import Gathered, bytes_of_queues
from gpumemnet.tracing.script.longest_batch import time_to_read
from gpumemnet.tracing.script.read_values import type_of

_SLOW_SECONDS: Final = 2.0
"""CPU time of a round of which few more can be run."""
_RISES: Final = 2
"""How often a number has risen from one step to the next that is taken for a counter; once, where it
is the number of a loop over a range."""
_TRAINERS: Final = (
    "fastai/learner.py",
    "mmengine/runner/loops.py",
    "poutyne/framework/model.py",
)
"""Files of libraries whose loops train as a user's do: no loader tells them that an epoch ends."""
_CALM_ROUNDS: Final = 16
"""Rounds that bring nothing new, after which a loop may be left that does not train."""
_CALM_ROUNDS_OF_TRAINING: Final = 3
_SMALL_BYTES: Final = 2**16
"""What a round of training may leave that is nothing new, such as a loss or a mask in a list."""
_AHEAD: Final = 100_000
"""How many later numbers of a counter are tried."""
_POWERS: Final = 50
"""The same of a counter whose condition stays so: each power of 2 later."""
_FAR: Final = range(2**40)
"""How much longer something may become."""
_NUMBERS: Final = {int, float}
_FEW: Final = 8
"""Numbers of a loop that each change a condition, such as where a network grows, or is kept."""
_LARGEST: Final = 64
"""Numbers in a collection that a counter is looked for in."""
_COMPUTING: Final = ("builtins", "gpumemnet", "numpy", "scipy", "torch", "PIL")
"""Packages whose errors tell that something cannot be computed; others steer a run by theirs."""
_MOST_ERRORS: Final = 200
"""After so many the next one ends the run: its loop may wait for what it cannot get."""
_PARTS: Final = 1000
"""Parts that a model may have; with more, these are models."""
_SECONDS: Final = 5.0
"""CPU time in such a loop before it is left: a loop that fills a buffer should come to its end."""
_MORE_SECONDS: Final = 20.0
"""The same for a loop that may train later: a name that is called there leads to ``backward``."""
_MOST_SECONDS: Final = 60.0
"""The same for one that is in no other loop: all that trains may be left with it."""
_WANTED_SECONDS: Final = 3.0
"""CPU time of the rounds of a loop over a range that make a condition other than it was."""
_LESS_SECONDS: Final = 1.0
"""The same after the first steps."""
_READ_SECONDS: Final = 3.0
"""CPU time to make the batches that are left of a loop, of which the largest is wanted."""
_REST_SECONDS: Final = 2.0
"""CPU time of the rounds that are left of a loop, below which it goes on: code after it may look up
what its last round gave."""


@dataclass(slots=True)
class _Condition:
    """A condition that compares numbers of the script, where an object asks for it, or a caller.

    Attributes:
        line: file, line and code.
        leaves: whether what follows leaves a loop or function.
        stays: whether it stays so once the counter is large enough.
        repeats: whether it holds for multiples; the first of them, 0, is often left out or has no
            state of an optimizer yet, and the second one meets what the first has left.
        is_position: whether it compares a position in data.
        sizes: for each number, whether it is the length of something, which a script may keep.
        is_shape: whether it compares the size of a tensor, as modules do.
        seen: whether it held, so far.
        step: the last step at which it was met.
        now: the numbers for which it was asked last.
        first, last: the numbers at the first step, and at the last one.
        rises: how often one has risen; ``None`` if one has fallen, other than to its first value.
        later: what it is from now on.
    """

    line: str
    leaves: bool
    stays: bool
    repeats: bool
    is_position: bool
    sizes: tuple[bool, ...]
    is_shape: bool
    seen: set[Any] = field(default_factory=set)
    step: int = 0
    now: tuple[float, ...] = ()
    first: tuple[float, ...] = ()
    last: tuple[float, ...] = ()
    rises: int | None = 0
    later: Any = None

    def met(self, step: int, numbers: tuple[float, ...]) -> None:
        """Learn how the numbers change from step to step."""
        if self.first and self.rises is not None:
            fell = any(
                a < b and a > c for a, b, c in zip(numbers, self.last, self.first, strict=False)
            )
            self.rises = None if fell else self.rises + (numbers > self.last)
        self.step, self.first, self.last = step, self.first or numbers, numbers

    def ahead(self, number: float, is_answer: bool) -> Iterator[float]:
        """Yield later values of a counter; of one that has a place among numbers, the last one
        first."""
        if not self.stays:
            return (number + each for each in range(_AHEAD))
        powers = range(_POWERS) if is_answer else range(_POWERS)[::-1]
        return (number + 2**each for each in powers)


@dataclass(slots=True, eq=False)
class _Running:
    """A loop that runs.

    Attributes:
        numbers: those of a range, also where a bar shows them.
        steps: optimizer steps before it.
        given: how many of them were given; the last one is that of this round.
        wanted, found: which of the numbers make a condition other than it was so far, and all of them.
        rare: those of conditions that the last two numbers leave as they were.
        asked: the conditions that were looked at.
    """

    numbers: Sequence[int]
    steps: int
    given: int = 0
    wanted: set[int] = field(default_factory=set)
    found: set[int] = field(default_factory=set)
    rare: set[int] = field(default_factory=set)
    asked: set[Hashable] = field(default_factory=set)
    has_parts: bool = False
    """Whether it is over the parts of a model, of which none may be left out."""
    ends_itself: bool = False
    """Whether it is over a data loader, which ends early once the first steps are over."""
    is_outer: bool = False
    """Whether another loop trains within it, as one over epochs: that one has met what changes from
    step to step."""

    left: int | None = None
    """Rounds that are left of a ``while`` loop that counts, once these are few; 0 before."""

    whole: int = 0
    """The last round before loops within it were left early."""

    least_bytes: float = inf
    """The fewest bytes at the end of a round since one left more than any before."""

    cycle: tuple[int, int, int] = 0, 0, 0
    """Bytes that a round left more than any before, its number, and how many after the one before it
    that left as much; 0 if that left other bytes."""

    most: int = 0
    """Size of the largest batch that it gave while it trained, where it makes them itself."""

    def want(self, is_other: Callable[[int], bool]) -> bool:
        """Want the numbers that make a condition other than it was, if they are few, else the first
        and the last one, before which time may be up; return whether there is one."""
        left = range(self.given, len(self.numbers))[:_AHEAD]
        found = [index for index in left if is_other(self.numbers[index])]
        few = found if len(found) <= _FEW else [found[0], found[-1]]
        self.found.update(found)
        self.wanted.update(few)
        if not any(map(is_other, self.numbers[-2:])):
            self.rare.update(few)
        return bool(found)

    def rest(self, seconds: float, live_bytes: Callable[[], int]) -> Iterator[int]:
        """Yield the numbers that are wanted, those that follow one whose round leaves something, and
        the last two; where a round takes many ``seconds``, only those that change what the last two
        do not."""
        size, is_slow = len(self.numbers), seconds * len(self.wanted) > _WANTED_SECONDS
        wanted = {*(self.rare if is_slow else self.wanted), *range(size - 2, size)}
        left_bytes = 0
        for index in sorted(wanted | self.found):
            if index >= self.given and (index in wanted or left_bytes >= _SMALL_BYTES):
                self.given, left_bytes = index + 1, -live_bytes()
                yield self.numbers[index]
                left_bytes += live_bytes()


class _Nowhere:
    """Stands for the loops in what a script pickles."""

    condition = due = continues_after_error = enumerated = near_end = rounds = was_cut = None


class Loops:
    """The loops of a running script.

    Args:
        recorder: records what is on the GPU.
        is_inside: whether a module, a backward pass or an optimizer runs: their loops stay.
        trained: returns optimizer steps, and optimizers made.
        is_cut: whether data loaders have ended early.
        generates: whether the script generates token by token.
        number_of: returns the number of the batch that a data loader gave last; ``None`` for others.
        batches: returns how many batches data loaders gave, and how many an epoch of the last one has.
        ends: what ends the script, which it may not catch.
    """

    def __init__(
        self,
        recorder: Recorder,
        is_inside: Callable[[], bool],
        trained: Callable[[], tuple[int, int]],
        is_cut: Callable[[], bool] = lambda: False,
        generates: Callable[[], bool] = lambda: False,
        number_of: Callable[[Any], int | None] = lambda items: None,
        batches: Callable[[], tuple[int, int]] = lambda: (0, 0),
        ends: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._batches, self._ends = batches, ends
        self._recorder, self._is_inside, self.trained = recorder, is_inside, trained
        self._is_cut, self._generates, self._number_of = is_cut, generates, number_of
        self._conditions: dict[Hashable, _Condition] = {}
        self._asked: dict[Hashable, tuple[tuple[int, int], int, tuple[float, ...]]] = {}
        """Place of a condition → the step and batch at which it was asked for last, how often
        before, and the first numbers: each of several milestones is a condition of its own."""
        self._asks: defaultdict[Hashable, list[int]] = defaultdict(list)
        """Place and step → the events at which a value was read there."""
        self._vary: set[Hashable] = set()
        """Places of conditions on numbers that are no counters, such as letters of a text."""
        self.waiting: dict[str, None] = {}
        """Places of conditions on counters that were never so, or always."""
        self.turned: dict[str, int] = {}
        """What was taken the other way before its time → after how many events."""
        self.sizes: dict[str, float] = {}
        """Place of a condition on the length of something that grows → steps before it is other."""
        self.queues = Counter[str]()
        self._cycles = Counter[str]()
        """Queues of a longest length, and loops → bytes that they will hold more, or leave."""
        self._running: list[_Running] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tops: defaultdict[str, int] = defaultdict(int)
        """Place of a loop → the most bytes on the GPU in a round."""
        self._ended: dict[str, tuple[int, int]] = {}
        """Place of a loop that has trained → rounds that brought nothing new at its end, and the most
        bytes that a round has left."""
        self._called: defaultdict[str, set[str]] = defaultdict(set)
        """Place of a loop, or name of a function → names that it calls."""
        self.training: set[str] = set()
        self.making: set[str] = set()
        """Loops that run and have trained, and whose rounds make optimizers."""
        self.has_stepped = self.has_trained = False
        """Whether the script has trained for its first steps, and for as long as is wanted."""
        self._has_left = self._is_last = self.met_longest = False
        self.left: dict[str, None] = {}
        """Loops that were left before the first steps."""
        self._waits = False
        """Whether a loop runs for long that may train later."""
        self.hurried: dict[str, None] = {}
        """Conditions that were decided as they are later, so that such a loop trains."""
        self.errors: dict[str, bool] = {}
        """Errors after which the run went on → whether it had trained for long enough."""
        self._errors_left = _MOST_ERRORS

    def __reduce__(self) -> tuple[Any, ...]:
        return _Nowhere, ()  # datasets hashes functions with what they name

    def rounds(
        self, place: str, items: Iterable[Any] = iter(int, 1), only_returns: bool = False
    ) -> Iterator[Any]:
        """Yield the items of a loop, keeping none of them; 0 for a ``while`` loop.

        Args:
            place: its own.
            items: what it is over.
            only_returns: whether it ends by returning a value only: then it is not left unless it
                trains.
        """
        if _is_aside():
            yield from items
            return
        iterator, rise = iter(items), 0
        # Another epoch begins as the one before has ended.
        calm, most_bytes = self._ended.get(place, (0, 0)) if self.has_trained else (0, 0)
        numbers, is_numbered = _shown(items), _is_numbered(items)
        second, event, (steps, made) = process_time(), self._recorder.now(), self.trained()
        is_range = isinstance(numbers, range) and not is_numbered
        loop = _Running(numbers if is_range else (), steps)
        gathered = Gathered()
        self._running.append(loop)
        try:
            while True:
                has_trained = self.has_trained  # a last round takes conditions on counters
                given = self._batches()[0]
                # no name: enumerate would keep the first pair
                yield self._taken(loop, next(iterator), given, place in self.training)
                is_on_host = self._recorder.now() == event
                trains_nothing = self.has_stepped or self.trained()[0] == steps
                is_whole = loop.has_parts and loop.given < _PARTS and self.trained()[0] == steps
                if (is_on_host and trains_nothing) or is_whole or self._is_inside():
                    continue
                top, end = self._recorder.levels_since(event)
                before = second, steps, made
                second, event, (steps, made) = process_time(), self._recorder.now(), self.trained()
                small = _SMALL_BYTES if place in self.training else 0
                is_new = top > self._tops[place] + small or end > most_bytes + small
                # Before the first steps, one that keeps as much of each round does nothing else.
                before_rise, rise = rise, end - most_bytes
                keeps = rise == before_rise > 0 and top - self._tops[place] <= rise
                keeps = keeps and not self.has_stepped
                is_new = (is_new and not keeps) or made > before[2]
                calm = 0 if is_new else calm + 1
                loop.whole = loop.whole if self.has_trained else loop.given
                loop.least_bytes = min(end, loop.least_bytes)
                if rise > _SMALL_BYTES and self.has_stepped:
                    # What was left then is still there: it was no larger batch.
                    is_cycle = rise == loop.cycle[0] and loop.least_bytes >= most_bytes
                    apart = (loop.given - loop.cycle[1]) * is_cycle
                    loop.cycle, loop.least_bytes = (rise, loop.given, apart), end
                self._tops[place], most_bytes = max(top, self._tops[place]), max(end, most_bytes)
                self._seconds[place] += max(second - before[0], 0)  # a fork begins at 0
                if steps > before[1] and not is_on_host:
                    self.training.add(place)
                    for each in self._running[: self._running.index(loop)]:
                        each.is_outer = True
                if made > before[2]:
                    self.making.add(place)
                if place in self.training:
                    # Conditions on another counter than a loop's own number wait for its next rise.
                    of_epochs = 1 if loop.numbers else _RISES
                    is_slow = second - before[0] > _LESS_SECONDS
                    enough = of_epochs if loop.is_outer or is_slow else _CALM_ROUNDS_OF_TRAINING
                    is_done = has_trained and calm >= enough
                    # Other numbers bring something else, and epochs were cut for them. Slow rounds
                    # that bring something take the time for it.
                    is_slow = second - before[0] > _SLOW_SECONDS and not loop.is_outer
                    is_over = is_done or bool(
                        loop.wanted and (calm or is_slow) and (has_trained or self._is_cut())
                    )
                else:
                    spent, seconds = self._seconds[place], _SECONDS
                    if self.has_stepped:
                        seconds = _LESS_SECONDS
                    elif spent > seconds and not is_on_host and self._may_train(place):
                        self._waits |= calm >= _CALM_ROUNDS
                        is_inner = loop is not self._running[0]
                        seconds = _MORE_SECONDS if is_inner else _MOST_SECONDS
                    # A generation grows with each round; it comes again after the first steps.
                    is_early = not self.has_stepped and self._generates()
                    seconds = max(seconds, _MORE_SECONDS if keeps else 0)
                    is_calm = calm >= _CALM_ROUNDS and not (self.has_stepped and loop.ends_itself)
                    is_over = spent > seconds and (is_early or is_calm) and not only_returns
                    if is_over and isinstance(numbers, range | list | tuple):
                        left = len(numbers) - loop.given
                        is_over = is_early or left * (second - before[0]) > _REST_SECONDS
                        if is_over and not is_early:
                            with suppress(Exception):  # of classes of tensors that cannot be copied
                                gathered.go_on(sys._getframe(1), loop.given, left - 1)
                            loop.given += left
                            last = numbers[-1]  # which may be smaller
                            yield (_first(items) + loop.given - 1, last) if is_numbered else last
                if not is_over:
                    gathered.learn(sys._getframe(1), loop.given)
                    continue
                self._has_left = True
                self._is_last |= place in self.training
                self.left.update({} if self.has_stepped else {place: None})
                if place in self.training:
                    last = loop.given
                    for round_number in loop.rest(second - before[0], self._recorder.live_bytes):
                        gap = loop.given - 1 - last
                        gathered.go_on(sys._getframe(1), last, gap, trains=True)
                        last = loop.given
                        yield round_number
                    yield from self._longest(loop, iterator)
                    for left in () if loop.left is None else (2, 1)[is_slow:]:
                        loop.left = left
                        yield 0
                    grown, number, apart = loop.cycle
                    is_known = self.turned or self._recorder.live_bytes() - end > _SMALL_BYTES
                    if loop.numbers and loop.whole - number < apart > 1 and not is_known:
                        self._cycles[f"what {place} leaves each {apart} rounds"] += (
                            (len(loop.numbers) - number) // apart * grown
                        )
                    self.learn_queues()
                break
        except StopIteration:
            self._met(loop)
        finally:
            stepped, kept = self.trained()
            if stepped > steps and kept == made:  # it trains what an earlier round has made
                self.making.discard(place)
            self._running.remove(loop)
            self._waits = False
            if place in self.training:
                self._ended[place] = calm, most_bytes
            self.training.discard(place)
        self.making.discard(place)  # not where the trace ends within

    def _taken(self, loop: _Running, item: Any, given: int, trains: bool) -> Any:
        """Learn from the item of a round, and return it; data loaders had ``given`` so many batches
        before it was asked for."""
        batches = self._batches_since(given)
        loop.given += 1
        if trains and not batches:
            loop.most = max(loop.most, self._batch_size(item))
        loop.ends_itself = loop.given <= batches
        if loop.given == 1:
            parts = item if type(item) is tuple else (item,)
            loop.has_parts = any(isinstance(each, nn.Module) for each in parts)
        return item

    def _longest(self, loop: _Running, left: Iterator[Any]) -> Iterator[Any]:
        """Yield the largest batch that is left of a loop whose code makes them itself, unless one
        that it has met was as large."""
        has_time, before = time_to_read(_READ_SECONDS), (self._recorder.now(), self.trained())

        def is_plain(item: Any) -> bool:
            """Whether there is time, and nothing runs on the GPU to make a batch."""
            return has_time() and before == (self._recorder.now(), self.trained())

        waits = type(left) is type(iter(int, 1))  # perhaps for what the body of the loop does
        largest = None
        with suppress(Exception):  # of code that counts on the body
            batches = takewhile(is_plain, left if loop.most and not waits else ())
            largest = max(batches, key=self._batch_size, default=None)
            if has_time():
                self._met(loop)
        if self._batch_size(largest) > loop.most:
            yield largest

    def _met(self, loop: _Running) -> None:
        """A loop has given all its batches; one within a loop that gives others is not meant."""
        outer = self._running[: self._running.index(loop)]
        self.met_longest |= bool(loop.most) and all(each.numbers for each in outer)

    def _batch_size(self, item: Any, depth: int = 4) -> int:
        """Return the numbers in the tensors and arrays of a batch on the host; 0 for others."""
        if isinstance(item, torch.Tensor):
            return 0 if self._recorder.holds(item) else item.numel()
        if isinstance(item, np.ndarray):
            return item.size
        if isinstance(item, dict):
            item = [*item.values()]
        elif type(item) not in (tuple, list) or not depth:
            return 0
        return sum(self._batch_size(each, depth - 1) for each in item[:_LARGEST])

    @property
    def trains(self) -> bool:
        """Whether the script's own loops train: one that runs, or one that has ended within another
        that goes round, such as before an evaluation."""
        return bool(self.training) or (
            bool(self._ended) and any(self.trained()[0] > each.steps for each in self._running)
        )

    def _batches_since(self, given: int) -> int:
        """Return how many batches an epoch of the loader has that has given one since; else 0."""
        now, batches = self._batches()
        return batches if now != given else 0

    def enumerated(self, items: Iterable[Any], start: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield as ``enumerate`` does; a loader's last batch, which comes early, has its number."""
        iterator = iter(items)
        for number in count(start):
            found = [*islice(iterator, 1)]
            if not found:
                return
            own = self._number_of(_shown(items))
            yield number if own is None else start + own, found.pop()

    def condition(
        self,
        about: tuple[Any, ...],
        holds_at: Function,
        collection: Any,
        *given: Any,
    ) -> Any:
        """Return whether a condition holds; for a few numbers, whether each does, or a number's place
        among them.

        Args:
            about: what is known of it from its code.
            holds_at: tells whether it does, or would with other values.
            collection: that a number is looked for in; ``None`` in other conditions.
            given: the variables that it compares.
        """
        holds = holds_at(*given)
        asked = about, sys._getframe(2).f_lineno
        if asked in self._vary:
            return holds
        shown = str(holds)
        values = tuple(each if type(each) in _NUMBERS else 0 for each in given)
        step = self.trained()[0]
        moment = step, self._batches()[0]
        before, times, firsts = self._asked.get(asked, (moment, -1, values))
        if before != moment:
            times, firsts = -1, values
        times = min(times + 1, _FEW)
        self._asked[asked] = moment, times, firsts
        place = *asked, times
        known = self._conditions.get(place)
        if known is None:
            known = self._conditions[place] = _Condition(*about)
            known.stays |= type(holds) is not bool
        if known.now > values not in (known.first, firsts) and times == _FEW:
            self._vary.add(asked)  # no counter falls within a step, other than to its first value
            self.waiting.pop(known.line, None)
        known.now = values
        if known.later is not None:
            # What follows may have set the next time.
            if all(
                a != b or a == c for a, b, c in zip(known.first, known.last, values, strict=True)
            ):
                return copy(known.later)
            known.later = None
        if collection is None and (self.has_stepped or not known.repeats):
            known.seen.add(shown)
        is_met = len(known.seen) > 1 or (collection and holds)
        if is_met:
            self.waiting.pop(known.line, None)
        if not self.has_stepped:
            known.first, known.last = known.first or values, values
        is_asked = self.has_stepped and not (known.is_shape and self._is_inside())
        if is_met or asked in self._vary or step == known.step or not is_asked:
            return holds
        last, steps = known.last or values, step - known.step
        known.met(step, values)
        risen = [i for i, each in enumerate(values) if each > known.first[i]]
        if not known.rises or (known.leaves and holds is False) or not risen:
            return holds
        counter, value = risen[0], values[risen[0]]

        def at(value: float) -> Any:
            return holds_at(*given[:counter], value, *given[counter + 1 :])

        def is_other(value: float) -> bool:
            return str(at(value)) != shown

        # Such as where a memory is full, and from then on loses its oldest.
        if known.sizes[counter]:
            more = bisect_left(_FAR, True, key=lambda each: is_other(value + each))
            rise = value - last[counter]
            if known.stays and more < len(_FAR) and rise > 0 and not self._is_last:
                self.sizes[known.line] = min(more / rise * steps, self._rounds_left())
            return holds
        loops = [
            each for each in self._running if value in each.numbers[each.given - 1 : each.given]
        ]
        for loop in loops:
            if place not in loop.asked and loop.want(is_other):
                self.waiting[known.line] = None
            loop.asked.add(place)
        # A size that is drawn for a sample may rise some times.
        if loops or known.rises < _RISES or _makes_sample():
            return holds
        found = next(
            filter(is_other, known.ahead(min(last[counter], value), type(holds) is bool)), None
        )
        if found is None:
            known.seen = {True, False}
        elif (
            isinstance(collection, dict)
            or known.is_position
            or not (self.has_trained or self._is_cut())
        ):
            self.waiting[known.line] = None
        else:
            self.waiting.pop(known.line, None)
            if not known.repeats:
                known.seen = {True, False}
            known.repeats = False
            known.later = copy(at(found)) if known.stays else None
            self.turned[f"{known.line}, at {value:,}"] = self._recorder.now()
            return at(found)
        return holds

    def is_still(self, place: str) -> bool:
        """Whether the last two rounds of a loop, each of which asks at ``place`` for a value, did the
        same on the GPU and left nothing: it may end, as one does that comes to a fixed point."""
        asked = self._asks[place, self.trained()]
        asked.append(self._recorder.now())
        if len(asked) < _CALM_ROUNDS:
            return False
        first, second = (self._recorder.changes(*events) for events in pairwise(asked[-3:]))
        is_still = bool(first) and first == second and not sum(first)
        if is_still:
            asked.clear()
        return is_still

    def _rounds_left(self) -> float:
        """Return how many rounds are left of loops over ranges, if all that run are such loops."""
        left = 0.0
        for each in self._running:
            count = len(each.numbers) or inf
            left = left * count + count - each.given if left or count < inf else inf
        return left

    def learn_queues(self) -> None:
        """Learn what queues of a longest length will hold more."""
        self.queues = self._cycles + bytes_of_queues(self._recorder)

    def due(self, place: str) -> bool:
        """Whether a condition is as it is later, because the script waits for it to train."""
        is_due = self._waits and not self.has_stepped and self._may_train(place)
        if is_due:
            self.hurried[place] = None
        return is_due

    def near_end(self, counter: Any, limit: Any, more: int) -> Any:
        """Return what a ``while`` loop counts, which is near its end in the last rounds."""
        if {type(counter), type(limit)} != {int} or _is_aside() or not self._running:
            return counter
        loop = self._running[-1]
        loop.left = loop.left or 0
        return max(counter, limit + more - loop.left) if loop.left else counter

    def was_cut(self) -> bool:
        """Whether a loop was left, so that an assertion holds that no code of the user's handles."""
        return self._has_left and not is_guarded(sys._getframe(1), AssertionError)

    def continues_after_error(self) -> bool:
        """Whether the run goes on after the error of a statement.

        It has trained before, or left loops; no module with gradients, no backward pass and no
        optimizer was running; and no code of the user's handles the error.  An evaluation, say, then
        goes on without what could not be computed.
        """
        error: Any = sys.exception()
        frame = sys._getframe(1)
        may_be_cut = self.trained()[0] or self.left
        is_own = not sees_functions()  # the trace reads samples, to choose among batches
        # A worker's errors reach the loop over its loader.
        if (
            is_own
            or get_worker_info() is not None
            or self._is_inside()
            or not may_be_cut
            or is_guarded(frame, type(error))
        ):
            return False
        name = frame.f_code.co_name
        if name.startswith("__") and name != "__call__":  # a protocol, which an error may end
            return False
        steers = type(error).__module__.partition(".")[0] not in _COMPUTING
        files = {frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)}
        trains = torch.is_grad_enabled() and not files.isdisjoint(TRAINING_FILES)
        if steers or trains or isinstance(error, StopIteration) or not self._errors_left:
            return False
        self._errors_left -= 1
        self.errors.setdefault(fault_sentence(error), self.has_trained)
        return True

    def changed(self, tree: ast.Module, path: str) -> ast.Module:
        """Return the code of a file as it runs in a trace."""
        return code.changed_code(tree, Path(path).name, self._called)

    def _may_train(self, place: str) -> bool:
        names, known = [place], {place}
        for name in names:
            names += self._called[name] - known
            known |= self._called[name]
        return "backward" in known

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which modules of the user's that are imported have such loops."""
        get_code = SourceFileLoader.get_code

        def changed(loader: Any, name: str) -> CodeType | None:
            path = loader.get_filename(name)
            if not (is_user_code(path) or path.endswith(_TRAINERS)):
                return get_code(loader, name)
            tree = self.changed(ast.parse(loader.get_data(path), path), path)
            return compile(tree, path, "exec", dont_inherit=True)

        called = {
            code.ROUNDS: self.rounds,
            code.CONDITION: self.condition,
            code.COUNTS: _are_numbers,
            code.DUE: self.due,
            code.ENUMERATED: self.enumerated,
            code.TYPE: type_of,
            code.CONTINUES: self.continues_after_error,
            code.CUT: self.was_cut,
            code.ENDS: self._ends,
            code.NEAR_END: self.near_end,
        }
        # Such modules may run again: a plan traces the script's model anew.
        later: dict[str, Any] = {
            code.ROUNDS: lambda place, *items: items[0] if items else iter(int, 1),
            code.CONDITION: lambda about, holds_at, _, *values: holds_at(*values),
            code.DUE: lambda place: False,
            code.ENUMERATED: enumerate,
            code.CONTINUES: lambda: False,
            code.CUT: lambda: False,
            code.ENDS: (),
            code.NEAR_END: lambda counter, *limit: counter,
        }
        vars(builtins).update(called)
        try:
            with patch.object(SourceFileLoader, "get_code", changed):
                yield
        finally:
            vars(builtins).update(later)


def _is_aside() -> bool:
    """Whether a thread of the script runs, which ends with it, or a worker of a data loader."""
    return current_thread() is not main_thread() or get_worker_info() is not None


def _makes_sample() -> bool:
    """Whether a data set is asked for a sample, by a loader or by the trace."""
    files = (each.f_code.co_filename for each, _ in walk_stack(None))
    return not sees_functions() or FETCHING_FILE in files


def _is_numbered(items: Any) -> bool:
    return isinstance(items, GeneratorType) and items.gi_code is Loops.enumerated.__code__


def _first(items: Any) -> Any:
    return items.gi_frame.f_locals["start"]


def _shown(items: Any) -> Any:
    """What a loop is over, also where a bar shows it, or it is numbered."""
    if _is_numbered(items):
        return _shown(items.gi_frame.f_locals["items"])
    try:  # an object may answer anything for what it has not
        return object.__getattribute__(items, "__dict__").get("iterable", items)
    except AttributeError:
        return items


def _are_few(value: Any) -> bool:
    """Whether this is a number, or few numbers."""
    if isinstance(value, list):
        return len(value) <= _LARGEST and {*map(type, value)} <= _NUMBERS
    return not isinstance(value, np.ndarray) or value.size <= _LARGEST


def _are_numbers(collection: Any, *values: Any) -> bool:
    """Whether these are numbers, or some beside a few in an array or a list."""
    kinds = {*map(type, values)}
    if kinds - _NUMBERS:
        is_mixed = kinds & _NUMBERS and kinds <= {*_NUMBERS, list, np.ndarray}
        return bool(is_mixed) and all(map(_are_few, values))
    return collection is None or (
        isinstance(collection, Collection)
        and len(collection) <= _LARGEST
        and {int} == set(map(type, collection))
    )
