"""Tells which module of a model is running, and finds the tensors in what modules and functions take
and return; extraction and tracing share it.

Global module hooks also see scripted modules, which have no hooks of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import TracebackType
from typing import Any

from torch import Tensor, nn


class ModulePath:
    """Context that follows which module of ``model`` runs.

    Args:
        model: the model.
        entered: called with each module before its forward pass.
        left: called with each module after its forward pass, with its arguments and its output.
    """

    def __init__(
        self,
        model: nn.Module,
        entered: Callable[[nn.Module], None] | None = None,
        left: Callable[[nn.Module, tuple[object, object], object], None] | None = None,
    ) -> None:
        self._names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
        self._entered = entered
        self._left = left
        self._stack: list[nn.Module] = []
        self._handles: list[Any] = []

    @property
    def running(self) -> nn.Module | None:
        """The innermost module that is running."""
        return self._stack[-1] if self._stack else None

    @property
    def path(self) -> str:
        """Dotted path of the innermost module that is running; empty for the model itself and
        outside of it."""
        return self.path_of(self._stack[-1]) if self._stack else ""

    @property
    def depth(self) -> int:
        """Number of nested running modules."""
        return len(self._stack)

    def path_of(self, module: nn.Module) -> str:
        """Return the dotted path of ``module``; empty if it is not part of the model."""
        return self._names.get(module, "")

    def forget(self) -> None:
        """Forget all running modules: a module that raised has left its entry."""
        self._stack.clear()

    def __enter__(self) -> ModulePath:
        self._handles = [
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave, with_kwargs=True),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: object) -> None:
        if module not in self._names:
            return
        self._stack.append(module)
        if self._entered is not None:
            self._entered(module)

    def _leave(self, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        if module not in self._names:
            return
        while (
            self._stack.pop() is not module
        ):  # a module that raised, and whose caller continued, has left its entry
            pass
        if self._left is not None:
            self._left(module, (args, kwargs), output)


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
