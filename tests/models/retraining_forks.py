"""Runs of ``gpumemnet`` forked from one process that has loaded everything, on request with
a fault at their first step.

A step ends when a file or a folder gets its final name, which has no dot in front.  Reads requests
from its input, one a line as
JSON, and answers each in a line: the exit status, which is negative for a signal, what was said,
and the step that it came to.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from gpumemnet.cli import main
from gpumemnet.site.releases import SHIPPED, Aliases, Registry
from tests.models.filled_graphs import fill_graphs
from tests.models.retraining import champion_of, dataset, measured

FULL_DISK: Final = "full disk"
KILLED_BEFORE: Final = "killed before"
KILLED_AFTER: Final = "killed after"
ANOTHER_CHAMPION: Final = "another champion"
_LITTLE_BYTES: Final = 64
"""Libraries look for a folder in which they can write a few bytes."""


def run(arguments: list[str], fault: str | None) -> tuple[int, str, str]:
    """Exit status, what was said, and the step at which it was killed."""
    (step_out, step_in), (said_out, said_in) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(said_in, 1)
        os.dup2(said_in, 2)
        if fault == FULL_DISK:
            sys.dont_write_bytecode = (
                True  # Python would leave half a file of bytecode for all later processes
            )
            resource.setrlimit(resource.RLIMIT_FSIZE, (_LITTLE_BYTES, _LITTLE_BYTES))
        elif fault == ANOTHER_CHAMPION:
            Registry.set_champion = _late(Registry.set_champion)  # type: ignore[method-assign]
        elif fault:
            for name in ("rename", "replace"):
                setattr(Path, name, _deadly(getattr(Path, name), fault, step_in))
        status = 70
        try:
            status = main(arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.close(step_in)
    os.close(said_in)
    with os.fdopen(said_out) as said, os.fdopen(step_out) as step:
        texts = said.read(), step.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *texts


def _deadly(
    original: Callable[[Path, Path], Path], fault: str, told: int
) -> Callable[[Path, Path], Path]:
    def finish(self: Path, target: Path) -> Path:
        if any(part.startswith(".") for part in Path(target).parts):
            return original(self, target)
        os.write(told, str(target).encode())
        if fault == KILLED_AFTER:
            original(self, target)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    return finish


def _late(original: Callable[..., Aliases]) -> Callable[..., Aliases]:
    def set_champion(self: Registry, name: str, **options: Any) -> Aliases:
        original(self, SHIPPED, by="somebody", reason="")
        return original(self, name, **options)

    return set_champion


if __name__ == "__main__":
    torch.set_num_threads(1)  # a child has the forking thread alone
    fill_graphs()
    folder = Path(sys.argv[1])
    champion_of(folder, dataset(folder / "base.parquet", measured(160, 1)))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(*json.loads(line))), flush=True)
