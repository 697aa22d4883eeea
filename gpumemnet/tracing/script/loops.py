"""The loops of a user's code, which a trace may leave early.

The code is changed as it is compiled: each ``for`` and ``while`` asks after a round whether it goes
on.  Evaluation, generation and steps of an environment repeat thousands of rounds.  Where the last
ones reached no new peak on the GPU, left nothing there, and trained nothing there, the loop is left
after some seconds; a note says so where that is before the first steps.  A loop that trains is left
once the script has trained for long enough and its last rounds brought nothing new: what the script
does after it is traced too, such as an evaluation or another network.

A loop over a range that trains goes on with the numbers at which a condition on a counter is other than
it was so far (:mod:`~gpumemnet.tracing.script.counters`), and ends with its last two, as does a
``while`` loop that counts up to a number.

A statement of an evaluation, say, may end with an error, because a value that was read cannot be. Once
the script has trained, the run then goes on with the next one.

Before the first steps, a loop may wait for so many rounds, as one does that fills a buffer of what an
agent has met.  After some seconds its conditions on numbers hold whose code leads to ``backward``,
and those do not that leave code which does.
"""

from __future__ import annotations

import ast
import builtins
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import SourceFileLoader
from itertools import count, islice, takewhile
from pathlib import Path
from threading import current_thread, main_thread
from time import monotonic, process_time
from traceback import walk_tb
from types import CodeType, FrameType, GeneratorType
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.utils.data import get_worker_info

from gpumemnet.sandbox.process import DeadlineReached, shorten_alarm
from gpumemnet.sandbox.user_code import fault_sentence, is_user_code
from gpumemnet.torch_private.names import sees_functions
from gpumemnet.torch_private.script import TRAINING_FILES
from gpumemnet.tracing.recorder import Recorder
from gpumemnet.tracing.script import changed_code as code
from gpumemnet.tracing.script.branches import is_guarded
from gpumemnet.tracing.script.counters import (
    CALM_ROUNDS,
    OFTEN,
    RISES,
    SMALL_BYTES,
    Counters,
    Later,
    Nowhere,
    Running,
    makes_sample,
)
from gpumemnet.tracing.script.gathered import (
    SHRINKS,
    Gathered,
    Queues,
    lists_of,
)
from gpumemnet.tracing.script.longest_batch import (
    batch_size,
    items_of,
    largest_batch,
    largest_file,
    time_to_read,
)
from gpumemnet.tracing.script.look_ahead import READ_SECONDS, LookAhead
from gpumemnet.tracing.script.read_values import type_of
from gpumemnet.units import MIB

_SLOW_SECONDS: Final = 2.0
"""CPU time of a round of which few more can be run."""
_TRAINERS: Final = (
    "fastai/learner.py",
    "mmengine/runner/loops.py",
    "poutyne/framework/model.py",
    "ultralytics/engine/trainer.py",
)
"""Files of libraries whose loops train as a user's do: no loader tells them that an epoch ends."""
_CALM_ROUNDS_OF_TRAINING: Final = 3
_MANY: Final = 8
"""Rounds that must be left of such a loop whose rounds each make an optimizer, for it to be left."""
_FEW_MAKERS: Final = 20
"""Rounds that follow at most, where what they leave counts without being traced."""
_ALIKE: Final = 0.05
"""By how much what two rounds leave may differ, for later ones to be taken to leave as much."""
_MOST_PROBES: Final = 8
"""How often the time goes on after a statement on the host was ended."""
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
_LESS_SECONDS: Final = 1.0
"""The same after the first steps."""
_PATIENCE: Final = 6
"""So many times longer goes such a loop where leaving it led to an error."""
_MOST_ROUNDS: Final = 100_000
"""Rounds among which the last one of an endless loop is looked for."""
_NEW_SECONDS: Final = 10.0
_MOST_NEW: Final = 6
"""CPU time after a loop was met that was not known, in which a run is not over, and how often."""
_HOST_SECONDS: Final = 0.5
"""CPU time without anything on the GPU, after which a statement is taken to run on the host alone."""
_REST_SECONDS: Final = 2.0
"""CPU time of the rounds that are left, below which they run: later code may look up the last one."""


