"""A process group of ranks that do not exist: this process is one of them, and every collective is over at once.

The group is PyTorch's own fake one (``torch/testing/_internal/distributed/fake_pg.py``), which knows no meta tensors; so the
collectives are answered before they reach it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from gpumemnet.errors import ExtractError

_RANK = 0
_START = dist.init_process_group


@contextmanager
def process_group(ranks: int) -> Iterator[None]:
    """Context in which this process is the first of ``ranks``.

    Raises:
        ExtractError: when the process is part of a group already.
    """
    if dist.is_initialized():
        raise ExtractError("this process is part of a process group (torch.distributed.init_process_group): trace outside of it")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _START("fake", rank=_RANK, world_size=ranks, store=FakeStore())
    try:
        with _Collectives():
            yield
    finally:
        dist.destroy_process_group()


class _Collectives(TorchDispatchMode):
    """Answers collectives at once, and lets sharded tensors take their operators apart before anybody looks at them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to tell Dynamo so would import it, which takes a second

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            return _done(func, args)
        if any(is_sharded(each) for each in types):
            return NotImplemented
        return func(*args, **(kwargs or {}))


def is_sharded(kind: type) -> bool:
    """Whether tensors of a class are pieces of larger ones that other ranks hold the rest of."""
    tensors = sys.modules.get("torch.distributed.tensor")  # without it there are none, and to load it takes a second
    return tensors is not None and issubclass(kind, tensors.DTensor)


def _done(func: Any, args: tuple[Any, ...]) -> Any:
    """What a collective returns: the tensors that it writes into, if it says so, and work that is done."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    written = args[0] if args else None
    future.set_result(written if isinstance(written, list) else [written])
    work = torch._C._distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]
    return work if len(func._schema.returns) == 1 else (written, work)
