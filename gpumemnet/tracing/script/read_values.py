"""Values that a script reads from the simulated GPU, where nothing is computed.

Each read comes here.  A number is 0, because scripts print and log them; one that counts elements is
as large as it can be, because it may be a size.  An array holds tiny numbers that differ, because
scripts scale them by their range, or look for neighbours among them.  Checks for infinite numbers find
none.  Any other condition is decided by the code around it, see
:mod:`gpumemnet.tracing.script.branches`, and so is each comparison of a number that was read, or was
computed from one.  An operator that selects
elements by their values selects all of them, which is the most that it can take, or a stated share.
One that picks among a few candidates, as a router picks experts, picks all of them equally often:
what follows from its choice is computed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from functools import cache, cached_property
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gpumemnet.extract.host_numbers import MOST_NUMBERS, HostNumbers
from gpumemnet.extract.placement import (
    READS_VALUE_BELOW,
    REAL_WHOLE_ELEMENTS,
    MissingValues,
)
from gpumemnet.sandbox.user_code import UnknownValueError, running_line
from gpumemnet.torch_private import script as names
from gpumemnet.torch_private.names import (
    Arguments,
    Function,
    Keywords,
    aten,
    operator_name,
    schema,
    storage_id,
    tree_leaves,
    value_of,
    version_of,
)
from gpumemnet.tracing.missing_values import guess_of, running_place, selection_of, selects
from gpumemnet.tracing.script.branches import Assumptions, Decisions, Place

MAX_VALUES: Final = 2**26
"""Largest number of elements of a copy to the host, where copies are real tensors."""


def _functions(*names_of: str) -> frozenset[Any]:
    """The functions and methods of these names."""
    return frozenset(
        getattr(owner, name)
        for name in names_of
        for owner in (torch, Tensor)
        if hasattr(owner, name)
    )


_NEVER: Final = _functions("isnan", "isinf", "isposinf", "isneginf")
_ALWAYS: Final = _functions("isfinite")
_ALL: Final = _functions("all") | {value_of(names.ALL_TRUE)}
_SAME: Final = _ALL | _functions(
    "any", "clone", "detach", "reshape", "view", "squeeze", "flatten", "bool", "max", "min"
)
_NOT: Final = _functions("logical_not", "bitwise_not", "__invert__")
_OR: Final = _functions("logical_or", "bitwise_or", "__or__")
_AND: Final = _functions("logical_and", "bitwise_and", "__and__", "__iand__")
_EQUAL: Final = _functions("eq", "__eq__")
_UNEQUAL: Final = _functions("ne")
_LESS: Final = _functions("lt", "le")
_GREATER: Final = _functions("gt", "ge")
_ORDERED: Final = _LESS | _GREATER
_FAR: Final = 1e8
"""A number that others are compared with until the first of them is the best so far."""
_MULTIPLIES: Final = _functions("mul", "mul_")
_FROM_NOTHING: Final = _functions("exp", "sigmoid") | {torch.nn.functional.softplus}
"""Functions that make another number of 0."""
_EACH: Final = (
    _MULTIPLIES
    | _FROM_NOTHING
    | _functions(
        *("clamp", "clamp_", "clamp_min", "clamp_max", "maximum", "minimum"),
        *("add", "add_", "sub", "__rsub__", "div", "__floordiv__", "round", "floor", "ceil"),
    )
)
"""Functions that compute each number of its own."""
_WHOLE: Final = _functions("round", "floor", "ceil")
_COUNTS: Final = _functions("sum", "count_nonzero")
_BOTH: Final = _AND | _MULTIPLIES
"""Functions whose results are 0 where one of their arguments is."""
_FILLS: Final = _functions("masked_fill", "masked_fill_", "__setitem__")
_LIMITS: Final = _BOTH | _FILLS | _GREATER | _UNEQUAL | {torch.where}
"""Functions whose results may be 0 more often than their arguments."""
_SOFTMAX: Final = _functions("softmax") | {torch.nn.functional.softmax}
_KEEPS: Final = _functions(
    *("clone", "detach", "long", "int", "float", "double", "bool", "to", "max", "__getitem__"),
    *("view", "reshape", "squeeze", "unsqueeze", "flatten", "expand", "repeat", "cat", "stack"),
    *("abs", "contiguous"),
) | {
    Tensor.data.__get__,  # type: ignore[attr-defined]  # a property of C++
    torch.nn.functional.interpolate,
}
_MOVES: Final = _functions(
    *("__getitem__", "index_select", "gather", "take", "take_along_dim", "masked_select")
)
"""Functions whose results are some of the numbers of their first argument."""
_MOST_CANDIDATES: Final = 1024
"""Above, a choice is not a router's: it may be a word of a vocabulary."""
_SORTS: Final = frozenset({aten.sort.default, aten.sort.stable})
"""Operators that pick each candidate once."""
_PICKS: Final = _SORTS | {
    aten.topk.default,
    aten.argmax.default,
    aten.max.dim,
    aten.multinomial.default,
}
"""Operators that pick by values; the numbers of what they pick are their last output."""
_ORDERS: Final = _functions("argsort", "sort")
_ONES: Final = _functions("ones_like", "ones", "new_ones")
_PICKING: Final = _functions("topk", "argmax", "max", "sort", "argsort", "multinomial")
_LARGE_NUMBER: Final = 100
"""What a floating-point number is where conditions are the opposite: more than most thresholds."""
_SMALL_NUMBER: Final = 1e-30
"""What it is otherwise: unlike 0 it has a logarithm, and can be divided by."""
_DIFFERENT: Final = range(2, 2**22)
"""How many elements an array has that holds tiny numbers that differ, the same in each of its shape."""


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return storage_id(tensor), tensor.storage_offset(), tensor.size(), tensor.stride()


