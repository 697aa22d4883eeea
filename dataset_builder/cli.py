"""The command line of the dataset builder; an error that the user can correct is one sentence and
exit code 2."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from gpumemnet.atomic_files import check_writable, json_bytes, write_output
from gpumemnet.cli.commands import run
from gpumemnet.cli.options import AsJson
from gpumemnet.cli.output import print_result, progress_bar
from gpumemnet.job.dataset import write_dataset
from gpumemnet.site.implausible_rows import implausible_rows
from gpumemnet.units import format_bytes

from .measure.campaign import RunSettings, Tally, run_campaign
from .measure.gpu_process import probe_device
from .measure.journal import Journal, Settings
from .measure.nvml import visible_meters
from .merge import merge_datasets, read_source
from .recipe import load_recipe, sample_jobs

FINDINGS_EXIT_CODE: Final = 3
"""Exit code of ``merge`` without ``--out`` on rows that cannot be true."""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _root() -> None:
    """Measure jobs on GPUs, and build datasets of them."""


@app.command()
def campaign(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="Path of a YAML file, or name of a shipped recipe."),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Folder of the campaign; a campaign continues in its folder."
        ),
    ],
    time_budget: Annotated[
        float, typer.Option(metavar="SECONDS", min=10, help="The campaign stops by then.")
    ] = 540.0,
    jobs: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Jobs to draw; the time budget usually ends the campaign earlier.",
        ),
    ] = 1_500,
    workers: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=256, help="Largest number of jobs side by side on one GPU."
        ),
    ] = 12,
    seed: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Seed of the sample, the weights and the inputs."),
    ] = 0,
    deadline: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=1, help="A single job is killed after this long."),
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Measure the jobs of a recipe, as many as a time budget allows.

    Writes dataset.parquet into the folder. Run it again to continue.
    """
    space = load_recipe(recipe)
    settings = Settings(space.name, space.digest, seed, jobs)
    started = time.monotonic()
    meters = visible_meters()
    with Journal(out) as journal:
        planned = journal.plan(settings)
        if planned is None:
            capacity_bytes = min(meter.gpu.total_bytes for meter in meters)
            planned = sample_jobs(space, jobs, seed, capacity_bytes)
            journal.keep_plan(settings, planned)
        tally = Tally(jobs, len(journal.finished), started, time_budget)
        left = [job for job in planned if job.key not in journal.finished]
        run = RunSettings(space.name, seed, workers, deadline, out)
        with progress_bar("measuring") as show:
            run_campaign(
                left, lambda job, one: journal.append(job.key, one), meters, run, tally, show
            )
    rows, dataset = read_source(out), out / "dataset.parquet"
    sentence = f"{write_dataset(dataset, rows):,} measurements written to {dataset}"
    print_result({"rows": len(rows), "dataset": dataset}, sentence, as_json=as_json)


@app.command()
def merge(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE|FOLDER", help="Datasets (.parquet), and folders of campaigns."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.parquet", help="Dataset to write; it may be one of the sources."
        ),
    ] = None,
    keep_first: Annotated[
        bool,
        typer.Option(
            "--keep-first",
            help="Keep the first of contradicting rows; without it they are an error.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Join datasets and campaigns into one dataset; without --out, check them.

    Each job on one GPU and software occurs once in the result. A check lists rows that cannot be
    true, and ends with exit code 3 if there are any.
    """
    if out is None:
        _check(sources, as_json)
        return
    merged = merge_datasets(sources, out, keep_first)
    sentence = (
        f"{merged.written:,} of {merged.read:,} rows written to {out}: {merged.repeats:,} repeated a job, "
        f"{len(merged.conflicts):,} contradicted another"
    )
    print_result(asdict(merged), "\n".join([*merged.conflicts, sentence]), as_json=as_json)


def _check(sources: Sequence[Path], as_json: bool) -> None:
    rows, findings = 0, list[str]()
    for source in sources:
        measurements = read_source(source)
        rows += len(measurements)
        findings += [f"{source} {finding}" for finding in implausible_rows(measurements)]
    text = "\n".join([*findings, f"{rows:,} rows, {len(findings):,} findings"])
    print_result({"rows": rows, "findings": findings}, text, as_json=as_json)
    if findings:
        raise typer.Exit(FINDINGS_EXIT_CODE)


@app.command("probe")
def probe_gpu(
    out: Annotated[Path, typer.Option(metavar="FILE.json", help="Device profile to write.")] = Path(
        "profile.json"
    ),
    as_json: AsJson = False,
) -> None:
    """Measure the first visible GPU while nothing else uses it.

    Reads its CUDA context after training steps, and the workspace of cuBLAS.
    """
    check_writable(out)
    [meter, *_] = visible_meters()
    document = probe_device(meter)
    write_output(out, json_bytes(document))
    found = document["profile"]
    text = (
        f"context after training steps: {format_bytes(found['context_bytes'])}\n"
        f"cuBLAS workspace: {found['blas_workspace_bytes']:,} bytes\n"
        f"profile of {meter.gpu.name} written to {out}: give it as --gpu"
    )
    print_result(document, text, as_json=as_json)


def main() -> None:
    """Run the command line."""
    sys.exit(run(typer.main.get_command(app), None, f"python -m {__package__}"))
