"""Passes through a model without gradients that repeat, as evaluation and generation do: from the
fourth on, what the third allocated is recorded again, and the model does not run; from the seventh
on, only the output is, because the allocator's cache then holds what a pass takes.

So are functions that turn gradients off by a decorator, as those do that plan or sample.

A pass repeats another if the model is the same, and numbers, switches and words that its modules
keep, the shapes of its tensors and its other arguments are equal: a model that counts its passes
always runs.  It must also allocate and free the same in the same order, and leave nothing but its
output.  A model that is called with other objects, such as a cache, always runs.  A function may be:
what is in them, two levels deep, is then compared too, and must be as before when it returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from copy import deepcopy
from dataclasses import dataclass, is_dataclass
from functools import partial, wraps
from inspect import isfunction, isgeneratorfunction
from typing import Any, Final
from weakref import ref

import torch
from numpy import ndarray
from torch import Tensor, nn

from gpumemnet.torch_private.names import storage_id, without_function_modes
from gpumemnet.torch_private.script import WITHOUT_MODES
from gpumemnet.tracing.recorder import RecordedPass, Recorder

_RUNS: Final = 3
"""How often equal passes run before they are recorded without running."""
_WHOLE: Final = 6
"""How often all that equal passes allocate is recorded."""
_MOST_HELD: Final = 64
"""Of a larger collection only the length is compared."""
_STATE: Final = frozenset({bool, int, float, str})
_PLAIN: Final = (bool, int, float, str, type(None), torch.dtype, torch.device)


class _NotRepeatedError(Exception):
    """A pass has arguments or an output that another cannot be compared with."""


@dataclass(slots=True)
class _Known:
    """What equal passes do.

    Attributes:
        recorded: what the last one allocated.
        output: what it returned, with a number in the place of each tensor.
        layouts: of these tensors: size, stride, offset, type, number of its storage in the pass.
        runs: how many equal passes ran or were recorded, one after the other.
    """

    recorded: RecordedPass
    output: Any
    layouts: list[tuple[torch.Size, tuple[int, ...], int, torch.dtype, int]]
    runs: int


class RepeatedPasses:
    """Runs a model, or records its pass again.

    Args:
        recorder: records passes.
        is_outermost: whether no module runs.
        starting: called before a pass is recorded again.
    """

    def __init__(
        self, recorder: Recorder, is_outermost: Callable[[], bool], starting: Callable[[], None]
    ) -> None:
        self._recorder = recorder
        self._is_outermost = is_outermost
        self._starting = starting
        self._known: dict[Hashable, _Known] = {}

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return what takes the place of ``Module.__call__``."""

        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() or not self._is_outermost():
                return call(module, *args, **kwargs)
            return self._run(
                partial(call, module, *args, **kwargs),
                lambda: (ref(module), _state(module), _key((args, kwargs))),
            )

        return run

    def around_decorator(self, decorate: Callable[..., Any]) -> Callable[..., Any]:
        """Return what takes the place of how a context such as ``torch.no_grad()`` decorates."""

        def decorated(context: Any, function: Any) -> Any:
            call = decorate(context, function)
            is_plain = isfunction(function) and not isgeneratorfunction(function)
            if not is_plain or not isinstance(context, torch.no_grad | torch.inference_mode):
                return call
            names = function.__code__.co_names

            @wraps(call)
            def run(*args: Any, **kwargs: Any) -> Any:
                if not self._is_outermost():
                    return call(*args, **kwargs)
                return self._run(
                    partial(call, *args, **kwargs),
                    lambda: (
                        call,
                        tuple(_inside(function.__globals__.get(name), 0) for name in names),
                        _inside((*args, *kwargs.items()), 3),
                    ),
                )

            return run

        return decorated

    def _run(self, call: Callable[[], Any], describe: Callable[[], tuple[Any, ...]]) -> Any:
        def key() -> Hashable:
            with without_function_modes():
                return _settings(), *describe()

        try:
            before = key()
        except _NotRepeatedError:
            return call()
        known = self._known.get(before)
        if known is not None and known.runs >= _RUNS:
            known.runs += 1
            if known.runs <= _WHOLE:
                self._starting()
            return self._again(known)
        start = self._recorder.now()
        output = call()
        if self._recorder.now() > start and key() == before:
            self._learn(before, start, output)
        return output

    def _learn(self, key: Hashable, start: int, output: Any) -> None:
        before = self._known.pop(key, None)
        recorded = self._recorder.recorded_since(start)
        if recorded is None:
            return
        found: list[Tensor] = []
        try:
            with without_function_modes():
                form = _form(output, found)
        except _NotRepeatedError:
            return
        numbers = [recorded.left.get(storage_id(tensor)) for tensor in found]
        if None in numbers or set(numbers) != set(recorded.left.values()):
            return
        layouts = [
            (
                tensor.size(),
                tensor.stride(),
                int(tensor.storage_offset()),
                tensor.dtype,
                number or 0,
            )
            for tensor, number in zip(found, numbers, strict=True)
        ]
        is_equal = (
            before is not None
            and before.recorded.events == recorded.events
            and before.layouts == layouts
            and repr(before.output) == repr(form)
        )
        runs = before.runs + 1 if before is not None and is_equal else 1
        self._known[key] = _Known(recorded, form, layouts, runs)

    def _again(self, known: _Known) -> Any:
        storages: dict[int, Tensor] = {}
        tensors = []
        with without_function_modes():
            for size, stride, offset, dtype, number in known.layouts:
                whole = storages.get(number)
                if whole is None:
                    size_bytes = known.recorded.size_bytes(number)
                    whole = storages[number] = torch.empty(
                        size_bytes // dtype.itemsize, dtype=dtype, device="meta"
                    )
                typed = whole if whole.dtype == dtype else whole.view(dtype)
                tensors.append(typed.as_strided(size, stride, offset))
        self._recorder.record_again(
            known.recorded,
            {number: tensor.untyped_storage() for number, tensor in storages.items()},
            known.runs > _WHOLE,
        )
        return _filled(known.output, tensors)


