"""Conditions on a script's counters, such as ``step % 1000 == 0``, ``epoch in milestones`` and
``epoch > 50``, which hold later than in the steps that were traced.

Where the counter is the number of a loop over a range, that loop goes on with the numbers at which one
of them is other than it was so far, and ends with its last two.  Another one that was never so in the
steps that were traced is taken the other way then, because the run goes on, if a later number makes it
so.  A position in data, such as ``start`` in ``data[start:end]``, is no such counter: the rest of the
data would be one batch.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isclose
from traceback import walk_stack
from typing import Any, Final, NamedTuple

import numpy as np
from torch import Tensor

from gpumemnet.torch_private.names import Function, sees_functions
from gpumemnet.torch_private.script import FETCHING_FILE
from gpumemnet.tracing.recorder import Recorder
from gpumemnet.tracing.script.longest_batch import LARGEST

RISES: Final = 2
"""How often a number has risen from one step to the next that is taken for a counter; once, where it
is the number of a loop over a range, or where the code adds to it."""
SMALL_BYTES: Final = 2**16
"""What a round of training may leave that is nothing new, such as a loss or a mask in a list."""
CALM_ROUNDS: Final = 16
"""Rounds that bring nothing new, after which a loop may be left that does not train."""
_AHEAD: Final = 100_000
"""How many later numbers of a counter are tried."""
_POWERS: Final = 50
"""The same of a counter whose condition stays so: each power of 2 later."""
_FAR: Final = range(2**40)
"""How much longer something may become."""
_NUMBERS: Final = {int, float}
_FEW: Final = 8
"""Numbers of a loop that each change a condition, such as where a network grows, or is kept."""
OFTEN: Final = 1000
"""How often a condition is asked for that is not on a counter, and a loop is watched that runs nothing
on the GPU."""
_READERS: Final = (FETCHING_FILE, "script/longest_batch.py", "script/whole_run.py")
"""Files whose code asks a data set for samples, and makes batches of them."""
_WANTED_SECONDS: Final = 3.0
"""CPU time of the rounds of a loop over a range that make a condition other than it was."""


@dataclass(slots=True)
class Progress:
    """How far a running script has come.

    Attributes:
        is_inside: whether a module, a backward pass or an optimizer runs.
        trained: returns optimizer steps, and optimizers made.
        batches: returns how many batches data loaders gave, and how many an epoch of the last one has.
        is_cut: whether data loaders have ended early.
        has_stepped, has_trained: whether it has trained for its first steps, and for as long as is
            wanted.
        is_last: whether a loop that trained was left, for its last rounds.
        looks: place of a loop whose rounds only make their batches, to find the largest.
    """

    is_inside: Callable[[], bool]
    trained: Callable[[], tuple[int, int]]
    batches: Callable[[], tuple[int, int]] = lambda: (0, 0)
    is_cut: Callable[[], bool] = lambda: False
    has_stepped: bool = False
    has_trained: bool = False
    is_last: bool = False
    looks: str = ""


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
        counts: whether the script adds to the first of its numbers.
        bounds: what it is while something grows that its branch adds to, or then makes shorter.
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
    counts: bool
    bounds: bool | None
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


@dataclass(slots=True)
class _Asked:
    """A condition on numbers that the rounds of a loop ask for.

    Attributes:
        leaves: whether what follows leaves the loop.
        holds_at: tells whether it holds.
        met: number of a round → the condition's numbers, and what it was.
    """

    leaves: bool
    holds_at: Function
    met: dict[int, tuple[tuple[Any, ...], Any]] = field(default_factory=dict)

    def answers(self) -> Callable[[int], Any] | None:
        """Return what tells whether it holds in a round; ``None`` if its numbers do not rise from round
        to round as in the first two."""
        start, after, *_ = rounds = [*self.met, 0, 0]
        first, second = (self.met.get(each, [()])[0] for each in (start, after))

        def given(number: int) -> list[Any]:
            return [*map(lambda a, b: a + (number - start) * (b - a), first, second)]

        def answer(number: int) -> Any:
            if number in self.met:
                return self.met[number][1]
            with suppress(Exception):  # of numbers that the script never has
                return self.holds_at(*given(number))
            return None

        # The last one may be that of an epoch, which comes early.
        is_known = after == start + 1 and all(
            map(isclose, self.met[rounds[-4]][0], given(rounds[-4]))
        )
        return answer if is_known else None


class Later(NamedTuple):
    """What later rounds of a loop leave whose last two rounds left as much.

    Attributes:
        place: that of the loop.
        round_bytes: what each round leaves.
        rounds: how many follow.
        between, at: as :meth:`~gpumemnet.tracing.recorder.Recorder.keep` takes them.
    """

    place: str
    round_bytes: int
    rounds: int
    between: list[int]
    at: int


@dataclass(slots=True, eq=False)
class Running:
    """A loop that runs.

    Attributes:
        numbers: those of a range, also where a bar shows them.
        steps: optimizer steps before it.
        frame: identity of that which runs it.
        given: how many of them were given; the last one is that of this round.
        wanted, found: which of the numbers make a condition other than it was so far, and all of them.
        rare: those of conditions that the last two numbers leave as they were.
        asked: the conditions that were looked at.
    """

    numbers: Sequence[int]
    steps: int
    frame: int = 0
    given: int = 0
    wanted: set[int] = field(default_factory=set)
    found: set[int] = field(default_factory=set)
    rare: set[int] = field(default_factory=set)
    asked: set[Hashable] = field(default_factory=set)
    has_parts: bool = False
    """Whether it is over the parts of a model, of which none may be left out."""
    ends_itself: int = 0
    """Batches of the data loader that it is over, which ends early once the first steps are over."""
    is_outer: bool = False
    """Whether another loop trains within it, as one over epochs: that one has met what changes from
    step to step."""

    batches: Sequence[Any] = ()
    """The list that it is over."""

    held: tuple[int | None, Any] | None = None
    """The place of the largest, -1 if it is to be given, and the item in whose place it was."""

    leaving: str = ""
    """Its place, once it is left by its own condition."""

    left: int | None = None
    """Rounds that are left of a ``while`` loop that counts, after this one."""

    counter: int = 0
    """What it counts."""

    skipped: int = 0
    """Rounds that are left out before the next one."""

    whole: int = 0
    """The last round before loops within it were left early."""

    top: int = 0
    """The most bytes on the GPU in the last round."""

    least_bytes: float = inf
    """The fewest bytes at the end of a round since one left more than any before."""

    cycle: tuple[int, int, int] = 0, 0, 0
    """Bytes that a round left more than any before, its number, and how many after the one before it
    that left as much; 0 if that left other bytes."""

    grown: list[int] = field(default_factory=list)
    """The event before it, and those after the rounds that left more than any before."""

    patience: int = 64
    """Rounds that it still waits for conditions on other counters than its number."""

    later: Later | None = None
    """What later rounds leave, if the last two left as much."""

    most: int = 0
    """Size of the largest batch that it gave while it trained, where it makes them itself."""

    moved: set[int] = field(default_factory=set)
    """How many numbers its rounds moved to the GPU for their first model, if it is over a range."""

    asks: dict[Hashable, _Asked] = field(default_factory=dict)
    """Conditions on numbers that its rounds ask for."""

    def rounds_left(self, most: int) -> int:
        """Return after how many more rounds one of its conditions leaves it, at most."""
        ends = [*filter(None, (each.answers() for each in self.asks.values() if each.leaves))]
        left = range(1, most)
        return next((more for more in left if any(end(self.given + more) for end in ends)), most)

    def kinds(self) -> Callable[[int], tuple[str, ...]]:
        """Return what tells the answers of all others in a round, on which may depend what it gathers."""
        others = [*filter(None, (each.answers() for each in self.asks.values() if not each.leaves))]
        return lambda number: tuple(str(answer(number)) for answer in others)

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
        the last two; where a round takes many ``seconds``, the first of those, and such that change
        what the last two do not."""
        size, few = len(self.numbers), int(_WANTED_SECONDS / max(seconds, 1e-9))
        wanted = {*self.rare, *sorted(self.wanted)[:few], *range(size - 2, size)}
        left_bytes = 0
        for index in sorted(wanted | self.found):
            if index >= self.given and (index in wanted or left_bytes >= SMALL_BYTES):
                self.given, left_bytes = index + 1, -live_bytes()
                yield self.numbers[index]
                left_bytes += live_bytes()


