"""Moves what a unit saves for its backward pass to host memory, and back before the backward pass
needs it.

Autograd hands each saved tensor to a pair of hooks (``torch.autograd.graph.saved_tensors_hooks``).
One table for the whole model
knows which storages were copied: tensors that share a storage share the copy.  When memory is
released and fetched, and what is
never swapped, follows the rules of :mod:`gpumemnet.planner.plans`.

On a GPU, copies run on a stream of their own for each direction.  Fetched tensors are allocated on
the stream that computes, so the caching allocator needs no second pool.  PyTorch's allocator of
pinned memory reuses host memory, once the copies from it have ended.  On a CPU the same code copies
at once, so that its results are tested without a GPU.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from operator import methodcaller
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gpumemnet.errors import PlanError
from gpumemnet.extract.module_calls import tensors_in
from gpumemnet.planner.plans import (
    COPIES_BEHIND,
    FETCHED_AHEAD,
    MIN_SWAPPED_BYTES,
    pinned_bytes,
)
from gpumemnet.torch_private.names import id_of_storage, storage_id, version_of

_STEPS_FROM_WEIGHT: Final = 4
"""How many operators are looked at between a saved tensor and the weight that it is a cast of."""


class Swaps:
    """The storages of one model that wait in host memory.  A copy of a model begins with an empty
    table of its own.

    Attributes:
        peak_host_bytes: the most pinned memory that the copies have taken at one time.
    """

    def __init__(self) -> None:
        self._copies = weakref.WeakValueDictionary[int, _Copy]()
        self._host_bytes = self.peak_host_bytes = 0
        self._queues: dict[torch.device, tuple[_Queue, _Queue]] = {}
        self._behind: deque[UnitRun] = deque()
        self._last: Callable[[], UnitRun | None] = lambda: None

    def __reduce__(self) -> tuple[type[Swaps], tuple[()]]:
        return Swaps, ()

    @contextmanager
    def running(self, module: nn.Module, swaps: bool, checks: bool) -> Iterator[UnitRun]:
        """Context of one forward pass of a unit.

        Args:
            module: the unit.
            swaps: whether what is saved in it goes to the host.
            checks: whether it is compared when it comes back.
        """
        run = UnitRun(self, self._last(), module if swaps else None, checks)
        if swaps:
            with saved_tensors_hooks(run.pack, methodcaller("unpacked")):
                yield run
            run.copy_out()
        else:
            yield run
        self._last = weakref.ref(run)
        self._behind.append(run)
        while len(self._behind) > COPIES_BEHIND:
            self._behind.popleft().release()

    def release_but(self, needed: Collection[UnitRun]) -> None:
        """Release the GPU memory of what was copied and is not ``needed`` next: the backward pass
        starts."""
        while self._behind:
            run = self._behind.popleft()
            if run not in needed:
                run.release()

    def find(self, tensor: Tensor) -> _Copy | None:
        """Return the copy of the storage of ``tensor``, if there is one with its present
        content."""
        copy = self._copies.get(storage_id(tensor))
        return copy if copy is not None and copy.is_of(tensor) else None

    def add(self, tensor: Tensor, checks: bool) -> _Copy:
        """Enter the storage of ``tensor`` into the table."""
        queues = self._queues.get(tensor.device)
        if queues is None:
            queues = self._queues[tensor.device] = (_Queue(tensor.device), _Queue(tensor.device))
        copy = self._copies[storage_id(tensor)] = _Copy(tensor, checks, self, *queues)
        return copy

    def pin(self, size_bytes: int) -> None:
        """Count ``size_bytes`` more of pinned memory that the copies take, or less if below 0."""
        self._host_bytes += size_bytes
        self.peak_host_bytes = max(self.peak_host_bytes, self._host_bytes)


class UnitRun:
    """One forward pass of a unit, and what it saved.

    Attributes:
        previous: returns the run of the unit before it, while that is needed.

    Args:
        swaps: the table.
        previous: the run of the unit before it.
        module: the unit, if it swaps.
        checks: whether what it saved is compared when it comes back.
    """

    def __init__(
        self, swaps: Swaps, previous: UnitRun | None, module: nn.Module | None, checks: bool
    ) -> None:
        self._swaps = swaps
        self._checks = checks
        self.previous: Callable[[], UnitRun | None] = (
            (lambda: None) if previous is None else weakref.ref(previous)
        )
        self._copies = weakref.WeakValueDictionary[int, _Copy]()
        tensors = [] if module is None else [*module.parameters(), *module.buffers()]
        self._weights = {storage_id(tensor) for tensor in tensors}
        self._device = tensors[0].device if tensors else None

    def pack(self, tensor: Tensor) -> _Saved | _Kept:
        """Hook: return what autograd keeps in the place of ``tensor``."""
        if not self._is_swapped(tensor):
            return _Kept(tensor)
        copy = self._swaps.find(tensor)
        if copy is None:
            copy = self._swaps.add(tensor, self._checks)
        self._copies[id(copy)] = copy
        return _Saved(copy, tensor)

    def _is_swapped(self, tensor: Tensor) -> bool:
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if not is_plain or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return False
        if self._device is not None and tensor.device != self._device:
            return False
        if tensor.untyped_storage().nbytes() < MIN_SWAPPED_BYTES:
            return False
        is_leaf = tensor.requires_grad and tensor.grad_fn is None
        return not (is_leaf or storage_id(tensor) in self._weights or _is_of_one_weight(tensor))

    def copy_out(self) -> None:
        """Start the copies to the host: the unit's forward pass has ended."""
        for copy in self.copies():
            copy.copy_out()

    def release(self) -> None:
        """Release the GPU memory of what was copied."""
        for copy in self.copies():
            copy.release()

    def watch(self, output: object) -> None:
        """Fetch ahead when the backward pass reaches ``output``, the result of the unit."""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._on_backward)

    def _on_backward(self, gradients: object) -> None:
        needed: list[UnitRun] = [self]
        while len(needed) <= FETCHED_AHEAD and (previous := needed[-1].previous()) is not None:
            needed.append(previous)
        self._swaps.release_but(needed)
        for run in needed:
            for copy in reversed(run.copies()):
                copy.fetch()

    def copies(self) -> list[_Copy]:
        """Return the storages that it saved and that are still needed; other units may have saved
        them too."""
        return list(self._copies.values())