class ReadValues(MissingValues):
    """Gives values to a script that reads them from the GPU; each such line is noted.

    Args:
        assumed: returns what the run assumes; called when that is first needed.
    """

    def __init__(self, assumed: Callable[[], Assumptions]) -> None:
        self._assumed_ways = assumed
        self.is_still: Callable[[str], bool] = lambda place: False
        """Whether the rounds of a loop that asks at a place do nothing new."""
        self.sentences: dict[str, str] = {}
        self._truths: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        self._decided: MutableMapping[Tensor, tuple[int, bool]] = WeakTensorKeyDictionary()
        """Conditions that were read → their versions, and what they were taken to be."""
        self._counts: MutableMapping[Tensor, float] = WeakTensorKeyDictionary()
        """Tensors of which more is known than that they may be 0 → what each element is taken to be."""
        self._whole: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        """Tensors of whole numbers, such as what was rounded: these stay 0 in arrays."""
        self._masks: MutableMapping[Tensor, float] = WeakTensorKeyDictionary()
        """Tensors that were made of masks → the share of elements that are not 0, at most; 1 if each
        is one."""
        self._same: set[str] = set()
        """Lines that have compared a tensor with itself."""
        self._orders: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        """Places of what was sorted → among how many at least; each is there once."""
        self.numbers = HostNumbers(lambda tensor: tensor.is_meta, self.assumed)
        self._assumed: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        self.selections: dict[str, None] = {}
        """Lines that select elements by values of the GPU, in order."""

    @cached_property
    def _decisions(self) -> Decisions:
        return Decisions(self._assumed_ways())

    @property
    def branches(self) -> tuple[str, ...]:
        """Places that branch on such a value, in order."""
        return tuple(self._decisions.places)

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each operator and line."""
        return tuple(self.sentences.values())

    def note(self, what: str, end: str = "") -> None:
        """Note ``what`` with the running line of the script, once, whatever its ``end``."""
        where = running_line()
        sentence = f"{where}: {what}" if where else what
        self.sentences.setdefault(sentence, f"{sentence}{end}.")

    def note_once(self, sentence: str) -> None:
        """Note a sentence that does not belong to a line."""
        self.sentences.setdefault(sentence, f"{sentence}.")

    def value(self, function: str, tensor: Tensor) -> Any:
        """Return a copy on the host."""
        return self.on_host(function, tensor, is_lost=True)

    def result(
        self, operator: Any, args: Arguments, kwargs: Keywords, error: UnknownValueError
    ) -> Any:
        """Return what is read: a truth value or a number; an operator that selects elements selects
        its share.

        Raises:
            UnknownValueError: as ``error``, for another shape that depends on values.
        """
        if schema(operator).name not in READS_VALUE_BELOW:
            masks = [each for each in tree_leaves(args[1:] or args) if each in self._masks]
            usual = self._decisions.assumptions.selected_share
            share = self._masks[masks[0]] if masks else usual
            guess = selection_of(operator, share) or guess_of(operator, args, kwargs)
            if guess is None:
                raise error
            if selects(operator):
                self.selections.setdefault(running_line() or error.operator)
            result, what = guess(*args, **kwargs)
            self.note(error.operator, f" {what}")
            return result
        tensor = args[0]
        if operator_name(operator) != "_local_scalar_dense":
            if len(args) > 1 and _layout(tensor) == _layout(args[1]):
                self._same.add(self._line_that_chooses())
                return True
            if operator_name(operator) == "equal" and tensor.shape != args[1].shape:
                return False
            if self.is_assumed(tensor):
                return self.decide(bool(operator(*args, **kwargs)))
            if len(args) > 1:  # who compares tensors expects that they are alike
                # A line that has met one tensor twice asks which ones they are, as attention does.
                line = self._line_that_chooses()
                return not (line and line in self._same) and self.decide(True)
            return self.condition(tensor)
        if tensor.dtype == torch.bool:
            return self.condition(tensor)
        return self._read(tensor)

    def condition(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is taken to be true."""
        known = self._truths.get(tensor)
        if known is not None:
            return bool(known)
        version = version_of(tensor)
        before, decided = self._decided.get(tensor, (None, False))
        if before == version:  # it is what another line has read
            return decided
        is_assumed = self.is_assumed(tensor)
        usual = is_assumed and bool(self._value_of(tensor))
        is_likely = is_assumed and self.is_assumed(tensor, is_picked=True)
        decided = self.decide(usual, is_likely=is_likely)
        self._decided[tensor] = version, decided
        return decided

    def decide(self, usual: bool, *, is_likely: bool = False) -> bool:
        """Return what a condition of the running code is, see :class:`Decisions`."""
        place = running_place()
        if place is None:  # PyTorch's own code
            return usual
        taken = self._decisions.decide(place, usual, is_likely=is_likely)
        taken ^= place.ends_range and taken == place.usual and self.is_still(place.name)
        self.note(f"a condition on values of the GPU was taken to be {str(taken).lower()}")
        return taken

    def _line_that_chooses(self) -> str:
        """Return the running line if both ways of its condition go on; else it is empty."""
        place = running_place()
        is_one = place is not None and place.usual is None and not place.name.endswith(">")
        return place.name if place is not None and is_one else ""

    def branch_at(self, place: Place) -> None:
        """Keep a place that chooses by a number that was read."""
        self._decisions.places.setdefault(place.name)

    def item(self, tensor: Tensor) -> Any:
        """Return the value of a tensor of one element: a number that notices what compares it."""
        if tensor.dtype == torch.bool:
            return self.condition(tensor)
        if self.is_assumed(tensor):
            number = usual = self._value_of(tensor)
        else:
            number = self._read(tensor, False)
            usual = number if tensor in self._counts else type(number)()
        kind = _READ_NUMBERS.get(type(number))
        return number if kind is None else kind.of(self, number, usual)

    def _read(self, tensor: Tensor, is_lost: bool = True) -> int | float | complex:
        """Return the number that a tensor is taken to hold.

        Args:
            tensor: of one element.
            is_lost: whether nothing follows how the number is used.
        """
        count = self._counts.get(tensor)
        number = self._number(tensor.dtype, is_lost) if count is None else count
        if not number and self.is_assumed(tensor):
            number = self._value_of(tensor)
        self.note("a value read from the GPU was taken to be", f" {number:,}")
        if tensor.dtype.is_complex:
            return complex(number)
        return float(number or _SMALL_NUMBER) if tensor.dtype.is_floating_point else int(number)

    def _number(self, dtype: torch.dtype, is_lost: bool) -> float:
        place = running_place() if is_lost else None
        turned = not is_lost and self._decisions.assumptions.opposite
        if place is not None and place.is_chosen_by:
            turned = self._decisions.decide(Place(place.name), False)
            if turned and place.compared_with is not None:
                return place.compared_with
        return (_LARGE_NUMBER if dtype.is_floating_point else 1) if turned else 0

    def is_assumed(self, tensor: Tensor, *, is_picked: bool | None = None) -> bool:
        """Whether the values of a real tensor follow from assumptions; or from what was picked, or
        was not."""
        if not self._assumed:
            return False
        known = self._assumed.get(tensor)
        return known is not None and is_picked in (None, known)

    @property
    def are_made_up(self) -> bool:
        """Whether unknown numbers are made up; traces that follow, which may do so, go on from
        here."""
        return self._decisions.assumptions.makes_up

    def on_host(self, function: str, tensor: Tensor, *, is_lost: bool) -> Tensor:
        """Return a copy of ``tensor`` on the host, all the same number, or tiny ones that differ.

        Args:
            function: what makes the copy.
            tensor: on the GPU, or a copy of such a tensor.
            is_lost: whether nothing follows how the copy is used.
        """
        if tensor.numel() > 4 * MAX_VALUES:  # zeros take no memory
            raise UnknownValueError(
                function,
                f"copies {tensor.numel():,} elements to the host, but a trace computes no values",
            )
        if self._truths.get(tensor):
            return torch.ones(tensor.shape, dtype=tensor.dtype)
        number = self._number(tensor.dtype, True) if is_lost else 0
        number = number or self._counts.get(tensor, 0)
        differ = tensor.is_floating_point() and tensor.numel() in _DIFFERENT
        differ &= is_lost and tensor not in self._whole
        if not number and differ and (tensor.is_meta or not tensor.any()):
            with names.unseen():  # a script may scale them by their range, or sort them into a tree
                draw = torch.Generator().manual_seed(0)
                copy = torch.rand(tensor.shape, generator=draw).mul_(1e-6).to(tensor.dtype)
        elif not number and not tensor.is_meta:
            return tensor
        else:
            copy = torch.zeros(tensor.shape, dtype=tensor.dtype)
        if tensor in self._whole:
            self._whole[copy] = None
        if number or tensor.is_meta:  # else it was noted as it came to the host
            self.note(f"{function}: values read from the GPU were taken to be", f" {number}")
        return self.assumed(copy.fill_(number) if number else copy)

    def assumed(self, tensor: Tensor) -> Tensor:
        """Let conditions on a real tensor be traced both ways; return it."""
        self._assumed[tensor] = False
        return tensor

    def picked(self, operator: Any, args: Arguments, result: Any) -> Any:
        """Return the result of an operator on meta tensors; where it picks among a few candidates,
        with real numbers."""
        if operator not in _PICKS:
            return result
        picks = result if isinstance(result, Tensor) else result[-1]
        dim = args[1] if len(args) > 1 and type(args[1]) is int else -1
        if operator is aten.topk.default:
            dim = args[2] if len(args) > 2 else -1
        elif operator is aten.multinomial.default:
            dim = -1
        source = args[0]
        is_one = isinstance(result, Tensor) and not picks.ndim
        candidates = source.numel() if is_one or not source.ndim else source.shape[dim]
        most = MOST_NUMBERS if operator in _SORTS else _MOST_CANDIDATES
        largest = REAL_WHOLE_ELEMENTS if operator in _SORTS else MOST_NUMBERS
        if not 0 < candidates <= most or not 0 < picks.numel() <= largest:
            return result
        with names.unseen():
            numbers = torch.arange(1, picks.numel() + 1) % candidates  # 0 is no frequency
            is_removed = picks.ndim < source.ndim or is_one
            if not is_removed and picks.ndim:
                moved = torch.empty(picks.shape, device="meta").movedim(dim, -1)
                numbers = numbers.view(moved.shape).movedim(-1, dim)
            real = torch.empty_strided(picks.size(), picks.stride(), dtype=picks.dtype)
            real.copy_(numbers.view(picks.shape) if is_removed or not picks.ndim else numbers)
        self.note(
            f"{operator_name(operator)} was taken to pick all", f" {candidates:,} equally often"
        )
        return real if isinstance(result, Tensor) else type(result)((*result[:-1], real))

    def learn(
        self,
        func: Function,
        args: Arguments,
        named: Keywords,
        result: object,
    ) -> None:
        """Learn from a call what the truth of its result is, if that is known whatever the values
        are, how much it counts, and whether it follows from assumptions."""
        last: Any = result[-1] if isinstance(result, tuple) and result else result
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        writes = func is Tensor.__setitem__
        made = args[0] if writes else last
        if not isinstance(made, Tensor):
            return
        for first in tensors[:1]:
            keeps = func in _KEEPS and (first in self._whole or not first.is_floating_point())
            if keeps or func in _WHOLE:
                self._whole[made] = None
        is_open = func in _LIMITS and made.is_meta
        with suppress(RuntimeError):  # of tensors that torch.vmap computes with
            if is_open and self.numbers.follows(tensors):  # those that are drawn may be others
                is_open = any(map(self.numbers.is_drawn, tensors))
        most = self._most(func, args) if is_open else 1
        if made is args[0] and func not in _KEEPS:
            self._masks.pop(made, None)
        if writes and len(tensors) == 3 and tensors[2].ndim and tensors[2].dtype == torch.bool:
            most = self._selected(args[2]) / _size(made)
        # What is unlike one number is nearly all.
        if most < 1 or func in _ONES or (func in _UNEQUAL and len(tensors) == 1 and is_open):
            self._masks[made] = most
        if writes:
            return
        if func is torch.cat and any(each in self._masks for each in args[0]):
            self._masks[last] = sum(map(self._selected, args[0])) / _size(last)
        if (
            func in _NOT
            and self._decisions.assumptions.selected_share < 1
            and args[0] in self._masks
        ):
            self._masks[last] = 1 - self._masks[args[0]]  # the safe bytes hold all
        if func in _EQUAL and last.ndim == 1 and 0 in (each.ndim for each in tensors):
            self._masks[last] = 1 / _size(last)  # such as the rank of a label
        if func in _EQUAL and self._orders:
            for tensor in tensors:
                if tensor in self._orders:  # such as its rank in each row
                    self._masks[last] = 1 / max(self._orders[tensor], 1)
        if not last.is_meta:
            if func in _PICKING and isinstance(args[0], Tensor) and args[0].is_meta:
                self._assumed[last] = True
            elif self._assumed:
                known = [self._assumed.get(arg) for arg in args if isinstance(arg, Tensor)]
                if True in known or False in known:
                    self._assumed[last] = False not in known
            return
        if func in _ORDERS and last.ndim:
            self._orders[last] = min(last.shape)  # whatever dimension was sorted
        given = args[0] if isinstance(args[0], Tensor) else None
        if given is not None and func in _COUNTS and last.numel():
            is_ones = self._masks.get(given) == 1
            each = 1 if is_ones or given.dtype == torch.bool else self._counts.get(given)
            if each is not None:
                share = self._masks.get(given, 1) if last.numel() == 1 else 1
                self._counts[last] = round(each * given.numel() * share / last.numel())
            if is_ones:
                self._keep(last, self._counts[last])
        elif given is not None and self._counts and func in _KEEPS and given in self._counts:
            self._counts[last] = self._counts[given]
        elif (
            given is not None
            and func in _MOVES
            and not (given.is_meta or last.is_floating_point())
            and self.numbers.follows([given])
        ):
            self._counts[last] = self._value_of(given)
        elif func in _EACH:
            with suppress(RuntimeError, TypeError, ValueError):  # of what is no number
                if (number := self._number_of_each(func, args, named)) > 0:
                    self._counts[last] = number
        if func in _SOFTMAX and last.ndim:
            self._counts[last] = 1 / max(last.shape[-1], 1)  # they add up to one
        elif func in _KEEPS:
            source = args[0][0] if given is None else given
            if source in self._masks and last not in self._masks:
                self._masks[last] = self._masks[source]
            if source.dtype == torch.bool != last.dtype:
                self._counts[last] = 1
        if self._masks.get(last) == 1 and last.dtype != torch.bool:
            self._keep(last, 1)
        truth = self._truth(func, args)
        if truth is not None:
            self._truths[last] = truth

    def _number_of_each(self, func: Function, args: Arguments, named: Keywords) -> float:
        """Return what a function makes of what its arguments are taken to be, which is 0 where
        nothing is known of them; other factors, which may be masks, are 1."""

        def taken(arg: Any) -> Any:
            if not isinstance(arg, Tensor):
                return _plain(arg)
            is_one = not arg.is_meta and arg.numel() == 1
            return self._value_of(arg) if is_one else self._counts.get(arg, 0)

        given, number = [*map(taken, args)], 0.0
        if func in _MULTIPLIES:
            if any(arg in self._counts for arg in args if isinstance(arg, Tensor)):
                number = math.prod(filter(None, given))
        elif any((*given, *named, func in _FROM_NOTHING)):
            # What is named may be a tensor, which must not be held.
            number = (_made_of.__wrapped__ if named else _made_of)(func, *given, **named)
        return number if math.isfinite(number) else 0

    def _keep(self, tensor: Tensor, number: float) -> None:
        """Let each element of a small tensor be a known number."""
        with suppress(RuntimeError):  # it has no storage
            is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
            if is_whole and not self.numbers.follows([tensor]):
                # What is unlike a number is nearly all, but what is like it is not known.
                self.numbers.keep(tensor, torch.tensor(number), is_drawn=number == 1)

    def _most(self, func: Function, args: Arguments) -> float:
        """Return the share of the elements of a result that are not 0, at most."""
        if func in _FILLS and len(args) == 3 and getattr(args[1], "dtype", 0) == torch.bool:
            func, args = torch.where, (*args[1:], args[0])
        if func is torch.where and len(args) == 3:
            mask, chosen, other = args
            others = min(1 - self._share(mask, 0), self._share(other, 1))
            return min(self._share(mask, 1), self._share(chosen, 1)) + others
        if func in _BOTH:
            return min(self._share(each, None if func in _AND else 1) for each in args)
        is_above = type(limit := args[-1]) in _READ_NUMBERS and limit >= 0
        is_other = func in _GREATER or (func in _UNEQUAL and limit == 0)
        return self._masks.get(args[0], 1) if is_above and is_other else 1

    def _share(self, mask: Any, usual: float | None = None) -> float:
        """Return the share of its elements that a mask selects, which are not 0."""
        if not isinstance(mask, Tensor):
            return bool(_plain(mask))
        with suppress(RuntimeError):  # of tensors that torch.vmap computes with
            # More are made up each time, and no number that is drawn is 0.
            is_known = (
                mask.numel() <= MOST_NUMBERS
                and (self.numbers.makes_up or self.numbers.follows([mask]))
                and not (mask.is_floating_point() and self.numbers.is_drawn(mask))
            )
            if is_known:
                with names.unseen():
                    if (known := self.numbers.of_mask(mask)) is not None:
                        return int(known.count_nonzero()) / _size(known)
        share = self._masks.get(mask, usual)
        return self._decisions.assumptions.selected_share if share is None else share

    def _selected(self, mask: Tensor) -> float:
        return mask.numel() * self._share(mask)

    def _truth(self, func: Function, args: Arguments) -> bool | None:
        if func in _NEVER or func in _ALWAYS:
            return func in _ALWAYS
        if (func in _EQUAL or func in _UNEQUAL) and args[0] is args[1]:
            return func in _EQUAL  # not a number is the one value that is unlike itself
        known = [
            self._known(arg, func) if isinstance(arg, Tensor) else _plain(arg) for arg in args[:2]
        ]
        if func in _ALL and known[0] is None and running_place() is None:
            return True  # PyTorch's own check of arguments
        if func in _SAME:
            return known[0]
        if func in _EQUAL and known[0] is False and known[1] == 0 and known[1] is not None:
            return True
        if func in _ORDERED and isinstance(limit := known[-1], float | int):
            return (limit > 0) is (func in _LESS) if abs(limit) >= _FAR else None
        if func in _NOT:
            return None if known[0] is None else not known[0]
        for functions, decides in ((_OR, True), (_AND, False)):
            if func in functions and (decides in known or None not in known):
                return decides if decides in known else not decides
        return None

    def _known(self, tensor: Tensor, func: Function) -> bool | None:
        """Return what all elements of ``tensor`` are, if that is known."""
        if tensor.is_meta or func not in _OR | _AND or tensor.dtype != torch.bool:
            return self._truths.get(tensor)
        return {0.0: False, 1.0: True}.get(self._share(tensor))

    def _value_of(self, tensor: Tensor) -> Any:
        """Return the largest number of a real tensor; 0 if it has none."""
        with names.unseen():
            return tensor.max().item() if tensor.numel() else 0


