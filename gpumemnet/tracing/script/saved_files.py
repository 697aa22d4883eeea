"""Files that a script saves and loads again: they are kept as objects, because weights have no
values to write.

A checkpoint that the same run has saved is loaded as ``torch.load`` would: on the device that it
was saved from, or on that of ``map_location``.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gpumemnet.torch_private.names import replaced
from gpumemnet.torch_private.operators import without_function_modes
from gpumemnet.torch_private.script import SAFETENSORS_SAVE
from gpumemnet.tracing.script.cuda_answers import GPU


class SavedFiles:
    """What ``torch.save`` was called with, by file.

    Args:
        device_of: returns the device of a tensor as the script sees it.
    """

    def __init__(self, device_of: Callable[[Tensor], torch.device]) -> None:
        self._device_of = device_of
        self._saved: dict[object, tuple[object, set[int]]] = {}

    def save(self, value: object, file: Any) -> None:
        """Keep a copy of ``value``; its tensors are on the host."""
        on_gpu: set[int] = set()

        def kept(tensor: Tensor) -> Tensor:
            is_on_gpu = self._device_of(tensor) == GPU
            with without_function_modes():
                copied = _like(tensor, _on_host(tensor))
            if is_on_gpu:
                on_gpu.add(id(copied))
            return copied

        self._saved[_key(file)] = _copied(value, kept), on_gpu

    def has(self, file: Any) -> bool:
        """Whether the script has saved ``file`` in this run."""
        return _key(file) in self._saved

    def load(self, file: Any, map_location: object = None) -> object:
        """Return what was saved, on the device that it was saved from or on ``map_location``."""
        value, on_gpu = self._saved[_key(file)]

        def loaded(tensor: Tensor) -> Tensor:
            if isinstance(map_location, str | torch.device):
                goes_to_gpu = torch.device(map_location).type == GPU.type
            else:  # a function keeps tensors on the host, in the usual ``lambda storage, location: storage``
                goes_to_gpu = id(tensor) in on_gpu and not callable(map_location)
            if goes_to_gpu:
                return _like(tensor, tensor.detach().to(GPU))
            with without_function_modes():
                return _like(tensor, _on_host(tensor))

        return _copied(value, loaded)


@contextmanager
def saving_safetensors(note: Callable[[str], None]) -> Iterator[None]:
    """Context in which ``safetensors.torch.save_file`` writes zeros, or nothing where they would
    take too much memory.

    Args:
        note: called with a sentence for the answer where nothing is written.
    """
    if importlib.util.find_spec("safetensors") is None:
        yield
        return
    write = SAFETENSORS_SAVE.value()

    def save_file(tensors: Mapping[str, Tensor], filename: Any, metadata: Any = None) -> None:
        on_host = {name: tensor.to("cpu") for name, tensor in tensors.items()}
        if any(tensor.is_meta for tensor in on_host.values()):
            note("safetensors.torch.save_file was left out for tensors without values")
            return
        write(on_host, filename, metadata)

    with replaced([(SAFETENSORS_SAVE, save_file)]):
        yield


def _key(file: Any) -> object:
    name = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    return os.path.abspath(name) if isinstance(name, str | os.PathLike) else file  # noqa: PTH100 - symbolic links stay


def _on_host(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
        )
    return tensor.detach().to("cpu", copy=True)


def _like(tensor: Tensor, copied: Tensor) -> Tensor:
    return (
        nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
    )


def _copied(value: object, place: Callable[[Tensor], Tensor]) -> object:
    """Return a copy of ``value`` with ``place(tensor)`` for each of its tensors."""
    copies = {
        id(tensor): place(tensor)
        for tensor in {id(each): each for each in _tensors(value)}.values()
    }
    return copy.deepcopy(value, dict(copies))


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, list | tuple | set):
        for entry in value:
            yield from _tensors(entry)
