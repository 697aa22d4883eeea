"""``gpumemnet extract``: a training job from a model factory, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gpumemnet.atomic_files import check_writable, write_output
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
from gpumemnet.extract.extraction import (
    DEADLINE_SECONDS,
    DEFAULT_GPU,
    DEFAULT_OPTIONS,
    ExtractOptions,
    extract_file,
    extraction_to_dict,
)
from gpumemnet.extract.factory import factory_request
from gpumemnet.job.json_codec import job_to_json


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
        factory_request(source, inputs, named_values(argument, "arg"), batch_size),
        options,
        deadline,
    )
    if out is not None:
        write_output(out, job_to_json(extraction.job).encode())
    if as_json:
        typer.echo(json.dumps(extraction_to_dict(extraction)))
        return
    if out is None:
        typer.echo(job_to_json(extraction.job), nl=False)
    job = extraction.job
    typer.echo(
        f"{job.family}, {len(job.layers):,} layers, {job.total_parameters:,} parameters",
        err=out is None,
    )
    for note in extraction.notes:
        typer.echo(f"note: {note}", err=out is None)
