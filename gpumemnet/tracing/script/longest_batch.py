"""Which batch of a data loader is the longest, from the sizes of the samples that there is time to
read, and from draws where a data set or a collate function draws them; and which of the files that a
script goes through is the largest."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from operator import itemgetter
from os import PathLike
from pathlib import Path
from time import monotonic, process_time
from types import FrameType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    SequentialSampler,
    default_collate,
    get_worker_info,
)

from gpumemnet.extract.module_calls import tensors_in
from gpumemnet.sandbox.process import alarm_waits
from gpumemnet.sandbox.user_code import fault_sentence, variables_of
from gpumemnet.torch_private.names import tree_map_only, value_of
from gpumemnet.torch_private.script import unseen

SAMPLED: Final = 32
"""Samples that tell whether all are of one size, and draws that tell whether sizes are drawn."""
_READ: Final = 4096
_EPOCHS: Final = 32
_AHEAD: Final = 100_000
"""Epochs, and samples in them, that are drawn for the longest batch."""
_DRAWS: Final = 24
"""Draws of a sample, or of a batch of two, of which the largest is taken where data sets or collate
functions draw their size."""
_ALIKE: Final = 0.02
"""Part of a size by which draws of one sample may differ that count as alike."""
_ITERATOR: Final = "torch.utils.data:DataLoader._get_iterator"
"""Starts the workers of a loader of the trace's own, which gives all that they read."""
_SECONDS: Final = 2.0
"""CPU time to draw batches of two."""
_BATCH_SECONDS: Final = 6.0
"""CPU time to read the samples of a batch that are alike."""
_MOST_SHARED: Final = 64
"""Tensors that come through shared memory from a worker of the trace's own."""
LARGEST: Final = 64
"""Members of a batch whose sizes are added up, and of a collection that a number is looked for in."""
_LEVELS: Final = 2
"""How deep in objects of the script the name of a folder is looked for."""
_LONGEST_NAME: Final = 1024
"""Characters of a text that may be such a name."""
_OF_LISTS: Final[Any] = type(iter([])), type(reversed([]))
_OF_RANGES: Final[Any] = type(iter(range(0)))
_MOST_VALUES: Final = 1000
"""Values of one dictionary or object that are looked at for it."""
AnyLoader = DataLoader[Any]
_Draw = tuple[int, tuple[Any, ...]]
"""A size, and the states of random numbers that lead to it."""


def longest_and_last(
    loader: AnyLoader, sizes: dict[Any, int], unread: dict[str, None], seconds: float
) -> tuple[Sequence[Any] | None, ...]:
    """Return the numbers of the samples in the longest batch, if samples differ in size, in the
    last one, if it is smaller, in the one beside the longest, and in the first one, if another is
    the longest and the first one is the same in each epoch.

    Args:
        loader: gives them.
        sizes: gets the sizes of samples that were read.
        unread: gets a sentence if there was no time to find the longest.
        seconds: CPU time for it.
    """
    data, sampler = vars(loader)["dataset"], loader.batch_sampler
    if sampler is None or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        return (None,) * 4
    count = len(data)
    # A copy, because some are iterators of their own: Lightning's, when it predicts.
    batches, drawn = [], 0
    for batch in islice(iter(copy(sampler)), count):
        batches.append(list(batch))
        drawn += len(batches[-1])
        if drawn >= count:  # a sampler may go on for billions of samples
            break
    last = batches[-1] if len(batches[-1]) < len(batches[0]) else None
    has_time = time_to_read(seconds)
    # A sampler that gives more than a number chooses what differs from batch to batch.
    firsts = [batch[0] for batch in batches if batch]
    known = firsts if isinstance(firsts[0], tuple) else range(count)
    filled: dict[Any, int] = {}
    for most in (SAMPLED, _READ):
        for number in (known[place] for place in _spread(len(known), most)):
            if number not in filled and has_time():
                sample = data[number]
                sizes[number], filled[number] = size_of(sample), _filled(sample)
        if len(set(sizes.values())) == 1 == len(set(filled.values())):
            is_own = loader.collate_fn is not default_collate
            is_drawn = is_own and len({size for size, _ in _draws(loader, batches[0])}) > 1
            return batches[0] if is_drawn else None, last, None, None
    lengths = filled if len(set(sizes.values())) == 1 else sizes
    padded = [
        len(batch) * max((lengths.get(each, 0) for each in batch), default=0) for batch in batches
    ]
    if len(sizes) < min(len(known), SAMPLED):
        unread[
            f"the longest of {len(sizes):,} samples was taken, as there was no time to read more of the {len(known):,} "
            "of a data set: a longer one takes more"
        ] = None
    place = padded.index(max(padded))
    beside = [*batches[place + 1 : place + 2], *batches[place - 1 :]][0]
    is_in_order = isinstance(getattr(sampler, "sampler", None), SequentialSampler)
    first = batches[0] if place and is_in_order else None
    return _longest_of_epochs(loader, batches, batches[place], lengths), last, beside, first


