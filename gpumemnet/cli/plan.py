"""``gpumemnet plan``: plans how a job that does not fit a GPU can be made to fit, and prints it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from gpumemnet.allocator.settings import parse_settings
from gpumemnet.atomic_files import check_writable, json_bytes, write_output
from gpumemnet.cli.fit import OF_PLAN
from gpumemnet.cli.options import (
    AllocatorConf,
    BatchSize,
    Cudnn,
    Deadline,
    FactoryArguments,
    Inputs,
    Optimizer,
    Precision,
    SequenceLength,
    Settings,
    TraceGpu,
    TrainingMethod,
    named_values,
    parse_memory,
    result_option,
    training_settings,
)
from gpumemnet.cli.output import print_facts, shown_steps
from gpumemnet.cli.trace import (
    COLOURS,
    Loss,
    amount_cells,
    amounts_text,
    attention_kernel,
    is_given,
    launched,
    peak_text,
    show_verdict,
    verdict_text,
)
from gpumemnet.cudnn.session import OFF
from gpumemnet.errors import InvalidRequestError
from gpumemnet.extract.extraction import DEFAULT_GPU
from gpumemnet.extract.factory import factory_request
from gpumemnet.gpu import YES
from gpumemnet.planner.api import plan_file, plan_named, plan_script, within_budget
from gpumemnet.planner.plans import (
    DECISION_TEXTS,
    DEFAULT_PLANNER,
    NO_PLAN,
    PLANNERS,
    Alternative,
    Plan,
    PlanAnswer,
    PlanRequest,
    plan_answer_to_dict,
    plan_to_dict,
    python_lines,
    units_by_decision,
)
from gpumemnet.tracing.api import (
    DEADLINE_SECONDS,
    DEFAULT_OPTIONS,
    LOSSES,
    TraceOptions,
    checked_request,
)
from gpumemnet.tracing.result import TraceAnswer
from gpumemnet.units import format_bytes

_plan_option: Final = partial(typer.Option, rich_help_panel="The plan")
NO_PLAN_CODE: Final = 1
"""Exit code where no plan makes the job fit."""


def plan(
    context: typer.Context,
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL|FILE.py:FACTORY",
            help="A hub id such as Qwen/Qwen3-8B, as for fit; or a function that returns a "
            "torch.nn.Module, (model, inputs) or (model, inputs, loss). "
            "Or -- and the line that starts the training on one GPU: python train.py.",
        ),
    ],
    method: TrainingMethod = None,
    sequence_length: SequenceLength = None,
    batch_size: BatchSize = None,
    inputs: Inputs = None,
    argument: FactoryArguments = None,
    optimizer: Optimizer = DEFAULT_OPTIONS.optimizer,
    precision: Precision = DEFAULT_OPTIONS.precision,
    loss: Loss = LOSSES[0],
    settings: Settings = None,
    gpu: TraceGpu = DEFAULT_GPU,
    allocator_conf: AllocatorConf = "",
    cudnn: Cudnn = OFF,
    budget: Annotated[
        str | None,
        _plan_option(
            metavar="AMOUNT",
            help="Memory that the process may use, such as 20GiB; the GPU's by default.",
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        _plan_option(
            metavar="AMOUNT",
            help="Pinned host memory that swapped tensors may use; 64GiB by default.",
        ),
    ] = None,
    planner: Annotated[
        str, _plan_option(metavar="|".join(PLANNERS), help="The search that chooses the plan.")
    ] = DEFAULT_PLANNER,
    no_alternatives: Annotated[
        bool,
        result_option(
            "--no-alternatives", help="Do not trace other settings of a job that does not fit."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        result_option(metavar="FILE.json", help="Write the plan, for gpumemnet.planner.applied."),
    ] = None,
    as_json: Annotated[
        bool,
        result_option("--json", help="For programs: print the whole result as JSON, no tables."),
    ] = False,
    deadline: Deadline = DEADLINE_SECONDS,
) -> None:
    """Plan what a training step recomputes and swaps, so that it fits a GPU.

    The step runs without a GPU and allocates nothing.  All times are modelled.  The exit code is 1
    if no plan fits.
    """
    launch = launched(source, 1, context)
    model = source[0] if launch is None else launch.script
    if out is not None:
        check_writable(out)
    is_named = launch is None and Path(model.partition(":")[0]).suffix != ".py"
    stated = {name: context.params[name] for name in OF_PLAN if is_given(context, name)}
    if is_named:
        options, stated = TraceOptions(), stated | named_values(settings, "set")
    elif launch is not None:
        options = TraceOptions(attention_kernel=attention_kernel(settings))
    elif method or sequence_length:
        raise InvalidRequestError("is for a model by its name", "method")
    else:
        options = TraceOptions(
            optimizer=optimizer,
            precision=precision,
            loss=loss,
            **training_settings(settings, ("zero_grad", "keeps_names")),
        )
    request = checked_request(options, gpu, parse_settings(allocator_conf), cudnn=cudnn)
    plan_request = PlanRequest(
        trace=within_budget(request, None if budget is None else parse_memory(budget, "budget")),
        planner=planner,
        host_bytes=None if host_memory is None else parse_memory(host_memory, "host_memory"),
        with_alternatives=not no_alternatives,
    )
    with shown_steps(model) as progress:
        limits: dict[str, Any] = {"deadline_seconds": deadline, "progress": progress}
        if launch is not None:
            answer = plan_script(launch, plan_request, **limits)
        elif is_named:
            answer = plan_named(model, plan_request, stated, **limits)
        else:
            factory = factory_request(model, inputs, named_values(argument, "arg"), batch_size)
            answer = plan_file(factory, plan_request, **limits)
    if out is not None:
        if answer.plan is None:
            typer.echo("there is no plan to write", err=True)
        else:
            write_output(out, json_bytes(plan_to_dict(answer.plan)))
    if as_json:
        typer.echo(json.dumps(plan_answer_to_dict(answer)))
    else:
        training = [
            f"{name.replace('_', ' ')} {value}"
            for name, value in stated.items()
            if name != "batch_size"
        ]
        words = (optimizer, precision) if launch is None and not is_named else training
        show_plan(answer, words, Console(), is_named=is_named)
    if answer.outcome == NO_PLAN:
        raise typer.Exit(NO_PLAN_CODE)


def show_plan(
    answer: PlanAnswer, training: Sequence[str], console: Console, *, is_named: bool
) -> None:
    """Prints what the job needs, the plan that makes it fit, and other changes that would.

    Args:
        answer: the plan.
        training: how the model is trained, in words.
        console: where to print it.
        is_named: whether Hugging Face's trainers train the model.
    """
    before = answer.before
    show_verdict(before, training, console)
    print_facts(console, "", [("peak", peak_text(before.peak)), ("safe", before.safe_basis)])
    if answer.plan is not None and answer.after is not None:
        _show_plan(answer.plan, answer.after, console, is_named)
    if answer.reason:
        console.print(Text.assemble("\n", ("No plan fits", "bold red"), f": {answer.reason}"))
    if answer.alternatives:
        _show_alternatives(answer.alternatives, console)
    console.print()
    for note in dict.fromkeys((*before.notes, *(answer.plan.notes if answer.plan else ()))):
        console.print(Text.assemble(("note: ", "bold"), note))


def _show_plan(plan: Plan, after: TraceAnswer, console: Console, is_named: bool) -> None:
    headline = ("A plan fits", f"bold {COLOURS[YES]}")
    console.print(Text.assemble("\n", headline, f": {amounts_text(after)}"))
    facts = [
        (DECISION_TEXTS[decision], units) for decision, units in units_by_decision(plan).items()
    ]
    facts.append(
        (
            "step",
            f"{_seconds(plan.step_seconds)} instead of {_seconds(plan.keep_step_seconds)}: {100 * plan.slowdown:+.1f} %, modelled",
        )
    )
    if plan.host_bytes:
        facts.append(("host memory", f"{format_bytes(plan.host_bytes)}, pinned"))
    facts += [("peak", peak_text(after.peak)), ("search", _search(plan))]
    print_facts(console, "", facts)
    code = "\n".join((_IMPORT, *python_lines(plan), _OF_TRAINER if is_named else _OF_LOOP))
    console.print(Text(code, style="cyan"), soft_wrap=True)


_IMPORT: Final = """
from gpumemnet.planner import applied
"""
_OF_LOOP: Final = "applied(model, plan)  # before the training loop"
_OF_TRAINER: Final = """\
trainer.args.gradient_checkpointing = False  # the plan recomputes instead
trainer.args.activation_checkpointing = False  # its newer name
trainer.model.config.use_cache = False  # recomputation would fill it again
applied(trainer.model, plan)  # before trainer.train()"""


def _search(plan: Plan) -> str:
    text = f"{plan.optimizer}, {plan.planning_seconds:.2g} s"
    if plan.gap is None:
        return text
    return f"{text}; " + (
        "no plan is faster"
        if plan.gap < 5e-4
        else f"the fastest plan is at most {100 * plan.gap:.1f} points faster"
    )


def _show_alternatives(alternatives: Sequence[Alternative], console: Console) -> None:
    heading = f"{'instead of a plan':42}{'expected':>10}{'safe MiB':>11}"
    console.print(Text(f"\n{heading}", style="bold"))
    for each in alternatives:
        expected, safe = amount_cells(each)
        row = Text(f"{each.change:42}{expected:>10}{safe:>11}   ")
        console.print(row + verdict_text(each.verdict))
        for line in each.how.splitlines():
            console.print(Text(f"  {line}", style="cyan"), soft_wrap=True)
        console.print(Padding(Text(f"{each.effect}; time: {each.time}", style="dim"), (0, 0, 0, 2)))


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:,.2f} s"