class Loops:
    """The loops of a running script.

    Args:
        recorder: records what is on the GPU.
        counters: those of the script, which know how far it has come.
        generates: whether the script generates token by token.
        number_of: returns the number of the batch that a data loader gave last; ``None`` for others.
        ends: what ends the script, which it may not catch.
    """

    def __init__(
        self,
        recorder: Recorder,
        counters: Counters,
        generates: Callable[[], bool] = lambda: False,
        number_of: Callable[[Any], int | None] = lambda items: None,
        ends: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._recorder, self._counters, self._progress = recorder, counters, counters.progress
        self._generates, self._number_of, self._ends = generates, number_of, ends
        self._running, self.ahead = counters.running, LookAhead(recorder, counters)
        self._gathered = defaultdict[str, dict[tuple[int, Hashable], list[int]]](dict)
        """Place of a loop → what :class:`Gathered` knows of it."""
        self._queues, self.queues = Queues(), Counter[str]()
        """Queues of a longest length → bytes that they will hold more."""
        self.kept = Counter[str]()
        """Loops whose rounds, or each third, leave as much → bytes that those leave that are left out."""
        self._idle = Counter[str]()
        """How often a loop has ended without anything on the GPU, such as over letters of a text."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tops: defaultdict[str, int] = defaultdict(int)
        """Place of a loop → the most bytes on the GPU in a round."""
        self._ended: dict[str, tuple[int, int]] = {}
        """Place of one that has trained → last rounds with nothing new, and the most that one has left."""
        self._called: defaultdict[str, set[str]] = defaultdict(set)
        """Place of a loop, or name of a function → names that it calls."""
        self.training: set[str] = set()
        """Loops that run and have trained."""
        self._cut: list[tuple[Later, int, float]] = []
        """What later rounds leave of loops that were left, and the event and time when that was."""
        self._left_within: tuple[int, list[int]] = 0, []
        """The event at which loops were left last before their last round, and those they began with."""
        self.making: dict[str, int] = {}
        """Those whose rounds make optimizers → bytes that the last round left more than any before."""
        self.sampled: set[str] = set()
        """Loops whose rounds make optimizers, and that were left."""
        self._has_left = False
        self._walked = set[str]()
        """Loops over lists at whose largest a condition has waited."""
        self.left: dict[str, None] = {}
        """Loops that were left before the first steps."""
        self._waits = False
        """Whether a loop runs for long that may train later."""
        self.is_patient: Callable[[], bool] = bool
        """Whether no loop is left before the first steps; called when one is about to be."""
        self.has_read: Callable[[], bool] = bool
        """Whether the script has read values that nothing computes."""
        self.hurried: dict[str, None] = {}
        """Conditions that were decided as they are later, so that such a loop trains."""
        self.errors: dict[str, bool] = {}
        """Errors after which the run went on → whether they may be only of the trace."""
        self._errors_left = _MOST_ERRORS
        self._late = -1, 0
        """As time was up last: events so far, and statements on the host that were ended in a row."""
        self._outer = 0
        """How many calls of such a one the error passes before it ends a statement."""
        self._probes = 1
        """How often the time may still go on."""
        self._new_at, self._new_left = 0.0, _MOST_NEW
        """When a loop was met last that was not known, and how often time may still go on for such."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Nowhere, ()  # datasets hashes functions with what they name

    def rounds(
        self,
        place: str,
        items: Any = iter(int, 1),  # noqa: B008 - each loop may go on with it, as it has no end
        ends: bool | None = None,
    ) -> Iterator[Any]:
        """Yield the items of a loop, keeping none of them; 0 for a ``while`` loop.

        Args:
            place: its own.
            items: what it is over.
            ends: whether a condition on amounts ends an endless loop: it is left by that. One that
                counts, or ends by returning a value only, is not left unless it trains, or it is known
                how many rounds are left.
        """
        was_met = place in self._idle
        if self._idle[place] > OFTEN and self._may_train(place):
            self._idle[place] = 0
        if self._idle[place] > OFTEN or _is_aside():
            yield from items
            return
        if not was_met:
            self._new_at = process_time()
        progress, iterator, rise = self._progress, iter(items), 0
        calm, most_bytes = self._ended.get(place, (0, 0)) if progress.has_trained else (0, 0)
        numbers, is_numbered = _shown(items), _is_numbered(items)
        start = event = self._recorder.now()
        second, (steps, made) = process_time(), progress.trained()
        is_range = isinstance(numbers, range) and not is_numbered
        loop = Running(numbers if is_range else (), steps, id(sys._getframe(1)), grown=[start])
        loop.batches = (
            numbers if isinstance(numbers, list | tuple) and place not in self._walked else ()
        )
        gathered = Gathered(loop.kinds, self._gathered[place])
        if progress.has_stepped:  # it may be left after its first round
            gathered.learn(sys._getframe(1), 0)
        loaded = progress.batches()
        self._running.append(loop)
        try:
            while True:
                has_trained = progress.has_trained  # a last round takes conditions on counters
                given = progress.batches()[0]
                # no name: enumerate would keep the first pair
                yield self._taken(loop, next(iterator), given, place, is_numbered)
                is_on_host = self._recorder.now() == event
                trains_nothing = progress.has_stepped or progress.trained()[0] == steps
                is_whole = loop.has_parts and loop.given < _PARTS and progress.trained()[0] == steps
                if (is_on_host and trains_nothing) or is_whole or progress.is_inside():
                    continue
                top, end = self._recorder.levels_since(event)
                before = second, steps, made, event
                second, event = process_time(), self._recorder.now()
                steps, made = progress.trained()
                small = SMALL_BYTES if place in self.training else 0
                is_new = top > self._tops[place] + small or end > most_bytes + small
                # Of many rounds that each make an optimizer, as of clients or folds, a few tell that
                # have the same peak.
                is_sized = isinstance(numbers, range | list | tuple | np.ndarray)
                makers_left = len(numbers) - loop.given if is_sized and made > before[2] else 0
                # Such a loop, or one before the first steps, that keeps as much of each round does
                # nothing else.
                before_rise, rise = rise, end - most_bytes
                before_top, loop.top = loop.top, top
                keeps = rise == before_rise > 0 and top - self._tops[place] <= rise
                keeps &= makers_left > _MANY or not progress.has_stepped
                are_many = makers_left > _MANY or (loop.given > _MANY and not is_sized)
                is_alike = are_many and (keeps or top == before_top)
                is_new = (is_new and not keeps) or (made > before[2] and not is_alike)
                calm = 0 if is_new else calm + 1
                loop.whole = loop.whole if progress.has_trained else loop.given
                loop.least_bytes = min(end, loop.least_bytes)
                if rise > SMALL_BYTES and progress.has_stepped:
                    # What was left then is still there: it was no larger batch.
                    is_cycle = rise == loop.cycle[0] and loop.least_bytes >= most_bytes
                    apart = (loop.given - loop.cycle[1]) * is_cycle
                    loop.cycle, loop.least_bytes = (rise, loop.given, apart), end
                loop.grown += [event] * (rise > 0)
                is_again = rise > MIB and math.isclose(rise, before_rise, rel_tol=_ALIKE)
                # Others may be bounded by what nothing tells, such as by the number of classes.
                are_few = 0 < makers_left <= _FEW_MAKERS and not loop.found
                if progress.has_stepped and is_again and are_few:
                    loop.later = Later(place, rise, makers_left, loop.grown[-3:-1], before[3])
                else:
                    loop.later = None
                # The first round of a generation, of a whole prompt, may leave more than the next one.
                least = end if loop.given == 2 and place not in self.training else most_bytes
                self._tops[place], most_bytes = max(top, self._tops[place]), max(end, least)
                self._seconds[place] += max(second - before[0], 0)  # a fork begins at 0
                if steps > before[1] and not is_on_host:
                    self.training.add(place)
                    for each in self._running[: self._running.index(loop)]:
                        each.is_outer = True
                if made > before[2]:
                    self.making[place] = max(0, rise) * progress.has_stepped
                is_early = not progress.has_stepped and self._generates()
                is_slow = second - before[0] > _SLOW_SECONDS and not loop.is_outer
                if place in self.training:
                    # Conditions on another counter than a loop's own number wait for its next rise.
                    of_epochs = 1 if loop.numbers else RISES
                    are_slow = second - before[0] > _LESS_SECONDS
                    are_enough = (loop.is_outer or are_slow) and place not in self.making
                    enough = of_epochs if are_enough else _CALM_ROUNDS_OF_TRAINING
                    is_done = has_trained and calm >= enough
                    is_flat = loop is self._running[0] and not (loop.is_outer or are_slow)
                    if is_done and is_flat and self._counters.waiting and loop.patience:
                        loop.patience, is_done = loop.patience - 1, False
                    # Other numbers bring something else, and epochs were cut for them. Slow rounds
                    # that bring something take the time for it.
                    is_over = is_done or bool(
                        loop.wanted and (calm or is_slow) and (has_trained or progress.is_cut())
                    )
                else:
                    spent, seconds = self._seconds[place], _SECONDS
                    if progress.has_stepped:
                        seconds = _LESS_SECONDS
                    elif spent > seconds and not is_on_host and self._may_train(place):
                        self._waits |= calm >= CALM_ROUNDS
                        is_inner = loop is not self._running[0]
                        seconds = _MORE_SECONDS if is_inner else _MOST_SECONDS
                    # A generation grows with each round; it comes again after the first steps.
                    seconds = max(seconds, _MORE_SECONDS if keeps else 0)
                    is_calm = calm >= CALM_ROUNDS and not (
                        progress.has_stepped and loop.ends_itself
                    )
                    is_known = ends is not False or loop.left is not None
                    is_over = spent > seconds and (is_early or is_calm) and is_known
                    if is_over and not progress.has_stepped and self.is_patient():
                        is_over = spent > _PATIENCE * seconds
                    if is_over and (loop.left or isinstance(numbers, range | list | tuple)):
                        left = loop.left or len(numbers) - loop.given
                        is_over = is_early or left * (second - before[0]) > _REST_SECONDS
                        if is_over and not (is_early or loop.left):
                            frame, first = sys._getframe(1), loop.given
                            kinds = gathered.first_of_kinds(range(first + 1, len(numbers)))
                            chosen = {len(numbers) - 1, *(each - 1 for each in kinds)}
                            with suppress(Exception):  # of objects that answer with an error
                                left = largest_file(numbers[first:-1], frame, READ_SECONDS)
                                chosen.add(first + left)
                            for index in sorted(chosen):
                                with suppress(Exception):  # of tensors that cannot be copied
                                    gathered.go_on(frame, loop.given, index - loop.given)
                                loop.given, item = index + 1, numbers[index]
                                if is_numbered:
                                    item = items.gi_frame.f_locals["start"] + index, item
                                yield item
                if not is_over:
                    gathered.learn(sys._getframe(1), loop.given)
                    continue
                self._has_left = True
                progress.is_last |= place in self.training
                self.left.update({} if progress.has_stepped else {place: None})
                self.sampled.update({place}.intersection(self.making))
                # Where rounds make no optimizers, what they leave tells what they keep.
                but_tensors = place not in self.making or self._may_shrink(place)
                if loop.left and not is_early:
                    few = min(2 - is_slow, loop.left)
                    skipped = loop.left - few
                    lists_stay = but_tensors and place in self.training
                    gathered.go_on(sys._getframe(1), loop.given, skipped, but_tensors=lists_stay)
                    for more in range(few)[::-1]:
                        loop.skipped = max(0, loop.left - 1 - more)
                        yield 0
                if place in self.training:
                    # Of a loop whose rounds all keep as much, the first ones are known as well.
                    grown, number, apart = (rise, loop.given, 1) if keeps else loop.cycle
                    is_regular = keeps or (apart > 1 and not self._counters.turned)
                    self.learn_queues()  # the script may leave the loop in its last rounds
                    is_full = self._counters.sizes or self.queues
                    is_cycle = keeps or loop.whole - number < apart
                    leaving = range(0)
                    if is_sized and is_regular and is_cycle and not is_full:
                        leaving = range(number + apart, len(numbers) + 1, apart)
                    last = reached = loop.given
                    for round_number in loop.rest(second - before[0], self._recorder.live_bytes):
                        gap = loop.given - 1 - last
                        gathered.go_on(sys._getframe(1), last, gap, but_tensors=but_tensors)
                        last = loop.given
                        short = sum(each < last for each in leaving) * grown + end
                        self._keep(place, loop, bool(leaving) * short, before[3])
                        yield round_number
                    if is_sized and not is_range:
                        left = len(numbers) - last
                        gathered.go_on(sys._getframe(1), last, left, but_tensors=but_tensors)
                    can_look = code.LOOKED in self._called[place] and not loop.is_outer
                    if can_look and len(loop.moved) > 1 and progress.batches() == loaded:
                        lengths = [(each, len(each)) for each in lists_of(sys._getframe(1))]
                        yield from self.ahead.rounds(loop, place, reached)
                        for each, length in lengths:
                            if isinstance(each, list):
                                del each[length:]
                    yield from self.ahead.longest(
                        loop, iterator, enumerate if is_numbered else iter, numbers
                    )
                    all_bytes = bool(leaving) * (end + len(leaving) * grown)
                    self._keep(place, loop, all_bytes, None if is_range else before[3])
                    self.learn_queues()
                if ends:
                    frame, loop.leaving = sys._getframe(1), place
                    if place not in self.training:
                        # 0 where none of its conditions holds later
                        left = loop.rounds_left(_MOST_ROUNDS) % _MOST_ROUNDS
                        gathered.go_on(frame, loop.given, left)
                    has_time = time_to_read(_LESS_SECONDS)
                    while has_time():
                        yield 0
                break
        except StopIteration:
            self.ahead.met(loop)
            if loop.ends_itself and progress.is_cut():
                frame = sys._getframe(1)
                left = loop.rounds_left(loop.ends_itself - loop.given)
                if place in self.training:
                    left *= not self._may_shrink(place)
                gathered.go_on(frame, loop.given, left)
        finally:
            if loop.held:  # another round of it would wait, too
                self._walked.add(place)
            # One that counts is near its own end, and not near that of a loop around it.
            counts = loop.given < 2 or loop.left is not None
            self._idle[place] += not counts and self._recorder.now() == start
            stepped, kept = progress.trained()
            if stepped > steps and kept == made:  # it trains what an earlier round has made
                self.making.pop(place, None)
            self._running.remove(loop)
            if sys.exc_info()[0] is GeneratorExit:  # time may be up within
                now, items = self._recorder.now(), loop.numbers or loop.batches
                if loop.later:
                    self._cut.append((loop.later, now, monotonic()))
                if not items or loop.given < len(items):
                    self._left_within = now, [*self.starts_again(), loop.grown[0]]
            self._waits = False
            if place in self.training:
                self._ended[place] = calm, most_bytes
            self.training.discard(place)
        self.making.pop(place, None)  # not where the trace ends within

    def _may_shrink(self, place: str) -> bool:
        """Whether a loop may make lists shorter in a later round."""
        return bool(self._counters.sizes) or not self._called[place].isdisjoint(SHRINKS)

    def _keep(self, place: str, loop: Running, size_bytes: int, at: int | None) -> None:
        """Record what rounds keep that are left out, where less than ``size_bytes`` is there."""
        if (short := size_bytes - self._recorder.live_bytes()) > 0:
            self.kept[place] = max(self.kept[place], short)
            self._recorder.keep(loop.grown[-3:-1], short, at)

    def starts_again(self) -> list[int]:
        """Return the events from which all comes again, in further rounds of loops that were left just
        now: nothing was taken on the GPU since."""
        left, starts = self._left_within
        return [] if max(self._recorder.changes(left), default=0) > 0 else starts

    def time_is_up(self) -> Iterator[str]:
        """Record what later rounds leave of the loops that ran, where the last ones left as much;
        yield what was added."""
        # After its own ``break``, the script does more.
        last = [
            later
            for later, now, seconds in self._cut
            if monotonic() - seconds < _LESS_SECONDS
            and max(self._recorder.changes(now), default=0) <= 0
        ]
        is_full = last and (self._counters.sizes or self.queues)
        for each in () if is_full else last:
            # Those that are left out are there at the last one's peak.
            self._recorder.keep(each.between, each.rounds * each.round_bytes, each.at)
            yield f"{each.place}: {each.rounds:,} times {each.round_bytes / MIB:,.1f} MiB"

    def _taken(self, loop: Running, item: Any, given: int, place: str, is_numbered: bool) -> Any:
        """Learn from the item of a round, and return it; data loaders had ``given`` so many batches
        before it was asked for. Where a condition waits for it, the largest of a list comes in its
        place, and it in the largest's."""
        batches = self._batches_since(given)
        index, held = loop.held or (None, None)
        if loop.given == index:
            item = held
        elif index == -1 and place in self.training and not loop.is_outer:  # no stages, nor tasks
            has_time = time_to_read(READ_SECONDS)
            left = takewhile(lambda _: has_time(), loop.batches[loop.given :])
            place_left, size = largest_batch(left)
            index, loop.held = loop.given + place_left, (None, None)
            if size > loop.most:
                largest = loop.batches[index]
                loop.held = index, item
                item = (item[0] - loop.given + index, largest) if is_numbered else largest
        loop.given += 1
        if place in self.training and not batches:
            loop.most = max(loop.most, batch_size(item))
        loop.ends_itself = batches if loop.given <= batches else 0
        if loop.given == 1:
            parts = item if type(item) is tuple else (item,)
            loop.has_parts = any(isinstance(each, nn.Module) for each in parts)
        return item

    @property
    def trains(self) -> bool:
        """Whether the script's own loops train: one that runs, or one that has ended within another
        that goes round, such as before an evaluation."""
        return bool(self.training) or (
            bool(self._ended)
            and any(self._progress.trained()[0] > each.steps for each in self._running)
        )

    def _batches_since(self, given: int) -> int:
        """Return how many batches an epoch of the loader has that has given one since; else 0."""
        now, batches = self._progress.batches()
        return batches if now != given else 0

    def enumerated(self, items: Iterable[Any], start: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield as ``enumerate`` does; a loader's last batch, which comes early, has its number."""
        iterator, shown = iter(items), _shown(items)
        for number in count(start):
            found = [*islice(iterator, 1)]
            if not found:
                return
            own = self._number_of(shown)
            yield number if own is None else start + own, found.pop()

    def learn_queues(self) -> None:
        """Learn what queues of a longest length will hold more."""
        self.queues = self._queues.learn(self._recorder)

    def due(self, place: str, loop: str = "") -> bool:
        """Whether a condition is as it is later, because the script waits for it to train; of one that
        ends a ``loop``, whether that is left."""
        if loop:
            return loop in (each.leaving for each in self._running)
        is_due = self._waits and not self._progress.has_stepped and self._may_train(place)
        is_due = is_due and not self.is_patient()
        if is_due:
            self.hurried[place] = None
        return is_due

    def near_end(self, counter: Any, limit: Any, more: int, walked: Any = ()) -> Any:
        """Return what a ``while`` loop counts, which is near its end in the last rounds, or at the
        largest of a list that is ``walked``, if it has met none as large."""
        if {type(counter), type(limit)} != {int} or _is_aside() or not self._running:
            return counter
        loop = self._running[-1]
        rise = max(1, counter - loop.counter)
        if isinstance(walked, list | tuple):
            left = walked[counter : counter + loop.skipped * rise + 1 : rise]
            place, size = largest_batch(left)
            if size > loop.most:
                loop.skipped, loop.most = place, size
        loop.counter = counter + loop.skipped * rise
        loop.left, loop.skipped = (limit + more - loop.counter - 1) // rise, 0
        return loop.counter

    def was_cut(self) -> bool:
        """Whether a loop or data loader was left, or values were read, so that an assertion holds that
        no code of the user's handles."""
        is_left = self._has_left or self._progress.is_cut() or self.has_read()
        return is_left and not is_guarded(sys._getframe(1), AssertionError, also_told=False)

    def continues_after_error(self) -> bool:
        """Whether the run goes on after the error of a statement.

        It has trained before, or left loops; no module with gradients, no backward pass and no
        optimizer was running; and no code of the user's handles the error.  An evaluation, say, then
        goes on without what could not be computed.
        """
        error: Any = sys.exception()
        frame = sys._getframe(1)
        may_be_cut = self._progress.trained()[0] or self.left
        is_own = not sees_functions()  # the trace reads samples, to choose among batches
        # A worker's errors reach the loop over its loader.
        if (
            is_own
            or (self._progress.looks and not self.ahead.is_whole)
            or get_worker_info() is not None
            or self._progress.is_inside()
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
        if isinstance(error, TimeoutError) and self._outer:
            self._outer -= 1
            return False
        self._errors_left -= 1
        # Where a condition was turned, what it leads to may not find what it needs.
        may_be_of_trace = self._progress.has_trained or bool(self._counters.turned)
        self.errors.setdefault(fault_sentence(error), may_be_of_trace)
        return True

    def goes_on(self, frame: FrameType | None) -> bool:
        """Called as time is up: whether the run goes on for a while, because it may be on the host
        alone that it computes for long, such as to draw pictures.

        If so, a statement of the user's ends with an error, after which the run goes on; the next
        time, as nothing has run on the GPU in between, the one that has called it.
        """
        (before, ended), now = self._late, self._recorder.now()
        if not self._progress.has_trained or makes_sample():
            return False
        if now != before:
            self._late = now, 0
            if self._new_left and process_time() - self._new_at < _NEW_SECONDS:
                self._new_left -= 1
                return shorten_alarm(_NEW_SECONDS, self.goes_on)
            self._probes = _MOST_PROBES if ended else self._probes - 1
            return self._probes >= 0 and shorten_alarm(
                _SLOW_SECONDS if self._probes else _HOST_SECONDS, self.goes_on
            )
        while frame is not None and not is_user_code(file := frame.f_code.co_filename):
            if "gpumemnet" in file or "/torch/" in file:  # it may not be ended there
                return shorten_alarm(_HOST_SECONDS / 10, self.goes_on)
            frame = frame.f_back
        if not shorten_alarm(_SLOW_SECONDS, self.goes_on):
            return False
        self._late, self._outer = (before, ended + 1), ended
        error = TimeoutError("it computes on the host for longer than a trace takes")
        error.__context__ = DeadlineReached()  # where no statement ends by it, the trace does
        raise error

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
            with suppress(SyntaxError, RecursionError):  # perhaps of the changed code alone
                tree = self.changed(ast.parse(loader.get_data(path), path), path)
                return compile(tree, path, "exec", dont_inherit=True)
            return get_code(loader, name)

        called = {
            code.ROUNDS: self.rounds,
            code.BEST: self._counters.best,
            code.CONDITION: self._counters.condition,
            code.COUNTS: self._counters.counts,
            code.DUE: self.due,
            code.ENUMERATED: self.enumerated,
            code.TYPE: type_of,
            code.CONTINUES: self.continues_after_error,
            code.CUT: self.was_cut,
            code.ENDS: self._ends,
            code.NEAR_END: self.near_end,
            code.LOOKED: self.ahead.looked,
        }
        vars(builtins).update(called)
        try:
            with patch.object(SourceFileLoader, "get_code", changed):
                yield
        finally:  # such modules may run again: a plan traces the script's model anew
            vars(builtins).update(code.UNWATCHED)


def _is_aside() -> bool:
    """Whether a thread of the script runs, which ends with it, or a worker of a data loader."""
    return current_thread() is not main_thread() or get_worker_info() is not None


def _is_numbered(items: Any) -> bool:
    return isinstance(items, GeneratorType) and items.gi_code is Loops.enumerated.__code__


def _shown(items: Any) -> Any:
    """What a loop is over, also where a bar shows it, or it is numbered."""
    if _is_numbered(items):
        return _shown(items.gi_frame.f_locals["items"])
    with suppress(AttributeError):  # an object may answer anything for what it has not
        items = object.__getattribute__(items, "__dict__").get("iterable", items)
    return items_of(items)
