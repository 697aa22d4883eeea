"""Records every storage on the simulated GPU while PyTorch runs on meta tensors: allocation,
release, operator and module.

The recorder is a dispatch mode below autograd, so it sees each operator of the forward and the
backward pass once.  A storage is on the GPU if an operator made it from one that is, or if the code
requested it there.  It is released when the last reference to it goes, which a weak reference
reports, as in ``torch/distributed/_tools/mem_tracker.py``. A module owns what its operators
allocate.  In the backward pass, the sequence number of the running autograd node tells which module
made the node.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from threading import RLock
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from gpumemnet.allocator import EMPTY_CACHE
from gpumemnet.extract.known_layouts import argument_tensors
from gpumemnet.extract.module_calls import ModulePath
from gpumemnet.launchers.host_memory import HostTensors
from gpumemnet.torch_private.engine import backward_runs, next_node_number, running_node_number
from gpumemnet.torch_private.names import (
    Arguments,
    DispatchMode,
    Keywords,
    aten,
    dense_parts,
    id_of_storage,
    operator_name,
    schema,
    storage_id,
    storage_of,
    without_function_modes,
)
from gpumemnet.tracing.operators.elementwise import layout_rule
from gpumemnet.tracing.operators.library_workspaces import blas_workspace
from gpumemnet.tracing.operators.rules import SCRATCH_RULES, Platform, Scratch, scratch
from gpumemnet.tracing.timeline import Phase, Storage, Timeline

_UNKNOWN: Final = "temporary"
_COMMUNICATION: Final = "communication"
_GUESSED: Final = frozenset({_UNKNOWN, _COMMUNICATION, "saved_activation", "input", "buffer"})
"""Classes that follow from when and how a storage arrived; what a model or an optimizer refers to
later is known better."""
_HOST: Final = torch.device("cpu")
_FUSED: Final = frozenset({"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"})
"""Optimizer steps in one kernel, in place: they allocate nothing, and not all of them run on meta
tensors."""
_LAST_OUTPUT_FIRST: Final = frozenset({aten.native_dropout.default})
"""Operators that allocate their last output first: dropout its mask
(``aten/src/ATen/native/cuda/Dropout.cu``)."""

_EFFICIENT_ATTENTION: Final = aten._scaled_dot_product_efficient_attention.default
_ON_THE_GPU: Final = {_EFFICIENT_ATTENTION: 2, aten._pack_padded_sequence.default: 1}
"""Operator → number of its outputs that are on the GPU: these keep a random state, or the sizes of
batches, in host memory."""


class _StorageRef(weakref.ref):  # type: ignore[type-arg]
    """A weak reference with the index and the id of its storage."""

    __slots__ = ("index", "key")
    index: int
    key: int


class _UnclassifiedStorage(NamedTuple):
    """A storage whose memory class is not known yet."""

    size_bytes: int
    bound_bytes: int
    operator: str
    module: str
    scratch: str = ""
    stream: int = 0


class RecordedPass(NamedTuple):
    """What a pass through a model allocated and freed.

    Attributes:
        events: in order, the number of a storage in the pass with what it is, or ``~number`` where
            it is freed, and the size of an older one that is freed; nothing is allocated where the
            cache is emptied.
        indices: index of each storage.
        left: id of each storage that the pass has left, with its number.
        freed: sizes of older storages that it has freed, such as weights that are made anew.
    """

    events: tuple[tuple[int, _UnclassifiedStorage | None], ...]
    indices: tuple[int, ...]
    left: dict[int, int]
    freed: tuple[int, ...]

    def size_bytes(self, number: int) -> int:
        """The size of a storage."""
        return next(made.size_bytes for each, made in self.events if each == number and made)


class Recorder(DispatchMode):
    """Collects storages and events while it is entered.

    Args:
        modules: tells which module is running, and the recorder of each that begins or ends.
        platform: the GPU that the job will run on.
        run: runs an operator with its arguments; it goes on to the mode below by default.
    """

    def __init__(
        self,
        modules: ModulePath,
        platform: Platform,
        *,
        run: Callable[[Any, Arguments, Keywords], Any] | None = None,
    ) -> None:
        super().__init__()
        self._run = run or (lambda func, args, kwargs: func(*args, **kwargs))
        self._modules = modules
        modules.entered, modules.left = self.entered_module, self.left_module
        self._platform = platform
        self._watches = cache(lambda func: _allocates(func) or func in SCRATCH_RULES)
        self._layout_of = cache(layout_rule)
        self._live: dict[int, int] = {}
        self._live_bytes = 0
        self._references: dict[int, _StorageRef] = {}
        self._storages: list[_UnclassifiedStorage] = []
        self._classes: list[str] = []
        self._events: list[int] = []
        self._phases: list[Phase] = []
        self._step_starts: list[int] = []
        self._passes: list[int] = []
        self._cublas_handles: set[bool] = set()
        self._done_once: set[tuple[bool, Hashable]] = set()
        self._nodes: list[tuple[int, str]] = []
        self._sequence_numbers: list[int] = []
        self._recomputed: list[int] = []
        self._backward = False
        self._steps = 0
        self._stream = 0
        self._communicates = False
        self._is_absent = False
        self.host = HostTensors()
        self._ranks = 1
        self._groups: dict[str, int] = {}
        self._held_with: defaultdict[int, list[int]] = defaultdict(list)
        """Storage → what is held as long as it is."""
        self._is_closed = False
        self._adding = RLock()
        """Held while a storage is added: threads of a script may allocate at the same time."""

    # Called by the training loop.

    def begin_step(self) -> None:
        """Begin an optimizer step."""
        self._step_starts.append(len(self._events))
        self._steps += 1

    @property
    def ended_steps(self) -> int:
        """How many steps have ended; each may be of several optimizers."""
        return max(0, self._steps - 1)

    def end_steps(self) -> None:
        """Take what follows the last whole step as a part of it."""
        self._step_starts.pop()
        self._steps -= 1

    def take_all_as_step(self) -> None:
        """Take all that was recorded as one step, because the first one has not ended."""
        self._step_starts = [0]
        self._steps = 1
        self.close()

    def begin(self, phase: str) -> None:
        """Begin a phase, see :class:`~gpumemnet.tracing.timeline.Phase`."""
        if self._phases and self._phases[-1].name == "forward":
            self._classify_saved_activations()
        self._classify_recomputed()
        self._modules.forget()
        self._backward = phase == "backward"
        self._phases.append(Phase(phase, self._steps, len(self._events)))

    @property
    def phase(self) -> str:
        """Name of the running phase."""
        return self._phases[-1].name if self._phases else ""

    def begin_pass(self) -> None:
        """Begin a pass through a model, which the code may repeat."""
        self._passes.append(len(self._events))

    def recorded_since(self, start: int) -> RecordedPass | None:
        """Return what was allocated and freed since the event ``start``; ``None`` if nothing is
        recorded any more."""
        numbers: dict[int, int] = {}
        freed: list[int] = []
        events: list[tuple[int, _UnclassifiedStorage | None]] = []
        for event in self._events[start:]:
            if event == EMPTY_CACHE:
                events.append((EMPTY_CACHE, None))
            elif event >= 0:
                numbers[event] = len(numbers)
                events.append((numbers[event], self._storages[event]))
            elif ~event in numbers:
                events.append((~numbers[~event], None))
            else:
                freed.append(self._storages[~event].size_bytes)
                events.append((freed[-1], None))
        if self._is_closed:
            return None
        left = {key: numbers[index] for key, index in self._live.items() if index in numbers}
        return RecordedPass(tuple(events), tuple(numbers), left, tuple(freed))

    def record_again(
        self,
        recorded: RecordedPass,
        storages: Mapping[int, torch.UntypedStorage],
    ) -> None:
        """Record a pass again, without what it also frees.

        Args:
            recorded: the pass.
            storages: those that it leaves, by their numbers.
        """
        if self._is_closed:
            return
        for number, storage in storages.items():
            known = recorded.indices[number]
            self._refer(storage, self._add(self._storages[known], self._classes[known]))

    def keep(self, between: Sequence[int], size_bytes: int, at: int | None = None) -> None:
        """Record that as many bytes more are held as long as the largest storage that was allocated
        between two events, and is held now; to the end, if none is.

        Args:
            between: the two events.
            size_bytes: the bytes.
            at: index of the event before which they were allocated; now by default.
        """
        held = self._references.keys() & self._events[slice(*between)]
        if self._references and size_bytes:
            like = max(held or self._references, key=lambda each: self._storages[each].size_bytes)
            made = self._storages[like]._replace(size_bytes=size_bytes, bound_bytes=size_bytes)
            self._held_with[like if held else -1].append(self._add(made, "buffer", at))
            self._live_bytes += size_bytes

    def requested(self, tensor: Tensor, operator: str) -> None:
        """Record that the model's code requests ``tensor`` on the GPU; see
        :func:`gpumemnet.extract.placement.placement`."""
        if self._phases and not self._is_closed and storage_id(tensor) not in self._live:
            self._allocated(storage_of(tensor), operator, self._modules.path)

    def now(self) -> int:
        """Return the number of events so far, for :meth:`arrived`."""
        return len(self._events)

    def arrived(
        self,
        tensor: Tensor,
        memory_class: str = _UNKNOWN,
        module: str | None = None,
        at: int | None = None,
    ) -> None:
        """Record that ``tensor`` was copied to the GPU, unless it is there already.

        Args:
            tensor: the tensor.
            memory_class: its class, one of :data:`~gpumemnet.tracing.timeline.MEMORY_CLASSES`.
            module: path of the module that it belongs to; the running module by default.
            at: index of the event before which it arrived; now by default.
        """
        if self._is_closed:
            return
        storage = tensor.untyped_storage()
        index = self._live.get(id_of_storage(storage))
        if index is None:
            index = self._allocated(
                storage, "to", self._modules.path if module is None else module, at
            )
        if memory_class != _UNKNOWN:
            self._classes[index] = memory_class

    def classify(self, tensors: Iterable[Tensor], memory_class: str, module: str) -> None:
        """Set class and module of those ``tensors`` that are on the GPU and whose class is unknown
        or guessed."""
        for part in (part for tensor in tensors for part in dense_parts(tensor)):
            index = self._live.get(storage_id(part))
            if (
                index is not None
                and self._classes[index] in _GUESSED
                and self._classes[index] != memory_class
            ):
                self._classes[index] = memory_class
                self._storages[index] = self._storages[index]._replace(module=module)

    def classify_kept(self) -> None:
        """Take what the code has kept for a whole step, and refers to no more closely, for a buffer:
        a copy of the weights, a table."""
        if self._steps > 1:  # the first step begins with the model, after its batch
            before = self._events[: self._step_starts[-1]]
            first_of_step = max((event for event in before if event >= 0), default=-1) + 1
            for index in self._live.values():
                is_copy = self._storages[index].operator == "aten.clone"
                known = self._classes[index]
                if index < first_of_step and (known == _UNKNOWN or (is_copy and known in _GUESSED)):
                    self._classes[index] = "buffer"

    def use_platform(self, platform: Platform) -> None:
        """Assume another platform from here on."""
        self._platform = platform

    def set_ranks(self, ranks: int) -> None:
        """Set the number of GPUs that the job runs on."""
        self._ranks = ranks

    def exchanged(self, group: str, ranks: int) -> None:
        """Record a collective in a process group of so many ranks."""
        self._groups[group] = ranks

    def use_stream(self, number: int) -> None:
        """Allocate on another CUDA stream from here on; 0 is the default stream."""
        self._stream = number

    def on_stream(self, number: int | None) -> AbstractContextManager[object]:
        """Context in which memory is allocated on another CUDA stream; ``None`` changes nothing."""
        return patch.object(self, "_stream", self._stream if number is None else number)

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Context of code that communicates with other ranks: what it allocates on the meta device
        is on the GPU too."""
        before, self._communicates = self._communicates, True
        try:
            yield
        finally:
            self._communicates = before

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Context of code whose tensors are on no device: the script chose the meta device."""
        before, self._is_absent = self._is_absent, True
        try:
            yield
        finally:
            self._is_absent = before

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that ``storage`` was freed or allocated again by
        :meth:`torch.UntypedStorage.resize_`."""
        index, event = self._live.get(id_of_storage(storage)), len(self._events)
        if index is None and storage.device.type != "meta":
            return  # of the host
        if index is not None:
            if self._storages[index].size_bytes == storage.nbytes():
                return
            self._released(self._references[index])
        if storage.nbytes():  # as PyTorch copies what it holds, before the old one is released
            self._allocated(storage, "resize_", self._owner(), event)

    def emptied(self) -> None:
        """Record that the allocator's cache is emptied."""
        self._events.append(EMPTY_CACHE)

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is on the GPU."""
        if tensor.layout is torch.strided:
            return storage_id(tensor) in self._live
        return any(storage_id(part) in self._live for part in dense_parts(tensor))

    def numbers_of(self, tensors: Iterable[Tensor]) -> list[int]:
        """Return the numbers of the storages of those tensors that are on the GPU."""
        keys = [storage_id(part) for tensor in tensors for part in dense_parts(tensor)]
        return [self._live[key] for key in keys if key in self._live]

    def bytes_of(self, numbers: Iterable[int]) -> int:
        """Return the bytes of storages."""
        return sum(self._storages[number].size_bytes for number in numbers)

    @property
    def has_live_storages(self) -> bool:
        """Whether anything is on the GPU."""
        return bool(self._live)

    def live_bytes(self) -> int:
        """Return the bytes of all tensors that are on the GPU now."""
        return self._live_bytes

    def levels_since(self, start: int) -> tuple[int, int]:
        """Return the most bytes on the GPU since the event ``start``, and those now."""
        level = top = end = self.live_bytes()
        for change in reversed(self.changes(start)):
            level -= change
            top = max(top, level)
        return top, end

    def changes(self, start: int, end: int | None = None) -> list[int]:
        """Return the bytes of each allocation between two events, and those of releases below 0."""
        return [
            self._storages[event].size_bytes if event >= 0 else -self._storages[~event].size_bytes
            for event in self._events[start:end]
            if event != EMPTY_CACHE
        ]

    def entered_module(self, module: object) -> None:
        """Callback for :class:`ModulePath`: autograd nodes made from here on belong to the module
        that runs now."""
        self._sequence_numbers.append(next_node_number())
        self._nodes.append((self._sequence_numbers[-1], self._modules.path))

    def left_module(self, module: object, arguments: object, output: object) -> None:
        """Callback for :class:`ModulePath`."""
        self.entered_module(module)

    def timeline(self) -> Timeline:
        """Return the record."""
        storages = tuple(
            Storage(
                storage.size_bytes,
                storage.bound_bytes,
                memory_class,
                storage.operator,
                storage.module,
                storage.scratch,
                storage.stream,
            )
            for storage, memory_class in zip(self._storages, self._classes, strict=True)
        )
        starts = (*self._step_starts, len(self._events))
        groups = tuple(self._groups.values())
        return Timeline(
            storages,
            tuple(self._events),
            tuple(self._phases),
            starts,
            self._ranks,
            groups,
            tuple(self._passes),
        )

    def close(self) -> None:
        """Stop recording, also what threads of a script do that go on."""
        self._is_closed = True
        self._references.clear()
        self._live.clear()
        self._live_bytes = 0

    def run(self, func: Any, args: Arguments, kwargs: Keywords) -> Any:
        """Run an operator, and record what it allocates."""
        # In a backward pass, function modes would see each attribute that is looked at here.
        with without_function_modes():
            if self._is_closed or self._is_absent:
                return self._run(func, args, kwargs)
            if not self._watches(func):
                return None if operator_name(func) in _FUSED else self._run(func, args, kwargs)
            if self._recomputed and not torch.is_grad_enabled():
                self._classify_recomputed()
            result = self._run(func, args, kwargs)
            # Real tensors keep their values, and subclasses and sparse tensors define their own layout.
            made = argument_tensors([result], {})
            if (layout := self._layout_of(func)) is not None and all(
                type(each) is Tensor and each.is_meta and each.layout is torch.strided
                for each in made
            ):
                result = layout(args, result)
                made = argument_tensors([result], {})
            outputs = [part for tensor in made for part in dense_parts(tensor)]
            fresh = [
                tensor
                for tensor in outputs[: _ON_THE_GPU.get(func)]
                if storage_id(tensor) not in self._live
            ]
            for storage in map(storage_of, outputs) if _resizes(func) and not fresh else ():
                if storage.nbytes() > self._storages[self._live[id_of_storage(storage)]].size_bytes:
                    self.resized(storage)
            if func in _LAST_OUTPUT_FIRST:
                fresh.reverse()
            device = kwargs.get("device")
            is_meta = device is not None and device.type == "meta"
            made_there = is_meta and (
                self._communicates or backward_runs()
            )  # hooks run there without what calls ``requested``
            goes_to_host = device is not None and device.type == _HOST.type
            if not goes_to_host and (
                made_there or self._any_live(args) or self._any_live(kwargs.values())
            ):
                self.ran(func, args, kwargs, outputs, fresh)
            else:
                for tensor in fresh:
                    self.host.allocated(tensor.untyped_storage())
            return result

    def ran(
        self,
        func: Any,
        args: Arguments,
        kwargs: Mapping[str, Any],
        outputs: Sequence[Tensor],
        fresh: Sequence[Tensor],
    ) -> None:
        """Record that ``func`` ran on the GPU; ``fresh`` are those of its ``outputs`` that are
        new."""
        self.called(func, fresh, scratch(func, args, kwargs, outputs, self._platform))

    def called(self, func: Any, fresh: Sequence[Tensor], pieces: Sequence[Scratch]) -> None:
        """Record what a call of ``func`` allocates: its new outputs, the scratch memory in between,
        the workspace of cuBLAS."""
        held: list[int] = []
        for number, tensor in enumerate(fresh):
            between: list[int] = []
            self._record_scratch(
                [piece for piece in pieces if piece.after == number],
                func,
                between if number else held,
            )
            self._events += [~index for index in reversed(between)]
            if storage_id(tensor) not in self._live:  # outputs may share a storage
                index = self._allocated(tensor.untyped_storage(), func, self._owner())
                if self._backward and torch.is_grad_enabled():
                    self._recomputed.append(index)
        self._record_scratch(
            [piece for piece in pieces if piece.after is None or piece.after >= len(fresh)],
            func,
            held,
        )
        workspace = blas_workspace(func, self._platform)
        # The engine has its own, also for torch.autograd.grad.
        thread = self._backward or backward_runs()
        if workspace is not None and thread not in self._cublas_handles:
            self._cublas_handles.add(thread)
            self._record_library_memory(workspace, workspace, func)
        self._events += [~index for index in reversed(held)]

    # Bookkeeping.

    def _allocated(
        self, storage: torch.UntypedStorage, operator: Any, module: str, at: int | None = None
    ) -> int:
        size = storage.nbytes()
        self.host.left(storage)
        made = _UnclassifiedStorage(size, size, _name(operator), module, stream=self._stream)
        index = self._add(made, _COMMUNICATION if self._communicates else _UNKNOWN, at)
        self._refer(storage, index)
        return index

    def _add(self, made: _UnclassifiedStorage, memory_class: str, at: int | None = None) -> int:
        """Record an allocation, now or before the event ``at``; return the storage's index."""
        with self._adding:
            index = len(self._storages)
            self._storages.append(made)
            self._classes.append(memory_class)
            self._events.insert(len(self._events) if at is None else at, index)
        return index

    def _refer(self, storage: torch.UntypedStorage, index: int) -> None:
        """Notice when ``storage`` is released."""
        reference = _StorageRef(storage, self._released)
        reference.index, reference.key = index, id_of_storage(storage)
        self._references[index] = reference
        self._live[reference.key] = index
        self._live_bytes += self._storages[index].size_bytes

    def _released(self, reference: _StorageRef) -> None:
        if self._references.pop(reference.index, None) is not None:
            self._events.append(~reference.index)
            del self._live[reference.key]
            self._live_bytes -= self._storages[reference.index].size_bytes
            for number in self._held_with.pop(reference.index, ()):
                self._events.append(~number)
                self._live_bytes -= self._storages[number].size_bytes

    def _record_scratch(self, pieces: Sequence[Scratch], operator: Any, held: list[int]) -> None:
        """Record scratch memory and its release, see
        :class:`~gpumemnet.tracing.operators.rules.Scratch`.

        Pieces that are held until the operator ends are added to ``held`` instead of being
        released.
        """
        for piece in pieces:
            if piece.once is not None:
                once = self._backward or backward_runs(), piece.once
                if once in self._done_once:
                    continue
                self._done_once.add(once)
            index = self._record_library_memory(
                piece.expected_bytes, piece.bound_bytes, operator, piece.kind
            )
            if piece.held:
                held.append(index)
            else:
                self._events.append(~index)
            if piece.once is not None:
                self._events.append(EMPTY_CACHE)

    def _record_library_memory(
        self, size_bytes: int, bound_bytes: int, operator: Any, scratch: str = ""
    ) -> int:
        made = _UnclassifiedStorage(
            size_bytes, bound_bytes, _name(operator), self._owner(), scratch, self._stream
        )
        return self._add(made, "workspace")

    def _any_live(self, values: Iterable[Any]) -> bool:
        for value in values:
            if isinstance(value, Tensor):
                if self.holds(value):
                    return True
            elif isinstance(value, list | tuple) and self._any_live(value):
                return True
        return False

    def _owner(self) -> str:
        """Return the path of the module that the running operator belongs to."""
        if (
            not self._backward or torch.is_grad_enabled()
        ):  # gradients enabled in the backward pass: a recomputed forward pass
            return self._modules.path
        node = running_node_number()
        if node is None:
            return ""
        position = bisect_right(self._sequence_numbers, node) - 1
        return self._nodes[position][1] if position >= 0 else ""

    def _classify_saved_activations(self) -> None:
        start = self._phases[-1].start
        for index in {
            event for event in self._events[start:] if event >= 0
        } & self._references.keys():
            if self._classes[index] == _UNKNOWN:
                self._classes[index] = "saved_activation"

    def _classify_recomputed(self) -> None:
        for index in self._recomputed:
            if index in self._references and self._classes[index] == _UNKNOWN:
                self._classes[index] = "saved_activation"
        self._recomputed.clear()


def _allocates(func: Any) -> bool:
    """Whether the operator may return new memory: not if it returns only views or tensors that it
    wrote into."""
    if operator_name(func) in _FUSED:
        return False
    returns = schema(func).returns
    return any(value.alias_info is None for value in returns) or _resizes(func)


@cache
def _resizes(func: Any) -> bool:
    """Whether the operator may make the storage of a tensor that it writes into larger."""
    arguments = schema(func).arguments
    is_of_tensor = operator_name(func) in ("set_", "resize_", "resize_as_")
    return is_of_tensor or any(each.is_out for each in arguments)


@cache
def _name(operator: Any) -> str:
    return operator if isinstance(operator, str) else str(operator).rpartition(".")[0]
