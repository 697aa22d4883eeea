"""Values that a script reads from the simulated GPU, where nothing is computed.

Numbers that are read are 0, because scripts print and log them.  Checks for infinite numbers find
none.  Any other condition on values is false; a script that branches in its own code can be traced
a second time the other way (conditions true, numbers 1). An operator that selects elements by their
values selects all of them, which is the most that it can take, or a stated share.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gpumemnet.extract.placement import HINT, MissingValues
from gpumemnet.sandbox.user_code import UnknownValueError, is_user_code, running_line
from gpumemnet.torch_private import script as names
from gpumemnet.torch_private.names import operator_name, schema
from gpumemnet.tracing.missing_values import guess_of, selection_of, selects

MAX_VALUES: Final = 2**26
"""Largest number of elements of a copy to the host, where copies are real tensors."""
_READS: Final = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")


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
_ALL: Final = _functions("all") | {names.ALL_TRUE.value()}
_SAME: Final = _ALL | _functions(
    "any", "clone", "detach", "reshape", "view", "squeeze", "flatten", "bool"
)
_NOT: Final = _functions("logical_not", "bitwise_not", "__invert__")
_OR: Final = _functions("logical_or", "bitwise_or", "__or__", "__ror__")
_AND: Final = _functions("logical_and", "bitwise_and", "__and__", "__rand__")
_EQUAL: Final = _functions("eq", "__eq__")
_UNEQUAL: Final = _functions("ne", "__ne__")
_GREATER: Final = _functions("gt", "__gt__")


class ReadValues(MissingValues):
    """Gives values to a script that reads them from the GPU; each such line is noted.

    Args:
        conditions_hold: whether conditions that nothing tells are true and numbers 1, instead of false
            and 0.
        selected_share: share of the elements that operators select which select by values.
        best_effort: whether to guess what operators of other libraries return that do not describe
            it.
    """

    def __init__(
        self, *, conditions_hold: bool = False, selected_share: float = 1, best_effort: bool = False
    ) -> None:
        self._conditions_hold = conditions_hold
        self._selected_share = selected_share
        self._best_effort = best_effort
        self._sentences: dict[str, str] = {}
        self._truths: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        self.selections: dict[str, None] = {}
        """Lines that select elements by values of the GPU, in order."""
        self.branches: dict[str, None] = {}
        """Lines of the script itself that branch on such a value, in order."""

    @property
    def number(self) -> int:
        """What numbers that are read are taken to be."""
        return int(self._conditions_hold)

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each operator and line."""
        return tuple(self._sentences.values())

    def note(self, what: str) -> None:
        """Note ``what`` with the running line of the script, once."""
        where = running_line()
        sentence = f"{where}: {what}." if where else f"{what}."
        self._sentences.setdefault(sentence, sentence)

    def note_once(self, sentence: str) -> None:
        """Note a sentence that does not belong to a line."""
        self._sentences.setdefault(sentence, f"{sentence}.")

    def value(self, function: str, tensor: Tensor) -> Any:
        """Return a copy on the host."""
        return self.on_host(function, tensor)

    def result(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: UnknownValueError
    ) -> Any:
        """Return what is read: a truth value or a number; an operator that selects elements selects
        its share.

        Raises:
            UnknownValueError: as ``error``, for another shape that depends on values.
        """
        if schema(operator).name not in _READS:
            selection = selection_of(operator, self._selected_share)
            guess = selection or guess_of(operator, args, kwargs)
            if guess is None or not (selection or self._best_effort):
                raise UnknownValueError(error.operator, f"{error.reason}{(guess and HINT) or ''}")
            if selects(operator):
                self.selections.setdefault(running_line() or error.operator)
            result, what = guess(*args, **kwargs)
            self.note(f"{error.operator} {what}")
            return result
        dtype = args[0].dtype
        if operator_name(operator) != "_local_scalar_dense" or dtype == torch.bool:
            return self.condition(args[0])
        self.note(f"a value read from the GPU was taken to be {self.number}")
        return float(self.number) if dtype.is_floating_point else self.number

    def condition(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is taken to be true."""
        known = self._truths.get(tensor)
        if known is not None:
            return bool(known)
        self.note(
            f"a condition on values of the GPU was taken to be {'true' if self._conditions_hold else 'false'}"
        )
        self.branched(sys._getframe(1))
        return self._conditions_hold

    def item(self, tensor: Tensor) -> Any:
        """Return the value of a tensor of one element: a number that notices what compares it."""
        if tensor.dtype == torch.bool:
            return self.condition(tensor)
        self.note(f"a value read from the GPU was taken to be {self.number}")
        if tensor.dtype.is_complex:
            return complex(self.number)
        return _ReadFloat.of(self) if tensor.dtype.is_floating_point else _ReadInt.of(self)

    def on_host(self, function: str, tensor: Tensor) -> Tensor:
        """Return a copy of ``tensor`` on the host, all zeros."""
        if tensor.numel() > MAX_VALUES:
            raise UnknownValueError(
                function,
                f"copies {tensor.numel():,} elements to the host, but a trace computes no values",
            )
        if self._truths.get(tensor):
            return torch.ones(tensor.shape, dtype=tensor.dtype)
        self.note(f"{function}: values read from the GPU were taken to be {self.number}")
        return torch.full(tensor.shape, self.number, dtype=tensor.dtype)

    def learn(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        result: object,
        is_called_by_lbfgs: bool,
    ) -> None:
        """Learn from a call what the truth of its result is, if that is known whatever the values
        are."""
        if isinstance(result, Tensor) and result.is_meta:
            truth = (
                True
                if is_called_by_lbfgs and _is_curvature_condition(func, args)
                else self._truth(func, args)
            )
            if truth is not None:
                self._truths[result] = truth

    def branched(self, frame: Any) -> None:
        """A value decides how the code goes on: keep the line if it is the script's own."""
        while frame is not None and frame.f_code.co_filename in _BETWEEN:
            frame = frame.f_back
        if frame is not None and is_user_code(frame.f_code.co_filename):
            self.branches.setdefault(running_line())

    def _truth(self, func: Callable[..., Any], args: tuple[Any, ...]) -> bool | None:
        if func in _NEVER or func in _ALWAYS:
            return func in _ALWAYS
        if (func in _EQUAL or func in _UNEQUAL) and args[0] is args[1]:
            return func in _EQUAL  # not a number is the one value that is unlike itself
        known = [self._truths.get(arg) if isinstance(arg, Tensor) else arg for arg in args[:2]]
        if func in _ALL and known[0] is None:
            self.note("all() of values on the GPU was taken to be true")
            return True
        if func in _SAME:
            return known[0]
        if func in _NOT:
            return None if known[0] is None else not known[0]
        for functions, decides in ((_OR, True), (_AND, False)):
            if func in functions and (decides in known or None not in known):
                return decides if decides in known else not decides
        return None


def _is_curvature_condition(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether LBFGS asks here if it may keep an update (``if ys > 1e-10`` in
    ``torch/optim/lbfgs.py``), as it can in training."""
    return func in _GREATER and isinstance(args[1], float) and args[1] > 0


class _ReadNumber:
    """What numbers that were read from the GPU share: comparing one is a branch."""

    values: ReadValues

    @classmethod
    def of(cls, values: ReadValues) -> Self:
        number = cls(values.number)  # type: ignore[call-arg]  # a class that follows takes it
        number.values = values
        return number

    def __lt__(self, other: Any) -> bool:
        return self._compared(super().__lt__(other))  # type: ignore[misc]

    def __le__(self, other: Any) -> bool:
        return self._compared(super().__le__(other))  # type: ignore[misc]

    def __gt__(self, other: Any) -> bool:
        return self._compared(super().__gt__(other))  # type: ignore[misc]

    def __ge__(self, other: Any) -> bool:
        return self._compared(super().__ge__(other))  # type: ignore[misc]

    def __eq__(self, other: object) -> bool:
        return self._compared(super().__eq__(other))

    def __bool__(self) -> bool:
        return self._compared(self != 0)

    def __hash__(self) -> int:
        return super().__hash__()

    def _compared(self, outcome: bool) -> bool:
        self.values.branched(sys._getframe(2))
        return outcome


class _ReadFloat(_ReadNumber, float):
    """A floating-point number that was read from the GPU."""

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float.__add__(self, 0.0),)


class _ReadInt(_ReadNumber, int):
    """A whole number that was read from the GPU."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int.__add__(self, 0),)


_BETWEEN: Final = frozenset({__file__, *names.WRAPPER_FILES})
"""Files that stand between the code that reads a value and :class:`ReadValues`."""
