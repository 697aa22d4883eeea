"""Worker processes for torch work: one core and one thread each; they end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, Final

_CHUNK: Final = 4
"""Tasks per message to a worker: few enough that all workers end together, many enough that
messages cost nothing."""


def in_processes(
    function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], workers: int | None
) -> Iterator[Any]:
    """Call ``function`` with the arguments of each task in a pool of new processes, one for each
    core by default, and yield the results in order."""
    if tasks:
        processes, context = workers or os.cpu_count() or 1, get_context("spawn")
        with ProcessPoolExecutor(processes, context, _start) as pool:
            yield from pool.map(function, *zip(*tasks, strict=True), chunksize=_CHUNK)


def _start() -> None:
    import torch

    torch.set_num_threads(1)  # more threads would only wait for those of the other processes
    end_with_parent()


def end_with_parent() -> None:
    """End this worker process when its parent dies, by whatever signal; for the initializer of a
    process pool.

    A worker waits for its next task on a pipe that the other workers hold open too.  If the parent
    were killed, all of them would wait forever and keep their memory.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)  # a thread cannot end the process otherwise, and no parent is left to report to

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()
