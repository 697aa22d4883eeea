"""Traces scripts, each in a process of its own, forked from one that has loaded PyTorch and nothing
of the tests."""

from __future__ import annotations

import multiprocessing
import os
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.torch_forks import FORKS


def traced(script: Path, arguments: tuple[str, ...], ranks: int | None) -> Any:
    """The answer as a JSON object, or the sentence with which the script is refused."""
    return _ask([script], arguments, ranks)[script.stem]


def traced_all(scripts: list[Path]) -> dict[str, Any]:
    """The same for several scripts by their names, one after the other in one process."""
    return _ask(scripts, (), None)


def _ask(scripts: list[Path], arguments: tuple[str, ...], ranks: int | None) -> dict[str, Any]:
    here, there = FORKS.Pipe(duplex=False)
    child = FORKS.Process(target=_trace, args=(there, scripts, arguments, ranks))
    child.start()
    there.close()
    try:
        return dict(here.recv())
    finally:
        child.join()


def _trace(
    answers: Connection, scripts: list[Path], arguments: tuple[str, ...], ranks: int | None
) -> None:
    from gpumemnet.errors import ExtractError
    from gpumemnet.tracing.result import answer_to_dict
    from gpumemnet.tracing.script.branches import largest_answer

    multiprocessing.set_start_method(
        "fork", force=True
    )  # as in a process of the user's, for the script's data loaders
    found: dict[str, Any] = {}
    for script in scripts:
        try:
            with patch.dict(os.environ):
                answer = largest_answer(partial(_one_way, script, arguments, ranks))
            found[script.stem] = answer_to_dict(answer)
        except ExtractError as error:
            found[script.stem] = str(error)
    answers.send(found)


def _one_way(
    script: Path,
    arguments: tuple[str, ...],
    ranks: int | None,
    assumptions: Any,
) -> Any:
    from gpumemnet.allocator import AllocatorSettings
    from gpumemnet.gpu import device_profile
    from gpumemnet.tracing.operators.rules import Platform
    from gpumemnet.tracing.script.run import ScriptCall, result_of_script, run_script

    platform = Platform(device=device_profile("A100"))
    settings = AllocatorSettings()
    call = ScriptCall(
        script=script,
        arguments=arguments,
        platform=platform,
        settings=settings,
        ranks=ranks,
        assumptions=assumptions,
    )
    return result_of_script(run_script(call), call)