class Nowhere:
    """Stands for the loops in what a script pickles."""

    best = condition = counts = due = continues_after_error = enumerated = near_end = rounds = (
        was_cut
    ) = None


class Counters:
    """The counters of a running script.

    Args:
        recorder: records what is on the GPU.
        progress: how far the script has come.
    """

    def __init__(self, recorder: Recorder, progress: Progress) -> None:
        self._recorder, self.progress = recorder, progress
        self.running: list[Running] = []
        self._conditions: dict[Hashable, _Condition] = {}
        self._asked: dict[Hashable, tuple[tuple[int, int], int, tuple[float, ...]]] = {}
        """Place of a condition → the step and batch at which it was asked for last, how often
        before, and the first numbers: each of several milestones is a condition of its own."""
        self._vary: set[Hashable] = set()
        """Places of conditions on numbers that are no counters, such as letters of a text."""
        self._in_vain = defaultdict[str, int](int)
        """A condition → how often it was asked for in vain, whoever called it: at a place of those, or not
        on numbers. To look up the caller each time would take most of the time of a loop on the host."""
        self._on_host: dict[str, tuple[int, int]] = {}
        """A condition → after how many events it was asked for, and how often since one."""
        self.waiting: dict[str, bool] = {}
        """Places of conditions on counters that were never so, or always → whether they were asked
        for once only."""
        self.turned: dict[str, int] = {}
        """What was taken the other way before its time → after how many events."""
        self._bests: dict[str, float] = {}
        """Comparisons with the best so far → the step at which one was first asked for."""
        self._read: defaultdict[Hashable, list[int]] = defaultdict(list)
        """Place and step → the events at which a value was read there."""
        self.sizes: dict[str, float] = {}
        """Place of a condition on the length of something that grows → steps before it is other."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Nowhere, ()  # datasets hashes functions with what they name

    def counts(self, about: tuple[Any, ...], collection: Any, *values: Any) -> bool:
        """Whether a condition is to be asked for: one on numbers, or some beside a few in an array or a
        list, and none that is met often and is on no counter, as in what reads a text, or while nothing
        runs on the GPU."""
        now = self._recorder.now()
        at, times = self._on_host.get(about[0], (now, 0))
        self._on_host[about[0]] = now, times + 1 if at == now else 0
        if max(times, self._in_vain[about[0]]) > 10 * OFTEN or self.progress.looks:
            return False
        kinds = {*map(type, values)}
        if kinds - _NUMBERS:
            is_mixed = kinds & _NUMBERS and kinds <= {*_NUMBERS, list, np.ndarray}
            are_asked = bool(is_mixed) and all(map(_are_few, values))
        else:
            are_asked = collection is None or (
                isinstance(collection, Collection)
                and len(collection) <= LARGEST
                and {int} == set(map(type, collection))
            )
        self._in_vain[about[0]] += not are_asked
        return are_asked

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
        answer = self._answer((about, sys._getframe(2).f_lineno), holds_at, collection, given)
        if self.running and {*map(type, given)} <= _NUMBERS:
            loop = self.running[-1]
            leaves = about[1] and id(sys._getframe(1)) == loop.frame
            rounds = loop.asks.setdefault(about, _Asked(leaves, holds_at)).met
            rounds[loop.given] = given, answer
        return answer

    def _answer(
        self,
        asked: tuple[tuple[Any, ...], int],
        holds_at: Function,
        collection: Any,
        given: tuple[Any, ...],
    ) -> Any:
        """Return what :meth:`condition` does; one that is asked for at several places is several."""
        about, holds = asked[0], holds_at(*given)
        if asked in self._vary:
            self._in_vain[about[0]] += 1
            return holds
        shown = str(holds)
        values = tuple(each if type(each) in _NUMBERS else 0 for each in given)
        step = self.progress.trained()[0]
        moment = step, self.progress.batches()[0]
        is_first = asked not in self._asked
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
        counter = 0

        def at(value: float) -> Any:
            return holds_at(*given[:counter], value, *given[counter + 1 :])

        def is_other(value: float) -> bool:
            return str(at(value)) != shown

        if is_first and known.counts and shown == "False" and not (known.stays and known.leaves):
            if any(map(is_other, known.ahead(values[0], True))):
                self.waiting[known.line] = True
        elif self.waiting.get(known.line):
            self.waiting.pop(known.line)
        if known.later is not None:
            # What follows may have set the next time.
            if all(
                a != b or a == c for a, b, c in zip(known.first, known.last, values, strict=True)
            ):
                return copy(known.later)
            known.later = None
        # Another loop that trains begins with 0, too.
        counts = self.progress.has_stepped and not (is_first and self.progress.has_trained)
        if collection is None and (counts or not known.repeats):
            known.seen.add(shown)
        is_met = len(known.seen) > 1 or (collection and holds)
        if is_met:
            self.waiting.pop(known.line, None)
        if not self.progress.has_stepped:
            known.first, known.last = known.first or values, values
        is_asked = self.progress.has_stepped and not (known.is_shape and self.progress.is_inside())
        if is_met or asked in self._vary or step == known.step or not is_asked:
            return holds
        last, steps = known.last or values, step - known.step
        known.met(step, values)
        risen = [i for i, each in enumerate(values) if each > known.first[i]]
        if not known.rises or (known.leaves and holds is False) or not risen:
            return holds
        counter, value = risen[0], values[risen[0]]
        loops = [
            each for each in self.running if value in each.numbers[each.given - 1 : each.given]
        ]
        # Such as where a memory is full, and from then on loses its oldest.
        if known.sizes[counter] or (holds is known.bounds and not loops):
            more = bisect_left(_FAR, True, key=lambda each: is_other(value + each))
            rise = value - last[counter]
            if known.stays and more < len(_FAR) and rise > 0 and not self.progress.is_last:
                share = self._recorder.ended_steps / step  # of several optimizers, as of a GAN
                self.sizes[known.line] = min(more / rise * steps * share, self._rounds_left())
            return holds
        for loop in loops:
            is_met = place in loop.asked or not loop.want(is_other)
            if not is_met and not (holds is True and is_other(value + 1)):  # as i % 10 == 0 at 0
                self.waiting[known.line] = False
            loop.asked.add(place)
        # A size that is drawn for a sample may rise some times.
        if loops or known.rises < RISES - known.counts or makes_sample():
            return holds
        if type(value) is float and self.progress.is_inside():
            # Such as RAdam's, whose root is of a negative number before its time.
            self.waiting[known.line] = False
            return holds
        found = next(
            filter(is_other, known.ahead(min(last[counter], value), type(holds) is bool)), None
        )
        if found is None:
            known.seen = {True, False}
        elif (
            isinstance(collection, dict)
            or known.is_position
            or not (self.progress.has_trained or self.progress.is_cut())
        ):
            self.waiting[known.line] = False
        elif lists := [each for each in self.running if each.batches and not each.held]:
            for each in lists:  # first, as what follows may take the time that is left
                each.held = -1, None
        else:
            self.waiting.pop(known.line, None)
            if not known.repeats:
                known.seen = {True, False}
            known.repeats = False
            known.later = copy(at(found)) if known.stays else None
            self.turned[f"{known.line}, at {value:,}"] = self._recorder.now()
            return at(found)
        return holds

    def best(self, place: str, holds: Any, score: Any) -> bool:
        """Return whether a score is the best so far.  One that was not at two steps is, once: of values
        that are made up, none may be better than the first.

        Args:
            place: the comparison.
            holds: what it is.
            score: ``None`` where the code says that it is one, else a number.
        """
        if not isinstance(
            score, float | np.floating | Tensor | None
        ):  # the longest text so far, say
            return bool(holds)
        step = self.progress.trained()[0]
        is_best = bool(holds) or step > self._bests.setdefault(place, step)
        if is_best:
            self._bests[place] = inf
        return is_best

    def is_still(self, place: str) -> bool:
        """Whether the last two rounds of a loop, each of which asks at ``place`` for a value, did the
        same on the GPU and left nothing: it may end, as one does that comes to a fixed point."""
        asked = self._read[place, self.progress.trained()]
        asked.append(self._recorder.now())
        if len(asked) < CALM_ROUNDS:
            return False
        first, second = (self._recorder.changes(*events) for events in pairwise(asked[-3:]))
        is_still = bool(first) and first == second and not sum(first)
        if is_still:
            asked.clear()
        return is_still

    def _rounds_left(self) -> float:
        """Return how many rounds are left of loops over ranges, if all that run are such loops."""
        left = 0.0
        for each in self.running:
            count = len(each.numbers) or inf
            left = left * count + count - each.given if left or count < inf else inf
        return left


def makes_sample() -> bool:
    """Whether a data set is asked for a sample, by a loader or by the trace."""
    files = (each.f_code.co_filename for each, _ in walk_stack(None))
    return not sees_functions() or any(each.endswith(_READERS) for each in files)


def _are_few(value: Any) -> bool:
    """Whether this is a number, or few numbers."""
    if isinstance(value, list):
        return len(value) <= LARGEST and {*map(type, value)} <= _NUMBERS
    return not isinstance(value, np.ndarray) or value.size <= LARGEST
