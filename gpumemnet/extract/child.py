"""The child process of an extraction, ``python -m gpumemnet.extract.child``: it reads a request and writes an answer.

A user's file is imported here and nowhere else, with nothing of this project importable but ``gpumemnet``, so a ``models`` or
``service`` package of the user's is the one that the file gets.  What the user's code prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final, NoReturn

import gpumemnet
from gpumemnet.errors import ExtractError, GpumemnetError
from gpumemnet.extract.factory import call_factory, compile_file, load_module
from gpumemnet.extract.faults import user_location
from gpumemnet.extract.inputs import inputs_from_example, inputs_from_specs, parse_input
from gpumemnet.extract.result import Extraction, extraction_to_dict

_HIDDEN: Final = frozenset({"dataset_builder", "models", "service"})


class _DeadlineReached(BaseException):
    """Raised in the user's code when its time is up; no ``except Exception`` swallows it."""


class _HideOwnPackages:
    """Keeps installed packages of this project from being found in place of a user's of the same name."""

    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find ``name`` anywhere but next to ``gpumemnet``."""
        if path is not None or name not in _HIDDEN:
            return None
        spec = PathFinder.find_spec(name, [entry for entry in sys.path if os.path.realpath(entry) != self._root])
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return spec


def main() -> NoReturn:
    """Answer one request and leave at once, whatever threads the user's code has started."""
    request = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _hide_this_project(request["pythonpath"])
    answer: dict[str, Any]
    try:
        _start_clock(request["deadline_seconds"])
        answer = {"extraction": extraction_to_dict(_extract(request))}
        signal.setitimer(signal.ITIMER_REAL, 0)
    except GpumemnetError as error:
        answer = {"error": str(error)}
    except _DeadlineReached as error:
        where = user_location(error)
        within = f" (it was at {where})" if where else ""
        answer = {"error": f"was not done after {request['deadline_seconds']:g} seconds{within}: give it more with --deadline"}
    except SystemExit as error:
        answer = {"error": f"the code ended the program: {user_location(error)}: sys.exit({error.code!r})"}
    json.dump(answer, answers)
    for stream in (answers, sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(0)


def _extract(request: dict[str, Any]) -> Extraction:
    file = Path(request["file"])
    code = compile_file(file)  # before torch is imported, which takes seconds
    from gpumemnet.extract.extraction import extract_from
    from gpumemnet.extract.placement import placement

    _leave_machine_alone()
    options, batch_size = request["options"], request["batch_size"]
    specs = [parse_input(text) for text in request["inputs"]]
    with placement():
        module = load_module(file, code)
        model, example = call_factory(module, request["name"], request["arguments"])
    if example is not None:
        if specs:
            raise ExtractError(f"{request['name']}() gives inputs itself: leave out --input")
        return extract_from(model, inputs_from_example(example, batch_size), options)
    if not specs:
        raise ExtractError(f"{request['name']}() gives no inputs: say them with --input, such as --input 3x224x224")
    if batch_size is None:
        raise ExtractError("the batch size is missing: say it with --batch-size")
    return extract_from(model, inputs_from_specs(specs, batch_size), options)


def _hide_this_project(pythonpath: str | None) -> None:
    """Take the folder that holds ``gpumemnet`` off the path, and what else lies in it out of reach."""
    root = os.path.realpath(Path(gpumemnet.__path__[0]).parent)
    os.environ.pop("PYTHONPATH", None)
    if pythonpath is not None:
        os.environ["PYTHONPATH"] = pythonpath
    installed = {os.path.realpath(sysconfig.get_path(scheme)) for scheme in ("purelib", "platlib")}
    if root in installed:
        sys.meta_path.insert(0, _HideOwnPackages(root))
    else:
        sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != root]


def _leave_machine_alone() -> None:
    """Let weights files be opened without their weights, and default devices be set without effect."""
    import torch

    load: Callable[..., Any] = torch.load

    @wraps(load)
    def load_shapes(*args: Any, **kwargs: Any) -> Any:
        return load(*args[:1], **{**kwargs, "map_location": "meta"})

    torch.load = load_shapes
    torch.set_default_device = lambda device: None
    torch.cuda.set_device = lambda device: None


def _start_clock(deadline_seconds: float) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _DeadlineReached

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, deadline_seconds)


if __name__ == "__main__":
    main()