@cache
def _made_of(func: Function, *numbers: Any, **named: Any) -> Any:
    with names.unseen():
        return func(*(torch.tensor(float(each)) for each in numbers), **named).item()


def _size(mask: Tensor) -> int:
    return max(mask.numel(), 1)


class _ReadNumber:
    """What numbers that were read from the GPU share: comparing one, or what is computed from it, is
    a condition."""

    values: ReadValues
    usual: float
    """What the number is where each condition is as usual."""

    @classmethod
    def of(cls, values: ReadValues, number: float, usual: float) -> Self:
        """A number of this value."""
        made = cls(number)  # type: ignore[call-arg]  # a class that follows takes it
        made.values, made.usual = values, usual
        return made

    def __bool__(self) -> bool:
        return self.values.decide(bool(self.usual))

    def __hash__(self) -> int:
        return super().__hash__()

    def __reduce__(self) -> tuple[Any, ...]:
        number = _plain(self)
        return type(number), (number,)


class _ReadFloat(_ReadNumber, float):
    """A floating-point number that was read from the GPU."""


class _ReadInt(_ReadNumber, int):
    """A whole number that was read from the GPU."""


_READ_NUMBERS: Final[dict[type, type[Any]]] = {float: _ReadFloat, int: _ReadInt}


def _plain(number: Any) -> Any:
    if not isinstance(number, _ReadNumber):
        return number
    kind: Any = type(number).__mro__[2]
    return kind.__pos__(number)


