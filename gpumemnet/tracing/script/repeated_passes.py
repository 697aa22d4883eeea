"""Passes through a model without gradients that repeat, as evaluation and generation do: from the
fourth on, the model does not run, and only the output is recorded, because the allocator's cache
then holds what a pass takes.

So are functions that turn gradients off by a decorator, as those do that plan or sample, and what
runs within a long pass, such as the steps of a sampler that is a module.

A pass repeats another if the model is the same, and numbers, switches and words that its modules
keep, the shapes of its tensors and its other arguments are equal: a model that counts its passes
always runs.  It must also allocate and free the same in the same order, and leave nothing but its
output and what takes the place of others in the attributes of modules, such as the attention of the
last pass; they get it again.  What other arguments hold must be equal too, some
levels deep, and as before when it returns.  Where more is on the GPU than when a pass last ran,
because outputs are gathered, it runs again; where a quarter more is, as beside the graph of a student
that waits for its backward pass, as often as a new one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from copy import deepcopy
from dataclasses import dataclass
from functools import wraps
from inspect import isfunction
from typing import Any, Final

import torch
from numpy import ndarray
from torch import Tensor, nn

from gpumemnet.torch_private.names import (
    Function,
    own_buffers,
    storage_id,
    tree_map_only,
    without_function_modes,
)
from gpumemnet.torch_private.script import unseen
from gpumemnet.tracing.recorder import RecordedPass, Recorder

_RUNS: Final = 3
"""How often equal passes run before they are recorded without running."""
_GROWTH: Final = 1 / 32
"""By how much more may be on the GPU than when a pass last ran."""
_BESIDE: Final = 1 / 4
"""By how much more there is where others count anew, as those of a teacher beside a student's graph."""
_DEPTH: Final = 4
"""How deep arguments are compared."""
_MOST_HELD: Final = 64
"""Of a larger collection only the length is compared."""
_LONG_EVENTS: Final = 2**12
"""A pass with as many allocations and releases may repeat others within."""
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
        attributes: where modules of the model keep tensors that it made: path and name.
        layouts: of the tensors in its output and these attributes: size, stride, offset, type, number
            of its storage in the pass.
        runs: how many equal passes ran, one after the other.
        live_bytes: bytes on the GPU when the last one began.
    """

    recorded: RecordedPass
    output: Any
    attributes: list[tuple[str, str]]
    layouts: list[tuple[torch.Size, tuple[int, ...], int, torch.dtype, int]]
    runs: int
    live_bytes: int


class RepeatedPasses:
    """Runs a model, or records its pass again.

    Args:
        recorder: records passes.
        is_outermost: whether no module runs.
        starting: called before a pass that is not within another is recorded again.
        trained: returns how often the script has trained: functions repeat between two steps.
    """

    def __init__(
        self,
        recorder: Recorder,
        is_outermost: Callable[[], bool],
        starting: Callable[[], None],
        trained: Callable[[], Hashable],
    ) -> None:
        self._recorder = recorder
        self._is_outermost = is_outermost
        self._starting = starting
        self._trained = trained
        self._known: dict[Hashable, _Known] = {}
        self._began = 0
        """The event at which the running pass began."""

    def forget(self) -> None:
        """Run each model again before its pass is recorded again."""
        self._known.clear()

    def around(self, call: Function, *, turns_off: bool = False) -> Function:
        """Return what takes the place of ``Module.__call__``, or of a function that ``turns_off``
        gradients."""

        @wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            def key() -> Hashable:
                with without_function_modes():
                    steps = turns_off and self._trained()  # an average of weights counts steps
                    return call, steps, _settings(), _inside((args, kwargs), _DEPTH)

            is_outermost, start = self._is_outermost(), self._recorder.now()
            if is_outermost:
                self._began = start
            is_part = not is_outermost and start - self._began < _LONG_EVENTS
            if is_part or (torch.is_grad_enabled() and not turns_off):
                return call(*args, **kwargs)
            before, live = key(), self._recorder.live_bytes()
            model = None if turns_off else args[0]
            known = self._known.get(before)
            if (
                known is not None
                and known.runs >= _RUNS
                and live <= known.live_bytes * (1 + _GROWTH)
            ):
                if is_outermost:
                    self._starting()
                return self._again(known, model)
            output = call(*args, **kwargs)
            if self._recorder.now() > start and key() == before:
                self._learn(before, start, output, live, model)
            return output

        return run

    def around_decorator(self, decorate: Function) -> Function:
        """Return what takes the place of how a context such as ``torch.no_grad()`` decorates."""

        def decorated(context: Any, function: Any) -> Any:
            call = decorate(context, function)
            turns_off = isinstance(context, torch.no_grad | torch.inference_mode)
            return self.around(call, turns_off=True) if turns_off and isfunction(call) else call

        return decorated

    def _learn(
        self, key: Hashable, start: int, output: Any, live_bytes: int, model: nn.Module | None
    ) -> None:
        before = self._known.pop(key, None)
        recorded = self._recorder.recorded_since(start)
        if recorded is None:
            return
        found: list[Tensor] = []
        try:
            with without_function_modes():
                form = _form(output, found)
                attributes = {} if model is None else _attributes(model)
        except _NotRepeatedError:
            return
        numbers = {recorded.left.get(storage_id(tensor)) for tensor in found}
        kept = {key for key, number in recorded.left.items() if number not in numbers}
        attributes = {at: each for at, each in attributes.items() if storage_id(each) in kept}
        found += attributes.values()
        # What a module makes is in the place of others, such as normed weights.
        is_held = kept == {*map(storage_id, attributes.values())}
        if None in numbers or len(kept) != len(recorded.freed) or not is_held:
            return
        layouts = [
            (
                tensor.size(),
                tensor.stride(),
                int(tensor.storage_offset()),
                tensor.dtype,
                recorded.left[storage_id(tensor)],
            )
            for tensor in found
        ]
        is_equal = (
            before is not None
            and before.recorded.events == recorded.events
            and before.layouts == layouts
            and repr(before.output) == repr(form)
            and live_bytes <= before.live_bytes * (1 + _BESIDE)
        )
        runs = before.runs + 1 if before is not None and is_equal else 1
        self._known[key] = _Known(recorded, form, [*attributes], layouts, runs, live_bytes)

    def _again(self, known: _Known, model: nn.Module | None) -> Any:
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
        )
        modules = {} if model is None else dict(model.named_modules())
        for (path, name), tensor in zip(known.attributes[::-1], tensors[::-1], strict=False):
            setattr(modules[path], name, tensor)
        return _filled(known.output, tensors)


def _attributes(model: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Return the tensors that are attributes or buffers of a model's modules, by path and name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in {**vars(module), **own_buffers(module)}.items()
        if isinstance(value, Tensor)
    }


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


def _inside(value: Any, depth: int) -> Hashable:
    """What a call may read in an argument, and change there."""
    if isinstance(value, Tensor | ndarray):
        order: tuple[int, ...] = ()
        if isinstance(value, Tensor) and value.layout is torch.strided:
            order = tuple(sorted(range(value.ndim), key=value.stride, reverse=True))
        is_meta = getattr(value, "is_meta", False)
        return type(value), tuple(value.shape), order, value.dtype, is_meta
    if isinstance(value, _PLAIN):  # numbers that were read compare as conditions
        return value if type(value) in _STATE else repr(value)
    if isinstance(value, dict):
        # Keys may be parameters, as those of an optimizer's state, which must not be held.
        keys = tuple(each if type(each) in _STATE else id(each) for each in value)
        return keys, _inside([*value.values()], depth)
    held, identity = value, 0
    if not isinstance(value, list | tuple | set | deque):
        held, identity = getattr(value, "__dict__", {}).values(), id(value)
    state: Hashable = ()
    if isinstance(value, nn.Module):
        state, held = _state(value), [each for each in held if type(each) is not dict]
    is_open = depth > 0 and len(held) <= _MOST_HELD
    inner = tuple(_inside(each, depth - 1) for each in held) if is_open else ()
    return type(value), identity, len(held), state, inner


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor stands in an output."""

    number: int


def _form(output: Any, found: list[Tensor]) -> Any:
    """Return ``output`` with a place for each tensor, which is added to ``found``."""

    def place(value: Any) -> Any:
        if type(value) is Tensor and value.is_meta and value.layout is torch.strided:
            found.append(value)
            return _Place(len(found) - 1)
        is_on_host = type(value) in (Tensor, ndarray) and not getattr(value, "is_meta", False)
        if isinstance(value, _PLAIN) or (is_on_host and not value.any()):
            return value  # without values, as a copy on the host is
        raise _NotRepeatedError

    return tree_map_only(object, place, output)


def _filled(form: Any, tensors: list[Tensor]) -> Any:
    """Return an output of this form."""

    def fill(value: Any) -> Any:
        if isinstance(value, _Place):
            return tensors[value.number]
        return deepcopy(value) if isinstance(value, Tensor | ndarray) else value

    with unseen():
        return tree_map_only(object, fill, form)
