"""``gpumemnet plan``: how a job that does not fit a GPU can be made to fit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from gpumemnet.cli.arguments import factory_arguments, parse_memory
from gpumemnet.cli.model_options import (
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
    shown_progress,
)
from gpumemnet.cli.output import check_writable, write_atomically
from gpumemnet.cli.training_options import training_values
from gpumemnet.cudnn.session import OFF
from gpumemnet.extract.options import DEFAULT_GPU
from gpumemnet.planner.options import DEFAULT_PLANNER, PLANNERS, PlanRequest, within_budget
from gpumemnet.tracing.options import (
    DEADLINE_SECONDS,
    DEFAULT_OPTIONS,
    LOSSES,
    ZERO_GRAD,
    TraceOptions,
    checked_request,
)

_of_plan: Final = partial(typer.Option, rich_help_panel="The plan")
NO_PLAN_CODE: Final = 1
"""Exit code where no plan makes the job fit."""


def plan(
    call: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FACTORY",
            help="A function that returns a torch.nn.Module, (model, inputs) or (model, inputs, loss).",
        ),
    ],
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
    attention_kernel: AttentionKernel = DEFAULT_OPTIONS.attention_kernel,
    channels_last: ChannelsLast = DEFAULT_OPTIONS.channels_last,
    cudnn_benchmark: CudnnBenchmark = DEFAULT_OPTIONS.cudnn_benchmark,
    gpu: Gpu = DEFAULT_GPU,
    context_mib: ContextMib = None,
    allocator_conf: AllocatorConf = "",
    cudnn: Cudnn = OFF,
    budget: Annotated[
        str | None,
        _of_plan(
            metavar="AMOUNT",
            help="Memory that the process may use, such as 20GiB; the GPU's by default.",
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        _of_plan(
            metavar="AMOUNT",
            help="Pinned host memory that swapped tensors may use; 64GiB by default.",
        ),
    ] = None,
    machine: Annotated[
        str | None,
        _of_plan(
            metavar="NAME|FILE.json",
            help="Rates that give the times; those of the GPU's data sheet by default.",
        ),
    ] = None,
    planner: Annotated[
        str, _of_plan(metavar="|".join(PLANNERS), help="The search that chooses the plan.")
    ] = DEFAULT_PLANNER,
    alternatives: Annotated[
        bool,
        of_answer(
            "--alternatives/--no-alternatives",
            help="Trace other settings of the job too, if it does not fit.",
        ),
    ] = True,
    plot: Annotated[
        Path | None,
        of_answer(
            metavar="FILE.png|FILE.html",
            help="Draw the memory before and after, and time against memory for every search.",
        ),
    ] = None,
    script: Annotated[
        Path | None, of_answer(metavar="FILE.py", help="Write the code that applies the plan.")
    ] = None,
    out: Annotated[
        Path | None,
        of_answer(metavar="FILE.json", help="Write the plan, for gpumemnet.planner.applied."),
    ] = None,
    as_json: Annotated[
        bool, of_answer("--json", help="For programs: print the whole answer as JSON, no tables.")
    ] = False,
    deadline: Deadline = DEADLINE_SECONDS,
    show_output: ShowOutput = False,
) -> None:
    """Plan what a training step recomputes and swaps, so that it fits a GPU.

    The step runs without a GPU and allocates nothing.  All times are modelled.  The exit code is 1
    if no plan fits.
    """
    from gpumemnet.allocator.settings import parse_settings
    from gpumemnet.cli.plan_report import show_plan
    from gpumemnet.planner.answer import NO_PLAN, plan_answer_to_dict
    from gpumemnet.planner.decisions import plan_to_dict
    from gpumemnet.planner.process import plan_file
    from gpumemnet.tracing.options import ExtraResults

    check_plot(plot)
    for path, field in ((script, "script"), (out, "out")):
        if path is not None:
            check_writable(path, field)
    options = TraceOptions(
        **{
            **training_values({**DEFAULT_OPTIONS.job_fields(), **call.params}),
            "checkpointing": "none",
        },
        loss=loss,
        zero_grad=zero_grad,
        best_effort=best_effort,
    )
    extras = ExtraResults(curve=plot is not None)
    request = checked_request(
        options,
        device_of(gpu, context_mib),
        parse_settings(allocator_conf),
        extras,
        batch_size,
        cudnn,
    )
    asked = PlanRequest(
        trace=within_budget(request, None if budget is None else parse_memory(budget, "budget")),
        planner=planner,
        machine=machine,
        host_bytes=None if host_memory is None else parse_memory(host_memory, "host_memory"),
        with_alternatives=alternatives,
        with_searches=plot is not None,
    )
    with shown_progress(source, not show_output) as progress:
        answer = plan_file(
            source,
            asked,
            inputs=inputs or (),
            arguments=factory_arguments(argument or ()),
            batch_size=batch_size,
            deadline_seconds=deadline,
            show_output=show_output,
            progress=progress,
        )
    if plot is not None:
        from gpumemnet.planner.plot import plot as draw

        draw(answer, plot)
    if out is not None and answer.plan is not None:
        write_atomically(out, json.dumps(plan_to_dict(answer.plan), indent=2) + "\n")
    if script is not None and answer.script:
        write_atomically(script, answer.script, "script")
    if answer.plan is None and (out or script) is not None:
        typer.echo("there is no plan to write", err=True)
    if as_json:
        typer.echo(json.dumps(plan_answer_to_dict(answer)))
    else:
        show_plan(answer, (optimizer, precision), Console())
    if answer.outcome == NO_PLAN:
        raise typer.Exit(NO_PLAN_CODE)