def type_of(kind: Callable[[object], Any], value: object) -> Any:
    """Call ``type(value)``, or what else has that name: code that compares types expects a number's."""
    return kind(_plain(value) if kind is type else value)


def _usual(number: Any) -> Any:
    return number.usual if isinstance(number, _ReadNumber) else number


def _comparing(compare: Callable[[Any, Any], Any]) -> Function:
    def compared(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        if other is self or not math.isfinite(other):  # whether it is a number, or infinite
            return compare(self.usual, _usual(other))
        place = running_place()
        if place is not None and not place.compares and compare in (operator.eq, operator.ne):
            self.values.branch_at(place)
            return compare(_plain(self), other)  # a key of a dictionary
        usual = compare(self.usual, _usual(other))
        if isinstance(other, _ReadNumber) and self.usual == other.usual and self.usual:
            usual |= compare in (operator.gt, operator.lt)  # better than the best, each time
        return self.values.decide(usual)

    return compared


def _computing(compute: Function) -> Function:
    def result(*numbers: Any) -> Any:
        try:
            return compute(*numbers)
        except ZeroDivisionError:
            return 0.0

    def computed(self: Any, *others: Any) -> Any:
        if not all(isinstance(other, int | float | None) for other in others):
            return NotImplemented
        plain = [_plain(each) for each in (self, *others)]
        number, usual = result(*plain), result(self.usual, *map(_usual, others))
        kind = _READ_NUMBERS.get(type(number))
        return number if kind is None else kind.of(self.values, number, usual)

    return computed


def _reflected(compute: Function) -> Function:
    return lambda right, left: compute(left, right)


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(_ReadNumber, f"__{_name}__", _comparing(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(_ReadNumber, f"__{_name}__", _computing(getattr(operator, _name)))
    setattr(_ReadNumber, f"__r{_name}__", _computing(_reflected(getattr(operator, _name))))
for _name, _function in (("neg", operator.neg), ("abs", abs), ("round", round)):
    setattr(_ReadNumber, f"__{_name}__", _computing(_function))
