"""Traces scripts, each in a process of its own, forked from one that has loaded PyTorch and nothing of the tests."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "torch.utils.data", "gpumemnet.tracing.script.run"])


def traced(script: Path, arguments: tuple[str, ...], ranks: int) -> Any:
    """The answer as a JSON object, or the sentence with which the script is refused."""
    here, there = _FORKS.Pipe(duplex=False)
    child = _FORKS.Process(target=_trace, args=(there, script, arguments, ranks))
    child.start()
    there.close()
    try:
        return here.recv()
    finally:
        child.join()


def _trace(answers: Connection, script: Path, arguments: tuple[str, ...], ranks: int) -> None:
    from gpumemnet.allocator import AllocatorSettings
    from gpumemnet.errors import ExtractError
    from gpumemnet.gpu.catalogue import device_profile
    from gpumemnet.tracing.platform import Platform
    from gpumemnet.tracing.report.answer import answer_to_dict
    from gpumemnet.tracing.script.run import trace_script

    multiprocessing.set_start_method("fork", force=True)  # as in a process of the user's, for the script's data loaders
    try:
        platform = Platform(device=device_profile("A100"))
        answers.send(answer_to_dict(trace_script(script, arguments, platform, AllocatorSettings(), ranks=ranks)))
    except ExtractError as error:
        answers.send(str(error))
