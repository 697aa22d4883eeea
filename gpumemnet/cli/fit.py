"""``gpumemnet fit``: whether fine-tuning a model fits a GPU, asked by the model's name."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text

from gpumemnet.cli.options import AsJson, SequenceLength, TrainingMethod
from gpumemnet.cli.output import print_facts, print_json, print_table, shown_steps
from gpumemnet.gpu import VERDICT_TEXTS
from gpumemnet.named.methods import (
    ALL_LINEAR,
    ATTENTION,
    FIT_OPTIMIZERS,
    KERNELS,
    PARALLEL,
    PRECISIONS,
    STATED,
)
from gpumemnet.units import GIB, format_bytes

if TYPE_CHECKING:
    from gpumemnet.named.fit import FitAnswer

DOES_NOT_FIT: Final = 3
"""Exit code of a job that is not safe on the GPU."""
_PART_NAMES: Final = {
    "base_weights_bytes": "base weights",
    "adapters_bytes": "adapters",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "activations_bytes": "activations",
    "logits_bytes": "logits and loss",
    "workspace_bytes": "workspace",
    "fragmentation_bytes": "fragmentation",
    "context_bytes": "CUDA context",
}
_BAR: Final = 30


def fit(
    call: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A hub id such as Qwen/Qwen3-8B, a local folder, the path of a config.json, or a file of axolotl, "
            "LLaMA-Factory, TRL, torchtune, litgpt or Trainer; options override the file.",
        ),
    ],
    method: TrainingMethod = None,
    base_model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The model, if the file names none or another."),
    ] = None,
    sequence_length: SequenceLength = None,
    resolution: Annotated[
        int | None,
        typer.Option(metavar="PIXELS", help="Of a side of an image, for networks of images."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", help="Samples on one GPU; 1 by default.")
    ] = None,
    gradient_accumulation: Annotated[
        int | None,
        typer.Option(
            "--accumulation",
            metavar="N",
            help="Batches for one step of the optimizer; 1 by default.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            "--gpus",
            envvar="GPUMEMNET_GPU",
            metavar="GPU",
            help="RTX-4090, A100-80GB, 8xH100 …",
        ),
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(PARALLEL),
            help="How several GPUs share the training; fsdp2 by default.",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(PRECISIONS),
            help="bf16, the default: weights in bfloat16, as trainers load them; amp_…: trained weights in fp32.",
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"{', '.join(FIT_OPTIMIZERS)}; adamw by default."),
    ] = None,
    checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--checkpointing/--no-checkpointing",
            help="Recompute each block in the backward pass; on by default.",
        ),
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option(metavar="N", help="Rank of the adapters; 16 by default.")
    ] = None,
    lora_target: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"Layers with adapters, such as q_proj,v_proj; {ALL_LINEAR} by default.",
        ),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(metavar="|".join(ATTENTION), help="PyTorch's choice on this GPU by default."),
    ] = None,
    kernels: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(KERNELS),
            help="fused_loss and liger make no logits; none by default.",
        ),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Trace the real model; needs torch and its library.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Tell whether fine-tuning a model fits a GPU, by the model's name."""
    from gpumemnet.named.fit import fit as ask

    stated = {name: call.params[name] for name in STATED}
    options = {name: value for name, value in stated.items() if value is not None}
    with shown_steps(model) as progress:
        answer = ask(
            model, gpu=gpu, base_model=base_model, exact=exact, progress=progress, **options
        )
    if as_json:
        print_json(answer.document())
    else:
        _show(answer, Console(), model, {"base_model": base_model, **stated, "gpu": gpu})
    if not answer.fits:
        raise typer.Exit(DOES_NOT_FIT)


def _show(answer: FitAnswer, console: Console, model: str, stated: Mapping[str, Any]) -> None:
    free = f"{format_bytes(answer.safe_bytes)} are safe"
    title = f"{answer.model}: {VERDICT_TEXTS[answer.verdict] if answer.verdict else free}"
    facts = [("model", _model_text(answer)), ("training", _training_text(answer))]
    if answer.gpu is not None:
        facts.append(("GPU", f"{answer.gpu}, {format_bytes(answer.available_bytes or 0)} free"))
    readings = f"above {answer.coverage:.1%} of readings of such jobs"
    if answer.method.gpus > 1 or "tokens" not in answer.table_by:
        readings = "wider, as few readings of such jobs are published"
    safe = f"{format_bytes(answer.safe_bytes)}, {readings}"
    facts += [
        ("expected", f"{format_bytes(answer.expected_bytes)}, most in the {answer.moment}"),
        ("safe", safe),
        *((("attention", answer.attention),) if answer.attention else ()),
        *(("note", note) for note in answer.notes),
    ]
    print_facts(console, title, facts)
    console.print()
    console.print(Text("What it is made of", style="bold"))
    for name, size in answer.parts.items():
        if size:
            bar = "█" * round(_BAR * size / answer.expected_bytes)
            console.print(Text(f"{_PART_NAMES[name]:>17}  {format_bytes(size):>10}  {bar}"))
    console.print()
    _show_table(answer, console)
    _show_limits(answer, console, model, stated)


