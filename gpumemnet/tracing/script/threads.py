"""Threads and processes that a script starts.

PyTorch's modes belong to one thread, so a thread that a script starts inherits those of the trace:
threads of data loaders and prefetchers move tensors to the GPU.  A process that is started with a
model on the GPU runs in this one: the first of several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from gpumemnet.extract.nested_tensors import tensors_in
from gpumemnet.torch_private import script as names
from gpumemnet.torch_private.names import replaced
from gpumemnet.tracing.script.cuda_answers import GPU
from gpumemnet.tracing.script.watch import EnoughSteps


@contextmanager
def threads_inherit_modes() -> Iterator[None]:
    """Context in which threads are started with the modes of the thread that enters it."""
    modes = names.modes_of_thread()
    start = names.THREAD_START.value()

    def started(thread: Thread) -> None:
        run = thread.run

        def run_with_modes() -> None:
            with suppress(EnoughSteps), names.with_modes(modes):
                run()

        thread.run = run_with_modes  # type: ignore[method-assign]
        start(thread)

    with replaced([(names.THREAD_START, started)]):
        yield


@contextmanager
def first_process_runs_here(
    device_of: Callable[[Tensor], torch.device], note: Callable[[str], None]
) -> Iterator[None]:
    """Context in which the first process that is started with a model or a tensor on the GPU runs
    in this one, and others not.

    Args:
        device_of: returns the device of a tensor as the script sees it.
        note: called with a sentence for the answer.
    """
    make, start, join = (
        name.value() for name in (names.PROCESS_INIT, names.PROCESS_START, names.PROCESS_JOIN)
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
            start(process)
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
        [(names.PROCESS_INIT, made), (names.PROCESS_START, started), (names.PROCESS_JOIN, joined)]
    ):
        yield
