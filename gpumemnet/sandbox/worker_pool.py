"""Processes that share out work in torch: one core and one thread each, and none outlives the one that started it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, Final

from gpumemnet.sandbox.child_lifetime import end_with_parent

_CHUNK: Final = 4
"""Tasks that a process takes at once: short enough that all end together, long enough that the pipe costs nothing."""


def worker_pool(workers: int | None = None, prepare: Callable[[], None] | None = None) -> ProcessPoolExecutor:
    """A pool of fresh processes.

    Args:
        workers: how many; one for each core unless given.
        prepare: what each calls before its first task.
    """
    return ProcessPoolExecutor(
        workers or os.cpu_count() or 1, mp_context=get_context("spawn"), initializer=_start, initargs=(prepare,)
    )


def in_processes(function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], workers: int | None) -> Iterator[Any]:
    """``function`` of the arguments of every task, in order, in processes of a :func:`worker_pool`."""
    if tasks:
        with worker_pool(workers) as pool:
            yield from pool.map(function, *zip(*tasks, strict=True), chunksize=_CHUNK)


def _start(prepare: Callable[[], None] | None) -> None:
    import torch

    torch.set_num_threads(1)  # threads would only wait for those of the other processes
    end_with_parent()
    if prepare is not None:
        prepare()