class _Kept:
    """A saved tensor that stays where it is."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = (
            tensor.detach()
        )  # the tensor itself may be the output of the node that saves it, and keep that alive
        self.version = version_of(self.tensor)

    def unpacked(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it was changed since; autograd checks that only for tensors without hooks.
        """
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.tensor.dtype} {list(self.tensor.shape)} is at version {version_of(self.tensor)}; expected {self.version}"
            )
        return self.tensor


class _Saved:
    """A saved tensor whose storage is in the table: how it views the storage."""

    __slots__ = ("copy", "dtype", "is_read", "offset", "shape", "strides")

    def __init__(self, copy: _Copy, tensor: Tensor) -> None:
        self.copy = copy
        self.dtype, self.shape, self.strides = tensor.dtype, tensor.shape, tensor.stride()
        self.offset = tensor.storage_offset()
        self.is_read = False
        copy.unread += 1

    def unpacked(self) -> Tensor:
        """Return the tensor on its device."""
        storage = self.copy.on_device()
        self._finish()
        # In a trace, a constant whose values are known is in host memory.
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        with torch.no_grad():
            return empty.set_(storage, self.offset, self.shape, self.strides)

    def _finish(self) -> None:
        if not self.is_read:
            self.is_read = True
            self.copy.unread -= 1
            if self.copy.unread == 0:
                self.copy.release()

    def __del__(self) -> None:
        self._finish()


