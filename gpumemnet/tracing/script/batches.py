"""Traces a script at several batch sizes: each run is a process of its own, forked before the
script began."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any, Final

from gpumemnet.errors import ExtractError, GpumemnetError
from gpumemnet.sandbox.user_code import fault_sentence
from gpumemnet.tracing.batch_memory import BatchMemory
from gpumemnet.tracing.batch_sizes import BatchTraces
from gpumemnet.tracing.options import ExtraResults
from gpumemnet.tracing.report.answer import TraceAnswer
from gpumemnet.tracing.script.batch_setting import BatchSetting, find_setting
from gpumemnet.tracing.script.run import ScriptCall, ScriptRun, answer_of, run_script

_LOG: Final = logging.getLogger("gpumemnet.tracing")


def trace_batches(
    call: ScriptCall, extras: ExtraResults, batch_argument: str | None
) -> TraceAnswer:
    """Return the memory of a script, and that at other batch sizes.

    Args:
        call: the script.
        extras: which batch sizes, and whether to find the largest one that fits.
        batch_argument: the script's argument that sets its batch size; found by its name and value
            if ``None``.

    Raises:
        ExtractError: a run cannot be traced, or nothing is found that sets the batch size.
    """
    own = in_fork(lambda: run_script(call))
    setting = find_setting(own.file, call.arguments, own.batch_size, batch_argument)
    traces = BatchTraces(
        lambda size: _run_at(call, own, setting, size, batch_argument).timeline,
        setting.value,
        own.timeline,
    )
    for size in {min(extras.batches), max(extras.batches)} if extras.batches else ():
        traces.exact(size)  # what lies between is interpolated, and nothing is extrapolated
    memory = BatchMemory(traces, call.platform.device, own.settings)
    answer = answer_of(own, call, extras.curve)
    return replace(
        answer,
        batches=tuple(memory.point(size) for size in extras.batches),
        max_batch_size=memory.largest() if extras.max_batch else None,
        notes=(*answer.notes, f"{setting.sentence}."),
    )


def _run_at(
    call: ScriptCall, own: ScriptRun, setting: BatchSetting, size: int, batch_argument: str | None
) -> ScriptRun:
    """Run the script with another batch size."""
    _LOG.info("running up to the second step at batch size %d", size)
    changed = replace(
        call,
        arguments=tuple(setting.arguments(call.arguments, size)),
        compiled=lambda file: setting.code(file, size),
    )
    try:
        run: ScriptRun = in_fork(lambda: run_script(changed))
    except ExtractError as error:
        raise type(error)(f"at batch size {size:,}: {error}") from error
    if batch_argument is None and run.batch_size != size:
        raise ExtractError(
            f"--batch-argument: {setting.sentence}, but with {size:,} the model got batches of {run.batch_size:,}: "
            "name the argument that sets the batch size"
        )
    return run


def in_fork(compute: Callable[[], Any]) -> Any:
    """Return what ``compute`` returns in a forked process, which ends at once.

    Raises:
        ExtractError: the process ended without a result.
        GpumemnetError: as ``compute`` does.
    """
    here, there = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            outcome: Any = compute()
        except GpumemnetError as error:
            outcome = error
        except BaseException as error:  # the process must not go on as a copy of its parent
            outcome = ExtractError(fault_sentence(error))
        there.send(outcome)
        there.close()
        os._exit(0)
    there.close()
    try:
        outcome = here.recv()
    except EOFError:
        outcome = ExtractError("the process that ran the script ended without an answer")
    os.waitpid(child, 0)
    if isinstance(outcome, GpumemnetError):
        raise outcome
    return outcome
