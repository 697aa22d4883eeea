"""A process group of ranks that do not exist: this process is one of them, and every collective is over at once.

The group is PyTorch's own fake one (``torch/testing/_internal/distributed/fake_pg.py``), which knows no meta tensors; so the
collectives are answered before they reach it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from gpumemnet.errors import ExtractError

_RANK = 0
_BEGIN, _END = dist.init_process_group, dist.destroy_process_group
"""PyTorch's own: a script that is traced finds others in their place."""


Exchanged = Callable[[str, int], None]
"""Told of each collective the name of its process group, and how many ranks that has."""


@contextmanager
def process_group(ranks: int, exchanged: Exchanged) -> Iterator[None]:
    """Context in which this process is the first of ``ranks``.

    Args:
        ranks: how many there are.
        exchanged: told of collectives.

    Raises:
        ExtractError: when the process is part of a group already.
    """
    if dist.is_initialized():
        raise ExtractError("this process is part of a process group (torch.distributed.init_process_group): trace outside of it")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _BEGIN("fake", rank=_RANK, world_size=ranks, store=FakeStore())
    try:
        with ExitStack() as stack:
            for home in (dist, dist.distributed_c10d):
                for name, function in _OBJECTS.items():
                    stack.enter_context(patch.object(home, name, function))
            stack.enter_context(_Collectives(exchanged))
            yield
    finally:
        _END()


def _all_gather_object(objects: list[Any], given: Any, *args: object, **kwargs: object) -> None:
    objects[:] = [given] * len(objects)


def _gather_object(given: Any, objects: list[Any] | None = None, *args: object, **kwargs: object) -> None:
    if objects is not None:
        _all_gather_object(objects, given)


def _scatter_object_list(received: list[Any], objects: list[Any] | None = None, *args: object, **kwargs: object) -> None:
    received[:1] = (objects or [None])[:1]


def _broadcast_object_list(objects: list[Any], *args: object, **kwargs: object) -> None:
    pass


_OBJECTS: Final = {
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "scatter_object_list": _scatter_object_list,
    "broadcast_object_list": _broadcast_object_list,
}
"""Exchanges of Python objects, which go through the values of tensors: the other ranks have what this one has."""


class _Collectives(TorchDispatchMode):
    """Answers collectives at once, and lets sharded tensors take their operators apart before anybody looks at them."""

    def __init__(self, exchanged: Exchanged) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._exchanged = exchanged

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to tell Dynamo so would import it, which takes a second

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if "c10d" in func.namespace:
            group = _group_of(args)
            if group is not None:
                self._exchanged(group.group_name, group.size())
            if func.namespace == "c10d":
                return _done(func, args)
        if any(is_sharded(each) for each in types):
            return NotImplemented
        return func(*args, **(kwargs or {}))


def is_sharded(kind: type) -> bool:
    """Whether tensors of a class are pieces of larger ones that other ranks hold the rest of."""
    tensors = sys.modules.get("torch.distributed.tensor")  # without it there are none, and to load it takes a second
    return tensors is not None and issubclass(kind, tensors.DTensor)


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """The process group among the arguments of a collective: itself, or, for functional collectives, its name."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject | str):
            with suppress(RuntimeError):  # it is something else
                if isinstance(argument, str):
                    return dist.distributed_c10d._resolve_process_group(argument)  # type: ignore[attr-defined, arg-type]
                return dist.ProcessGroup.unbox(argument)
    return None


def _done(func: Any, args: tuple[Any, ...]) -> Any:
    """What a collective returns: the tensors that it writes into, if it says so, and work that is done."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    written = args[0] if args else None
    future.set_result(written if isinstance(written, list) else [written])
    work = torch._C._distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]
    return work if len(func._schema.returns) == 1 else (written, work)
