"""Traces scripts, each in a process of its own, forked from one that has loaded PyTorch and nothing
of the tests."""

from __future__ import annotations

import multiprocessing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.torch_forks import FORKS


def traced(
    script: Path,
    arguments: tuple[str, ...] = (),
    ranks: int | None = None,
    more_seconds: float = 20.0,
) -> Any:
    """The answer as a JSON object, or the sentence with which the script is refused; the whole run
    after the first steps has ``more_seconds``."""
    here, there = FORKS.Pipe(duplex=False)
    child = FORKS.Process(target=_trace, args=(there, script, arguments, ranks, more_seconds))
    child.start()
    there.close()
    try:
        return here.recv()
    finally:
        child.join()


def _trace(there: Connection, script: Path, *settings: Any) -> None:
    from gpumemnet.errors import ExtractError
    from gpumemnet.tracing.result import answer_to_dict
    from gpumemnet.tracing.script.branches import largest_answer

    multiprocessing.set_start_method(
        "fork", force=True
    )  # as in a process of the user's, for the script's data loaders
    try:
        there.send(answer_to_dict(largest_answer(partial(_one_way, script, *settings))))
    except ExtractError as error:
        there.send(str(error))


def _one_way(
    script: Path,
    arguments: tuple[str, ...],
    ranks: int | None,
    more_seconds: float,
    assumptions: Any,
) -> Any:
    from gpumemnet.allocator import AllocatorSettings
    from gpumemnet.gpu import device_profile
    from gpumemnet.tracing.operators.rules import Platform
    from gpumemnet.tracing.script.run import ScriptCall, run_script
    from gpumemnet.tracing.script.script_run import result_of_script

    platform = Platform(device=device_profile("A100"))
    settings = AllocatorSettings()
    call = ScriptCall(
        script=script,
        arguments=arguments,
        platform=platform,
        settings=settings,
        ranks=ranks,
        assumptions=assumptions,
        more_seconds=more_seconds,
    )
    return result_of_script(run_script(call))
