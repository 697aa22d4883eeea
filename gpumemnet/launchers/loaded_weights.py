"""Weights that a script loads from large files of ``safetensors``: they have no values, so that a
model loads that does not fit in the memory of the computer that traces it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

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