def _longest_of_epochs(
    loader: AnyLoader,
    batches: Sequence[Sequence[Any]],
    longest: Sequence[Any],
    sizes: Mapping[Any, int],
) -> Sequence[Any]:
    """Return the longest batch; where a collate function cuts all samples to the shortest of a batch,
    or joins them, it is one of many epochs, each of which has other batches.

    Args:
        loader: gives them.
        batches: those of one epoch.
        longest: the longest of them, once padded.
        sizes: those of samples that were read.
    """
    is_drawn = not isinstance(getattr(loader.batch_sampler, "sampler", None), SequentialSampler)
    has_own = loader.collate_fn is not default_collate
    # Of another size are those that a sampler fills up to a number of words.
    are_even = {len(longest)}.issuperset(map(len, batches[:-1]))
    if not (is_drawn and has_own and are_even):
        return longest
    members, draw = [each for batch in batches for each in batch], random.Random(0).sample
    rounds = range(min(_EPOCHS * len(batches), _AHEAD // len(longest)))
    others = [draw(members, len(longest)) for _ in rounds]

    candidates = [longest]
    for amount in (min, sum):  # a batch may be cut to its shortest sample, or be all in a row

        def measured(batch: Sequence[Any], amount: Callable[..., int] = amount) -> int:
            return amount(sizes.get(each, 0) for each in batch)

        most = max((*batches, *others), key=measured)
        if not are_alike(measured(most), measured(longest)):
            candidates.append(most)
    if len(candidates) > 1:
        with suppress(Exception):  # not all make a batch
            return max(
                candidates, key=lambda batch: size_of(loader.collate_fn(samples_of(loader, batch)))
            )
    return longest


def as_worker(loader: AnyLoader, read: Callable[[], Any]) -> Any:
    """Return what ``read`` returns; a worker of the loader reads, if it has any: a data set that changes
    itself as it is read then stays as it was for the script.

    Raises:
        RuntimeError: samples cannot be read.
    """
    if not loader.num_workers:
        return read()

    def begin(number: int) -> None:
        object.__setattr__(get_worker_info(), "dataset", vars(loader)["dataset"])
        if loader.worker_init_fn is not None:
            loader.worker_init_fn(number)

    def tried(samples: list[int]) -> bytes | str:
        # Here, because the loader would wait for ever for a worker that cannot send.
        try:
            value = read()
            # Each tensor in shared memory holds a file open until all have come.
            is_shared = 0 < len(tensors_in(value)) <= _MOST_SHARED
            with suppress(Exception):  # of what only a copy can be sent of
                if is_shared:
                    return bytes(ForkingPickler.dumps(value))
            return pickle.dumps(value)
        except Exception as error:
            return fault_sentence(error)

    one: Any = [0]
    worker: AnyLoader = DataLoader(
        one,
        num_workers=1,
        collate_fn=tried,
        worker_init_fn=begin,
        multiprocessing_context="fork",
    )
    batches = value_of(_ITERATOR)(worker)
    with alarm_waits():
        found = next(batches)
    if isinstance(found, str):
        raise RuntimeError(found)
    with unseen():  # a copy holds no file open
        return deepcopy(pickle.loads(found))  # noqa: S301 - of a process of its own, which still runs


def time_to_read(seconds: float) -> Callable[[], bool]:
    """Return what tells whether there is time left; other programs may take the CPU."""
    end, last_second = process_time() + seconds, monotonic() + 3 * seconds
    return lambda: process_time() < end and monotonic() < last_second


def largest_file(names: Sequence[Any], frame: FrameType, seconds: float) -> int:
    """Return which of ``names`` is that of the largest file: of pictures, by pixels.

    Args:
        names: of files, perhaps within a folder that a variable, an attribute or a dictionary in
            ``frame`` names.
        frame: where they are gone through.
        seconds: CPU time to look into pictures, those with the most bytes first.

    Raises:
        ValueError: these are no names of files.
    """
    if not isinstance(names[0], str | PathLike):
        raise ValueError("no names")
    known = [*_values(variables_of(frame)), *_values(frame.f_globals)]
    for _ in range(_LEVELS):  # such as the arguments of an object
        known += [inner for each in known for inner in _values(each)]
    texts = (str(each) for each in known if isinstance(each, str | PathLike))
    for folder in dict.fromkeys(["", *(each for each in texts if len(each) < _LONGEST_NAME)]):
        with suppress(OSError, TypeError, ValueError):  # a text that is no name, or no text
            if Path(folder, names[0]).is_file():
                paths = [Path(folder, each) for each in names]
                order = sorted(range(len(paths)), key=lambda place: -paths[place].stat().st_size)
                has_time = time_to_read(seconds)
                looked = [(_file_size(paths[place]), -place) for place in order if has_time()]
                return -max(looked, default=(0, -order[0]))[1]
    raise ValueError("no names of files")


def _values(owner: Any) -> list[Any]:
    """The values of a dictionary, and those of the attributes of an object."""
    if isinstance(owner, ModuleType):
        return []
    with suppress(Exception):  # an object may answer with an error
        values = (owner if isinstance(owner, dict) else vars(owner)).values()
        return [*islice(values, _MOST_VALUES)]
    return []


def _file_size(path: Path) -> int:
    with suppress(Exception):  # no picture
        from PIL import Image

        width, height = Image.open(path).size
        return width * height
    return path.stat().st_size


def _spread(count: int, most: int) -> list[int]:
    """Return at most ``most`` numbers below ``count``, evenly spread, with the first and the
    last."""
    taken = min(count, most)
    return [number * (count - 1) // max(taken - 1, 1) for number in range(taken)]


def size_of(sample: Any, depth: int = 3) -> int:
    """Return how much a sample holds, some levels deep where it is an object such as a graph."""
    if isinstance(sample, Mapping):
        return sum(size_of(each, depth) for each in sample.values())
    if str(getattr(sample, "dtype", "")) == "object":  # such as a row of a table
        sample = sample.tolist()
    if isinstance(sample, Tensor) or hasattr(sample, "shape"):
        size = 1
        for length in sample.shape:
            size *= length
        return size
    if isinstance(sample, str | bytes):
        return len(sample)
    if isinstance(sample, list | tuple):
        are_numbers = not sample or {type(sample[0]), type(sample[-1])} == {int}
        return len(sample) if are_numbers else sum(size_of(each, depth) for each in sample)
    held = getattr(sample, "__dict__", None)
    if not depth or type(held) is not dict:
        return 1
    return 1 + sum(size_of(each, depth - 1) for each in held.values())


def _filled(sample: Any) -> int:
    """Return the longest of what a sample holds, without the padding at its end: the last row or
    number as often as it is there."""
    if isinstance(sample, Mapping):
        sample = [*sample.values()]
    if isinstance(sample, list | tuple) and sample and type(sample[0]) is not int:
        return max(map(_filled, sample))
    rows: Any = np.zeros(0)
    with suppress(Exception):  # not every tensor becomes an array
        rows = np.asarray(sample) if isinstance(sample, Tensor | np.ndarray | list) else rows
    if rows.ndim not in (1, 2) or not rows.size or rows.dtype.kind not in "biuf":
        return 0
    others = (rows != rows[-1]).reshape(len(rows), -1).any(1).nonzero()[0]
    all_alike = len(rows) if rows[-1].any() else 0  # as a mask of attention
    return int(others[-1]) + 1 if others.size else all_alike


def collated(loader: AnyLoader, numbers: Sequence[Any], drawn: Mapping[Any, Any]) -> Any:
    """Return a batch of these samples, the largest of those that data set and collate function
    draw."""
    before = random_states()

    def read() -> Any:
        is_own = loader.collate_fn is not default_collate
        draws = _draws(loader, numbers) if is_own else []
        _, states = max(draws, key=itemgetter(0), default=(0, before))
        samples = samples_of(loader, numbers, drawn)
        set_random_states(states)
        return loader.collate_fn(samples)

    try:
        return as_worker(loader, read)
    finally:
        set_random_states(before)


def samples_of(
    loader: AnyLoader, numbers: Sequence[Any], drawn: Mapping[Any, Any] | None = None
) -> Any:
    """Return the samples of these numbers; those that were ``drawn`` before, as they were.

    Once there is no more time, and the last ones are alike, copies of these take the place of the
    others: their shapes tell the memory, and pictures and videos take long to decode.
    """
    data: Any = vars(loader)["dataset"]  # of RecBole's, which gives another once it has begun
    if not drawn and getattr(data, "__getitems__", None):
        return data.__getitems__(numbers)
    samples: list[Any] = []
    has_time, last = time_to_read(_BATCH_SECONDS), None
    for number in numbers:
        if last is None and len(samples) >= SAMPLED and not has_time():
            last = samples[-SAMPLED:]
            sizes = {(size_of(each), _filled(each)) for each in last}
            last = last if len(sizes) == 1 else []
        sample = drawn.get(number) if drawn else None
        if sample is None and last:
            sample = last[len(samples) % SAMPLED]
        made = None
        with suppress(Exception):  # of one that cannot be copied
            made = None if sample is None else copied(sample)
        samples.append(data[number] if made is None else made)
    return samples


def batch_size(item: Any, depth: int = 4) -> int:
    """Return the numbers and words in a batch, also one that is an object; 0 for a single one."""
    if isinstance(item, torch.Tensor | np.ndarray):
        return math.prod(item.shape)
    if isinstance(item, dict):
        parts = [*item.values()]
    elif isinstance(item, tuple | list):
        parts = [*item]
    elif isinstance(item, nn.Module) or not hasattr(type(item).__init__, "__code__"):
        return 0
    else:
        parts = [*getattr(item, "__dict__", {}).values()]
    more = depth and sum(batch_size(each, depth - 1) for each in parts[:LARGEST])
    return more or len(parts)


def largest_batch(batches: Iterable[Any]) -> tuple[int, int]:
    """Return the place of the largest of ``batches``, and its size; 0 if there are none."""
    sizes = [*map(batch_size, batches), 0]
    return sizes.index(max(sizes)), max(sizes)


def items_of(iterator: Any) -> Any:
    """Return what an iterator over lists or ranges gives, as of ``reversed`` or ``zip``, and take
    nothing of it; another one itself."""
    if isinstance(iterator, zip):
        inner = iterator.__reduce__()[1]  # the same one several times, in groups
        parts = [*map(items_of, inner)]
        are_known = all(isinstance(each, range | list) for each in parts)
        are_known &= len({*map(id, inner)}) == len(inner)
        return [*zip(*parts, strict=False)] if are_known else iterator
    if isinstance(iterator, _OF_LISTS):  # of others, one that the script frees would stay
        items = [*copy(iterator)]
        return items if {int, float}.issuperset(map(type, items)) else iterator
    if isinstance(iterator, _OF_RANGES):
        _, (numbers,), given = iterator.__reduce__()
        return numbers[given or 0 :]
    return iterator


def are_alike(size: int, other: float) -> bool:
    """Whether two draws of a sample have about one size: an image has more or fewer boxes."""
    return abs(size - other) <= size * _ALIKE


def largest_draws(
    loader: AnyLoader, numbers: Sequence[Any], sizes: dict[Any, int], seconds: float
) -> dict[Any, Any]:
    """Return the largest of several draws of each sample, if the data set draws their ``sizes``."""
    data: Any = vars(loader)["dataset"]
    largest: dict[Any, tuple[int, Any]] = {}
    has_time, is_drawn = time_to_read(seconds), False
    few = (list(numbers[: SAMPLED // 2]) * SAMPLED)[:SAMPLED]
    for count, number in enumerate(few + list(numbers) * _DRAWS):
        if not has_time() or (count == len(few) and not is_drawn):
            break
        sample = data[number]
        size = size_of(sample)
        first = sizes.setdefault(number, size)
        is_drawn |= not are_alike(size, first)
        if number not in largest or size > largest[number][0]:
            largest[number] = size, sample
    return {number: sample for number, (_, sample) in largest.items() if is_drawn}


def _draws(loader: AnyLoader, numbers: Sequence[int]) -> list[_Draw]:
    """Return sizes of a small batch that a collate function of the user's draws."""
    found: list[_Draw] = []
    before = random_states()
    with suppress(Exception), unseen():  # it may need more samples
        few, has_time = samples_of(loader, numbers[:2]), time_to_read(_SECONDS)
        while has_time() and len(found) < _DRAWS:
            states = random_states()
            found.append((size_of(loader.collate_fn(copied(few))), states))
    set_random_states(before)
    return found


def copied(sample: Any) -> Any:
    """Return a copy of a sample; a view of a larger tensor is copied alone."""
    return deepcopy(tree_map_only(Tensor, Tensor.clone, sample))


def random_states() -> tuple[Any, ...]:
    """Return the states of what draws numbers on the host."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - scripts use them


def set_random_states(states: tuple[Any, ...]) -> None:
    """Put such states back."""
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002 - scripts use it
    torch.set_rng_state(states[2])
