"""``gpumemnet trace``: computes the memory of one training step, allocation by allocation, without
a GPU, and prints it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpumemnet.allocator.settings import parse_settings
from gpumemnet.atomic_files import check_writable, write_output
from gpumemnet.cli.options import (
    AllocatorConf,
    BatchSize,
    Cudnn,
    Deadline,
    FactoryArguments,
    Inputs,
    Optimizer,
    Precision,
    Settings,
    ShowOutput,
    TraceContextMib,
    TraceGpu,
    machine_option,
    named_values,
    parse_memory,
    result_option,
    training_option,
    training_settings,
)
from gpumemnet.cli.output import (
    UNKNOWN_SEARCH,
    print_columns,
    print_facts,
    shown_steps,
)
from gpumemnet.cudnn.session import OFF
from gpumemnet.errors import InvalidRequestError
from gpumemnet.extract.extraction import DEFAULT_GPU
from gpumemnet.extract.factory import factory_request
from gpumemnet.gpu import NO, UNKNOWN, UNSURE, VERDICT_TEXTS, YES, asked_profile
from gpumemnet.job.layers import describe
from gpumemnet.launchers.launch_line import Launch, is_launch, parse_launch
from gpumemnet.tracing.api import (
    DEADLINE_SECONDS,
    DEFAULT_OPTIONS,
    LOSSES,
    PARALLEL,
    ExtraResults,
    TraceOptions,
    checked_request,
    trace_file,
)
from gpumemnet.tracing.result import (
    PART_NAMES,
    TOP_MODULES,
    HostMemory,
    Peak,
    TraceAnswer,
    answer_to_dict,
    shown_mib,
)
from gpumemnet.tracing.script.start import trace_script
from gpumemnet.units import GIB, MIB, ceil_mib

_OF_FACTORIES: Final = (
    *("batch_size", "inputs", "argument", "optimizer", "precision", "loss", "parallel"),
    *("method", "sequence_length"),
)
"""Parameters that do not apply to scripts."""

LOWER_BOUND_CODE: Final = 4
"""Exit code of an answer that is only a lower bound."""
COLOURS: Final = {YES: "green", UNSURE: "yellow", NO: "red", UNKNOWN: "yellow"}
Loss = Annotated[
    str,
    training_option(metavar="|".join(LOSSES), help="The loss, unless the factory returns one."),
]


def trace(
    call: typer.Context,
    source: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE.py:FACTORY|FILE.py",
            help="A function that returns a torch.nn.Module, (model, inputs) or (model, inputs, loss). "
            "Or a training script or notebook, which runs unmodified on a simulated GPU, -- and its own arguments. "
            "Or -- and the line that starts the training: torchrun --nproc-per-node 4 train.py, python -m, accelerate launch.",
        ),
    ] = None,
    batch_size: BatchSize = None,
    inputs: Inputs = None,
    argument: FactoryArguments = None,
    optimizer: Optimizer = DEFAULT_OPTIONS.optimizer,
    precision: Precision = DEFAULT_OPTIONS.precision,
    loss: Loss = LOSSES[0],
    settings: Settings = None,
    parallel: Annotated[
        str,
        machine_option(metavar="|".join(PARALLEL), help="How several GPUs are used; see --ranks."),
    ] = PARALLEL[0],
    ranks: Annotated[
        int,
        machine_option(
            metavar="N", help="GPUs; the result and the batch size are for one of them."
        ),
    ] = DEFAULT_OPTIONS.ranks,
    gpu: TraceGpu = DEFAULT_GPU,
    host_memory: Annotated[
        str | None,
        machine_option(
            metavar="AMOUNT",
            help="Memory of a host, such as 128GiB, for what a script keeps there.",
        ),
    ] = None,
    context_mib: TraceContextMib = None,
    allocator_conf: AllocatorConf = "",
    cudnn: Cudnn = OFF,
    largest_batch: Annotated[
        bool, result_option("--largest-batch", help="The largest batch size that fits the GPU.")
    ] = False,
    batches: Annotated[
        str | None, result_option(metavar="N,N,…", help="The memory at these batch sizes too.")
    ] = None,
    batch_argument: Annotated[
        str | None,
        result_option(
            metavar="OPTION",
            help="The script's argument that sets its batch size, such as --batch-size, where it is not found.",
        ),
    ] = None,
    phases: Annotated[
        bool,
        result_option("--phases", help="The memory of each phase: forward, evaluation and others."),
    ] = False,
    plot: Annotated[
        Path | None,
        result_option(
            metavar="FILE.png|FILE.svg", help="Draw the memory over a step, stacked by class."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        result_option(
            metavar="FILE.json", help="Write the job with its traced peak, for gpumemnet predict."
        ),
    ] = None,
    as_json: Annotated[
        bool,
        result_option("--json", help="For programs: print the whole trace as JSON, no tables."),
    ] = False,
    deadline: Deadline = DEADLINE_SECONDS,
    show_output: ShowOutput = False,
) -> None:
    """Trace one training step of a model, and show what its GPU memory holds.

    The step runs without a GPU and allocates nothing.  The exit code is 4 if the deadline left only
    a lower bound.
    """
    if plot is not None:  # a picture that cannot be written is refused before it is computed
        from gpumemnet.tracing.plot import picture_format

        picture_format(plot)
        check_writable(plot, "plot")
    if out is not None:
        check_writable(out)
    launch = launched(source or [], ranks, call, "out")
    spread: tuple[str, ...] = ()
    if launch is not None:
        options = TraceOptions(attention_kernel=attention_kernel(settings))
    else:
        spread = (optimizer, precision, *(() if parallel == PARALLEL[0] else (parallel,)))
        options = TraceOptions(
            optimizer=optimizer,
            precision=precision,
            loss=loss,
            parallel=parallel,
            ranks=ranks,
            **training_settings(settings, ("zero_grad", "keeps_names")),
        )
    request = checked_request(
        options,
        asked_profile(gpu, context_mib, "--context-mib"),
        parse_settings(allocator_conf),
        ExtraResults(
            batches=_batches(batches),
            max_batch=largest_batch,
            curve=plot is not None,
            job=out is not None,
        ),
        cudnn,
    )
    what = launch.script if launch is not None else (source or [""])[0]
    with shown_steps(what, is_shown=not show_output) as progress:
        limits: dict[str, Any] = {
            "deadline_seconds": deadline,
            "show_output": show_output,
            "progress": progress,
        }
        if launch is not None:
            answer = trace_script(launch, request, batch_argument=batch_argument, **limits)
        else:
            factory = factory_request(what, inputs, named_values(argument, "arg"), batch_size)
            answer = trace_file(factory, request, **limits)
    if launch is not None:
        answer = replace(answer, notes=(*launch.notes, *answer.notes))
    if host_memory is not None:
        if answer.host is None:
            raise InvalidRequestError("goes with a script, not with a factory", "host_memory")
        host = replace(answer.host, available_bytes=parse_memory(host_memory, "host_memory"))
        answer = replace(answer, host=host)
    if out is not None:
        from gpumemnet.job.json_codec import job_from_dict, job_to_json

        write_output(out, job_to_json(job_from_dict(answer.job)).encode())
    if plot is not None:
        from gpumemnet.tracing.plot import plot as draw

        draw(answer, plot)
    if as_json:
        typer.echo(json.dumps(answer_to_dict(answer)))
    else:
        console = Console()
        show_trace(answer, spread, console)
        if phases:
            _show_phases(answer, console)
    if answer.is_lower_bound:
        raise typer.Exit(LOWER_BOUND_CODE)


def launched(
    words: Sequence[str],
    ranks: int,
    call: typer.Context,
    *of_factories: str,
) -> Launch | None:
    """Returns the script or module to run; ``None`` for a factory.

    Args:
        words: a factory, or a line.
        ranks: number of GPUs.
        call: the command line.
        *of_factories: further parameters that do not apply to scripts.

    Raises:
        InvalidRequestError: when nothing or too much was named, or options say what the script says
            itself.
    """
    if not is_launch(words):
        if len(words) != 1:
            raise InvalidRequestError(
                "name one factory, such as train.py:build, or write -- python train.py", "source"
            )
        return None
    for name in (*_OF_FACTORIES, *of_factories):
        if is_given(call, name):
            raise InvalidRequestError(
                "does not go with a script, which trains as it is written", name
            )
    given = ranks if is_given(call, "ranks") else None
    launch = parse_launch(words, given)
    if None not in (given, launch.ranks) and given != launch.ranks:
        raise InvalidRequestError(
            f"{given:,} GPUs, and the line starts {launch.ranks:,} processes", "ranks"
        )
    return replace(launch, ranks=launch.ranks or given)


def is_given(call: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    source = call.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def attention_kernel(texts: Sequence[str] | None) -> str | None:
    """Returns the only training option that a script may be given: what PyTorch chooses itself."""
    values = training_settings(texts)
    kernel: str | None = values.pop("attention_kernel", None)
    if values:
        name = next(iter(values))
        raise InvalidRequestError(
            f"{name} does not go with a script, which trains as it is written", "set"
        )
    return kernel


def _batches(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise InvalidRequestError(
            f"must be batch sizes such as 1,2,4,8, not {describe(text)}", "batches"
        ) from None


def show_trace(answer: TraceAnswer, training: Sequence[str], console: Console) -> None:
    """Prints a trace: the verdict, the parts of the memory, the peak and the assumptions; arguments
    as those of :func:`show_verdict`."""
    show_verdict(answer, training, console)
    _show_parts(answer, console)
    _show_peak(answer, console)
    if answer.batches or answer.max_batch_size is not None:
        _show_batches(answer, console)
    if answer.by_rank:
        rows = [(f"{each.rank}", *amount_cells(each), each.phase) for each in answer.by_rank]
        print_columns(console, "rank", ("expected MiB", "safe MiB", "peak in"), rows)
    for note in answer.notes:
        console.print(Text.assemble(("note: ", "bold"), note))
    if answer.not_included:
        console.print(Text("Not included:", style="dim"))
        bullets = Table.grid(padding=(0, 1))
        for item in answer.not_included:
            bullets.add_row(Text(" ·", style="dim"), Text(item, style="dim"))
        console.print(bullets)


def show_verdict(answer: TraceAnswer, training: Sequence[str], console: Console) -> None:
    """Prints whether a job fits, and what it is.

    Args:
        answer: the trace.
        training: how the model is trained, in words.
        console: where to print it.
    """
    console.print(_verdict(answer))
    if answer.host is not None and answer.host.node_bytes >= MIB:
        console.print(_host_verdict(answer.host))
    workspaces = answer.convolution_workspaces
    source = (f"convolution workspaces: {workspaces}",) if workspaces else ()
    job = (
        answer.model,
        f"batch size {answer.batch_size:,}",
        *training,
        f"loss: {answer.loss}",
        *source,
    )
    console.print(Text(", ".join(job), style="dim"))


def _show_phases(answer: TraceAnswer, console: Console) -> None:
    largest = max(phase.requested_bytes for phase in answer.phases)
    rows = [
        (
            phase.name,
            f"{phase.step:,}",
            f"{phase.requested_bytes / MIB:,.1f}",
            *_share(phase.requested_bytes, largest),
        )
        for phase in answer.phases
    ]
    columns = ("step", "MiB of tensors", "of the peak", "")
    print_columns(console, "phase", columns, rows)


def _verdict(answer: TraceAnswer) -> Text:
    text = "a lower bound for" if answer.verdict == UNKNOWN else VERDICT_TEXTS[answer.verdict]
    headline = (f"{text[0].upper()}{text[1:]} {answer.gpu}", f"bold {COLOURS[answer.verdict]}")
    available = "" if answer.fits else f", {amount_text(answer.available_bytes)} available"
    each = "" if answer.ranks == 1 else f" on each of {answer.ranks:,} GPUs"
    return Text.assemble(headline, f": {amounts_text(answer)}{available}{each}")


def _host_verdict(host: HostMemory) -> Text:
    fits = {
        None: ("Host", "bold"),
        True: ("Fits the host", f"bold {COLOURS[YES]}"),
        False: ("Does not fit the host", f"bold {COLOURS[NO]}"),
    }
    each = "" if host.node_ranks == 1 else f" of {host.node_ranks:,} processes"
    pinned = f", {host.pinned_bytes * host.node_ranks / GIB:,.2f} GiB pinned"
    return Text.assemble(
        fits[host.fits],
        f": {amount_text(host.node_bytes)} for tensors{each}{pinned if host.pinned_bytes else ''}; "
        "Python, libraries and the driver come on top",
    )


def amounts_text(answer: TraceAnswer) -> str:
    """Returns the expected and the safe amount."""
    return ", ".join(f"{amount_text(size)} {name}" for name, size in answer.amounts)


def amount_text(amount_bytes: int) -> str:
    """Returns an amount in GiB and in whole MiB."""
    return f"{amount_bytes / GIB:,.2f} GiB ({ceil_mib(amount_bytes):,} MiB)"


def _show_parts(answer: TraceAnswer, console: Console) -> None:
    amounts = shown_mib(list(answer.parts.values()))
    rows: list[tuple[str | Text, ...]] = [
        (PART_NAMES.get(part, part), f"{mib:,}", *_share(size, answer.expected_bytes))
        for (part, size), mib in zip(answer.parts.items(), amounts, strict=True)
        if size
    ]
    name, _ = answer.amounts[0]
    total = Text(name, style="bold"), Text(f"{sum(amounts):,}", style="bold")
    rows.append((*total, *_share(answer.expected_bytes, answer.expected_bytes)))
    print_columns(console, "memory at the peak", ("MiB", "share", ""), rows)


def _show_peak(answer: TraceAnswer, console: Console) -> None:
    peak = answer.peak
    facts = [
        ("peak", peak_text(peak)),
        *(
            [("start-up", _startup(answer))]
            if answer.startup_peak_bytes != answer.expected_bytes
            else []
        ),
        (
            "least",
            f"{amount_text(answer.smallest_bytes)}: with less it runs out of memory, even if all that is cached is released",
        ),
        ("context", answer.context_source),
        *([] if answer.is_lower_bound else [("safe", answer.safe_basis)]),
    ]
    print_facts(console, "", facts)
    top, rest = peak.modules[:TOP_MODULES], peak.modules[TOP_MODULES:]
    held = [(name or "(the model itself, loss)", size) for name, size in top]
    if rest:
        held.append((f"{len(rest):,} others", sum(size for _, size in rest)))
    rows = [
        (name, f"{size / MIB:,.1f}", *_share(size, answer.expected_bytes)) for name, size in held
    ]
    columns = ("MiB", "share", "")
    print_columns(console, "modules that hold most at the peak", columns, rows)


def peak_text(peak: Peak) -> str:
    """Returns phase, step, operator and module of a peak."""
    where = f"{peak.phase}, step {peak.step}" if peak.step else peak.phase
    return f"{where}: {peak.operator}{f' in {peak.module}' if peak.module else ''}"


def _startup(answer: TraceAnswer) -> str:
    if answer.startup_peak_bytes is None:
        return f"{UNKNOWN_SEARCH}; --cudnn asks cuDNN for it"
    return f"takes up to {amount_text(answer.startup_peak_bytes)} and gives it back; cuDNN's search takes less where less is free"


def _show_batches(answer: TraceAnswer, console: Console) -> None:
    if answer.batches:
        rows = [
            (f"{point.batch_size:,}", *amount_cells(point), verdict_text(point.verdict))
            for point in answer.batches
        ]
        print_columns(console, f"batch size, {answer.gpu}", ("expected MiB", "safe MiB", ""), rows)
    if answer.max_batch_size is not None:
        largest = (
            "no batch size fits"
            if answer.max_batch_size == 0
            else f"largest batch size that fits: {answer.max_batch_size:,}"
        )
        console.print(Text(f" {answer.gpu}: {largest}", style="bold"))


def amount_cells(one: Any) -> tuple[str, str]:
    """Returns the expected and the safe bytes of ``one`` in whole MiB."""
    return f"{ceil_mib(one.expected_bytes):,}", f"{ceil_mib(one.safe_bytes):,}"


def verdict_text(verdict: str) -> Text:
    """Returns the words for a verdict, in its colour."""
    return Text(VERDICT_TEXTS[verdict], style=COLOURS[verdict])


def _share(amount: int, whole: int) -> tuple[str, str]:
    share = amount / whole
    return f"{share:.1%}".replace("%", " %"), "█" * round(20 * share)
