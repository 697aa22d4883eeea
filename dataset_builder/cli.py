"""The command line of the dataset builder; an error that the user can correct is one sentence and
exit code 2."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from gpumemnet.cli.commands import run
from gpumemnet.cli.options import AsJson
from gpumemnet.cli.output import print_result
from gpumemnet.errors import MeasurementError
from gpumemnet.units import format_bytes

from .measure.campaign import (
    ProgressLine,
    Tally,
    accounting,
    fork_server,
    run_campaign,
    with_history,
)
from .measure.fork_server import ForkServer
from .measure.journal import Journal, Settings, read_journal
from .measure.nvml import visible_meters
from .measure.pool import RunSettings
from .merge import ConflictError, Keep, merge_datasets
from .recipe.recipe import Recipe, load_recipe

FINDINGS_EXIT_CODE: Final = 3
"""Exit code of ``validate`` on a readable dataset with impossible rows."""

_MAKE: Final = "Make rows"
_LOOK: Final = "Look at rows"
_GPU: Final = "Measure a GPU"

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Folder = Annotated[
    Path, typer.Option("--out", help="Folder of the campaign; a campaign continues in its folder.")
]
Workers = Annotated[
    int, typer.Option(min=1, max=256, help="Largest number of jobs side by side on one GPU.")
]
Budget = Annotated[
    float | None,
    typer.Option("--time-budget", min=10, help="Seconds after which the campaign stops."),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the sample, the weights and the inputs.")]
Deadline = Annotated[float, typer.Option(min=1, help="Seconds after which a single job is killed.")]
History = Annotated[
    int,
    typer.Option(
        "--record-history", min=0, help="Record the allocator's events of this many jobs."
    ),
]
Accounting = Annotated[
    bool,
    typer.Option(
        "--enable-accounting",
        help="Switch on the driver's accounting, which gives exact peaks, for the campaign; needs root.",
    ),
]


@app.callback()
def _root() -> None:
    """Measure jobs on GPUs, and build datasets of them."""


@app.command(rich_help_panel=_MAKE)
def campaign(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="Path of a YAML file, or name of a shipped recipe."),
    ],
    out: Folder,
    time_budget: Budget = 540.0,
    jobs: Annotated[
        int,
        typer.Option(
            min=1, help="Jobs of the plan; the time budget usually ends the campaign earlier."
        ),
    ] = 1_500,
    workers: Workers = 12,
    seed: Seed = 0,
    deadline: Deadline = 60.0,
    record_history: History = 0,
    enable_accounting: Accounting = False,
    as_json: AsJson = False,
) -> None:
    """Measure as much of a recipe as a time budget allows; run it again to continue."""
    space = load_recipe(recipe)
    run = RunSettings(space.name, seed, workers, deadline, out)
    _measure(space, jobs, run, time_budget, record_history, enable_accounting)
    _collect(out, out / "dataset.parquet", as_json=as_json)


def _measure(
    recipe: Recipe,
    count: int,
    run: RunSettings,
    time_budget: float | None,
    record_history: int,
    enable_accounting: bool,
) -> None:
    started = time.monotonic()
    from .recipe.sampling import sample_jobs

    meters = visible_meters()
    capacity_bytes = min(meter.gpu.total_bytes for meter in meters)
    with accounting(meters if enable_accounting else []), Journal(run.folder) as journal:
        settings = Settings(recipe.name, recipe.digest, run.seed, count)
        planned = journal.plan(settings)
        if planned is None:
            planned = sample_jobs(recipe, count, run.seed, capacity_bytes)
            journal.keep_plan(settings, planned)
        tally = Tally(count, len(journal.finished), started, time_budget)
        left = [job for job in planned if job.key not in journal.finished]
        line = ProgressLine()
        try:
            with fork_server(run.folder) as server:
                run_campaign(
                    left,
                    lambda job, one: journal.append(job.key, one),
                    server,
                    meters,
                    with_history(run, planned, record_history),
                    tally,
                    line,
                )
        finally:
            line.close(tally)


@app.command(rich_help_panel=_MAKE)
def sample(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="Path of a YAML file, or name of a shipped recipe."),
    ],
    out: Folder,
    gpu: Annotated[str, typer.Option(help="GPU that will measure: its memory is to be filled.")],
    jobs: Annotated[int, typer.Option(min=1, help="Jobs of the plan.")] = 1_500,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Draw the jobs of a campaign on any machine, so that the GPU does not wait for it; `campaign`
    with the same settings then measures them."""
    from gpumemnet.gpu.catalogue import device_profile

    from .recipe.sampling import sample_jobs

    space, capacity_bytes = load_recipe(recipe), device_profile(gpu).capacity_bytes
    with Journal(out) as journal:
        settings = Settings(space.name, space.digest, seed, jobs)
        if journal.plan(settings) is None:
            journal.keep_plan(settings, sample_jobs(space, jobs, seed, capacity_bytes))
    sentence = f"{jobs:,} jobs of recipe {space.name} planned in {out}"
    print_result({"jobs": jobs, "folder": out}, sentence, as_json=as_json)


@app.command(rich_help_panel=_MAKE)
def collect(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of a campaign, running or not.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Parquet file to write.")],
    as_json: AsJson = False,
) -> None:
    """Write the finished measurements of a campaign as a dataset."""
    _collect(folder, out, as_json=as_json)


