"""Lines that start a training, as people type them: ``torchrun --nproc-per-node 4 train.py --lr 1e-4``
and the like.  :func:`parse_launch` reads what a line starts, on how many GPUs, and with which
environment variables.

This module loads no torch, so the command line uses it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path, PurePath
from typing import Final

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.launchers.accelerate_line import read_accelerate

_FIELD: Final = "source"
_PYTHON: Final = re.compile(r"python(3(\.\d+)?)?")
_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_TORCHRUN_MODULES: Final = ("torch.distributed.run", "torch.distributed.launch")
_TORCHRUN_FLAGS: Final = frozenset({"standalone", "no-python", "module", "run-path", "use-env"})
_PREFIXES: Final = frozenset(
    {
        *("srun", "sbatch", "nohup", "numactl", "uv", "poetry", "pixi", "pdm", "hatch", "pipenv"),
        *("rye", "conda", "mamba", "micromamba", "jupyter", "mpirun", "mpiexec", "horovodrun"),
    }
)
"""Programs that start the rest of a line, after options of their own."""
_SCRIPTS: Final = (".py", ".ipynb")
_SHELLS: Final = ("bash", "sh")
_FLAGS: Final = ("-u", "--unbuffered", "-l", "--label", "--exclusive", "--wait")
"""Options of ``srun`` and ``sbatch`` without a value."""
_MPI_RANKS: Final = re.compile(r"\S*(?:mpirun|mpiexec|horovodrun) (?:.* )?--?np? (\d+)")
_MODULE: Final = re.compile(r"-[bBdEiIOPqsSuvx]*m(.*)")
"""``-m``, behind options without a value, as in ``-um``, or before its value."""
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
VISIBLE_ON_LINE: Final = "GPUMEMNET_VISIBLE_DEVICES"
"""What a line sets :data:`VISIBLE` to, for the process that runs its script: a child sees no GPU."""
PROGRAMS_MODULE: Final = "gpumemnet.launchers.programs"
_DEEPSPEED_FLAGS: Final = frozenset(
    {
        *("module", "no-python", "no-local-rank", "no-ssh", "no-ssh-check", "force-multi"),
        *("save-pid", "bind-cores-to-rank", "quiet", "q", "elastic-training"),
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
    return bool(words) and (
        bool(_VARIABLE.fullmatch(words[0]))
        or _starts(words[0])
        or _launcher(words[0]) in _PREFIXES
        or shutil.which(words[0]) is not None
    )


def parse_launch(words: Sequence[str], gpus: int | None = None) -> Launch:
    """Read a line: variables, a launcher with its options, a script with its arguments.

    Args:
        words: the line.
        gpus: number of GPUs, for a line that takes all of the machine.

    Raises:
        InvalidRequestError: the line has another form, or starts what cannot be traced.
    """
    left = list(words)
    # Of the caller's shell, as if the line began with it; one that hides all GPUs is not meant here.
    variables = {VISIBLE: shell} if (shell := os.environ.get(VISIBLE)) else {}
    while left and _VARIABLE.fullmatch(left[0]):
        name, _, value = left.pop(0).partition("=")
        variables[name] = value
    ranks = None
    if not left:
        raise InvalidRequestError("the line names no program", _FIELD)
    if _launcher(left[0]) in _PREFIXES:
        left, ranks = _after_prefix(left)
    if left[0].endswith(_SCRIPTS):
        left.insert(0, "python")
    elif left[0].endswith(".sh") and shutil.which(left[0]) is None:
        left.insert(0, _SHELLS[0])
    gpus = gpus or visible_gpus(variables)
    launcher = _launcher(left[0])
    reader = _READERS.get(launcher)
    launch = _program(left) if reader is None else reader(left[1:], variables, gpus)
    return replace(launch, ranks=launch.ranks or ranks, variables={**variables, **launch.variables})


def visible_gpus(variables: Mapping[str, str]) -> int | None:
    """Return how many GPUs environment variables let a process see; ``None`` if they do not say."""
    return sum(map(bool, variables.get(VISIBLE, "").split(","))) or None


def _after_prefix(words: list[str]) -> tuple[list[str], int | None]:
    """Return what a program such as ``srun`` starts, and as how many processes if it is MPI's."""
    starts = [number for number, word in enumerate(words) if _starts(word)]
    # options have values of any name, so what may be one counts only where nothing else starts
    sure = [
        number
        for number in starts
        if not words[number - 1].startswith("-")
        or words[number - 1] in _FLAGS
        or number + 1 not in starts
    ]
    starts = sure + starts
    starts += [number for number, word in enumerate(words) if number and shutil.which(word)]
    if not starts:
        raise InvalidRequestError("the line names no script and no launcher of one", _FIELD)
    ranks = _MPI_RANKS.search(" ".join(words[: starts[0]]))
    return words[starts[0] :], None if ranks is None else int(ranks[1])