class _Copy:
    """One storage on the device, in host memory, or in both.

    Attributes:
        device: the device.
        unread: tensors that view the storage and that the backward pass has not asked for yet.
    """

    def __init__(
        self,
        tensor: Tensor,
        checks: bool,
        swaps: Swaps,
        outward: _Queue,
        inward: _Queue,
    ) -> None:
        storage = tensor.untyped_storage()
        self.device = tensor.device
        self.unread = 0
        self._size_bytes = storage.nbytes()
        self._version = version_of(tensor)
        self._held: torch.UntypedStorage | None = storage
        self._storage: Callable[[], torch.UntypedStorage | None] = weakref.ref(storage)
        self._swaps, self._outward, self._inward = swaps, outward, inward
        self._on_host: Tensor | None = None
        self._copied: Any = None
        self._fetched: Any = None
        self._checks = checks
        self._released_sum = 0

    def is_of(self, tensor: Tensor) -> bool:
        """Whether the copy is of the storage of ``tensor`` with its present content."""
        storage = self._storage()
        return (
            storage is not None
            and id_of_storage(storage) == storage_id(tensor)
            and self._version == version_of(tensor)
        )

    def copy_out(self) -> None:
        """Start the copy to the host, unless another unit that saved the storage has done so."""
        if self._held is None or self._on_host is not None:
            return
        self._swaps.pin(pinned_bytes(self._size_bytes))
        is_pinned = self.device.type == "cuda"
        self._on_host = torch.empty(self._size_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        source = torch.empty(0, dtype=torch.uint8, device=self._held.device).set_(self._held)
        self._copied = self._outward.copy(self._on_host, source)

    def release(self) -> None:
        """Let go of the device's memory, which what is computed from here on may use once the
        copies have ended."""
        if self._held is not None:
            self._outward.wait(self._copied)
            self._inward.wait(self._fetched)
            if self._checks:
                self._released_sum = _sum(self._held)
            self._held = None

    def fetch(self) -> None:
        """Start the copy to the device, if a tensor is still to be read and the storage is not
        there."""
        if self.unread == 0 or self._held is not None:
            return
        self._held = self._storage()
        if self._held is None:
            self._copy_in()

    def on_device(self) -> torch.UntypedStorage:
        """Return the storage on the device."""
        storage = self._held or self._storage()
        if storage is None:
            storage = self._copy_in()
        self._inward.wait(self._fetched)
        if self._checks and self._released_sum not in (0, _sum(storage)):
            raise PlanError(
                f"a tensor of {self._size_bytes:,} bytes comes back from host memory with other values, so that the model would "
                "train differently: it was changed in place where autograd does not see it, as by `.data`; keep or recompute "
                "the modules that the plan swaps instead"
            )
        return storage

    def _copy_in(self) -> torch.UntypedStorage:
        assert self._on_host is not None
        target = torch.empty(self._size_bytes, dtype=torch.uint8, device=self.device)
        self._fetched = self._inward.copy(target, self._on_host, self._copied)
        storage = target.untyped_storage()
        self._held, self._storage = storage, weakref.ref(storage)
        return storage

    def __del__(self) -> None:
        self._checks = False
        self.release()
        if self._on_host is not None:
            self._swaps.pin(-pinned_bytes(self._size_bytes))


def _sum(storage: torch.UntypedStorage) -> int:
    """Return the sum of a storage's bytes."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return int(whole.sum(dtype=torch.int64))


class _Queue:
    """Copies in one direction: on a GPU in order on a stream of their own, elsewhere at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def copy(self, target: Tensor, source: Tensor, after: Any = None) -> Any:
        """Copy, after what the device computes now and after the event ``after``; return the event
        of the end."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, event: Any) -> None:
        """Let the device compute on only after ``event``."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def _is_of_one_weight(tensor: Tensor) -> bool:
    """Whether ``tensor`` holds the values of one weight, cast by autocast: its cache keeps that
    cast alive."""
    node = tensor.grad_fn
    for _ in range(_STEPS_FROM_WEIGHT):
        if node is None:
            return False
        weight = getattr(node, "variable", None)
        if isinstance(weight, Tensor):
            return weight.numel() == tensor.numel()
        inputs = [each for each, _ in node.next_functions if each is not None]
        node = inputs[0] if len(inputs) == 1 else None
    return False
