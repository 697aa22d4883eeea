"""Starts the trace of a training script: :func:`parse_launch` reads the line that starts a training,
as people type it (``torchrun --nproc-per-node 4 train.py --lr 1e-4`` and the like), and
:func:`trace_script` runs the script in a child process.

This module loads no torch, so the command line uses it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from time import monotonic
from typing import Any, Final

from gpumemnet.allocator.settings import AllocatorSettings
from gpumemnet.cudnn.session import OFF
from gpumemnet.errors import ExtractError, InvalidRequestError
from gpumemnet.extract.extraction import DEFAULT_GPU
from gpumemnet.extract.factory import existing_file
from gpumemnet.gpu import DeviceProfile
from gpumemnet.job.layers import describe
from gpumemnet.sandbox.process import Progress, ask
from gpumemnet.tracing.api import (
    DEADLINE_SECONDS,
    PURPOSE,
    ExtraResults,
    TraceOptions,
    check_ranks,
    checked_request,
    request_from_dict,
)
from gpumemnet.tracing.result import TraceAnswer, answer_from_dict, answer_to_dict
from gpumemnet.tracing.script.branches import SECONDS, Assumptions, largest_answer
from gpumemnet.tracing.script.programs import Programs, inheriting

_FIELD: Final = "source"
_PYTHON: Final = re.compile(r"python(3(\.\d+)?)?")
_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_TORCHRUN_MODULES: Final = ("torch.distributed.run", "torch.distributed.launch")
_TORCHRUN_FLAGS: Final = frozenset({"standalone", "no-python", "module", "run-path", "use-env"})
_ACCELERATE_FLAGS: Final = frozenset(
    {
        "multi-gpu",
        "module",
        "no-python",
        "quiet",
        "same-network",
        "debug",
        "use-fsdp",
        "use-deepspeed",
        "cpu",
        "tpu",
        "use-megatron-lm",
    }
)
_REFUSED: Final = {
    "deepspeed": "DeepSpeed brings kernels and an engine of its own, which cannot be traced",
    "use-deepspeed": "DeepSpeed brings kernels and an engine of its own, which cannot be traced",
    "use-megatron-lm": "Megatron brings kernels of its own, which cannot be traced",
    "use-fsdp": "FullyShardedDataParallel is not supported; use its successor, torch.distributed.fsdp.fully_shard, in the script",
}
"""Launcher, or option of ``accelerate launch`` → why it is refused."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a line starts.

    Attributes:
        script: a file, or a module's dotted name.
        is_module: whether it is a module, as after ``python -m``.
        arguments: the script's own arguments.
        ranks: number of processes, each on a GPU of its own; ``None`` for one that is started
            alone.
        variables: environment variables that the line sets.
    """

    script: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    ranks: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


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
    launch = reader(left[1:])
    return Launch(
        launch.script,
        launch.is_module,
        launch.arguments,
        launch.ranks,
        {**variables, **launch.variables},
    )


def _launcher(word: str) -> str:
    name = PurePath(word).name
    return "python" if _PYTHON.fullmatch(name) else name


def _python(words: list[str]) -> Launch:
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
        return _torchrun(rest)
    if module in ("accelerate.commands.launch", "accelerate.commands.accelerate_cli"):
        return _accelerate(["launch", *rest] if module.endswith("launch") else rest)
    return Launch(module, True, tuple(rest))


def _torchrun(words: list[str]) -> Launch:
    options, rest = _options(words, _TORCHRUN_FLAGS)
    each = options.get("nproc-per-node", "1")
    if each in ("gpu", "auto", "cpu", "xpu"):
        raise InvalidRequestError(
            f"--nproc-per-node {each} depends on the machine: give a number", _FIELD
        )
    hosts = options.get("nnodes", "1").rpartition(":")[2]
    return Launch(
        rest[0],
        "module" in options,
        tuple(rest[1:]),
        _number(each, "--nproc-per-node") * _number(hosts, "--nnodes"),
    )


def _accelerate(words: list[str]) -> Launch:
    if not words or words[0] != "launch":
        raise InvalidRequestError("only 'accelerate launch' starts a training", _FIELD)
    options, rest = _options(words[1:], _ACCELERATE_FLAGS)
    for option in options.keys() & _REFUSED.keys():
        raise InvalidRequestError(
            f"accelerate launch --{option.replace('-', '_')}: {_REFUSED[option]}", _FIELD
        )
    if "config-file" in options:
        raise InvalidRequestError(
            "accelerate launch --config_file is not read: give its settings as options", _FIELD
        )
    processes = options.get("num-processes")
    if processes is None and "multi-gpu" in options:
        raise InvalidRequestError(
            "accelerate launch --multi_gpu depends on the machine: give --num_processes", _FIELD
        )
    variables = {}
    if "mixed-precision" in options:
        variables["ACCELERATE_MIXED_PRECISION"] = options["mixed-precision"]
    if "gradient-accumulation-steps" in options:
        variables["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = options["gradient-accumulation-steps"]
    ranks = _number(processes or "1", "--num_processes")
    alone = ranks == 1  # accelerate starts one process as python does
    return Launch(
        rest[0], "module" in options, tuple(rest[1:]), None if alone else ranks, variables
    )


def _refused(launcher: str) -> Launch:
    raise InvalidRequestError(f"{launcher}: {_REFUSED[launcher]}", _FIELD)


_READERS: Final[Mapping[str, Callable[[list[str]], Launch]]] = {
    "python": _python,
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "deepspeed": lambda words: _refused("deepspeed"),
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


_LOG: Final = logging.getLogger("gpumemnet.tracing")
_LEAST_SECONDS: Final = 2.0
"""Shortest time for the whole run after the first steps."""


def trace_script(
    script: Path | str,
    arguments: Sequence[str] = (),
    *,
    gpu: str | DeviceProfile = DEFAULT_GPU,
    allocator: AllocatorSettings | None = None,
    cudnn: str = OFF,
    attention_kernel: str | None = None,
    best_effort: bool = False,
    is_module: bool = False,
    ranks: int | None = None,
    variables: Mapping[str, str] | None = None,
    extras: ExtraResults | None = None,
    batch_argument: str | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    show_output: bool = False,
    progress: Progress | None = None,
) -> TraceAnswer:
    """Predict the memory of an unmodified training script.

    The script really runs, on a simulated GPU, up to its second optimizer step; several times if it
    branches on values of the GPU, see :mod:`gpumemnet.tracing.script.branches`.

    Args:
        script: the file, or the dotted name of a module.
        arguments: command-line arguments of the script.
        gpu, allocator, cudnn, deadline_seconds, show_output, progress: as in :func:`trace_file`.
        attention_kernel: the scaled-dot-product kernel to use; the kernel that PyTorch would choose
            by default.
        best_effort: whether to continue with a guess where an operator of another library does not
            describe its output.
        is_module: whether it is a module, to be run as by ``python -m`` in this folder.
        ranks: number of GPUs that the script is started on by ``torchrun``, as whose first rank it
            is traced; ``None`` if it is started alone.
        variables: further environment variables of the script.
        extras: further results: the memory over one training step, and other batch sizes, for which
            the script is run again.
        batch_argument: the script's argument that sets its batch size; found by its name and value
            by default.

    Returns:
        the answer; all amounts are in bytes, for one GPU.

    Raises:
        ExtractError: names what cannot be traced, and the line of the script.
        InvalidJobError, InvalidRequestError: an option has no such value.
        MissingExtraError: torch is not installed.
    """
    options = TraceOptions(attention_kernel=attention_kernel, best_effort=best_effort)
    request = {
        "script": str(script) if is_module else str(existing_file(str(script))),
        "is_module": is_module,
        "arguments": list(arguments),
        "ranks": None if ranks is None else check_ranks(ranks),
        "batch_argument": batch_argument,
        **asdict(checked_request(options, gpu, allocator, extras, cudnn=cudnn)),
    }

    end = monotonic() + SECONDS

    def trace(assumptions: Assumptions, selected_share: float) -> TraceAnswer:
        asked = {
            **request,
            "more_seconds": max(_LEAST_SECONDS, (end - monotonic()) / 2),
            "opposite": assumptions.opposite,
            "exceptions": assumptions.exceptions,
            "selected_share": selected_share,
        }
        answer = ask(
            _trace_in_child,
            str(script),
            asked,
            purpose=PURPOSE,
            variables=variables,
            deadline_seconds=deadline_seconds,
            show_output=show_output,
            progress=progress,
        )
        return answer_from_dict(answer)

    return largest_answer(trace, end)


def _trace_in_child(document: dict[str, Any]) -> dict[str, Any]:
    request = request_from_dict(document)
    with inheriting(document, request.gpu) as programs:
        try:
            answer = trace_in_process(document, programs)
        except ExtractError as error:
            found = programs.answer()
            if found is None:
                if programs.error():
                    raise ExtractError(
                        f"{error}; a process that it started: {programs.error()}"
                    ) from None
                raise
            if request.extras.batches or request.extras.max_batch:
                raise ExtractError(
                    "the script trains in a process that it starts: for other batch sizes, trace the line that starts that one"
                ) from None
            answer = found
    return answer_to_dict(answer)


def trace_in_process(document: dict[str, Any], programs: Programs) -> TraceAnswer:
    """Trace a script in this process, see :func:`trace_script`.

    Args:
        document: the script and how it is traced.
        programs: the programs that it may start.

    Raises:
        ExtractError: as :func:`trace_script` does.
    """
    request = request_from_dict(document)
    _LOG.info("importing torch")
    from gpumemnet.tracing.operators.rules import Platform, with_cudnn
    from gpumemnet.tracing.script import batch_sizes, run

    _LOG.info("running up to the second step")
    platform = Platform(device=request.gpu, attention_kernel=request.options.attention_kernel)
    platform, notes = with_cudnn(platform, request.cudnn)
    call = run.ScriptCall(
        script=Path(document["script"]),
        arguments=tuple(document["arguments"]),
        platform=platform,
        settings=request.allocator,
        is_module=document["is_module"],
        ranks=document["ranks"],
        assumptions=Assumptions(document["opposite"], tuple(document["exceptions"])),
        selected_share=document["selected_share"],
        best_effort=request.options.best_effort,
        more_seconds=document["more_seconds"],
        report=programs.report,
    )
    extras = request.extras
    if extras.batches or extras.max_batch:
        answer = batch_sizes.trace_batches(call, extras, document["batch_argument"])
    else:
        answer = run.trace_script(call, with_curve=extras.curve)
    return replace(answer, notes=(*answer.notes, *notes))