def _state(model: nn.Module) -> Hashable:
    """What the modules of a model keep beside tensors and other objects."""
    return tuple(
        value
        for module in model.modules()
        for value in vars(module).values()
        if type(value) in _STATE
    )


def _settings() -> Hashable:
    """What a pass depends on beside its arguments."""
    return torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")


def _key(value: Any) -> Hashable:
    """A key that is equal for arguments of equal layouts."""
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
            raise _NotRepeatedError
        order = sorted(range(value.ndim), key=value.stride, reverse=True)
        return value.shape, value.is_contiguous(), tuple(order), value.dtype, value.is_meta
    if isinstance(value, tuple | list):
        return (type(value), *map(_key, value))
    if type(value) is dict:
        return tuple((name, _key(entry)) for name, entry in value.items())
    if isinstance(value, _PLAIN):
        return value
    raise _NotRepeatedError


def _inside(value: Any, depth: int = 2) -> Hashable:
    """What a function may read in an argument, and change there."""
    if isinstance(value, _PLAIN):  # numbers that were read compare as conditions
        return value if type(value) in _STATE else repr(value)
    if isinstance(value, Tensor | ndarray):
        return type(value), tuple(value.shape), value.dtype, getattr(value, "is_meta", False)
    held = value.values() if isinstance(value, dict) else value
    is_collection = isinstance(value, dict | list | tuple | set | deque)
    if not is_collection:
        held = getattr(value, "__dict__", {}).values()
    state: Hashable = ()
    if isinstance(value, nn.Module):
        state, held = _state(value), [each for each in held if type(each) is not dict]
    is_open = depth > 0 and len(held) <= _MOST_HELD
    inner = tuple(_inside(each, depth - 1) for each in held) if is_open else ()
    return type(value), 0 if is_collection else id(value), len(held), state, inner


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor stands in an output."""

    number: int


class _Zeros:
    """A copy on the host of what has no values."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __repr__(self) -> str:
        return f"{type(self.values)} {self.values.shape} {self.values.dtype}"


def _form(value: Any, found: list[Tensor]) -> Any:
    """Return ``value`` with a place for each tensor, which is added to ``found``."""
    if (
        type(value) in (Tensor, ndarray)
        and not getattr(value, "is_meta", False)
        and not value.any()
    ):
        return _Zeros(value)
    if isinstance(value, Tensor):
        if type(value) is not Tensor or not value.is_meta or value.layout is not torch.strided:
            raise _NotRepeatedError
        found.append(value)
        return _Place(len(found) - 1)
    if isinstance(value, _PLAIN):
        return value
    if type(value) in (tuple, list):
        return type(value)(_form(entry, found) for entry in value)
    if type(value) is dict or (isinstance(value, dict) and is_dataclass(value)):
        return type(value), {name: _form(entry, found) for name, entry in value.items()}
    raise _NotRepeatedError


def _filled(form: Any, tensors: list[Tensor]) -> Any:
    """Return an output of this form."""
    if isinstance(form, _Place):
        return tensors[form.number]
    if isinstance(form, _Zeros):
        with WITHOUT_MODES.value()(), without_function_modes():
            return deepcopy(form.values)
    if isinstance(form, tuple) and len(form) == 2 and isinstance(form[0], type):
        kind, entries = form
        return kind(**{name: _filled(entry, tensors) for name, entry in entries.items()})
    if isinstance(form, tuple | list):
        return type(form)(_filled(entry, tensors) for entry in form)
    return form