def _collect(folder: Path, out: Path, *, as_json: bool = False) -> None:
    from gpumemnet.job.dataset import write_dataset

    rows = list(read_journal(folder))
    if any(row.provenance == "stand_in" for row in rows):
        sentence = f"{len(rows):,} rows of a rehearsal stay in {folder}; they are no measurements, so no dataset is written"
        print_result({"rows": len(rows), "dataset": None}, sentence, as_json=as_json)
        return
    written = write_dataset(out, rows)
    print_result(
        {"rows": written, "dataset": out},
        f"{written:,} measurements written to {out}",
        as_json=as_json,
    )


@app.command(rich_help_panel=_MAKE)
def merge(
    sources: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Parquet files of datasets.")
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Parquet file to write; it may be one of the sources.")
    ],
    keep: Annotated[
        Keep | None,
        typer.Option(help="Which of contradicting rows to keep; without it they are an error."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Join datasets of several GPUs, hosts and campaigns; each job on one GPU and software occurs
    once in the result."""
    try:
        merged = merge_datasets(sources, out, keep)
    except ConflictError as error:
        for conflict in error.conflicts:
            print(conflict, file=sys.stderr)
        raise
    for conflict in merged.conflicts:
        print(conflict, file=sys.stderr)
    sentence = (
        f"{merged.written:,} of {merged.read:,} rows written to {out}: {merged.exact:,} were there already, {merged.repeats:,} "
        f"repeated a job, {len(merged.conflicts):,} contradicted another; {merged.histories:,} histories were copied, "
        f"{merged.lost_histories:,} were not found"
    )
    conflicts = [str(conflict) for conflict in merged.conflicts]
    print_result(asdict(merged) | {"conflicts": conflicts}, sentence, as_json=as_json)


@app.command(rich_help_panel=_LOOK)
def validate(
    dataset: Annotated[Path, typer.Argument(metavar="FILE", help="Parquet file of a dataset.")],
    as_json: AsJson = False,
) -> None:
    """List impossible rows, one a line. Exit code 0 without findings, 3 with findings, 2 when the
    dataset cannot be read."""
    from gpumemnet.job.dataset import read_dataset
    from gpumemnet.site import validation

    measurements = read_dataset(dataset)
    findings = [str(finding) for finding in validation.validate(measurements)]
    text = "\n".join([*findings, f"{len(measurements):,} rows, {len(findings):,} findings"])
    print_result({"rows": len(measurements), "findings": findings}, text, as_json=as_json)
    if findings:
        raise typer.Exit(FINDINGS_EXIT_CODE)


@app.command(rich_help_panel=_LOOK)
def split(
    dataset: Annotated[Path, typer.Argument(metavar="FILE", help="Parquet file of a dataset.")],
    out: Annotated[Path, typer.Option("--out", help="JSON file to write.")],
    folds: Annotated[int, typer.Option(min=2, max=100, help="How many folds.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Assign every architecture to a fold; added rows do not change folds, and real models belong
    to none."""
    from gpumemnet.job.dataset import read_dataset

    from .split import split_by_architecture, write_split

    chosen = split_by_architecture(read_dataset(dataset), folds, seed)
    write_split(chosen, out)
    in_folds, for_testing = len(chosen.fold_of), len(chosen.test_only)
    print_result(
        {"architectures": in_folds, "folds": folds, "for_testing_only": for_testing, "split": out},
        f"{in_folds:,} architectures in {folds} folds, {for_testing:,} for testing only, written to {out}",
        as_json=as_json,
    )


@app.command("probe-device", rich_help_panel=_GPU)
def probe_gpu(
    out: Annotated[
        Path, typer.Option("--out", help="JSON file to write: a device profile.")
    ] = Path("profile.json"),
    as_json: AsJson = False,
) -> None:
    """Measure the CUDA context and the workspaces of cuBLAS and cuDNN on the first visible GPU."""
    from .measure.device_probe import probe_device, write_profile

    [meter, *_] = visible_meters()
    if not out.absolute().parent.is_dir():
        raise MeasurementError(f"{out} cannot be written: there is no such folder")
    with closing(ForkServer(log=sys.stderr.buffer)) as server:
        document = probe_device(server, meter)
    write_profile(document, out)
    lines = [
        *(
            f"context after {reading['stage']}: {format_bytes(reading['context_bytes'])}"
            for reading in document["contexts"]
        ),
        f"cuBLAS workspace: {document['blas_workspaces']['forward_bytes']:,} bytes",
        f"profile of {meter.gpu.name} written to {out}",
    ]
    print_result(document, "\n".join(lines), as_json=as_json)


@app.command(rich_help_panel=_GPU)
def rates(
    out: Annotated[Path, typer.Option("--out", help="JSON file to write.")],
    as_json: AsJson = False,
) -> None:
    """Measure the rates of this GPU and its host, for `gpumemnet plan --machine`; takes seconds on
    an idle GPU."""
    import torch

    from gpumemnet.atomic_files import write_file
    from gpumemnet.planner.costs import machine_to_dict

    from .measure.machine_rates import measure_machine

    if not torch.cuda.is_available():
        raise MeasurementError("no rates can be measured here: PyTorch finds no GPU")
    document = machine_to_dict(measure_machine(torch.device("cuda")))
    write_file(out, json.dumps(document, indent=2).encode())
    print_result(document, f"{out} written, for `gpumemnet plan --machine {out}`", as_json=as_json)


def main() -> None:
    """Run the command line."""
    sys.exit(run(typer.main.get_command(app), None, f"python -m {__package__}"))
