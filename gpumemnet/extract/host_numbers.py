"""The numbers of meta tensors that come from the host, or are drawn.

Labels, boxes, flags and steps of time are floating-point numbers as activations are, but code reads
them back, or selects by them.  They stay meta tensors, so what is counted does not depend on their
numbers; beside the storage of each there is one on the host.  What an operator makes of known
numbers alone is known, too; what it writes otherwise is not known any more.

The numbers of a storage are computed once, and never written into: an operator that writes makes
others of them.  Few are computed at once.  Many, such as pictures or points on rays, are computed
only once code selects by what follows from them.  Those that are drawn at random may be anything
where a single one is read, but a mask of many selects about as many as it does here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from time import process_time
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from gpumemnet.extract.known_layouts import argument_tensors, meta_like
from gpumemnet.torch_private import script as names
from gpumemnet.torch_private.names import (
    Arguments,
    Keywords,
    aten,
    id_of_storage,
    storage_id,
    tree_map_only,
    version_of,
)

_AT_ONCE: Final = 2**16
"""Largest number of elements of such a tensor that is computed at once."""
MOST_NUMBERS: Final = 2**20
"""Largest number of elements that are few."""
_MOST_LATER: Final = 2**26
"""Most bytes of one that is computed once it is needed, of at most 4 for each element."""
_MOST_STEPS: Final = 32
"""Longest chain of operators that is computed then."""
_SECONDS: Final = 15.0
"""CPU time for all that is computed then."""
_FEW: Final = 16
"""Fewest elements that a mask that was drawn selects, and leaves, where their number counts."""
_MANY: Final = 256
"""Fewest elements of a mask that was drawn of which about the same share is selected each time."""
_COUNTS: Final = {aten.any, aten.all, aten.sum, aten.count_nonzero}
"""Operators whose results are about the same of a mask of many, however that is drawn."""
_MOST_FLOPS: Final = 2**33
"""Of a product that is computed then."""
_CUBIC: Final = ("linalg", "cholesky", "cdist", "lu_", "triangular", "geqrf", "ormqr")
"""Parts of names of operators that take long, as large products do."""
_MADE_UP_BYTES: Final = 2**26
"""Largest storage whose numbers are made up as a whole."""
_MOST_MADE_UP: Final = 2**22
"""Largest number of elements of which an operator computes, where numbers are made up."""
_MOST_FACTORS: Final = 2**16
"""The same for products of matrices and convolutions."""
_HOST: Final = torch.device("cpu")
_EMPTY: Final = torch.empty
"""PyTorch's own: ``deepspeed.zero.Init`` replaces it while a model is made."""
_PLAIN: Final = (Tensor, nn.Parameter)


class _Later:
    """The numbers of a storage that are computed once they are needed.

    Args:
        compute: returns them; fails with a ``RuntimeError``, or returns ``None``, if it cannot.
        is_drawn: whether they follow from some that are drawn at random.
        steps: operators that are computed one after another until then.
        is_whole: whether they follow from whole numbers and truth values alone, such as counts of
            labels.
    """

    def __init__(
        self,
        compute: Callable[[], torch.UntypedStorage | None],
        is_drawn: bool,
        steps: int,
        is_whole: bool = False,
    ) -> None:
        self.compute: Callable[[], torch.UntypedStorage | None] | None = compute
        self._storage: torch.UntypedStorage | None = None
        self.is_drawn, self.steps, self.is_whole = is_drawn, steps, is_whole
        self.is_own = False
        """Whether the script has written them, of numbers of the host."""

    def storage(self) -> torch.UntypedStorage | None:
        """Return the numbers; ``None`` if they cannot be computed."""
        if self.compute is not None:
            compute, self.compute = self.compute, None
            with suppress(RuntimeError, IndexError), names.unseen():
                self._storage = compute()
                self.steps = 0
        return self._storage


