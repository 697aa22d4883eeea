"""The run after the first steps: the longest and the last batch of a data loader, evaluation, what
begins in a later epoch or step.

A script goes on after the steps that are traced for its steady state, for a while.  Its data loaders
then give the longest batch and the last one, and end, so that it comes to the end of its epoch.  What
it takes there beyond its first steps is part of the answer.
"""

from __future__ import annotations

import pickle
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, wraps
from inspect import signature
from itertools import accumulate, pairwise
from math import inf
from time import monotonic, process_time
from types import FrameType
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from gpumemnet.allocator import EMPTY_CACHE, signed_bytes
from gpumemnet.extract.module_calls import tensors_in
from gpumemnet.sandbox.process import alarm_waits
from gpumemnet.torch_private.names import replaced, value_of
from gpumemnet.torch_private.script import unseen
from gpumemnet.tracing.result import PhasePeak
from gpumemnet.tracing.script.branches import asks_once, is_guarded
from gpumemnet.tracing.script.libraries import prepared
from gpumemnet.tracing.script.longest_batch import (
    SAMPLED,
    AnyLoader,
    are_alike,
    as_worker,
    collated,
    copied,
    largest_draws,
    longest_and_last,
    samples_of,
    size_of,
)
from gpumemnet.tracing.timeline import Timeline, peak_of
from gpumemnet.units import MIB

MORE_STEPS: Final = 64
"""Optimizer steps after the first ones."""
STEPS_OF_ANOTHER: Final = 4
"""Steps of a further network, after which the loaders of the library that trains it end."""
REST_SECONDS: Final = 30.0
REST_STEPS: Final = 12
"""CPU time for what follows these steps; as long as so many of the last one, where they are slow."""
MORE_EVENTS: Final = 20_000
"""Allocations and releases after the first steps."""
MORE_SECONDS: Final = 5.0
"""CPU time that they take at least: those of tiny tensors take little."""
MORE_EVENTS_OF_GENERATION: Final = 300_000
"""The same if the run generates, as no two of its passes are equal, and for what follows the steps."""
_MOST_COPIES: Final = 5
"""A step that joins what is gathered takes less than so many copies of it more each time."""
LEAST_GROWTH: Final = 2**14
"""Bytes by which memory grows with every step, where that counts: not those of losses in a list."""
_SIZE: Final = re.compile(r"(?!num)(?!.*batches).*batch", re.IGNORECASE)
"""Names of batch sizes, not of how many batches there are."""
_MOST_KEPT_BYTES: Final = 2**29
"""Size of a chosen batch that is kept, to be given again."""
_SECONDS: Final = 3.0
"""CPU time to read samples of one data set; on the clock it may take three times as long."""
LATER_SECONDS: Final = 1.0
"""The same of a data set that is first read once training loops end."""
_EVALUATION_SECONDS: Final = 3.0
"""CPU time of an evaluation that goes on to its end, because the script may count what it gave."""
_LONGEST: Final = "the longest batch"
_SLOW_ROUNDS: Final = 6
"""Their first rounds, which tell little: equal passes run a few times before they are repeated."""
_ITERATE: Final = "torch.utils.data:DataLoader.__iter__"
"""To come to the end of an epoch."""
_FETCH: Final = "torch.utils.data._utils.fetch:_MapDatasetFetcher.fetch"
"""To read fewer samples of a batch."""
_MAKE_LOADER: Final = "torch.utils.data:DataLoader.__init__"
"""To change its batch size."""
_PARSE: Final = "argparse:ArgumentParser.parse_known_args"
"""To change a default."""
_DECODE: Final = "json:JSONDecoder.decode"
"""To change the batch size of a JSON file."""