def _program(words: list[str]) -> Launch:
    """Read a line that starts another program: one of Python runs here, any other, such as a
    shell, in a process of its own.  What they start is traced."""
    file = shutil.which(words[0])
    if file is None:
        known = ", ".join(_READERS)
        raise InvalidRequestError(
            f"{describe(words[0])} is no program on this machine: use one of {known}", _FIELD
        )
    with Path(file).open("rb") as program:
        is_python = b"python" in program.readline(1000)
    if is_python:
        return Launch(file, arguments=tuple(words[1:]))
    return Launch(PROGRAMS_MODULE, True, tuple(words))


def _starts(word: str) -> bool:
    """Whether a word of a line is a launcher or a script."""
    is_script = word.endswith((*_SCRIPTS, ".sh")) and not word.startswith("-")
    return is_script or _launcher(word) in (*_READERS, *_SHELLS)


def _launcher(word: str) -> str:
    name = PurePath(word).name
    return "python" if _PYTHON.fullmatch(name) else name


def _python(words: list[str], variables: dict[str, str], gpus: int | None) -> Launch:
    module = None
    while module is None and words and words[0].startswith("-"):
        option = words.pop(0)
        module = _MODULE.fullmatch(option)
        if option == "-c":
            raise InvalidRequestError(
                "code of python -c cannot be traced: write it into a file", _FIELD
            )
        if option in ("-W", "-X") and words:
            words.pop(0)
    if module is not None and module[1]:
        words.insert(0, module[1])
    if not words:
        raise InvalidRequestError("the line names no script", _FIELD)
    if module is None:
        return Launch(words[0], arguments=tuple(words[1:]))
    name, *rest = words
    if name in _TORCHRUN_MODULES:
        launch = _torchrun(rest, variables, gpus)
        if name == _TORCHRUN_MODULES[0] or "use-env" in _options(rest, _TORCHRUN_FLAGS)[0]:
            return launch
        rank = f"{_rank_option(Path(launch.script))}=0"
        return replace(launch, arguments=(rank, *launch.arguments))
    if name in ("accelerate.commands.launch", "accelerate.commands.accelerate_cli"):
        line = ["launch", *rest] if name.endswith("launch") else rest
        return _accelerate(line, variables, gpus)
    if name == "deepspeed.launcher.runner":
        return _deepspeed(rest, variables, gpus)
    return Launch(name, True, tuple(rest))


def _rank_option(script: Path) -> str:
    """Return what the launcher passes a script, or passed before PyTorch 2.0 if the script, or a file
    beside it, still asks for that."""
    before, now = "--local_rank", "--local-rank"
    beside = (sorted(script.parent.glob(pattern)) for pattern in ("*.py", "[!.]*/*.py"))
    for file in (script, *chain.from_iterable(beside)):
        with suppress(OSError):
            text = file.read_text(errors="ignore")
            if before in text or now in text:
                return now if now in text else before
    return now


