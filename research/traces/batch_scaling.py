"""One trace gives the run at every batch size: the job is traced at a prime batch size, and what
the prime divides scales.

Sizes, shapes and strides of a run are products, so a prime that divides no size of the model tells
which of them hold the batch.  Scratch memory does not scale; it is computed again from the
operators' arguments, by the recorder that recorded the run.  Of the calls that take scratch memory
only the layouts of tensors are kept: what a rule reads of its arguments.  This needs no second
trace and gives workspaces of libraries at each batch size, which
:mod:`gpumemnet.tracing.model_tracer` can only interpolate.  A sum of a term with the batch and one
without it would be taken for a constant; no vision model has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from gpumemnet.allocator import EMPTY_CACHE
from gpumemnet.errors import ExtractError
from gpumemnet.extract.module_calls import ModelInputs, ModulePath
from gpumemnet.torch_private.names import find_operator
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.operators.library_workspaces import blas_workspace
from gpumemnet.tracing.operators.rules import SCRATCH_RULES, Platform, scratch
from gpumemnet.tracing.recorder import Recorder
from gpumemnet.tracing.timeline import Timeline
from gpumemnet.tracing.training_loop import record


class TensorLayout(NamedTuple):
    """Shape, strides (both in elements) and element type of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        """Return the layout of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def tensor(self) -> Tensor:
        """Return a meta tensor with this layout."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True, eq=False)
class OperatorCall:
    """One call of an operator that takes scratch memory.

    Attributes:
        start, end: its events are ``events[start:end]`` of the timeline; the range is empty if it
            allocated nothing.
        operator: name of the operator with its overload, such as ``aten.mm.default``.
        args, kwargs: its arguments, a :class:`TensorLayout` in place of every tensor.
        outputs: the layouts of its outputs.
    """

    start: int
    end: int
    operator: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[TensorLayout, ...]

    @classmethod
    def of(
        cls,
        start: int,
        end: int,
        operator: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outputs: Sequence[Tensor],
    ) -> OperatorCall:
        """Return the record of a call."""
        return cls(
            start,
            end,
            str(operator),
            tuple(map(_layouts, args)),
            {name: _layouts(value) for name, value in kwargs.items()},
            tuple(map(TensorLayout.of, outputs)),
        )