def _model_text(answer: FitAnswer) -> str:
    blocks = [f"{count} x {name}" for count, name in answer.blocks if count > 1]
    size = f"{answer.parameters / 1e6:,.0f} million parameters"
    return ", ".join((size, *blocks))


def _training_text(answer: FitAnswer) -> str:
    how = answer.method
    name = how.method
    if how.has_adapters:
        name = f"{name} of rank {how.lora_rank} on {how.lora_target}"
    parts = [
        name,
        f"{how.batch_size:,} x {how.sequence_length:,} tokens"
        if "tokens" in answer.table_by
        else f"{how.batch_size:,} images"
        + (f" of {how.resolution} x {how.resolution}" if how.resolution else ""),
        how.precision,
        how.optimizer,
        "checkpointing" if how.checkpointing else "no checkpointing",
    ]
    if how.kernels != "none":
        parts.append(f"{how.kernels} kernels")
    if how.gradient_accumulation > 1:
        parts.append(f"{how.gradient_accumulation} batches accumulated")
    if how.gpus > 1:
        parts.append(f"{how.gpus} GPUs by {how.parallel}")
    share = answer.trained_parameters / max(answer.parameters, 1)
    return f"{', '.join(parts)}; trains {share:.2%}"


def _show_table(answer: FitAnswer, console: Console) -> None:
    lengths = list(answer.table[0]["safe_bytes"])
    rows = []
    for row in answer.table:
        cells = [_cell(size, answer.available_bytes) for size in row["safe_bytes"].values()]
        rows.append((row["method"], "on" if row["checkpointing"] else "off", *cells))
    columns = ("method", "checkpointing", *(f"{int(each):,}" for each in lengths))
    title = f"What would fit (✓): safe GiB by {answer.table_by}"
    console.print(Text(title, style="bold"))  # a table's own title wraps at the table's width
    print_table(console, "", columns, rows)


def _cell(size: int, available: int | None) -> str:
    text = f"{size / GIB:,.1f}"
    if available is None:
        return text
    return f"{text} ✓" if size <= available else text


def _show_limits(
    answer: FitAnswer, console: Console, model: str, stated: Mapping[str, Any]
) -> None:
    facts = []
    if answer.largest_batch is not None:
        facts.append(
            ("largest batch", f"{answer.largest_batch:,}" if answer.largest_batch else "none fits")
        )
    if answer.longest_sequence is not None:
        longest = f"{answer.longest_sequence:,} tokens" if answer.longest_sequence else "none fits"
        facts.append(("longest sample", longest))
    facts.append(("smallest GPU", answer.smallest_gpu or "none of the catalogue"))
    if answer.fewest_gpus is not None and answer.fewest_gpus > 1:
        facts.append(("fewest of this GPU", f"{answer.fewest_gpus}, sharded by FSDP2"))
    print_facts(console, "Limits", facts)
    if answer.fits:
        return
    console.print()
    heading = "Cheapest changes that make it fit" if answer.changes else "No change makes it fit"
    console.print(Text(heading, style="bold"))
    for number, change in enumerate(answer.changes, 1):
        console.print(Text(f" {number}. {change.text}: safe {format_bytes(change.safe_bytes)}"))
    console.print(Text("Next", style="bold"))
    console.print(Text(f" {next_command(answer, model, stated)}"), soft_wrap=True)
    if answer.method.gpus == 1 and answer.available_bytes:
        console.print(Text(f" {plan_command(answer)}"), soft_wrap=True)


OF_PLAN: Final = ("method", "sequence_length", "batch_size", "optimizer", "precision")
"""Fields of a method that ``plan`` has options for; ``--set`` takes the others."""
_OWN_TO_FIT: Final = ("checkpointing", "gpus", "parallel", "adapter")


def plan_command(answer: FitAnswer) -> str:
    """The command that plans this training, which says what is recomputed."""
    words = ["gpumemnet", "plan", answer.model, "--gpu", (answer.gpu or "").replace(" ", "-")]
    usual = asdict(type(answer.method)())
    for name, value in asdict(answer.method).items():
        if name in OF_PLAN:
            words += [f"--{name.replace('_', '-')}", str(value)]
        elif value != usual[name] and name not in _OWN_TO_FIT:
            words += ["--set", f"{name}={value}"]
    return shlex.join(words)


def next_command(answer: FitAnswer, model: str, stated: Mapping[str, Any]) -> str:
    """The command as it was typed, with the cheapest change; else on the smallest GPU that holds the
    job, or with the most frugal method."""
    change = "--method qlora --kernels liger --gpu 8xH200"
    if answer.changes:
        change = answer.changes[0].options
    elif answer.smallest_gpu is not None:
        count = f"{answer.method.gpus}x" if answer.method.gpus > 1 else ""
        change = f"--gpu {shlex.quote(f'{count}{answer.smallest_gpu}')}"
    words = ["gpumemnet", "fit", model]
    for name, value in stated.items():
        option = name.removeprefix("gradient_").replace("_", "-")
        if value is None or f"--{option}" in change.split():
            continue
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{option}")
        else:
            words += [f"--{option}", str(value)]
    return f"{shlex.join(words)} {change}"
