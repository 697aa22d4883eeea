"""Keeps PyTorch from importing Dynamo, which nothing here compiles with and which takes more than a second to load.

Optimizers, checkpoints and reference kernels are wrapped in a function that imports ``torch._dynamo`` when it is first called,
only to tell it to look away (``torch/_compile.py``).  A stand-in hears that; whoever asks for anything else gets the real module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch

_NAME: Final = "torch._dynamo"


class _StandIn(ModuleType):
    """``torch._dynamo`` as long as nobody needs it."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.told: list[Any] = []

    def disable(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """The function as it is: Dynamo is not there to trace it."""
        self.told.append(function)
        return function

    def graph_break(self, *args: Any, **kwargs: Any) -> None:
        """Ends a graph that nobody records."""

    def __getattr__(self, name: str) -> Any:
        if name in ("__spec__", "__wrapped__", "__file__"):  # what ``inspect`` asks of every module that is loaded
            raise AttributeError(name)
        withdraw(self)
        return getattr(import_module(_NAME), name)


def withdraw(stand_in: _StandIn) -> None:
    """Leave ``torch._dynamo`` to whoever imports it, and forget what was told."""
    if sys.modules.get(_NAME) is stand_in:
        del sys.modules[_NAME]
        vars(torch).pop("_dynamo", None)
    for function in stand_in.told:
        vars(function).pop("__dynamo_disable", None)
    stand_in.told.clear()


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Context in which Dynamo is loaded only for those who use it; without effect where it has been loaded before."""
    if _NAME in sys.modules:
        yield
        return
    stand_in = _StandIn()
    sys.modules[_NAME] = stand_in
    vars(torch)["_dynamo"] = stand_in
    try:
        yield
    finally:
        withdraw(stand_in)
