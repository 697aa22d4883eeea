"""Finds the tensors in what a module or function takes and returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in nested sequences, mappings and dataclasses, each once, in order."""
    found = {id(tensor): tensor for tensor in _iterate_tensors(value)}
    return list(found.values())


def _iterate_tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _iterate_tensors(entry)
    elif isinstance(value, list | tuple | set | frozenset):
        for entry in value:
            yield from _iterate_tensors(entry)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _iterate_tensors(getattr(value, field.name, None))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with ``change`` applied to every tensor in nested sequences and mappings."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = type(value)()
        changed.update((key, map_tensors(entry, change)) for key, entry in value.items())
        return changed
    if isinstance(value, Mapping):
        return {key: map_tensors(entry, change) for key, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(entry, change) for entry in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(entry, change) for entry in value)
    return value