@dataclass(frozen=True, eq=False)
class WholeRun:
    """What a run has shown, its first steps and what follows.

    Attributes:
        timeline: its record.
        steps: optimizer steps.
        step_names: step → the batch that it trains on, where that was chosen.
        left_bytes: gradients and state of optimizers that never stepped.
        sentences: what it did not see.
        state: numbers of the storages that hold the state of each optimizer at the end → the event
            after which it was made.
    """

    timeline: Timeline
    steps: int
    step_names: Mapping[int, str]
    left_bytes: int
    sentences: tuple[str, ...]
    state: Mapping[tuple[int, ...], int]
    full: Mapping[str, float]
    """Condition on the length of something that grows → steps before it is other."""
    queues: Mapping[str, int]
    """Queues of a longest length → bytes that they will hold more."""
    kept: Mapping[str, int]
    """Loops → bytes that rounds keep which are left out; they are in the record."""
    comes_again: Sequence[int]
    """Events from which all comes again, in further rounds of loops that the trace ended in."""

    def late_bytes(self, peak: int, held_bytes: int) -> int:
        """Return the optimizer state that is not there at an event, of optimizers that step by the
        end of its step, or before the trace ended within a loop whose rounds bring all of it again: what happens
        there happens again in later steps, when it is.

        Args:
            peak: the event.
            held_bytes: optimizer state that is there.
        """
        events = self.timeline.events
        end = next((start for start in self.timeline.step_starts if start > peak), len(events))
        known = {event for event in events[:end] if event >= 0}
        gone = {~event for event in events[:peak] if event < 0}
        whole = {  # an optimizer whose parameters change has several entries
            number
            for numbers, made in self.state.items()
            if made <= peak and gone.isdisjoint(numbers)
            if not known.isdisjoint(numbers)
            or any(made <= each <= peak for each in self.comes_again)
            for number in numbers
        }
        return max(0, sum(self.timeline.storages[each].size_bytes for each in whole) - held_bytes)

    def peak_sentence(
        self, phase: PhasePeak, more: int, turned: Mapping[str, int], notes: Sequence[str]
    ) -> str:
        """Say that the peak is not in the first steps.

        Args:
            phase: that of the peak.
            more: bytes that it takes more than the first steps.
            turned: condition that was taken the other way → the event before which it was.
            notes: what else is said of the run.
        """
        peak = peak_of(self.timeline, self.timeline.sizes)[1]
        before = [what for what, event in turned.items() if event <= peak][-3:]
        sentence = (
            f"the peak is not in the first steps: {phase.name}, step {phase.step}, takes {more / MIB:,.1f} MiB more "
            "than they do."
        )
        if before:
            sentence += f" Conditions were taken the other way before it, in the run perhaps later, or never: {'; '.join(before)}."
        is_cut = any(each.startswith(("time was up", "the trace ended")) for each in notes)
        if is_cut and peak > 0.9 * len(self.timeline.events):
            sentence += " The trace ended soon after it, and what follows may take more."
        return sentence

    @property
    def rises(self) -> list[bool]:
        """Which of the last three steps end with more on the GPU than any before; the last one may
        not have begun, and the first one leaves gradients and state."""
        steps = range(1, len(self.timeline.step_starts) - 1)
        ends = list(accumulate(grown_bytes(self.timeline, step) for step in steps))
        tops = accumulate(ends, max, initial=0)  # a larger batch than the last leaves more, too
        return [end - top >= LEAST_GROWTH for end, top in zip(ends, tops, strict=False)][-3:]

    @cached_property
    def filling_bytes(self) -> int:
        """What the script gathers after the steps that were traced, where a condition on a length
        tells for how long, or the longest length of a queue, and what its steps make of it."""
        last = self.timeline.step_starts[-10:-1]
        filling = sum(self.queues.values())
        if not (self.queues or self.full) or len(last) < 3:
            return filling
        events = self.timeline.events[last[0] : last[-1]]
        # What once begins to be kept, as in another kind of epoch, is no memory that fills.
        middle = len(last) // 2
        grown = min(
            sum(signed_bytes(self.timeline.events[begin:end], self.timeline.sizes)) / steps
            for begin, end, steps in (
                (last[0], last[middle], middle),
                (last[middle], last[-1], len(last) - 1 - middle),
            )
        )
        # Larger batches than those before take more, but are as many tensors.
        if not kept_tensors(events) > 0 < grown:
            return filling
        filling = filling or round(grown * min(self.full.values()))
        live = np.cumsum(signed_bytes(self.timeline.events, self.timeline.sizes))
        tops = [int(live[begin:end].max()) for begin, end in pairwise(last)]
        # A step that joins all of it takes more each time, by as much; what rises by more than a few
        # copies of what was gathered has another cause, such as longer inputs of a model.
        rise, times = Counter(end - begin for begin, end in pairwise(tops)).most_common(1)[0]
        if grown < rise < _MOST_COPIES * grown and 2 * times > len(tops) - 1:
            filling = max(filling, tops[-1] + round(filling * rise / grown) - int(live.max()))
        return filling if filling >= MIB else 0


