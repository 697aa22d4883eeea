"""``gpumemnet trace``: computes the memory of one training step, allocation by allocation, without
a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from gpumemnet.cli.arguments import factory_arguments
from gpumemnet.cli.model_options import (
    MACHINE,
    TRAINING,
    AllocatorConf,
    AttentionKernel,
    BatchSize,
    BestEffort,
    ChannelsLast,
    ContextMib,
    Cudnn,
    CudnnBenchmark,
    Deadline,
    FactoryArguments,
    Gpu,
    GradientAccumulation,
    Inputs,
    Loss,
    Optimizer,
    OptimizerImplementation,
    Precision,
    ShowOutput,
    ZeroGrad,
    check_plot,
    device_of,
    of_answer,
    of_machine,
    of_model,
    shown_progress,
)
from gpumemnet.cli.output import check_writable, write_atomically
from gpumemnet.cli.training_options import training_option, training_values
from gpumemnet.cudnn.session import OFF
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
    from gpumemnet.tracing.report.answer import TraceAnswer

_OF_SCRIPTS: Final = frozenset(
    {
        *(
            "source",
            "script",
            "module",
            "gpu",
            "context_mib",
            "allocator_conf",
            "attention_kernel",
            "cudnn",
            "ranks",
        ),
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
        of_model(
            metavar="FILE.py",
            help="Run this training script, unmodified, on a simulated GPU, up to its second step.",
        ),
    ] = None,
    module: Annotated[
        str | None,
        of_model(
            metavar="PACKAGE.MODULE", help="The same for a module, as python -m runs it here."
        ),
    ] = None,
    batch_size: BatchSize = None,
    inputs: Inputs = None,
    argument: FactoryArguments = None,
    best_effort: BestEffort = False,
    optimizer: Optimizer = DEFAULT_OPTIONS.optimizer,
    precision: Precision = DEFAULT_OPTIONS.precision,
    loss: Loss = LOSSES[0],
    optimizer_implementation: OptimizerImplementation = DEFAULT_OPTIONS.optimizer_implementation,
    gradient_accumulation: GradientAccumulation = DEFAULT_OPTIONS.gradient_accumulation,
    zero_grad: ZeroGrad = ZERO_GRAD[0],
    checkpointing: Annotated[
        str, training_option("checkpointing", TRAINING)
    ] = DEFAULT_OPTIONS.checkpointing,
    attention_kernel: AttentionKernel = DEFAULT_OPTIONS.attention_kernel,
    channels_last: ChannelsLast = DEFAULT_OPTIONS.channels_last,
    cudnn_benchmark: CudnnBenchmark = DEFAULT_OPTIONS.cudnn_benchmark,
    parallel: Annotated[
        str, of_machine(metavar="|".join(PARALLEL), help="How several GPUs are used; see --ranks.")
    ] = PARALLEL[0],
    ranks: Annotated[
        int,
        training_option(
            "ranks", MACHINE, "GPUs; the answer and the batch size are for one of them."
        ),
    ] = DEFAULT_OPTIONS.ranks,
    gpu: Gpu = DEFAULT_GPU,
    context_mib: ContextMib = None,
    allocator_conf: AllocatorConf = "",
    cudnn: Cudnn = OFF,
    largest_batch: Annotated[
        bool, of_answer("--largest-batch", help="The largest batch size that fits the GPU.")
    ] = False,
    batches: Annotated[
        str | None, of_answer(metavar="N,N,…", help="The memory at these batch sizes too.")
    ] = None,
    batch_argument: Annotated[
        str | None,
        of_answer(
            metavar="OPTION",
            help="The script's argument that sets its batch size, such as --batch-size, where it is not found.",
        ),
    ] = None,
    fits: Annotated[
        bool, of_answer("--fits", help="On which GPUs of the catalogue it fits.")
    ] = False,
    plot: Annotated[
        Path | None,
        of_answer(
            metavar="FILE.png|FILE.html", help="Draw the memory over a step, stacked by class."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        of_answer(
            metavar="FILE.json", help="Write the job with its traced peak, for gpumemnet predict."
        ),
    ] = None,
    as_json: Annotated[
        bool, of_answer("--json", help="For programs: print the whole answer as JSON, no tables.")
    ] = False,
    deadline: Deadline = DEADLINE_SECONDS,
    show_output: ShowOutput = False,
) -> None:
    """Trace one training step of a model, and show what its GPU memory holds.

    The step runs without a GPU and allocates nothing.
    """
    from gpumemnet.allocator.settings import parse_settings
    from gpumemnet.cli.trace_report import show_trace
    from gpumemnet.tracing.process import trace_file, trace_script

    check_plot(plot)
    if out is not None:
        check_writable(out)
    words = source or []
    launch = _launch(words, script, module, ranks, call)
    what = words[0] if launch is None else launch.script
    device, allocator = device_of(gpu, context_mib), parse_settings(allocator_conf)
    options = TraceOptions(
        **training_values(call.params),
        loss=loss,
        zero_grad=zero_grad,
        parallel=parallel,
        best_effort=best_effort,
    )
    extras = ExtraResults(
        batches=_batches(batches),
        max_batch=largest_batch,
        gpus=fits,
        curve=plot is not None,
        job=out is not None,
    )
    with shown_progress(what, not show_output) as progress:
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


def _launch(
    words: Sequence[str], script: Path | None, module: str | None, ranks: int, call: typer.Context
) -> Launch | None:
    """Returns the script or module to trace; ``None`` for a factory.

    Raises:
        InvalidRequestError: when nothing or too much was named, or options say what the script says
            itself.
    """
    if script is None and module is None and not is_launch(words):
        if len(words) != 1:
            raise InvalidRequestError(
                "name one factory, such as train.py:build, or give --script train.py", "source"
            )
        return None
    if script is not None and module is not None:
        raise InvalidRequestError("give a script or a module, not both", "module")
    if script is not None and is_launch(str(script).split()) and not script.exists():
        raise InvalidRequestError(
            f"is a file; for a whole line write: gpumemnet trace -- {script}", "script"
        )
    for name in call.params:
        if name not in _OF_SCRIPTS and _is_given(call, name):
            raise InvalidRequestError(
                "does not go with a script, which trains as it is written", name
            )
    given = ranks if _is_given(call, "ranks") else None
    if module is not None:
        return Launch(module, True, tuple(words), given)
    if script is not None:
        return Launch(str(script), arguments=tuple(words), ranks=given)
    launch = parse_launch(words)
    if None not in (given, launch.ranks) and given != launch.ranks:
        raise InvalidRequestError(
            f"{given:,} GPUs, and the line starts {launch.ranks:,} processes", "ranks"
        )
    return replace(launch, ranks=launch.ranks or given)


def _is_given(call: typer.Context, name: str) -> bool:
    source = call.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _batches(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    sizes = [size.strip() for size in text.split(",")]
    if not all(size.isascii() and size.isdigit() and len(size) < 10 for size in sizes):
        raise InvalidRequestError(
            f"must be batch sizes such as 1,2,4,8, not {describe(text)}", "batches"
        )
    return tuple(int(size) for size in sizes)


def _write(answer: TraceAnswer, plot: Path | None, out: Path | None) -> None:
    if out is not None:
        from gpumemnet.job.json_codec import job_from_dict, job_to_json

        write_atomically(out, job_to_json(job_from_dict(answer.job)))
    if plot is not None:
        from gpumemnet.tracing.report.plot import plot as draw

        draw(answer, plot)
