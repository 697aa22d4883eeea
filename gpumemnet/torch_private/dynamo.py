"""Keeps PyTorch from importing Dynamo: a trace does not compile, and the import takes more than a
second.

Optimizers, checkpoints and reference kernels are wrapped in a function that imports
``torch._dynamo`` on its first call, only to exclude itself from compilation
(``torch/_compile.py``).  A placeholder module answers that call.  Any other access loads the real
module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch

from gpumemnet.torch_private.names import check, declare

_NAME: Final = "torch._dynamo"
_DISABLED: Final = "__dynamo_disable"
"""Attribute in which PyTorch keeps the function that Dynamo has excluded from compilation."""


class _Placeholder(ModuleType):
    """``torch._dynamo`` until something needs the real one."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.disabled: list[Any] = []

    def disable(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Callable[..., Any]:
        """Return the function unchanged: without Dynamo nothing compiles it."""
        self.disabled.append(function)
        return function

    def graph_break(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no graph is recorded."""

    def __getattr__(self, name: str) -> Any:
        if name in (
            "__spec__",
            "__wrapped__",
            "__file__",
        ):  # ``inspect`` reads these of every loaded module
            raise AttributeError(name)
        _withdraw(self)
        return getattr(import_module(_NAME), name)


def _withdraw(placeholder: _Placeholder) -> None:
    """Remove the placeholder, so that the next import of ``torch._dynamo`` loads the real
    module."""
    if sys.modules.get(_NAME) is placeholder:
        del sys.modules[_NAME]
        vars(torch).pop("_dynamo", None)
    for function in placeholder.disabled:
        vars(function).pop(_DISABLED, None)
    placeholder.disabled.clear()


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Context in which only code that uses Dynamo loads it; without effect where it is loaded
    already."""
    if _NAME in sys.modules:
        yield
        return
    placeholder = _Placeholder()
    sys.modules[_NAME] = placeholder
    vars(torch)["_dynamo"] = placeholder
    try:
        yield
    finally:
        _withdraw(placeholder)


def _probe() -> None:
    from torch._compile import _disable_dynamo

    if _NAME in sys.modules and not isinstance(sys.modules[_NAME], _Placeholder):
        return  # it is loaded already, and there is nothing to keep away
    with without_dynamo():

        @_disable_dynamo
        def excluded() -> int:
            return 1

        check(excluded() == 1, "a function that Dynamo is to leave out does not run")
        check(
            isinstance(sys.modules.get(_NAME), _Placeholder),
            "a function that Dynamo is to leave out loads it",
        )


declare(
    "torch._compile:_disable_dynamo",
    "keep optimizers and checkpoints from importing Dynamo",
    probe=_probe,
)
