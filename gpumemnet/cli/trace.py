"""``gpumemnet trace``: computes the memory of one training step, allocation by allocation, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from gpumemnet.cli.arguments import factory_arguments
from gpumemnet.cli.output import check_writable, write_atomically
from gpumemnet.cli.training_options import training_option, training_values
from gpumemnet.cudnn.libraries import OFF
from gpumemnet.errors import InvalidRequestError
from gpumemnet.extract.options import DEFAULT_GPU
from gpumemnet.job.layers import describe
from gpumemnet.tracing.options import (
    DEADLINE_SECONDS,
    DEFAULT_OPTIONS,
    LOSSES,
    PARALLEL,
    ZERO_GRAD,
    ExtraResults,
    TraceOptions,
)
from gpumemnet.tracing.script.launch import Launch, is_launch, parse_launch

if TYPE_CHECKING:
    from gpumemnet.gpu.catalogue import DeviceProfile
    from gpumemnet.sandbox.parent import Progress
    from gpumemnet.tracing.report.answer import TraceAnswer

_TRAINING: Final = "How it is trained"
_MACHINE: Final = "Where it is trained"
_of_model: Final = partial(typer.Option, rich_help_panel="The model")
_of_training: Final = partial(typer.Option, rich_help_panel=_TRAINING)
_of_machine: Final = partial(typer.Option, rich_help_panel=_MACHINE)
_of_answer: Final = partial(typer.Option, rich_help_panel="What else to answer")
_PLOTS: Final = (".png", ".html")
_OF_SCRIPTS: Final = frozenset(
    {
        *("source", "script", "module", "gpu", "context_mib", "allocator_conf", "attention_kernel", "cudnn", "ranks"),
        *("best_effort", "largest_batch", "batches", "batch_argument"),
        *("plot", "as_json", "deadline", "show_output"),
    }
)
"""Parameters that apply to scripts too."""


def trace(
    call: typer.Context,
    source: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE.py:FACTORY",
            help="A function that returns a torch.nn.Module, (model, inputs) or (model, inputs, loss). "
            "With --script or --module instead: -- and the script's own arguments. "
            "Or -- and the line that starts the training: torchrun --nproc-per-node 4 train.py, python, accelerate launch.",
        ),
    ] = None,
    script: Annotated[
        Path | None,
        _of_model(
            metavar="FILE.py",
            help="Run this training script, unmodified, on a simulated GPU, up to its second step.",
        ),
    ] = None,
    module: Annotated[
        str | None,
        _of_model(metavar="PACKAGE.MODULE", help="The same for a module, as python -m runs it here."),
    ] = None,
    batch_size: Annotated[int | None, _of_model(help="Samples per step; needed unless the factory gives inputs.")] = None,
    inputs: Annotated[
        list[str] | None,
        _of_model(
            "--input",
            metavar="SHAPE",
            help="3x224x224, 1024:int64, mask=128:bool …; once for each input of the model.",
        ),
    ] = None,
    argument: Annotated[
        list[str] | None,
        _of_model("--arg", metavar="NAME=VALUE", help="Keyword argument of the factory; JSON, or else text."),
    ] = None,
    best_effort: Annotated[
        bool,
        _of_model(
            "--best-effort",
            help="Continue with a guess, and a note, where the values of tensors are needed.",
        ),
    ] = False,
    optimizer: Annotated[str, training_option("optimizer", _TRAINING)] = DEFAULT_OPTIONS.optimizer,
    precision: Annotated[str, training_option("precision", _TRAINING)] = DEFAULT_OPTIONS.precision,
    loss: Annotated[str, _of_training(metavar="|".join(LOSSES), help="Unless the factory returns one.")] = LOSSES[0],
    optimizer_implementation: Annotated[
        str, training_option("optimizer_implementation", _TRAINING)
    ] = DEFAULT_OPTIONS.optimizer_implementation,
    gradient_accumulation: Annotated[
        int, training_option("gradient_accumulation", _TRAINING)
    ] = DEFAULT_OPTIONS.gradient_accumulation,
    zero_grad: Annotated[str, _of_training(metavar="|".join(ZERO_GRAD), help="Where the loop drops its gradients.")] = ZERO_GRAD[
        0
    ],
    checkpointing: Annotated[str, training_option("checkpointing", _TRAINING)] = DEFAULT_OPTIONS.checkpointing,
    attention_kernel: Annotated[
        str | None, training_option("attention_kernel", _TRAINING, "Instead of the one that PyTorch picks.")
    ] = DEFAULT_OPTIONS.attention_kernel,
    channels_last: Annotated[bool, training_option("channels_last", _TRAINING)] = DEFAULT_OPTIONS.channels_last,
    cudnn_benchmark: Annotated[bool, training_option("cudnn_benchmark", _TRAINING)] = DEFAULT_OPTIONS.cudnn_benchmark,
    parallel: Annotated[str, _of_machine(metavar="|".join(PARALLEL), help="How several GPUs are used; see --ranks.")] = PARALLEL[
        0
    ],
    ranks: Annotated[
        int, training_option("ranks", _MACHINE, "GPUs; the answer and the batch size are for one of them.")
    ] = DEFAULT_OPTIONS.ranks,
    gpu: Annotated[
        str,
        _of_machine(
            envvar="GPUMEMNET_GPU",
            metavar="NAME|FILE.json",
            help="A GPU of the catalogue, or a profile of your own.",
        ),
    ] = DEFAULT_GPU,
    context_mib: Annotated[
        int | None,
        _of_machine(
            envvar="GPUMEMNET_CONTEXT_MIB",
            metavar="MIB",
            help="The CUDA context where you know yours.",
            min=1,
        ),
    ] = None,
    allocator_conf: Annotated[
        str,
        _of_machine(
            metavar="TEXT",
            help="The job's PYTORCH_CUDA_ALLOC_CONF, such as expandable_segments:True; the value in this shell is ignored.",
        ),
    ] = "",
    cudnn: Annotated[
        str,
        _of_machine(
            metavar="auto|off|PATH",
            help="Take workspaces of convolutions from cuDNN, which needs no GPU: the installed one, none, or the one there.",
        ),
    ] = OFF,
    largest_batch: Annotated[bool, _of_answer("--largest-batch", help="The largest batch size that fits the GPU.")] = False,
    batches: Annotated[str | None, _of_answer(metavar="N,N,…", help="The memory at these batch sizes too.")] = None,
    batch_argument: Annotated[
        str | None,
        _of_answer(
            metavar="OPTION",
            help="The script's argument that sets its batch size, such as --batch-size, where it is not found.",
        ),
    ] = None,
    fits: Annotated[bool, _of_answer("--fits", help="On which GPUs of the catalogue it fits.")] = False,
    plot: Annotated[
        Path | None,
        _of_answer(metavar="FILE.png|FILE.html", help="Draw the memory over a step, stacked by class."),
    ] = None,
    out: Annotated[
        Path | None,
        _of_answer(metavar="FILE.json", help="Write the job with its traced peak, for gpumemnet predict."),
    ] = None,
    as_json: Annotated[bool, _of_answer("--json", help="For programs: print the whole answer as JSON, no tables.")] = False,
    deadline: Annotated[float, typer.Option(metavar="SECONDS", help="Give up after this long.")] = DEADLINE_SECONDS,
    show_output: Annotated[bool, typer.Option("--show-output", help="Show what the file prints, on standard error.")] = False,
) -> None:
    """Trace one training step of a model, and show what its GPU memory holds.

    The step runs without a GPU and allocates nothing.
    """
    from gpumemnet.allocator.settings import parse_settings
    from gpumemnet.cli.trace_report import show_trace
    from gpumemnet.tracing.process import trace_file, trace_script

    if plot is not None and plot.suffix not in _PLOTS:
        raise InvalidRequestError(f"must end in {' or '.join(_PLOTS)}, not {describe(plot.name)}", "plot")
    for path, field in ((plot, "plot"), (out, "out")):
        if path is not None:
            check_writable(path, field)
    words = source or []
    launch = _launch(words, script, module, ranks, call)
    what = words[0] if launch is None else launch.script
    device, allocator = _device(gpu, context_mib), parse_settings(allocator_conf)
    options = TraceOptions(
        **training_values(call.params), loss=loss, zero_grad=zero_grad, parallel=parallel, best_effort=best_effort
    )
    extras = ExtraResults(
        batches=_batches(batches), max_batch=largest_batch, gpus=fits, curve=plot is not None, job=out is not None
    )
    with _progress(what, not show_output) as progress:
        if launch is not None:
            answer = trace_script(
                launch.script,
                launch.arguments,
                is_module=launch.is_module,
                variables=launch.variables,
                gpu=device,
                allocator=allocator,
                cudnn=cudnn,
                attention_kernel=attention_kernel,
                ranks=launch.ranks,
                best_effort=best_effort,
                extras=extras,
                batch_argument=batch_argument,
                deadline_seconds=deadline,
                show_output=show_output,
                progress=progress,
            )
        else:
            answer = trace_file(
                what,
                options,
                inputs=inputs or (),
                arguments=factory_arguments(argument or ()),
                batch_size=batch_size,
                gpu=device,
                allocator=allocator,
                cudnn=cudnn,
                extras=extras,
                deadline_seconds=deadline,
                show_output=show_output,
                progress=progress,
            )
    _write(answer, plot, out)
    if as_json:
        from gpumemnet.tracing.report.answer import answer_to_dict

        typer.echo(json.dumps(answer_to_dict(answer)))
        return
    console = Console()
    spread = () if parallel == PARALLEL[0] else (parallel,)
    show_trace(answer, () if launch is not None else (optimizer, precision, *spread), console)
    if launch is None and not answer.fits and not largest_batch:
        console.print(Text("use --largest-batch to find the batch size that fits"), style="dim")


def _launch(words: Sequence[str], script: Path | None, module: str | None, ranks: int, call: typer.Context) -> Launch | None:
    """Returns the script or module to trace; ``None`` for a factory.

    Raises:
        InvalidRequestError: when nothing or too much was named, or options say what the script says itself.
    """
    if script is None and module is None and not is_launch(words):
        if len(words) != 1:
            raise InvalidRequestError("name one factory, such as train.py:build, or give --script train.py", "source")
        return None
    if script is not None and module is not None:
        raise InvalidRequestError("give a script or a module, not both", "module")
    if script is not None and is_launch(str(script).split()) and not script.exists():
        raise InvalidRequestError(f"is a file; for a whole line write: gpumemnet trace -- {script}", "script")
    for name in call.params:
        if name not in _OF_SCRIPTS and _is_given(call, name):
            raise InvalidRequestError("does not go with a script, which trains as it is written", name)
    given = ranks if _is_given(call, "ranks") else None
    if module is not None:
        return Launch(module, True, tuple(words), given)
    if script is not None:
        return Launch(str(script), arguments=tuple(words), ranks=given)
    launch = parse_launch(words)
    if None not in (given, launch.ranks) and given != launch.ranks:
        raise InvalidRequestError(f"{given:,} GPUs, and the line starts {launch.ranks:,} processes", "ranks")
    return replace(launch, ranks=launch.ranks or given)


def _is_given(call: typer.Context, name: str) -> bool:
    source = call.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _device(gpu: str, context_mib: int | None) -> DeviceProfile:
    from gpumemnet.gpu.catalogue import find_profile, with_context

    profile = find_profile(gpu)
    return profile if context_mib is None else with_context(profile, context_mib, "--context-mib")


def _batches(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    sizes = [size.strip() for size in text.split(",")]
    if not all(size.isascii() and size.isdigit() and len(size) < 10 for size in sizes):
        raise InvalidRequestError(f"must be batch sizes such as 1,2,4,8, not {describe(text)}", "batches")
    return tuple(int(size) for size in sizes)


@contextmanager
def _progress(source: str, is_shown: bool) -> Iterator[Progress | None]:
    """Shows the current step on standard error while it runs, if standard error is a terminal."""
    console = Console(stderr=True)
    if not (is_shown and console.is_terminal):
        yield None
        return
    with console.status(f"{source}: starting") as status:
        yield lambda step: status.update(f"{source}: {step}")


def _write(answer: TraceAnswer, plot: Path | None, out: Path | None) -> None:
    if out is not None:
        from gpumemnet.job.json_codec import job_from_dict, job_to_json

        write_atomically(out, job_to_json(job_from_dict(answer.job)))
    if plot is not None:
        from gpumemnet.tracing.report.plot import plot as draw

        draw(answer, plot)
