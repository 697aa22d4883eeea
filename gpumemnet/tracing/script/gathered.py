"""What a script gathers while it goes round: in lists, as slices of a picture or of a test set are,
and in queues, as a memory of a replay is.

A loop that is left early has gathered less than in the run, and code behind it counts on the whole:
it joins the parts and gives them a shape.  So each round that is left out adds copies of what the
last one of its kind has added: where a condition on the round's number decides what is kept, as
``step % 100 == 0``, its answers in the rounds to come are foreseen.
"""

from __future__ import annotations

import gc
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from types import FrameType, SimpleNamespace
from typing import Any, Final
from weakref import ref

from torch import Tensor

from gpumemnet.extract.module_calls import tensors_in
from gpumemnet.sandbox.user_code import is_user_code, variables_of
from gpumemnet.torch_private.names import storage_id, tree_map_only
from gpumemnet.tracing.recorder import Recorder
from gpumemnet.units import MIB

_MOST_NAMES: Final = 256
"""Largest dictionary in which lists are looked for."""
_LEVELS: Final = 4
_MOST_VALUES: Final = 256
"""How deep they are looked for, and among how many values at each depth."""
_KINDS: Final = (list, deque, dict, defaultdict, OrderedDict)
_MOST_COPIES: Final = 2**12
"""Most copies that are made on the GPU; further entries are the last one."""
_MOST_ENTRIES: Final = 2**20
_MOST_KINDS: Final = 4
"""How many kinds of rounds are told apart before a loop is left, so that one of each runs."""
_MOST_ROUNDS: Final = 2**14
"""Rounds of which each is asked for its kind; others are as these."""
SHRINKS: Final = ("clear", "pop", "popitem", "popleft", "remove")
"""Methods by which a loop makes a list shorter, perhaps in a later round."""


