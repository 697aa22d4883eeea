"""Runs a script that trains on several GPUs as its first rank, as ``torchrun`` would start it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from gpumemnet.errors import ExtractError
from gpumemnet.torch_private import distributed as names
from gpumemnet.torch_private.names import replaced
from gpumemnet.torch_private.operators import without_function_modes
from gpumemnet.tracing.parallel.process_group import process_group
from gpumemnet.tracing.script.gpu import not_traced, swap_for_meta
from gpumemnet.tracing.script.watch import Watch

_HOST_GPUS: Final = 8


def local_ranks(ranks: int) -> int:
    """Return how many of ``ranks`` are on one host, if hosts have eight GPUs."""
    return min(ranks, _HOST_GPUS)


def environment(ranks: int) -> dict[str, str]:
    """Return the environment variables that ``torchrun`` sets for the first of ``ranks``."""
    alone = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "GROUP_RANK": 0,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": local_ranks(ranks),
    }
    return {
        **{name: str(value) for name, value in alone.items()},
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }


@contextmanager
def one_of(ranks: int | None, watch: Watch, note: Callable[[str], None]) -> Iterator[None]:
    """Context in which a script may start a process group, and is its first rank.

    Args:
        ranks: number of GPUs that the script is started on; ``None`` if it is started alone.
        watch: observes the script.
        note: called with a note on the number of ranks.
    """
    stack = ExitStack()

    def begin(
        backend: object = None, *args: object, world_size: int = -1, **kwargs: object
    ) -> None:
        rank_count = world_size if world_size > 0 else ranks
        if rank_count is None:
            raise ExtractError(
                "--ranks: the script starts a process group (torch.distributed.init_process_group); give the number of GPUs"
            )
        if dist.is_initialized():
            raise ExtractError(
                "the script starts a second default process group, which is not supported"
            )
        from gpumemnet.tracing.parallel.replicas import replicas_on_meta
        from gpumemnet.tracing.parallel.sharding import sharding_on_meta

        stack.enter_context(process_group(rank_count, watch.recorder.exchanged))
        stack.enter_context(replicas_on_meta(watch.recorder))
        stack.enter_context(sharding_on_meta(watch.recorder, watch.streams, arrived))
        name = str(backend or "nccl")
        sharded = not_traced("FullyShardedDataParallel", "torch.distributed.fsdp.fully_shard")
        backend_names = [(each, lambda *args, **kwargs: name) for each in names.GET_BACKEND]
        stack.enter_context(replaced([*backend_names, (names.FSDP1_INIT, sharded)]))
        watch.recorder.set_ranks(rank_count)
        note(f"the first of {rank_count:,} ranks")

    def arrived(tensor: Tensor, is_parameter: bool) -> None:
        with without_function_modes():  # the script sees a CUDA tensor
            if not tensor.is_meta:
                swap_for_meta(
                    tensor,
                    torch.empty_strided(
                        tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
                    ),
                )
            watch.sharded_tensor(tensor, is_parameter)

    def ended(*args: object, **kwargs: object) -> None:
        """Do nothing: the group is needed until the script ends."""

    with stack:
        stack.enter_context(patch.dict(os.environ, {} if ranks is None else environment(ranks)))
        begins = [(name, begin) for name in names.INIT_PROCESS_GROUP]
        ends = [(name, ended) for name in names.DESTROY_PROCESS_GROUP]
        stack.enter_context(replaced([*begins, *ends, (names.SPAWN, _first_alone)]))
        try:
            yield
        finally:
            if (ranks or 1) > 1 and not dist.is_initialized():
                note("the script has started no process group; this is its memory on one GPU")


class _Ended:
    """Processes that have ended."""

    def join(self, *args: object, **kwargs: object) -> bool:
        """Return at once."""
        return True


def _first_alone(
    function: Callable[..., object],
    args: tuple[object, ...] = (),
    *others: object,
    **kwargs: object,
) -> _Ended:
    """Replace ``torch.multiprocessing.spawn``: run the first of several processes in this one."""
    function(0, *args)
    return _Ended()
