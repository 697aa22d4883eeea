"""Several GPUs, processes and threads of a script: one of its ranks, the first process, and threads
that allocate like the main one.

* A script that trains on several GPUs runs as one of its ranks, as ``torchrun`` would start it.
* A process that is started with a model on the GPU runs in this one: the first of several.  Others
  are forked and inherit the simulated GPU; see :mod:`gpumemnet.launchers.programs`.  Workers of
  data loaders start as they are, and allocate nothing on the GPU.
* PyTorch's modes belong to one thread, so a thread that a script starts inherits those of the
  trace: threads of data loaders and prefetchers move tensors to the GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpumemnet.errors import ExtractError
from gpumemnet.extract.module_calls import tensors_in
from gpumemnet.launchers.launch_line import torchrun_environment
from gpumemnet.launchers.parallel import process_group
from gpumemnet.launchers.pipeline_stages import StageFolder
from gpumemnet.sandbox.user_code import is_user_code
from gpumemnet.torch_private import script as script
from gpumemnet.torch_private import training
from gpumemnet.torch_private.names import replaced, without_function_modes
from gpumemnet.tracing.script.observer import EnoughSteps, ScriptObserver
from gpumemnet.tracing.script.simulated_cuda import GPU, swap_for_meta


@contextmanager
def threads_inherit_modes() -> Iterator[None]:
    """Context in which threads are started with the modes of the thread that enters it."""
    modes = script.modes_of_thread()
    start = script.THREAD_START.value()

    def started(thread: Thread) -> None:
        run = thread.run

        def run_with_modes() -> None:
            with suppress(EnoughSteps), script.with_modes(modes):
                run()

        thread.run = run_with_modes  # type: ignore[method-assign]
        start(thread)

    with replaced([(script.THREAD_START, started)]):
        yield


@contextmanager
def first_process_runs_here(
    device_of: Callable[[Tensor], torch.device],
    note: Callable[[str], None],
    report: Callable[[], None],
) -> Iterator[None]:
    """Context in which the first process that is started with a model or a tensor on the GPU runs
    in this one, and others not; any other process inherits the simulated GPU.

    Args:
        device_of: returns the device of a tensor as the script sees it.
        note: called with a sentence for the answer.
        report: called in another process when it ends, or has trained enough.
    """
    make, start, join = (
        name.value() for name in (script.PROCESS_INIT, script.PROCESS_START, script.PROCESS_JOIN)
    )
    given: WeakKeyDictionary[BaseProcess, tuple[object, ...]] = WeakKeyDictionary()
    ended: WeakSet[BaseProcess] = WeakSet()

    def made(
        process: BaseProcess,
        group: None = None,
        target: Any = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        args, kwargs = tuple(args), dict(kwargs or {})
        make(process, group, target, name, args, kwargs, **options)
        given[process] = (*args, *kwargs.values())

    def started(process: BaseProcess) -> None:
        values = given.get(process, ())
        weights = [
            weight
            for value in values
            if isinstance(value, nn.Module)
            for weight in value.parameters()
        ]
        if not any(device_of(tensor) == GPU for tensor in (*tensors_in(values), *weights)):
            _start_with_gpu(process, start, report)
            return
        ended.add(process)
        if len(ended) == 1:
            note(
                "the script starts processes that share a model on the GPU: this is one of them with the model; "
                "each of the others takes a CUDA context, and its own gradients, batches and activations"
            )
            process.run()

    def joined(process: BaseProcess, timeout: float | None = None) -> None:
        if process not in ended:
            join(process, timeout)

    with replaced(
        [
            (script.PROCESS_INIT, made),
            (script.PROCESS_START, started),
            (script.PROCESS_JOIN, joined),
        ]
    ):
        yield


def _start_with_gpu(
    process: BaseProcess, start: Callable[[BaseProcess], None], report: Callable[[], None]
) -> None:
    """Start a process with the simulated GPU: it is forked, whatever the script asks for, if its
    code is the script's own."""
    run: Any = process.run
    target = getattr(process, "_target", None)
    code = getattr(target or run, "__code__", None)
    if code is None or code.co_filename.startswith(script.TORCH_FOLDER):  # a data loader's
        start(process)
        return

    def run_and_report() -> None:
        torch.set_num_threads(1)  # those of the process that it is forked from are not here
        with suppress(EnoughSteps):
            run()
        report()

    process.run = run_and_report  # type: ignore[method-assign]
    if is_user_code(code.co_filename) and not isinstance(process, ForkProcess):
        vars(process)["_Popen"] = script.FORK.value()
    start(process)


@contextmanager
def as_rank(
    ranks: int | None,
    observer: ScriptObserver,
    note: Callable[[str], None],
    rank: int,
    stages: StageFolder | None,
) -> Iterator[None]:
    """Context in which a script may start a process group, and is one of its ranks.

    Args:
        ranks: number of GPUs that the script is started on; ``None`` if it is started alone.
        observer: observes the script.
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
        from gpumemnet.launchers.parallel import replicas_on_meta, sharding_on_meta

        stack.enter_context(process_group(rank_count, observer.recorder.exchanged, rank, sends))
        stack.enter_context(replicas_on_meta(observer.recorder))
        stack.enter_context(sharding_on_meta(observer.recorder, observer.streams, arrived))
        name = str(backend or "nccl")
        backend_names = [(each, lambda *args, **kwargs: name) for each in training.GET_BACKEND]
        stack.enter_context(replaced(backend_names))
        observer.recorder.set_ranks(rank_count)
        note(f"rank {rank:,} of {rank_count:,}" if rank else f"the first of {rank_count:,} ranks")

    def arrived(tensor: Tensor, is_parameter: bool) -> None:
        with without_function_modes():  # the script sees a CUDA tensor
            if observer.device_of(tensor).type == "cpu":  # others may hold its storage there
                fresh = torch.empty_strided(
                    tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
                )
                if tensor.is_meta:
                    tensor.data = fresh
                else:
                    swap_for_meta(tensor, fresh)
            observer.sharded_tensor(tensor, is_parameter)

    def ended(*args: object, **kwargs: object) -> None:
        """Do nothing: the group is needed until the script ends."""

    with stack:
        stack.enter_context(
            patch.dict(os.environ, {} if ranks is None else torchrun_environment(ranks, rank))
        )
        begins = [(name, begin) for name in training.INIT_PROCESS_GROUP]
        ends = [(name, ended) for name in training.DESTROY_PROCESS_GROUP]
        stack.enter_context(replaced([*begins, *ends, (training.SPAWN, _first_alone)]))
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
