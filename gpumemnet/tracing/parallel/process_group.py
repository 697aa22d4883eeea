"""A simulated process group: this process is the first rank, and every collective finishes at once.

The group is PyTorch's own fake group (``torch/testing/_internal/distributed/fake_pg.py``), which
does not support meta tensors. Therefore collectives are answered before they reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from gpumemnet.errors import ExtractError
from gpumemnet.torch_private.distributed import (
    OBJECT_COLLECTIVES,
    fake_store,
    finished_work,
    is_sharded,
    resolve_process_group,
)
from gpumemnet.torch_private.names import replaced
from gpumemnet.torch_private.operators import DispatchMode, schema

_RANK = 0
_BEGIN, _END = dist.init_process_group, dist.destroy_process_group
"""PyTorch's own functions: a traced script finds replacements."""


Exchanged = Callable[[str, int], None]
"""Called for each collective with the name of its process group and its number of ranks."""


@contextmanager
def process_group(ranks: int, exchanged: Exchanged) -> Iterator[None]:
    """Context in which this process is the first of ``ranks``.

    Args:
        ranks: number of ranks.
        exchanged: called for each collective.

    Raises:
        ExtractError: the process is part of a group already.
    """
    if dist.is_initialized():
        raise ExtractError(
            "this process is in a process group (torch.distributed.init_process_group); trace in another process"
        )
    _BEGIN("fake", rank=_RANK, world_size=ranks, store=fake_store())
    try:
        replacements = [
            (name, _OBJECTS[collective])
            for collective, names in OBJECT_COLLECTIVES.items()
            for name in names
        ]
        with replaced(replacements), _Collectives(exchanged):
            yield
    finally:
        _END()


def _all_gather_object(objects: list[Any], given: Any, *args: object, **kwargs: object) -> None:
    objects[:] = [given] * len(objects)


def _gather_object(
    given: Any, objects: list[Any] | None = None, *args: object, **kwargs: object
) -> None:
    if objects is not None:
        _all_gather_object(objects, given)


def _scatter_object_list(
    received: list[Any], objects: list[Any] | None = None, *args: object, **kwargs: object
) -> None:
    received[:1] = (objects or [None])[:1]


def _broadcast_object_list(objects: list[Any], *args: object, **kwargs: object) -> None:
    pass


_OBJECTS: Final = {
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "scatter_object_list": _scatter_object_list,
    "broadcast_object_list": _broadcast_object_list,
}
"""Collectives for Python objects, which need values of tensors: all ranks have the objects of this
one."""


class _Collectives(DispatchMode):
    """Answers collectives at once, and lets sharded tensors decompose their operators before other
    modes see them."""

    def __init__(self, exchanged: Exchanged) -> None:
        super().__init__()
        self._exchanged = exchanged

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
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


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Return the process group among the arguments of a collective; functional collectives have its
    name there."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject | str):
            with suppress(RuntimeError):  # it is not a process group
                if isinstance(argument, str):
                    return cast(dist.ProcessGroup, resolve_process_group(argument))
                return dist.ProcessGroup.unbox(argument)
    return None


def _done(func: Any, args: tuple[Any, ...]) -> Any:
    """Return the result of a collective: the tensors that it writes into, if its schema says so,
    and finished work."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    written = args[0] if args else None
    future.set_result(written if isinstance(written, list) else [written])
    work = finished_work(future)
    return work if len(schema(func).returns) == 1 else (written, work)
