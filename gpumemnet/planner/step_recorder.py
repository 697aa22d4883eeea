"""Records, beside the storages of a training step, what its operators compute and which module
saves what for the backward pass.

Positions are numbers of events of the timeline: what is recorded at position ``p`` happened after
``events[:p]``.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from gpumemnet.extract.known_layouts import argument_tensors
from gpumemnet.planner.recomputing import keeps_results
from gpumemnet.torch_private.engine import next_node_number, running_node_number
from gpumemnet.torch_private.names import (
    Arguments,
    Keywords,
    operator_name,
    schema,
    storage_id,
    storage_owners,
    tree_leaves,
    without_function_modes,
)
from gpumemnet.tracing.recorder import Recorder

_TYPES: Final = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
_ALLOCATES_ONLY: Final = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
)


@dataclass(slots=True)
class OperatorCost:
    """One call of an operator.

    Attributes:
        start, end: its position before and after it ran.
        phase: index of its phase in the timeline.
        call: index of the module call that it belongs to; -1 outside of modules.
        flops: floating-point operations of a matrix product, convolution or attention; 0 for
            others.
        moved_bytes: bytes that it reads and writes.
        element_type: ``fp64``, ``fp32``, ``fp16`` or ``bf16``, and ``tf32`` for a convolution in
            fp32.
        is_kept: whether its results are kept when cheap operators are recomputed.
    """

    start: int
    end: int
    phase: int
    call: int
    flops: int
    moved_bytes: int
    element_type: str
    is_kept: bool


@dataclass(slots=True)
class ModuleCall:
    """One call of a module in a forward pass.

    Attributes:
        module: its dotted path.
        parent: index of the call that it is part of; -1 for none.
        phase: index of the phase in the timeline.
        start, end: its position before and after it ran; ``end`` is -1 if it never ended.
        inputs: storages of its arguments.
    """

    module: str
    parent: int
    phase: int
    start: int
    end: int = -1
    inputs: tuple[int, ...] = ()


@dataclass(slots=True)
class SavedTensor:
    """A tensor that a backward node saves.

    Attributes:
        storage: its storage.
        call: index of the module call that saved it; -1 outside of modules.
        phase: index of the phase in the timeline.
        at: position when it was saved.
        used: position when the backward pass first asked for it; -1 if it never did.
        node: number of the backward node that asked for it last.
    """

    storage: int
    call: int
    phase: int
    at: int
    used: int = -1
    node: int | None = None


class _Held:
    """What PyTorch keeps in place of a saved tensor."""

    __slots__ = ("record", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.record: SavedTensor | None = None


class StepRecorder(Recorder):
    """A recorder that also collects operators, calls of modules and saved tensors; arguments as
    those of ``Recorder``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.operators: list[OperatorCost] = []
        self.module_calls: list[ModuleCall] = []
        self.saved: list[SavedTensor] = []
        self.unreferenced: dict[int, int] = {}
        """Saved storage → position when the program no longer refers to it, so that only the
        backward pass does."""
        self.casts: list[tuple[int, int]] = []
        """Storages of argument and result of each conversion to another element type."""
        self.node_ends: dict[tuple[int, int], int] = {}
        """Phase and number of a backward node → position after its last operator."""
        self.node_uses: dict[tuple[int, int], int] = {}
        """The same without the sums by which the engine brings gradients to their shapes, after the
        node has ended."""
        self._stack: list[int] = []
        self._marks: list[tuple[int, int]] = []
        self._mark_numbers: list[int] = []
        self._watched: dict[int, list[int]] = {}
        self._idle_references = _idle_references()
        self._first_of_step = 0

    # Called by the training loop and by modules.

    def begin(self, phase: str) -> None:
        """Begin a phase."""
        self._find_unreferenced()
        self._watched.clear()
        self._stack.clear()
        super().begin(phase)

    def entered_module(self, module: object) -> None:
        """Callback for ``ModulePath``."""
        super().entered_module(module)
        if not self._backward:
            self._find_unreferenced()
            parent = self._stack[-1] if self._stack else -1
            self._stack.append(len(self.module_calls))
            self.module_calls.append(
                ModuleCall(self._modules.path, parent, len(self._phases) - 1, self.now())
            )
            self._mark()

    def left_module(self, module: object, arguments: object, output: object) -> None:
        """Callback for ``ModulePath``."""
        Recorder.entered_module(self, module)
        if not self._backward and self._stack:
            self._find_unreferenced()
            name = self._modules.path_of(module)  # type: ignore[arg-type]
            while self._stack:
                call = self.module_calls[self._stack.pop()]
                if call.module == name:
                    call.end = self.now()
                    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
                    call.inputs = tuple(
                        dict.fromkeys(i for i in map(self._index, tensors) if i is not None)
                    )
                    break
            self._mark()

    def _mark(self) -> None:
        self._mark_numbers.append(next_node_number())
        self._marks.append((self._mark_numbers[-1], self._stack[-1] if self._stack else -1))

    # Called by autograd.

    def pack(self, tensor: Tensor) -> _Held:
        """Return what is kept in place of a tensor that a backward node saves."""
        with without_function_modes():
            held = _Held(tensor.data if tensor.layout is torch.strided else tensor.detach())
        index = self._index(tensor)
        if index is not None and not self._backward and self._phases:
            held.record = SavedTensor(
                index, self._stack[-1] if self._stack else -1, len(self._phases) - 1, self.now()
            )
            self.saved.append(held.record)
            if self._step_starts and index >= self._first_of_step:
                self._watched.setdefault(index, [storage_id(tensor), 0])[1] += 1
        return held

    def unpack(self, held: _Held) -> Tensor:
        """Return the saved tensor; called when a backward node needs it."""
        record = held.record
        if record is not None:
            if record.used < 0:
                record.used = self.now()
            node = running_node_number()
            if node is not None:
                record.node = node
                self.node_ends[len(self._phases) - 1, node] = self.node_uses[
                    len(self._phases) - 1, node
                ] = self.now()
        return held.tensor

    # Called by PyTorch.

    def run(self, func: Any, args: Arguments, kwargs: Keywords) -> Any:
        """Run an operator, and record what it costs."""
        if self._is_closed or not self._step_starts:
            return super().run(func, args, kwargs)
        self._find_unreferenced()
        start = self.now()
        result = super().run(func, args, kwargs)
        if not _returns_views_only(func):
            self._record_operator(func, args, kwargs, result, start)
        return result

    def _record_operator(
        self, func: Any, args: Arguments, kwargs: Keywords, result: Any, start: int
    ) -> None:
        inputs = list(filter(self.holds, argument_tensors(args, kwargs)))
        outputs = list(filter(self.holds, argument_tensors([result], {})))
        if not inputs and not outputs:
            return
        flops, dtype = (
            0,
            next((t.dtype for t in (*inputs, *outputs) if t.is_floating_point()), torch.float32),
        )
        element_type = _TYPES.get(dtype, "fp32")
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            flops = int(count(*args, **kwargs, out_val=result))
            if element_type == "fp32" and "convolution" in operator_name(func):
                element_type = "tf32"
        moved_bytes = sum(_bytes(tensor) for tensor in (*inputs, *outputs))
        if operator_name(func) in _ALLOCATES_ONLY:
            moved_bytes = 0
        if operator_name(func) == "_to_copy" and inputs and outputs:
            source, target = self._index(inputs[0]), self._index(outputs[0])
            if source is not None and target is not None:
                self.casts.append((source, target))
        phase, call = len(self._phases) - 1, self._stack[-1] if self._stack else -1
        if self._backward:
            node = running_node_number()
            call = self._call_of(node)
            if node is not None:
                self.node_ends[phase, node] = self.now()
                if operator_name(func) != "sum":
                    self.node_uses[phase, node] = self.now()
        self.operators.append(
            OperatorCost(
                start,
                self.now(),
                phase,
                call,
                flops,
                moved_bytes,
                element_type,
                keeps_results(func, args, kwargs),
            )
        )

    def _call_of(self, node: int | None) -> int:
        """Return the module call that made a backward node; nodes that no call made belong to the
        operator before."""
        if node is None or not self._mark_numbers or node >= next_node_number():
            return self.operators[-1].call if self.operators else -1
        position = bisect_right(self._mark_numbers, node) - 1
        return self._marks[position][1] if position >= 0 else -1

    # Bookkeeping.

    def _index(self, tensor: Tensor) -> int | None:
        return self._live.get(storage_id(tensor)) if tensor.layout is torch.strided else None

    def begin_step(self) -> None:
        """Begin an optimizer step."""
        super().begin_step()
        self._first_of_step = len(self._storages)

    def _allocated(
        self, storage: torch.UntypedStorage, operator: Any, module: str, at: int | None = None
    ) -> int:
        if at is not None:
            self._shift(at)
        return super()._allocated(storage, operator, module, at)

    def _shift(self, at: int) -> None:
        """Move all positions from ``at`` on by one, because an event is inserted there."""
        for operator in reversed(self.operators):
            if operator.end < at:
                break
            operator.start += operator.start >= at
            operator.end += 1
        for call in self.module_calls:
            call.start += call.start >= at
            call.end += call.end >= at
        for saved in self.saved:
            saved.at += saved.at >= at
            saved.used += saved.used >= at
        for index, position in self.unreferenced.items():
            self.unreferenced[index] = position + (position >= at)

    def _find_unreferenced(self) -> None:
        ended = [
            index
            for index, (storage, packs) in self._watched.items()
            if storage_owners(storage) <= packs + self._idle_references
        ]
        for index in ended:
            del self._watched[index]
            self.unreferenced[index] = self.now()


def _idle_references() -> int:
    """How many owners a storage has that no tensor refers to: its Python object, which the recorder
    made."""
    tensor = torch.empty(1, device="meta")
    return storage_owners(storage_id(tensor)) - 1


@cache
def _returns_views_only(func: Any) -> bool:
    returns = schema(func).returns
    return bool(returns) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in returns
    )


def _bytes(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
