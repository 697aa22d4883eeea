"""The tensors of a training process in host memory: weights before they move, offloaded states, copies
of what is on the GPU, and those among them that are pinned.

Weights that a script loads from large files of ``safetensors`` have no values, so that a model loads
that does not fit in the memory of the computer that traces it.

PyTorch pins memory in blocks of a power of two (``CachingHostAllocator`` in
``aten/src/ATen/core/CachingHostAllocator.h``) and keeps a block that was freed for the next request.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from gpumemnet.torch_private.names import id_of_storage

_LEAST_BYTES: Final = 2**16
"""Smaller tensors are not counted: batches' labels, counters, tables."""


class HostTensors:
    """Counts the bytes of tensors on the host.

    A storage counts once another follows: it may turn out to be on the GPU.
    """

    def __init__(self) -> None:
        self._peak_bytes = self._most_pinned_bytes = 0
        self._live: dict[int, tuple[int, weakref.finalize]] = {}  # type: ignore[type-arg]
        self._paged_bytes = self._used_bytes = 0
        self._pinned: set[int] = set()

    def peaks(self) -> tuple[int, int]:
        """Return the most bytes that all took so far, pinned blocks included, and that were pinned."""
        self._most_pinned_bytes = max(self._most_pinned_bytes, self._used_bytes)
        self._peak_bytes = max(self._peak_bytes, self._paged_bytes + self._most_pinned_bytes)
        return self._peak_bytes, self._most_pinned_bytes

    def allocated(self, storage: torch.UntypedStorage) -> None:
        """A tensor with this storage may be new on the host."""
        key, size = id_of_storage(storage), storage.nbytes()
        if size >= _LEAST_BYTES and key not in self._live:
            self.peaks()
            self._live[key] = size, weakref.finalize(storage, self._freed, key)
            self._paged_bytes += size

    def pinned(self, storage: torch.UntypedStorage) -> None:
        """A tensor with this storage is pinned: it moves to a block of a power of two."""
        self.allocated(storage)
        key = id_of_storage(storage)
        if key in self._live and key not in self._pinned:
            self._pinned.add(key)
            self._paged_bytes -= self._live[key][0]
            self._used_bytes += _block(self._live[key][0])

    def left(self, storage: torch.UntypedStorage) -> None:
        """The storage is on another device now."""
        key = id_of_storage(storage)
        if key in self._live:
            self._live[key][1].detach()
            self._freed(key)

    def _freed(self, key: int) -> None:
        size, _ = self._live.pop(key)
        if key in self._pinned:
            self._pinned.remove(key)
            self._used_bytes -= _block(size)
        else:
            self._paged_bytes -= size


def _block(size_bytes: int) -> int:
    """Return the bytes of the pinned block for so many."""
    return 1 << (size_bytes - 1).bit_length()


# Weights that are loaded.

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Returns a tensor on the host without values."""
_LEAST_FILE_BYTES: Final = 2**28
"""Smaller files are read."""
_LEAST_ELEMENTS: Final = 2**16
"""Smaller tensors are read: scripts may compute with their values."""
_TYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def preparations(allocate: Allocate) -> dict[str, Callable[[Any], None]]:
    """Return what prepares libraries that load such files."""

    def opening(module: Any) -> None:
        open_file = module.safe_open

        def safe_open(
            filename: Any, framework: Any = "pt", device: Any = "cpu", **options: Any
        ) -> Any:
            is_large = framework == "pt" and Path(filename).stat().st_size >= _LEAST_FILE_BYTES
            if not is_large:
                return open_file(filename, framework=framework, device=device, **options)
            return _LargeFile(open_file(filename, framework=framework), allocate, device)

        module.safe_open = safe_open

    def in_this_thread(module: Any) -> None:
        materialize = module.spawn_materialize
        module.spawn_materialize = lambda pool, *args, **options: materialize(
            None, *args, **options
        )

    return {
        "safetensors": opening,
        "safetensors.torch": opening,
        "transformers.core_model_loading": in_this_thread,
    }


class _LargeFile:
    """An open file whose large tensors have no values."""

    def __init__(self, file: Any, allocate: Allocate, device: Any) -> None:
        self._file = file
        self._allocate = allocate
        self._device = device

    def __enter__(self) -> _LargeFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor of the file."""
        whole = self._without_values(name)
        return self._on_device(self._file.get_tensor(name) if whole is None else whole)

    def get_slice(self, name: str) -> _Slice:
        """Return a tensor of the file that is read as it is indexed."""
        return _Slice(self, self._file.get_slice(name), name)

    def part(self, name: str, index: Any) -> Tensor:
        """Return a part of a tensor of the file."""
        whole = self._without_values(name)
        return self._on_device(self._file.get_slice(name)[index] if whole is None else whole[index])

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor if str(self._device) == "cpu" else tensor.to(self._device)

    def _without_values(self, name: str) -> Tensor | None:
        described = self._file.get_slice(name)
        shape, dtype = tuple(described.get_shape()), _TYPES.get(described.get_dtype())
        if dtype is None or math.prod(shape) < _LEAST_ELEMENTS:
            return None
        return self._allocate(shape, dtype)


class _Slice:
    def __init__(self, file: _LargeFile, described: Any, name: str) -> None:
        self._file = file
        self._described = described
        self._name = name

    def __getitem__(self, index: Any) -> Tensor:
        return self._file.part(self._name, index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._described, name)
