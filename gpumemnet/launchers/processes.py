"""Several GPUs, processes and threads of a script: one of its ranks, processes that inherit the
simulated GPU, and threads that allocate like the main one.

* A script that trains on several GPUs runs as one of its ranks, as ``torchrun`` would start it.
* A process that is started is forked and inherits the simulated GPU, with a model that is there;
  see :mod:`gpumemnet.launchers.programs`.  Workers of data loaders allocate nothing on it.
* PyTorch's modes belong to one thread, so a thread that a script starts inherits those of the
  trace: threads of data loaders and prefetchers move tensors to the GPU.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.process import BaseProcess
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from gpumemnet.errors import ExtractError
from gpumemnet.launchers import names
from gpumemnet.launchers.launch_line import torchrun_environment
from gpumemnet.launchers.parallel import (
    Arrived,
    RankRecorder,
    Streams,
    process_group,
    replicas_on_meta,
    sharding_on_meta,
)
from gpumemnet.launchers.pipeline_stages import StageFolder
from gpumemnet.sandbox.user_code import is_user_code
from gpumemnet.torch_private import script as script
from gpumemnet.torch_private.names import replaced, value_of, without_function_modes


@contextmanager
def threads_inherit_modes(end: type[BaseException]) -> Iterator[None]:
    """Context in which threads are started with the modes of the thread that enters it; ``end`` is
    how the trace ends one."""
    modes = script.modes_of_thread()
    start = value_of(names.THREAD_START)

    def started(thread: Thread) -> None:
        run = thread.run

        def run_with_modes() -> None:
            with suppress(end), script.with_modes(modes):
                run()

        thread.run = run_with_modes  # type: ignore[method-assign]
        start(thread)

    with replaced([(names.THREAD_START, started)]):
        yield


@contextmanager
def processes_inherit_gpu(traced: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Context in which a process starts with the simulated GPU: it is forked, whatever the script
    asks for, if its code is the script's own or a data loader's.

    Args:
        traced: runs what a process does, in that process, and reports its memory.
    """
    start = value_of(names.PROCESS_START)
    waited_for: list[BaseProcess] = []

    def started(process: BaseProcess) -> None:
        run: Any = process.run
        function = getattr(process, "_target", None) or run
        file = getattr(getattr(function, "__code__", None), "co_filename", "")
        is_loader = file.startswith(script.TORCH_FOLDER)
        is_own = is_user_code(file)

        def run_traced() -> None:
            torch.set_num_threads(1)  # those of the process that it is forked from are not here
            traced(run)

        def run_aside() -> None:
            """What a loader's worker computes is on the host, where nothing is counted."""
            with without_function_modes(), value_of(script.WITHOUT_MODES)():
                run()

        method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
        is_forked = method == "fork"
        if (is_loader or is_own) and not is_forked:
            vars(process)["_Popen"] = value_of(names.FORK)
        if file and not is_loader and (is_own or is_forked):  # a library's may be pickled
            process.run = run_traced  # type: ignore[method-assign]
        elif is_loader:
            process.run = run_aside  # type: ignore[method-assign]
        start(process)
        if is_own and not process.daemon:
            waited_for.append(process)

    with replaced([(names.PROCESS_START, started)]):
        yield
        for process in waited_for:  # as Python does before it ends
            process.join()


@contextmanager
def as_rank(
    ranks: int | None,
    recorder: RankRecorder,
    streams: Streams,
    arrived: Arrived,
    note: Callable[[str], None],
    rank: int,
    stages: StageFolder | None,
) -> Iterator[None]:
    """Context in which a script may start a process group, and is one of its ranks.

    Args:
        ranks: number of GPUs that the script is started on; ``None`` if it is started alone.
        recorder: records what is on the GPU.
        streams: those of the GPU.
        arrived: called for each unsharded tensor that arrives there.
        note: called with a note on the number of ranks.
        rank: which one.
        stages: what it tells others of a pipeline.
    """
    sends = (lambda ranks: None) if stages is None else stages.sends
    stack = ExitStack()

    def begin(
        backend: object = None, *args: object, world_size: int = -1, **kwargs: object
    ) -> None:
        chosen = os.environ.get("WORLD_SIZE", "")  # scripts also set the launcher's variables
        rank_count = world_size if world_size > 0 else ranks
        if rank_count is None and chosen.isdigit():
            rank_count = int(chosen)
        if rank_count is None:
            raise ExtractError(
                "--ranks: the script starts a process group (torch.distributed.init_process_group); give the number of GPUs"
            )
        if dist.is_initialized():
            raise ExtractError(
                "the script starts a second default process group, which is not supported"
            )
        gathered = stack.enter_context(process_group(rank_count, recorder.exchanged, rank, sends))
        stack.enter_context(replicas_on_meta(recorder))
        stack.enter_context(sharding_on_meta(recorder, streams, arrived, gathered))
        name = str(backend or "nccl")
        backend_names = [(each, lambda *args, **kwargs: name) for each in names.GET_BACKEND]
        stack.enter_context(replaced(backend_names))
        recorder.set_ranks(rank_count)
        note(f"rank {rank:,} of {rank_count:,}" if rank else f"the first of {rank_count:,} ranks")

    def ended(*args: object, **kwargs: object) -> None:
        """Do nothing: the group is needed until the script ends."""

    environment = {} if ranks is None else torchrun_environment(ranks, rank)
    begins = [(name, begin) for name in names.INIT_PROCESS_GROUP]
    ends = [(name, ended) for name in names.DESTROY_PROCESS_GROUP]
    with (
        patch.dict(os.environ, environment),
        replaced([*begins, *ends, (names.SPAWN, _first_alone)]),
        stack,
    ):
        try:
            yield
        finally:
            if (ranks or 1) > 1 and not dist.is_initialized():
                note("the script has started no process group; this is its memory on one GPU")


def _first_alone(
    function: Callable[..., object],
    args: tuple[object, ...] = (),
    *others: object,
    **kwargs: object,
) -> SimpleNamespace:
    """Replace ``torch.multiprocessing.spawn``: run the first of several processes in this one; all
    have then ended."""
    function(0, *args)
    return SimpleNamespace(join=lambda *timeout, **named: True)