class Gathered:
    """Lists and dictionaries that rounds of a loop make longer.

    Args:
        kinds: returns what tells of what kind a round is: those of one kind add as much.
        before: what the last ones of a kind added to a list, as the loop ran before.
    """

    def __init__(
        self,
        kinds: Callable[[], Callable[[int], Hashable]],
        before: dict[tuple[int, Hashable], list[int]],
    ) -> None:
        self._kinds, self._before = kinds, before
        self._lengths: dict[int, int] = {}
        """Identity of a list → its length after the last round."""
        self._since: dict[int, int] = {}
        """The same → the round after which it was met first."""
        self._rises = defaultdict[int, Counter[int]](Counter)
        """The same → number of a round → by how much it made the list longer."""
        self._number = -1
        """That of the last round."""

    def learn(self, frame: FrameType, number: int) -> None:
        """Learn from a round that has ended.

        Args:
            frame: runs the loop.
            number: that of the round, 0 before the first; some are left out, which do nothing on the
                GPU.
        """
        if number == self._number:
            return
        if number != self._number + 1:
            self._lengths, self._since = {}, {}
        for each in lists_of(frame):
            if rise := len(each) - self._lengths.get(id(each), len(each)):
                self._rises[id(each)][number] = rise
            self._since.setdefault(id(each), number)
            self._lengths[id(each)] = len(each)
        self._number = number

    def first_of_kinds(self, numbers: range) -> list[int]:
        """Return the first rounds of some kinds but the first one's."""
        kind_of = self._kinds()
        first = {kind_of(each): each for each in numbers[:_MOST_ROUNDS][::-1]}
        return sorted(first.values())[1:_MOST_KINDS]

    def go_on(
        self, frame: FrameType, number: int, rounds: int, *, but_tensors: bool = False
    ) -> None:
        """Add what ``rounds`` more would: as many entries as the last but one of their kind has added,
        and the last one no more, which may be the smaller end of an epoch.

        Args:
            frame: as in :meth:`learn`.
            number: that of the last round.
            rounds: those that are left out.
            but_tensors: whether lists of tensors stay as they are: what rounds leave tells what they keep,
                or the loop may make them shorter later.
        """
        self.learn(frame, number)
        left = range(number + 1, number + 1 + rounds)[:_MOST_ROUNDS]
        kind_of = self._kinds()
        kinds, known = Counter(map(kind_of, left)), [*map(kind_of, range(number + 1))]
        for each in lists_of(frame):
            numbers = range(self._since.get(id(each), number) + 1, number + 1)
            rises, of_kind = self._rises[id(each)], defaultdict[Hashable, list[int]](list)
            entries = [*(each.values() if isinstance(each, dict) else each)] if but_tensors else []
            for before in numbers:
                of_kind[known[before]].append(rises[before])
            for kind, count in kinds.items():
                found = of_kind[kind] or self._before.get((id(each), kind))
                found = found or [rises[before] for before in numbers]
                if kind:
                    self._before[id(each), kind] = found[-2:]
                rise, last = [0, 0, *found[:1], *found][-2:]
                if 0 < last <= rise and not tensors_in(entries[-rise:]):
                    _add(each, rise, count * rounds // len(left))
            self._lengths[id(each)] = len(each)
        self._number += rounds


def _add(entries: Any, rise: int, rounds: int) -> None:
    """Add copies of the last ``rise`` entries for each of ``rounds``, to a queue until it is full; to a
    dictionary, whose keys are numbers of samples, for those that it has not."""
    if not 0 < rise * rounds <= _MOST_ENTRIES:
        return
    if isinstance(entries, dict):
        keys = range(len(entries) + rise * rounds)
        if {*map(type, entries)} == {int} and max(entries) in keys:
            left, values = {*keys} - entries.keys(), [*entries.values()][-1:]
            _add(values, 1, len(left))
            entries.update(zip(left, values[1:], strict=True))
        return
    if isinstance(entries, deque) and entries.maxlen:
        rounds = min(rounds, (entries.maxlen - len(entries)) // rise)
    values = [*entries]
    shared = {*map(storage_id, tensors_in(values[:-rise]))}
    last, copies = values[-rise:], min(rounds, _MOST_COPIES // rise)
    for _ in range(copies):
        entries += tree_map_only(Tensor, partial(_copied, shared, {}), last)
    entries += last * (rounds - copies)


def _copied(shared: set[int], made: dict[int, Tensor], tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the GPU, such as a row of a batch that is copied as a whole; single
    numbers, others, and parts of what ``shared`` has, or may have, are the same in each round."""
    key, size = storage_id(tensor), tensor.untyped_storage().nbytes()
    is_there = tensor.is_meta or tensor.is_cuda  # as scripts and the trace see it
    is_own = key not in shared and (shared or size <= tensor.nbytes)
    if not (is_there and tensor.numel() > 1 and is_own):
        return tensor
    if key not in made:
        made[key] = tensor.as_strided((size // tensor.itemsize,), (1,), 0).clone()
    return made[key].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def lists_of(frame: FrameType) -> list[Any]:
    """Return the lists and dictionaries that the code of a frame or of one that called it names, or some
    levels deep in dictionaries and in objects of the user's, such as the callbacks of a trainer."""
    found: dict[int, Any] = {}
    values = [*map(frame.f_globals.get, frame.f_code.co_names)]
    caller: FrameType | None = frame
    for _ in range(_LEVELS):
        if caller is not None and is_user_code(caller.f_code.co_filename):
            values += variables_of(caller).values()
            caller = caller.f_back
    for _ in range(_LEVELS):
        new = {id(each): each for each in values[:_MOST_VALUES] if id(each) not in found}
        found |= new
        values = [inner for each in new.values() for inner in _held(each)]
    return [each for each in found.values() if type(each) in _KINDS]


def _held(value: Any) -> Iterable[Any]:
    """Return what a small dictionary, a list of lists or of objects of the user's, or such an object
    holds."""
    if type(value) in (list, tuple):  # a user's own may do anything
        return value if 0 < len(value) <= _MOST_NAMES and _is_users(value[0].__class__) else ()
    if type(value) in _KINDS[2:]:
        return [*value.values()] if len(value) <= _MOST_NAMES else ()
    return getattr(value, "__dict__", {}).values() if _is_users(value.__class__) else ()


@cache
def _is_users(kind: Any) -> bool:
    """Whether the user's code has this class, or it gathers, as those of ``torchmetrics`` and those
    that have names alone do."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return (
        hasattr(kind, "add_state")
        or kind in (*_KINDS, SimpleNamespace, Namespace)
        or (file is not None and is_user_code(file))
    )


@dataclass(slots=True)
class _Queue:
    """A queue of a longest length, the number of what was its first entry, and whether that is gone."""

    entries: ref[Any]
    first: int
    is_emptied: bool = False


class Queues:
    """What queues of a longest length, such as memories of a replay, will hold more."""

    def __init__(self) -> None:
        self._known: dict[int, _Queue] = {}
        """Identity of a queue → the queue."""
        self._found: list[list[tuple[_Queue, int, str]]] = []
        """Queues that were there together, bytes that each will hold more, and names."""
        self._full = set[str]()
        """Names of those that were full: what is known of the run's peak holds one."""

    def learn(self, recorder: Recorder) -> Counter[str]:
        """Return the bytes, also of queues that are gone; not of those that the script empties."""
        counted, found = set[int](), list[tuple[_Queue, int, str]]()
        for each in gc.get_objects():
            is_queue = type(each) is deque and each.maxlen is not None
            if is_queue and (len(each) > 1 or id(each) in self._known):
                # Entries and queues may share tensors.
                half, entries = len(each) // 2, [*each]
                before = recorder.numbers_of(tensors_in(entries[:half]))
                last = {*recorder.numbers_of(tensors_in(entries[half:]))} - counted.union(before)
                counted |= last
                left = (
                    recorder.bytes_of(last) * (each.maxlen - len(each)) // (len(each) - half or 1)
                )
                first = min(before, default=-1)
                queue = self._known.get(id(each))
                if queue is None or queue.entries() is not each:
                    queue = self._known[id(each)] = _Queue(ref(each), first)
                queue.is_emptied |= first != queue.first
                name = f"a queue of at most {each.maxlen:,}"
                found.append((queue, left, name))
                self._full.update([name] * (len(each) == each.maxlen))
        if found:
            self._found.append(found)
        more = Counter[str]()
        for together in self._found:
            bytes_of = Counter[str]()
            for queue, left, name in together:
                bytes_of[name] += left * (not queue.is_emptied)
            more |= bytes_of
        return Counter({name: more[name] for name in more.keys() - self._full if more[name] >= MIB})