class HostNumbers:
    """The numbers of meta tensors, as far as they are known.

    Args:
        unknown: whether a tensor itself has no numbers.
        given: called with each tensor that gives numbers to code that reads them; returns it.
    """

    def __init__(
        self, unknown: Callable[[Tensor], bool], given: Callable[[Tensor], Tensor]
    ) -> None:
        self._unknown = unknown
        self._given = given
        self.makes_up = False
        """Whether numbers that are not known are made up: normally distributed, with what follows
        from them computed, where that takes little."""
        self._storages: MutableMapping[torch.UntypedStorage, _Later] = WeakKeyDictionary()
        self._seconds_left = _SECONDS
        self._kept: set[int] = set()
        """Numbers of these storages, with those of some that are gone: quicker to ask."""

    def keep(self, tensor: Tensor, numbers: Tensor, *, is_drawn: bool = False) -> None:
        """Remember the numbers of a tensor whose storage is new, if they are not too many."""
        # One number for all takes no memory until it is needed.
        is_soon = not is_drawn and _AT_ONCE >= tensor.numel() == numbers.numel()
        # Those that torch.func computes with have no storage.
        with names.unseen(), suppress(NotImplementedError):
            self._keep(tensor, _unchanged(numbers), is_drawn=is_drawn, is_soon=is_soon)

    def make(self, tensor: Tensor, make: Callable[[], Tensor]) -> None:
        """Remember what makes the numbers of a new tensor; many are made once they are needed."""
        self._keep(tensor, make, is_drawn=False, is_soon=tensor.numel() <= _AT_ONCE)

    def draw(self, tensor: Tensor, draw: Callable[[], Tensor]) -> None:
        """Remember how the numbers of a new tensor are drawn."""

        def drawn() -> Tensor:
            with drawing():
                return draw()

        if not self.makes_up:
            self._keep(tensor, drawn, is_drawn=True)

    def _keep(
        self,
        tensor: Tensor,
        numbers: Callable[[], Tensor],
        *,
        is_drawn: bool,
        is_soon: bool = False,
        steps: int = 0,
        is_whole: bool = False,
    ) -> None:
        """Remember what computes the numbers of a tensor whose storage is new."""
        with suppress(NotImplementedError):  # one of the tensors that torch.vmap computes with
            storage = tensor.untyped_storage()
            if tensor.numel() and _fits(tensor):
                copied = partial(_copied, storage.nbytes(), _place(tensor), numbers)
                self._put(storage, _Later(copied, is_drawn, steps, is_whole), is_soon)

    def _put(self, storage: torch.UntypedStorage, later: _Later, is_soon: bool) -> None:
        """Remember the numbers of a storage, unless they are to be computed now, and cannot be."""
        self._kept.add(id_of_storage(storage))
        self._storages[storage] = later
        if is_soon and later.storage() is None:
            del self._storages[storage]

    def stand_in(self, numbers: Tensor, *, is_drawn: bool) -> Tensor:
        """What is on the GPU for these numbers: a meta tensor, unless they are whole."""
        if not (numbers.is_floating_point() or numbers.is_complex()):
            return numbers
        made = meta_like(numbers)
        self.keep(made, numbers, is_drawn=is_drawn)
        return made

    def forget(self, tensor: Tensor) -> None:
        """Something unknown is written into a tensor."""
        if self._has(tensor):
            del self._storages[tensor.untyped_storage()]

    def of(self, tensor: Tensor) -> Tensor | None:
        """A real tensor with the same numbers; ``None`` if they are not known."""
        if not self._unknown(tensor):
            return tensor
        if not tensor.numel():
            return _none(tensor)
        is_known = self._has(tensor) and (self.makes_up or not self.is_drawn(tensor))
        known = self._view(tensor) if is_known else None
        if known is not None:
            return self._given(known)
        if self.makes_up and _is_plain(tensor):
            return self._given(self._made_up(tensor))
        return None

    def of_mask(self, mask: Tensor) -> Tensor | None:
        """The same of a mask, of which it only matters how many it selects."""
        known = self._view(mask) if mask.numel() >= _MANY and self.is_drawn(mask) else None
        selected = 0 if known is None else int(known.count_nonzero())
        # Of few, or few others, another draw may have none.
        is_sure = _FEW <= selected <= mask.numel() - _FEW
        return self._given(known) if known is not None and is_sure else self.of(mask)

    def is_drawn(self, tensor: Tensor) -> bool:
        """Whether the numbers of a tensor follow from some that are drawn at random."""
        if not (self._unknown(tensor) and self._has(tensor)):
            return False
        return self._storages[tensor.untyped_storage()].is_drawn

    def is_own(self, tensor: Tensor) -> bool:
        """Whether a tensor holds one number, which the script itself has written, such as a flag, or
        which follows from whole numbers."""
        if tensor.numel() != 1 or not self._has(tensor):
            return False
        later = self._storages[tensor.untyped_storage()]
        return later.is_own or later.is_whole

    def _is_whole(self, tensor: Tensor) -> bool:
        """Whether the numbers of a tensor follow from whole numbers alone."""
        if self._has(tensor):
            return self._storages[tensor.untyped_storage()].is_whole
        has_fractions = tensor.is_floating_point() or tensor.is_complex()
        return not (has_fractions or self._unknown(tensor))

    def _made_up(self, tensor: Tensor) -> Tensor:
        """Make up numbers of a tensor, and of what else is in its storage."""
        storage = tensor.untyped_storage()
        is_kept = tensor.numel() <= MOST_NUMBERS and storage.nbytes() <= _MADE_UP_BYTES
        with names.unseen():
            shape = storage.nbytes() // tensor.element_size() if is_kept else tensor.shape
            made = torch.zeros(shape, dtype=tensor.dtype)
            if tensor.dtype == torch.bool:
                made.bernoulli_()
            elif made.is_floating_point():
                made.normal_()
            if not is_kept:
                return made
            whole = made.untyped_storage()
            self._put(storage, _Later(lambda: whole, False, 0), True)
            return _of_storage(whole, _place(tensor))

    def arguments(
        self, func: Any, tensors: list[Tensor], args: Arguments, named: Keywords
    ) -> tuple[Arguments, Keywords] | None:
        """Return the arguments of an operator as real tensors; ``None`` unless its result follows
        from their numbers."""
        if not self._may_follow(func, tensors):
            return None
        of = self.of_mask if torch.Tag.dynamic_output_shape in func.tags else self.of
        real: Any = tree_map_only(Tensor, of, (args, named))
        if len(argument_tensors(*real)) < len(tensors):
            return None
        if "device" in named:
            real[1]["device"] = _HOST
        return real

    def follows(self, tensors: list[Tensor]) -> bool:
        """Whether the result of an operator follows from the numbers of tensors."""
        return all(
            not tensor.numel() or self._has(tensor) if self._unknown(tensor) else _fits(tensor)
            for tensor in tensors
        )

    def _may_follow(self, func: Any, tensors: list[Tensor]) -> bool:
        """Whether the same holds, or numbers of all tensors may be made up."""
        if not self.makes_up:
            return self.follows(tensors)
        most = _MOST_FACTORS if func.overloadpacket in flop_registry else _MOST_MADE_UP
        return sum(each.numel() for each in tensors) <= most and all(map(_is_plain, tensors))

    def compute(
        self,
        func: Any,
        args: Arguments,
        named: Keywords,
        result: Any,
        written: Sequence[Tensor] = (),
    ) -> bool:
        """Compute what an operator makes, or writes, whose result follows from numbers: later, if
        these are many or drawn; return whether real tensors that it writes hold them now."""
        made, given = argument_tensors([result], {}), argument_tensors(args, named)
        fresh = [(place, each) for place, each in enumerate(made) if not self._has(each)]
        has_many = any(each.numel() > MOST_NUMBERS for each in made)
        # What changes a shape in place writes no numbers.
        is_view = torch.Tag.inplace_view in func.tags and "resize" not in func.__name__
        if is_view or "empty" in func.__name__ or not (written or fresh):
            return True
        if self.makes_up and (has_many or not self._may_follow(func, given)):
            for each in written:
                self.forget(each)
            return True
        draws = torch.Tag.nondeterministic_seeded in func.tags and not self.makes_up
        later = [self._storages[each.untyped_storage()] for each in given if self._has(each)]
        steps = 1 + max((each.steps for each in later), default=0)
        most = max((each.numel() for each in (*given, *made)), default=0)
        if steps > _MOST_STEPS and most <= MOST_NUMBERS:
            for source in later:
                source.storage()
            steps = 1
        is_soon = self.makes_up or not (
            draws
            or most > _AT_ONCE
            or any(each.is_drawn or each.compute is not None for each in later)
        )
        flops = flop_registry.get(func.overloadpacket, lambda *given, **others: 0)
        is_long = (
            steps > _MOST_STEPS
            or any(each in func.__name__ for each in _CUBIC)
            or flops(*args, **named, out_val=result) > _MOST_FLOPS
        )
        if not is_soon and (is_long or not all(_fits(each) for _, each in fresh)):
            for each in written:
                self.forget(each)
            return False
        # Of a real one that is unknown, what was written before waits beside its memory.
        kept = [each for each in written if self._unknown(each) or not is_soon]
        changed = {storage_id(each) for each in kept}
        changed_now = {storage_id(each) for each in written} - changed
        taken = tree_map_only(Tensor, partial(self._taken, changed, changed_now), (args, named))
        run = cache(partial(_run, func, taken, draws))
        counts = (
            func.overloadpacket in _COUNTS
            and given[0].numel() >= _MANY
            and not given[0].is_floating_point()
        )
        is_drawn = draws or (not counts and any(each.is_drawn for each in later))
        is_whole = bool(given) and not draws and all(map(self._is_whole, given))
        for each in written:
            copied = partial(lambda number: run()[1].get(number), storage_id(each))
            own = _Later(copied, is_drawn, steps, is_whole)
            own.is_own = all(other is each or not self._unknown(other) for other in given)
            self._put(each.untyped_storage(), own, is_soon)
        for place, each in fresh:
            if not written or storage_id(each) not in changed:
                numbers = partial(lambda place: run()[0][place], place)
                self._keep(
                    each,
                    numbers,
                    is_drawn=is_drawn,
                    is_soon=is_soon,
                    steps=steps,
                    is_whole=is_whole,
                )
        return is_soon

    def _taken(self, changed: set[int], changed_now: set[int], tensor: Tensor) -> _Taken:
        """What an operator takes in the place of a tensor."""
        number = storage_id(tensor)
        if number in changed_now:
            return _Taken(lambda: tensor)
        if not self._unknown(tensor):
            if number not in changed:
                return _Taken(_unchanged(tensor))
            real = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
            return _Taken(_Later(lambda: real, False, 0), _place(tensor), number)
        if not tensor.numel() and number not in changed:
            return _Taken(partial(_none, tensor))
        if not self._has(tensor):
            made_up = self._made_up(tensor)
            if not self._has(tensor):  # they are too many to remember
                return _Taken(lambda: made_up)
        source = self._storages[tensor.untyped_storage()]
        return _Taken(source, _place(tensor), number if number in changed else None)

    def _has(self, tensor: Tensor) -> bool:
        return (
            _fits(tensor)
            and _is_plain(tensor)
            and storage_id(tensor) in self._kept
            and tensor.untyped_storage() in self._storages
        )

    def _view(self, tensor: Tensor) -> Tensor | None:
        later, start = self._storages[tensor.untyped_storage()], process_time()
        if later.compute is not None and self._seconds_left <= 0:
            return None
        storage = later.storage()
        self._seconds_left -= process_time() - start
        return None if storage is None else _of_storage(storage, _place(tensor))