def _torchrun(words: list[str], variables: dict[str, str], gpus: int | None) -> Launch:
    options, rest = _options(words, _TORCHRUN_FLAGS)
    each = options.get("nproc-per-node", "1")
    hosts = _number(options.get("nnodes", "1").rpartition(":")[2], "--nnodes")
    if each in ("gpu", "auto", "cpu", "xpu"):
        on_host = _all_of_machine(f"--nproc-per-node {each}", gpus) // hosts
    else:
        on_host = _number(each, "--nproc-per-node")
    launch = Launch(rest[0], "module" in options, tuple(rest[1:]))
    return replace(
        _program(rest) if "no-python" in options else launch,
        ranks=on_host * hosts,
        variables={"LOCAL_WORLD_SIZE": str(on_host)},
    )


def _accelerate(words: list[str], variables: dict[str, str], gpus: int | None) -> Launch:
    if not words or words[0] != "launch":
        raise InvalidRequestError("only 'accelerate launch' starts a training", _FIELD)
    found = read_accelerate(words[1:], variables, gpus)
    return Launch(
        found["script"],
        found["is_module"],
        tuple(found["arguments"]),
        found["ranks"],
        found["variables"],
        tuple(found["notes"]),
    )


def _deepspeed(words: list[str], variables: dict[str, str], gpus: int | None) -> Launch:
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
        given = options.get("num-gpus", options.get("num-accelerators"))
        if given is None:
            ranks = _all_of_machine("deepspeed without --num_gpus", gpus)
        else:
            nodes = options.get("num-nodes", "1")
            ranks = _number(given, "--num_gpus") * _number(nodes, "--num_nodes")
    rank = () if "no-local-rank" in options else ("--local_rank=0",)
    return Launch(rest[0], "module" in options, (*rank, *rest[1:]), ranks)


def _all_of_machine(what: str, gpus: int | None) -> int:
    """Return the number of GPUs of a line that takes all of the machine."""
    if gpus is None:
        raise InvalidRequestError(
            f"{what} depends on the machine: say with --ranks how many GPUs it has", _FIELD
        )
    return gpus


_READERS: Final[Mapping[str, Callable[[list[str], dict[str, str], int | None], Launch]]] = {
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
        if word == "--":  # argparse leaves out the one beside the script
            continue
        name = {"m": "module"}.get(word.lstrip("-"), word.lstrip("-").replace("_", "-"))
        if name in flags:
            options[name] = ""
        elif has_value:
            options[name] = value
        elif left:
            options[name] = left.pop(0)
    if not left:
        raise InvalidRequestError("the line names no script", _FIELD)
    if left[1:2] == ["--"]:
        left.pop(1)
    return options, left


def _number(text: str, option: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 6 and int(text) > 0):
        raise InvalidRequestError(
            f"{option} must be a number above 0, not {describe(text)}", _FIELD
        )
    return int(text)


_HOST_GPUS: Final = "8"


def local_ranks(ranks: int) -> int:
    """Return how many of ``ranks`` are on one host: as its launcher says, or eight."""
    return min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", _HOST_GPUS)))


def torchrun_environment(ranks: int, rank: int = 0) -> dict[str, str]:
    """Return the environment variables that ``torchrun`` sets for one of ``ranks``, which sees one
    GPU if it is not the first."""
    alone = {
        "RANK": rank,
        "LOCAL_RANK": 0,
        "GROUP_RANK": 0,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": local_ranks(ranks),
    }
    return {
        **{name: str(value) for name, value in alone.items()},
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }


def launcher_remedy(error: BaseException, words: Sequence[str]) -> str:
    """Return what to do about an error of the script that ``words`` start, which lacks what a launcher
    gives, as the end of a sentence; empty for others."""
    if isinstance(error, KeyError) and str(error).strip("'") in torchrun_environment(1):
        return (
            "; a launcher sets this variable: start the script as it is started in training, for example "
            f"gpumemnet trace -- torchrun --nproc-per-node 1 {shlex.join(words)}"
        )
    package = str(getattr(error, "name", "")).partition(".")[0]
    if package == "deepspeed":  # its compiled operators are not needed
        return "; a trace runs DeepSpeed's own engine: DS_BUILD_OPS=0 pip install deepspeed"
    return ""