def kept_tensors(events: Sequence[int]) -> int:
    """Return how many more tensors are on the GPU after events than before."""
    return sum(1 if event >= 0 else -1 for event in events if event != EMPTY_CACHE)


def grown_bytes(timeline: Timeline, step: int = -2) -> int:
    """Return by how many bytes a step ends with more on the GPU than it began with; the last one by
    default."""
    begin, end = timeline.step_starts[step], timeline.step_starts[step + 1]
    return sum(signed_bytes(timeline.events[begin:end], timeline.sizes))


class Loaders:
    """The data loaders of a script.

    Args:
        goes_on: whether the first steps are over.
        live_bytes: returns the bytes on the GPU now.
        gives: called with what a batch is, before the script gets it.
        resized: a batch size, and the one to put in its place.
        holds: whether a tensor is on the GPU.
        varies: whether the model got batches of different shapes, such as cut to numbers of theirs.
    """

    def __init__(
        self,
        goes_on: Callable[[], bool],
        live_bytes: Callable[[], int],
        gives: Callable[[str], None],
        resized: tuple[int, int] | None,
        holds: Callable[[Tensor], bool],
        varies: Callable[[], bool],
    ) -> None:
        self._varies = varies
        self.goes_on, self.live_bytes = goes_on, live_bytes
        self._holds = holds
        self.gives = gives
        self._resized = resized
        self.batch_sizes: dict[int, bool] = {}
        """Batch sizes of data loaders, and of arguments and files → whether they are of the latter."""
        self.seconds = _SECONDS
        """CPU time to read samples of the next data set."""
        self.known: WeakKeyDictionary[AnyLoader, list[Any]] = WeakKeyDictionary()
        self.drawn: WeakKeyDictionary[AnyLoader, dict[Any, Any]] = WeakKeyDictionary()
        """Numbers of the samples of the longest batch, where a data set draws their sizes → the
        largest that were drawn."""
        self.has_drawn = False
        """Whether a data set draws sizes: another epoch may draw larger ones."""
        self._copies: WeakKeyDictionary[AnyLoader, Any] = WeakKeyDictionary()
        """Shapes and a copy of the first batch of each loader; no copy if another had others."""
        self.unread: dict[str, None] = {}
        """Sentences on longest batches that were not looked for to the end."""
        self.giving: AnyLoader | None = None
        """The loader that gave a batch last."""
        self._gave: WeakKeyDictionary[AnyLoader, int] = WeakKeyDictionary()
        """Loader → how many batches it gave since the last step."""
        self._made: WeakKeyDictionary[AnyLoader, dict[str, Any]] = WeakKeyDictionary()
        """Those of the batches that were chosen which were made."""
        self._passes = 2
        """Batches that the last of the first steps took."""
        self.batches = self.epoch_batches = 0
        """How many batches were given, and how many an epoch has of the loader that gave the last."""
        self.number: int | None = None
        """The number of that batch in its epoch, where it is the last one and comes early."""
        self._sizes: set[int] = set()
        self.trained_sizes: set[int] = set()
        """Batch sizes of the loaders that gave batches for a step, of the first steps."""
        self.ends: dict[tuple[type, int], float] = {}
        """Kind and number of the batches of an evaluation → after how many it ends early."""
        self._trained: WeakSet[AnyLoader] = WeakSet()
        self.is_over: bool | None = None
        """Once a library has trained for long enough: whether its loaders give no more, as no
        further optimizer was made."""
        self._has_evaluated: bool | None = None
        """From then on: whether another loader gave a batch; once, training has an epoch after it."""
        self.waiting_bytes = 0
        """The most that batches take which the workers of a loader have ready."""

    def gives_from(self, loader: AnyLoader, count: int) -> None:
        """A loader of ``count`` batches, if that is known, is about to give one."""
        self.giving, self.number = loader, None
        self.batches, self.epoch_batches = self.batches + 1, count
        self._gave[loader] = self._gave.get(loader, 0) + 1
        if self.is_over and self._has_evaluated is None and not self.trains(loader):
            self._has_evaluated = True

    def number_of(self, items: Any) -> int | None:
        """Return the number of the batch that ``items`` gave, if it is a loader's last one and comes
        early; a loader that reads ahead has given another one."""
        if isinstance(items, DataLoader) and type(items).__iter__ is DataLoader.__iter__:
            return self.number if items is self.giving else None
        return None

    def given(self, loader: AnyLoader, batch: Any) -> Any:
        """Learn from a batch how much those take that wait in shared memory; return it."""
        self._sizes.add(getattr(loader.batch_sampler, "batch_size", 0))
        waiting = loader.num_workers * (loader.prefetch_factor or 0)
        tensors = tensors_in(batch)
        size = sum(tensor.nbytes for tensor in tensors)
        self.waiting_bytes = max(self.waiting_bytes, waiting * size)
        shapes = [tensor.shape for tensor in tensors]
        if tensors and loader not in self._copies and not any(map(self._holds, tensors)):
            with suppress(Exception):  # not everything can be copied
                self._copies[loader] = shapes, deepcopy(batch)
        elif self._copies.get(loader, [shapes])[0] != shapes:
            self._copies[loader] = [None]
        return batch

    def trained(self) -> None:
        """A step of training ends: the loader that gave a batch last is one of training."""
        # Others than the last giver, which gave as often, gave their share of the batch.
        if self.giving is not None:
            most = self._gave.get(self.giving, 0)
            self._passes = self._passes if self.goes_on() else max(most, 2)
            self._trained.update(each for each, times in self._gave.items() if times == most)
            self._gave.clear()
        if self._sizes and not self.goes_on():
            self.trained_sizes, self._sizes = self._sizes, set()

    def again(self, loader: AnyLoader) -> Any:
        """Return the first batch of a loader, ``None`` if others have other shapes."""
        if self._varies() or self.known.get(loader, [(None, None)])[-1][1] is not None:
            return None
        with unseen():
            return deepcopy(self._copies.get(loader, [None])[-1])

    def chosen(self, loader: AnyLoader) -> list[Any]:
        """Return what an epoch gives, in the opposite order, and which samples: the first batch, where it
        is the same in each epoch, the longest, the one beside it, and the last one.

        In later epochs of training the longest comes twice: a network that is trained every second
        time, say, would meet the last one alone.  Evaluations are all alike: scripts compare them.
        """
        if self.is_over and self.trains(loader):
            if not self._has_evaluated:
                return []
            self._has_evaluated = False  # what the evaluation has left is there in this epoch
        if loader not in self.known:
            longest = last = beside = first = None
            seconds = self.seconds

            def read() -> tuple[Any, ...]:
                sizes: dict[Any, int] = {}
                unread: dict[str, None] = {}
                found, drawn = longest_and_last(loader, sizes, unread, seconds), {}
                with suppress(Exception):  # a data set may give each sample once
                    drawn = largest_draws(loader, found[0] or (), sizes, seconds)
                has_drawn = bool(drawn)
                try:
                    pickle.dumps(drawn if loader.num_workers else ())
                except Exception:  # no process can send them
                    drawn = {}
                return found, unread, has_drawn, drawn

            with suppress(Exception), unseen():
                found, unread, has_drawn, self.drawn[loader] = as_worker(loader, read)
                longest, last, beside, first = found
                self.unread.update(unread)
                self.has_drawn |= has_drawn
            known = [("the last batch", last), (_LONGEST, longest)]
            # Without no_grad, the graph of a batch lives until there is the next one.
            if torch.is_grad_enabled() and not self.trains(loader):
                known.insert(1, ("a batch beside the longest", beside))
            # A script may sample from its first batch alone.
            if first is not None and not self.trains(loader):
                known.append(("the first batch", first))
            self.known[loader] = known
            return [*known]
        known = self.known[loader]
        of_training = [each for each in known if each[0] == _LONGEST]
        times = self._passes if self.is_over else 2
        # What an evaluation has left is beside a smaller batch, too: the allocator splits blocks for it.
        ends = [each for each in known if each[0] == "the last batch"]
        return ends + of_training * times if self.trains(loader) else [*known]

    def made(self, loader: AnyLoader, what: str, numbers: Sequence[Any]) -> Any:
        """Return a batch that was chosen; samples can take long to read, so they are read once, as
        long as the first of them is as it was."""
        known, drawn = self._made.setdefault(loader, {}), self.drawn.get(loader, {})
        first = numbers[0]

        def first_size() -> int:
            samples = samples_of(loader, [first])
            with suppress(Exception):  # not each sample makes a batch
                return size_of(loader.collate_fn(copied(samples)))
            return size_of(samples)

        size = 0
        if first not in drawn:
            with unseen():
                size = as_worker(loader, first_size)
        if are_alike(size, known.get(what, (inf,))[0]):
            return deepcopy(known[what][1])
        batch = collated(loader, numbers, drawn)
        tensors = tensors_in(batch)
        is_small = sum(each.nbytes for each in tensors) < _MOST_KEPT_BYTES
        if is_small and not any(map(self._holds, tensors)):
            with suppress(Exception), unseen():  # not everything can be copied
                # The arrays of the copy can be written to, as those of a worker can.
                known[what], batch = (size, batch), deepcopy(batch)
        return batch

    def trains(self, loader: AnyLoader) -> bool:
        """Whether the script has trained on batches of a loader."""
        return loader in self._trained

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Context in which loaders end early, once the first steps are over."""
        iterate, make, fetch = value_of(_ITERATE), value_of(_MAKE_LOADER), value_of(_FETCH)

        def begin(loader: AnyLoader) -> Iterator[Any]:
            workers = loader.num_workers, loader.prefetch_factor
            # Few batches are wanted, and each that is never asked for is made for nothing.
            loader.num_workers, loader.prefetch_factor = (1, 1) if loader.num_workers else workers
            try:
                return iterate(loader)  # as the loader's own
            finally:
                loader.num_workers, loader.prefetch_factor = workers

        def fetched(fetcher: Any, numbers: Any) -> Any:
            samples = fetcher.auto_collation and samples_of(fetcher, numbers)
            if samples is False:
                return fetch(fetcher, numbers)
            return fetcher.collate_fn(samples)  # which may be a tensor of all

        @wraps(make)
        def made(*args: Any, **kwargs: Any) -> None:
            given = signature(make).bind(*args, **kwargs).arguments
            size = given.get("batch_size")
            if self._resized and size == self._resized[0]:
                given["batch_size"] = self._resized[1]
            self.batch_sizes.setdefault(size or 0, False)
            make(**given)

        def decoded(*args: Any) -> Any:
            return self._resize(decode(*args))

        def prepare_yaml(module: Any) -> None:
            construct = module.BaseConstructor.get_single_data
            module.BaseConstructor.get_single_data = lambda loader: self._resize(construct(loader))

        def parsed(*args: Any, **kwargs: Any) -> Any:
            found = parse(*args, **kwargs)
            self._resize(vars(found[0]))
            return found

        decode, parse = value_of(_DECODE), value_of(_PARSE)
        with (
            replaced(
                [
                    (_ITERATE, lambda loader: _Batches(loader, begin, self)),
                    (_FETCH, fetched),
                    (_MAKE_LOADER, made),
                    (_DECODE, decoded),
                    (_PARSE, parsed),
                ]
            ),
            prepared({"yaml.constructor": prepare_yaml}),
        ):
            yield

    def _resize(self, value: Any) -> Any:
        """Learn the batch sizes among named values, and change them."""
        if isinstance(value, list):
            for entry in value:
                self._resize(entry)
        if isinstance(value, dict):
            for name, entry in value.items():
                if type(entry) is int and _SIZE.match(str(name)):
                    self.batch_sizes[entry] = True
                    if self._resized and entry == self._resized[0]:
                        value[name] = self._resized[1]
                elif isinstance(entry, dict | list):
                    self._resize(entry)
        return value


class _Batches:
    """The batches of a loader: all of them while the first steps run, then the longest and the
    last."""

    def __init__(
        self,
        loader: AnyLoader,
        begin: Callable[[AnyLoader], Iterator[Any]],
        loaders: Loaders,
    ) -> None:
        self._loader, self._begin, self._loaders = loader, begin, loaders
        self._left: list[tuple[str, Any]] | None = None
        self._given = self._live_bytes = self._count = 0
        self._is_slow = False
        with suppress(Exception):  # a stream of samples, or batches of unlike sizes
            self._count = len(loader)
        self._last_second, self._second = monotonic() + _SECONDS, 0.0
        if not loader.num_workers:
            self._batches = begin(loader)

    def __iter__(self) -> _Batches:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    @cached_property
    def _batches(self) -> Iterator[Any]:
        return self._begin(self._loader)  # its workers make a batch at once

    def __next__(self) -> Any:
        self._given += 1
        self._loaders.gives_from(self._loader, self._count)
        before, self._live_bytes = self._live_bytes, self._loaders.live_bytes()
        left, is_known = self._count - self._given, self._loaders.goes_on()
        frame = sys._getframe(1)
        if self._count and left < 0 and _is_endless(frame):  # its sampler repeats
            self._given, self._left, left = 1, None, self._count - 1
        if is_known:
            if self._count and left < 0:
                raise StopIteration
            if self._left is None:
                self._left = self._loaders.chosen(self._loader)
                self._second = process_time()
            # Without no_grad, the graph of a batch lives until there is the next one.
            rounds = 1 if torch.is_grad_enabled() else self._count
            grows = (self._live_bytes - before) * rounds >= MIB
            longest_is_next = [each for each, _ in self._left[-1:]] == [_LONGEST]
            gathers = grows and self._given > 1 + torch.is_grad_enabled() and not longest_is_next
            gathers |= self._given > 1 and len(self._left) == 1 and self._is_cheap(left)
            what, numbers = self._left.pop() if self._left and not gathers else ("", None)
            if what and not self._left and self._count:
                self._loaders.number = self._count - 1
            # What it gathers of the last one is less.
            if (what or gathers) and self._given > 1 and not left:
                what, numbers = self._loaders.known.get(self._loader, [(what, numbers)])[0]
            if numbers is not None:
                self._loaders.gives(what)
                return self._loaders.made(self._loader, what, numbers)
            # The code has counted batches, or keeps something of each.
            goes_on = what or gathers or asks_once(frame)
            if not goes_on or (left < 0 and not (what or _is_endless(frame))):
                raise StopIteration
        elif self._given > SAMPLED and monotonic() > self._last_second:
            is_known = self._count > 0  # what the code computes of them is not traced
            if is_known and left < 0:
                raise StopIteration
        # The data set may give others in this epoch: its first batch is its own.  Where it takes little,
        # each is: a script may look up by the numbers of samples what they gave.
        is_wanted = is_known and self._given > 1 and self._is_slow
        known = self._loaders.again(self._loader) if is_wanted else None
        if known is not None:
            return known
        start = monotonic()
        with alarm_waits():
            batch = next(self._batches)
        self._is_slow = (monotonic() - start) * (self._count or inf) > LATER_SECONDS
        return self._loaders.given(self._loader, batch)

    def _is_cheap(self, left: int) -> bool:
        """Whether an evaluation goes on, as its rounds to the end take little: what it keeps on the
        host is whole then.  Those of later epochs are as long."""
        before, self._second = self._second, process_time()
        if torch.is_grad_enabled() and self._loaders.trains(self._loader):
            return False
        key = type(vars(self._loader)["dataset"]), self._count
        if key not in self._loaders.ends:
            is_early = self._given <= _SLOW_ROUNDS
            rounds = min(left, _SLOW_ROUNDS) if is_early else left
            if (self._second - before) * rounds > _EVALUATION_SECONDS:
                self._loaders.ends[key] = self._given - 1
            elif not is_early or left <= 1:
                self._loaders.ends[key] = inf
        return left > 0 and self._given <= self._loaders.ends.get(key, inf)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _is_endless(frame: FrameType) -> bool:
    """Whether code asks for a next batch that counts on there being one."""
    return asks_once(frame) and not is_guarded(frame, StopIteration)
