"""Lines that start a training, as people type them: ``torchrun --nproc-per-node 4 train.py --lr 1e-4``
and the like.  :func:`parse_launch` reads what a line starts, on how many GPUs, and with which
environment variables.

This module loads no torch, so the command line uses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Final

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.launchers.accelerate_line import read_accelerate

_FIELD: Final = "source"
_PYTHON: Final = re.compile(r"python(3(\.\d+)?)?")
_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_TORCHRUN_MODULES: Final = ("torch.distributed.run", "torch.distributed.launch")
_TORCHRUN_FLAGS: Final = frozenset({"standalone", "no-python", "module", "run-path", "use-env"})
_DEEPSPEED_FLAGS: Final = frozenset(
    {
        *("module", "no-python", "no-local-rank", "no-ssh", "no-ssh-check", "force-multi"),
        *("save-pid", "bind-cores-to-rank", "quiet", "q"),
    }
)


@dataclass(frozen=True, slots=True)
class Launch:
    """What a line starts.

    Attributes:
        script: a file, or a module's dotted name.
        is_module: whether it is a module, as after ``python -m``.
        arguments: the script's own arguments.
        ranks: number of processes, each on a GPU of its own; ``None`` for one that is started
            alone.
        variables: environment variables that the line and its launcher set.
        notes: sentences on how it was read.
    """

    script: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    ranks: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def is_launch(words: Sequence[str]) -> bool:
    """Whether ``words`` are a line that starts a training, and not the name of a factory."""
    return bool(words) and (bool(_VARIABLE.fullmatch(words[0])) or _launcher(words[0]) in _READERS)


def parse_launch(words: Sequence[str]) -> Launch:
    """Read a line: variables, a launcher with its options, a script with its arguments.

    Raises:
        InvalidRequestError: the line has another form, or starts what cannot be traced.
    """
    left = list(words)
    variables: dict[str, str] = {}
    while left and _VARIABLE.fullmatch(left[0]):
        name, _, value = left.pop(0).partition("=")
        variables[name] = value
    if not left:
        raise InvalidRequestError("the line starts no program", _FIELD)
    launcher = _launcher(left[0])
    reader = _READERS.get(launcher)
    if reader is None:
        known = ", ".join(_READERS)
        raise InvalidRequestError(
            f"{describe(left[0])} is no launcher that is known here: use one of {known}", _FIELD
        )
    launch = reader(left[1:], variables)
    return replace(launch, variables={**variables, **launch.variables})


def _launcher(word: str) -> str:
    name = PurePath(word).name
    return "python" if _PYTHON.fullmatch(name) else name


def _python(words: list[str], variables: dict[str, str]) -> Launch:
    while words and words[0].startswith("-") and words[0] != "-m":
        option = words.pop(0)
        if option == "-c":
            raise InvalidRequestError(
                "code of python -c cannot be traced: write it into a file", _FIELD
            )
        if option in ("-W", "-X") and words:
            words.pop(0)
    if not words or words == ["-m"]:
        raise InvalidRequestError("the line names no script", _FIELD)
    if words[0] != "-m":
        return Launch(words[0], arguments=tuple(words[1:]))
    module, *rest = words[1:]
    if module in _TORCHRUN_MODULES:
        return _torchrun(rest, variables)
    if module in ("accelerate.commands.launch", "accelerate.commands.accelerate_cli"):
        return _accelerate(["launch", *rest] if module.endswith("launch") else rest, variables)
    return Launch(module, True, tuple(rest))


def _torchrun(words: list[str], variables: dict[str, str]) -> Launch:
    options, rest = _options(words, _TORCHRUN_FLAGS)
    each = options.get("nproc-per-node", "1")
    if each in ("gpu", "auto", "cpu", "xpu"):
        raise InvalidRequestError(
            f"--nproc-per-node {each} depends on the machine: give a number", _FIELD
        )
    hosts = options.get("nnodes", "1").rpartition(":")[2]
    on_host = _number(each, "--nproc-per-node")
    return Launch(
        rest[0],
        "module" in options,
        tuple(rest[1:]),
        on_host * _number(hosts, "--nnodes"),
        {"LOCAL_WORLD_SIZE": str(on_host)},
    )


def _accelerate(words: list[str], variables: dict[str, str]) -> Launch:
    if not words or words[0] != "launch":
        raise InvalidRequestError("only 'accelerate launch' starts a training", _FIELD)
    found = read_accelerate(words[1:], variables)
    return Launch(
        found["script"],
        found["is_module"],
        tuple(found["arguments"]),
        found["ranks"],
        found["variables"],
        tuple(found["notes"]),
    )


def _deepspeed(words: list[str], variables: dict[str, str]) -> Launch:
    """Read ``deepspeed …``, which passes its script a rank (``deepspeed/launcher/runner.py``)."""
    options, rest = _options(words, _DEEPSPEED_FLAGS)
    chosen = options.get("include", options.get("i"))
    if chosen is not None:  # worker-0@worker-1:0,2
        ranks = sum(len(node.partition(":")[2].split(",")) for node in chosen.split("@"))
        if not all(node.partition(":")[2] for node in chosen.split("@")):
            raise InvalidRequestError(
                f"deepspeed --include {chosen} depends on the machine: name the GPUs, as in localhost:0,1",
                _FIELD,
            )
    else:
        gpus = options.get("num-gpus", options.get("num-accelerators"))
        if gpus is None:
            raise InvalidRequestError(
                "deepspeed without --num_gpus depends on the machine: give it", _FIELD
            )
        nodes = options.get("num-nodes", "1")
        ranks = _number(gpus, "--num_gpus") * _number(nodes, "--num_nodes")
    given = () if "no-local-rank" in options else ("--local_rank=0",)
    return Launch(rest[0], "module" in options, (*given, *rest[1:]), ranks)


_READERS: Final[Mapping[str, Callable[[list[str], dict[str, str]], Launch]]] = {
    "python": _python,
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
}


def _options(words: list[str], flags: frozenset[str]) -> tuple[dict[str, str], list[str]]:
    """Return a launcher's options, with ``-`` in their names, and what follows them: script and
    arguments."""
    options: dict[str, str] = {}
    left = list(words)
    while left and left[0].startswith("-"):
        word, has_value, value = left.pop(0).partition("=")
        name = {"m": "module"}.get(word.lstrip("-"), word.lstrip("-").replace("_", "-"))
        if name in flags:
            options[name] = ""
        elif has_value:
            options[name] = value
        elif left:
            options[name] = left.pop(0)
    if not left:
        raise InvalidRequestError("the line names no script", _FIELD)
    return options, left


def _number(text: str, option: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 6 and int(text) > 0):
        raise InvalidRequestError(
            f"{option} must be a number above 0, not {describe(text)}", _FIELD
        )
    return int(text)