def _layouts(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorLayout.of(value)
    return [_layouts(entry) for entry in value] if isinstance(value, list | tuple) else value


class CallRecorder(Recorder):
    """A recorder that also keeps the calls of operators that take scratch memory."""

    def __init__(self, modules: ModulePath, platform: Platform) -> None:
        super().__init__(modules, platform)
        self.calls: list[OperatorCall] = []

    def ran(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outputs: Sequence[Tensor],
        fresh: Sequence[Tensor],
    ) -> None:
        """Record the call, and keep it if it takes scratch memory."""
        start = len(self._events)
        super().ran(func, args, kwargs, outputs, fresh)
        if func in SCRATCH_RULES or blas_workspace(func, self._platform) is not None:
            self.calls.append(
                OperatorCall.of(start, len(self._events), func, args, kwargs, outputs)
            )

    def arrived(
        self,
        tensor: Tensor,
        memory_class: str = "temporary",
        module: str | None = None,
        at: int | None = None,
    ) -> None:
        """As :meth:`Recorder.arrived`; calls after ``at`` move with their events."""
        before = len(self._events)
        super().arrived(tensor, memory_class, module, at)
        if at is not None and len(self._events) > before:
            self.calls = [
                replace(c, start=c.start + 1, end=c.end + 1) if c.start >= at else c
                for c in self.calls
            ]


def scalable_run(
    model: nn.Module, inputs: ModelInputs, options: TraceOptions, platform: Platform
) -> ScalableRun:
    """Trace ``model`` with ``inputs``, whose batch size is a prime from :func:`prime_for`.

    Raises:
        ExtractError: names the operator or the line of code that cannot be traced.
    """
    recorders: list[CallRecorder] = []

    def new_recorder(modules: ModulePath, on: Platform) -> CallRecorder:
        recorders.append(CallRecorder(modules, on))
        return recorders[-1]

    timeline = record(model, inputs, options, platform, new_recorder=new_recorder).timeline
    return ScalableRun(timeline, tuple(recorders[0].calls), inputs.batch_size)


PRIMES: Final = (131, 139, 149, 151, 163, 167)
"""Batch sizes to trace at.  They are large enough to stand out, and leave tensors of images below
2**31 elements, from which on PyTorch runs other kernels."""


_WORKSPACE: Final = "workspace"


def prime_for(dimensions: Iterable[int]) -> int:
    """Return a prime that divides none of the model's own ``dimensions``.

    Args:
        dimensions: sizes of the dimensions of parameters, buffers and inputs, without the batch.

    Raises:
        ExtractError: every prime divides one of them.
    """
    taken = set(dimensions)
    for prime in PRIMES:
        if all(dimension % prime or not dimension for dimension in taken):
            return prime
    raise ExtractError(
        f"the model has dimensions that {', '.join(map(str, PRIMES))} divide: trace each batch size by itself"
    )


@dataclass(frozen=True, slots=True, eq=False)
class ScalableRun:
    """A run that was traced at a prime batch size.

    Attributes:
        timeline: the run.
        calls: its calls of operators that take scratch memory, in order.
        batch_size: the prime.
    """

    timeline: Timeline
    calls: tuple[OperatorCall, ...]
    batch_size: int

    def at(self, batch_size: int, platform: Platform) -> tuple[Timeline, dict[str, int]]:
        """Return the run at ``batch_size`` on ``platform``, and the largest piece of scratch memory
        of each kind, in bytes.

        Raises:
            ExtractError: the run has memory that no call explains.
        """
        with torch.no_grad():
            repetition = _RepeatedRun(self, batch_size, platform)
            return repetition.timeline(), repetition.largest


class _RepeatedRun:
    """Feeds a recorded run to a new recorder, with another batch size."""

    def __init__(self, run: ScalableRun, batch_size: int, platform: Platform) -> None:
        self._run = run
        self._batch_size = batch_size
        self._platform = platform
        self._recorder = Recorder(ModulePath(nn.Identity()), platform)
        self.largest: dict[str, int] = {}
        self._tensors: dict[int, Tensor] = {}

    def timeline(self) -> Timeline:
        """Return the run at the new batch size."""
        timeline, recorder = self._run.timeline, self._recorder
        calls = iter(self._run.calls)
        call = next(calls, None)
        phases, starts = list(timeline.phases), list(timeline.step_starts[:-1])
        index, step = 0, 0
        while index < len(timeline.events) or call is not None:
            while (starts and starts[0] <= index) or (phases and phases[0].start <= index):
                if phases and phases[0].start <= index and phases[0].step <= step:
                    recorder.begin(phases.pop(0).name)
                elif starts and starts[0] <= index:
                    starts.pop(0)
                    recorder.begin_step()
                    step += 1
                else:
                    break
            if call is not None and call.start == index:
                self._repeat(call)
                index, call = call.end, next(calls, None)
            else:
                self._event(timeline.events[index])
                index += 1
        result = recorder.timeline()
        recorder.close()
        return result

    def _event(self, event: int) -> None:
        if event == EMPTY_CACHE:
            self._recorder.emptied()
        elif event >= 0:
            storage = self._run.timeline.storages[event]
            if storage.memory_class == _WORKSPACE:
                raise ExtractError(
                    f"{storage.operator} takes scratch memory, but its call was not kept"
                )
            self._tensors[event] = tensor = self._bytes(event)
            self._recorder.arrived(tensor, storage.memory_class, storage.module)
        elif self._run.timeline.storages[~event].memory_class != _WORKSPACE:
            del self._tensors[~event]

    def _repeat(self, call: OperatorCall) -> None:
        storages = self._run.timeline.storages
        events = [event for event in self._run.timeline.events[call.start : call.end] if event >= 0]
        births = [event for event in events if storages[event].memory_class != _WORKSPACE]
        fresh = [self._bytes(event) for event in births]
        operator, args, kwargs, outputs = _arguments(call, self._run.batch_size, self._batch_size)
        pieces = scratch(operator, args, kwargs, outputs, self._platform)
        for piece in pieces:
            self.largest[piece.kind] = max(self.largest.get(piece.kind, 0), piece.expected_bytes)
        self._recorder.called(operator, fresh, pieces)
        for event, tensor in zip(births, fresh, strict=True):
            self._recorder.classify((tensor,), storages[event].memory_class, storages[event].module)
            self._tensors[event] = tensor

    def _bytes(self, event: int) -> Tensor:
        size = _scaled(
            self._run.timeline.storages[event].size_bytes, self._run.batch_size, self._batch_size
        )
        return torch.empty(size, dtype=torch.uint8, device="meta")


def _arguments(
    call: OperatorCall, before: int, after: int
) -> tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]:
    """Return operator, arguments and outputs of ``call`` at another batch size, as meta tensors."""
    args = tuple(_at(value, before, after) for value in call.args)
    kwargs = {name: _at(value, before, after) for name, value in call.kwargs.items()}
    outputs = [_at(layout, before, after) for layout in call.outputs]
    return find_operator(call.operator.removeprefix("aten.")), args, kwargs, outputs


def _at(value: Any, before: int, after: int) -> Any:
    if isinstance(value, TensorLayout):
        shape, strides = (
            tuple(_scaled(number, before, after) for number in numbers) for numbers in value[:2]
        )
        return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
    if isinstance(value, int) and not isinstance(value, bool):
        return _scaled(value, before, after)
    return [_at(entry, before, after) for entry in value] if isinstance(value, list) else value


def _scaled(number: int, before: int, after: int) -> int:
    return number if number % before else number // before * after
