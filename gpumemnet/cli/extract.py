"""``gpumemnet extract``: a training job from a model factory, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from gpumemnet.atomic_files import write_output
from gpumemnet.cli.options import (
    AsJson,
    BatchSize,
    Deadline,
    Factory,
    FactoryArguments,
    Inputs,
    Optimizer,
    Precision,
    Settings,
    named_values,
    training_settings,
)
from gpumemnet.cli.output import check_writable, print_facts, print_table
from gpumemnet.extract.extraction import (
    DEADLINE_SECONDS,
    DEFAULT_GPU,
    DEFAULT_OPTIONS,
    Extraction,
    ExtractOptions,
    extract_file,
    extraction_to_dict,
)
from gpumemnet.job.json_codec import job_to_json

_SHOWN_LAYERS: Final = 10


def extract(
    source: Factory,
    batch_size: BatchSize = None,
    inputs: Inputs = None,
    argument: FactoryArguments = None,
    optimizer: Optimizer = DEFAULT_OPTIONS.optimizer,
    precision: Precision = DEFAULT_OPTIONS.precision,
    settings: Settings = None,
    gpu: Annotated[
        str,
        typer.Option(
            metavar="GPU", help="The GPU of the training, which decides the attention kernel."
        ),
    ] = DEFAULT_GPU,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Write the job here; without it the job goes to standard output.",
        ),
    ] = None,
    as_json: AsJson = False,
    deadline: Deadline = DEADLINE_SECONDS,
) -> None:
    """Turn a model into a job, without a GPU. No weights are allocated."""
    options = ExtractOptions(
        optimizer=optimizer,
        precision=precision,
        gpu=gpu,
        **training_settings(settings, ("ranks",)),
    )
    if out is not None:
        check_writable(out)
    extraction = extract_file(
        source,
        options,
        inputs=inputs or (),
        arguments=named_values(argument, "arg"),
        batch_size=batch_size,
        deadline_seconds=deadline,
    )
    if out is not None:
        write_output(out, job_to_json(extraction.job).encode())
    if as_json:
        typer.echo(json.dumps(extraction_to_dict(extraction)))
        return
    if out is None:
        typer.echo(job_to_json(extraction.job), nl=False)
    _show_extraction(extraction, Console(stderr=out is None))


def _show_extraction(extraction: Extraction, console: Console) -> None:
    """Prints the largest layers, the totals and the notes."""
    job = extraction.job
    named = sorted(
        zip(extraction.layer_names, job.layers, strict=True),
        key=lambda pair: pair[1].activations,
        reverse=True,
    )
    print_table(
        console,
        f"Largest of {len(job.layers):,} layers",
        ("module", "kind", "outputs per sample", "parameters"),
        [
            (name or "(model)", layer.kind, layer.activations, layer.parameters)
            for name, layer in named[:_SHOWN_LAYERS]
        ],
    )
    facts = {
        "family": job.family,
        "batch size": job.batch_size,
        "input elements per sample": job.input_elements,
        "output elements per sample": job.total_activations,
        "parameters": job.total_parameters,
        "trainable parameters": job.trainable_parameters,
        "activation function": job.activation_function,
        "sequence length": job.sequence_length,
    }
    print_facts(
        console,
        "The job",
        [
            (name, f"{value:,}" if isinstance(value, int) else f"{value}")
            for name, value in facts.items()
            if value is not None
        ],
    )
    for note in extraction.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)