def _fits(tensor: Tensor) -> bool:
    return tensor.numel() * min(tensor.element_size(), 4) <= _MOST_LATER


def _none(tensor: Tensor) -> Tensor:
    """A tensor of the host like one that has no elements."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)


_Place = tuple[torch.dtype, Any, torch.Size, tuple[int, ...]]
"""Type of a view's elements, offset, sizes and strides."""


def _place(tensor: Tensor) -> _Place:
    return tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()


def _of_storage(storage: torch.UntypedStorage, place: _Place) -> Tensor:
    return _EMPTY(0, dtype=place[0]).set_(storage, *place[1:])


def _copied(size: int, place: _Place, numbers: Callable[[], Tensor]) -> torch.UntypedStorage:
    """Return a storage that holds numbers at a place."""
    storage = torch.UntypedStorage(size)  # type: ignore[no-untyped-call]
    _of_storage(storage, place).copy_(numbers())
    return storage


def _unchanged(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns the numbers of a real tensor.

    Whole numbers are copied, because they may be on the GPU, where what is held takes memory.  Others
    are held, if they are many and tell whether they change: memory of numpy's does not.
    """
    tells = tensor.untyped_storage().resizable() and not tensor.is_inference()
    if not (tells and tensor.is_floating_point() and tensor.numel() > _AT_ONCE):
        copied = tensor.detach().clone()
        return lambda: copied
    held = tensor.detach()
    version = version_of(held)

    def unchanged() -> Tensor:
        if version_of(held) != version:
            raise RuntimeError
        return held

    return unchanged


@dataclass(frozen=True, slots=True)
class _Taken:
    """A tensor that an operator takes once it is computed.

    Attributes:
        source: where its numbers are then.
        place: its own in them; ``None`` for a tensor of the host.
        changed: number of the storage, if the operator writes into it.
    """

    source: Any
    place: _Place | None = None
    changed: int | None = None

    def tensor(self, copies: dict[int, torch.UntypedStorage]) -> Tensor:
        """Return it; what is written into is a copy, which is kept in ``copies``."""
        if self.place is None:
            held: Tensor = self.source()
            return held
        storage = self.source.storage()
        if storage is None:
            raise RuntimeError
        if self.changed is not None:
            storage = copies.setdefault(self.changed, storage.clone())
        return _of_storage(storage, self.place)


def _run(func: Any, taken: Any, draws: bool) -> tuple[list[Any], dict[int, torch.UntypedStorage]]:
    """Run an operator; return its results, and copies of what it has written into."""
    copies: dict[int, torch.UntypedStorage] = {}
    args, named = tree_map_only(_Taken, lambda each: each.tensor(copies), taken)
    if "device" in named:
        named["device"] = _HOST
    with drawing() if draws else nullcontext():
        return argument_tensors([func(*args, **named)], {}), copies


_generator: Final = torch.Generator()
"""Of what is drawn later: the script's own one stays as it is."""


@contextmanager
def drawing() -> Iterator[None]:
    """Context in which what is drawn at random leaves the script's own numbers as they are."""
    own = torch.default_generator.get_state()
    torch.default_generator.set_state(_generator.get_state())
    try:
        yield
    finally:
        _generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(own)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided
