"""The command line of the dataset builder; an error that the user can mend is one sentence and exit code 2."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from gpumemnet.errors import GpumemnetError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Folder = Annotated[Path, typer.Option("--out", help="Folder of the campaign; the same folder goes on where it stopped.")]
Workers = Annotated[int, typer.Option(min=1, max=256, help="Most jobs side by side on one GPU.")]
Budget = Annotated[float | None, typer.Option("--time-budget", min=10, help="Seconds after which it has stopped by itself.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the sample, the weights and the inputs.")]
Deadline = Annotated[float, typer.Option(min=1, help="Seconds after which a single job is killed.")]
History = Annotated[int, typer.Option("--record-history", min=0, help="Record the allocator's events of this many jobs.")]
Accounting = Annotated[
    bool, typer.Option("--enable-accounting", help="Switch the driver's accounting on for the campaign (root): exact peaks.")
]


@app.callback()
def _root() -> None:
    """Measure the true GPU memory of training jobs, and build datasets from the results."""


@app.command()
def measure(
    out: Folder,
    recipe: Annotated[str, typer.Option(help="Name of a shipped recipe, or path of a YAML file.")] = "mlp",
    jobs: Annotated[int, typer.Option(min=1, help="How many jobs to draw.")] = 100,
    workers: Workers = 8,
    time_budget: Budget = None,
    seed: Seed = 0,
    deadline: Deadline = 60.0,
    record_history: History = 0,
    enable_accounting: Accounting = False,
) -> None:
    """Measure jobs drawn from a recipe on every visible GPU."""
    _measure(recipe, jobs, out, workers, time_budget, seed, deadline, record_history, enable_accounting)


@app.command()
def campaign(
    recipe: Annotated[str, typer.Argument(help="Path of a YAML file, or name of a shipped recipe.")],
    out: Folder,
    time_budget: Budget = 540.0,
    jobs: Annotated[int, typer.Option(min=1, help="Jobs of the plan; the time budget usually ends it before.")] = 5_000,
    workers: Workers = 12,
    seed: Seed = 0,
    deadline: Deadline = 60.0,
    record_history: History = 0,
    enable_accounting: Accounting = False,
) -> None:
    """Measure as much of a recipe as a time budget allows; run it again to go on."""
    _measure(recipe, jobs, out, workers, time_budget, seed, deadline, record_history, enable_accounting)


def _measure(
    recipe_name: str,
    count: int,
    folder: Path,
    workers: int,
    time_budget: float | None,
    seed: int,
    deadline: float,
    record_history: int,
    enable_accounting: bool,
) -> None:
    started = time.monotonic()
    from dataset_builder import campaign as engine
    from dataset_builder import nvml, progress
    from dataset_builder.journal import Journal, Settings
    from dataset_builder.pool import RunSettings
    from dataset_builder.recipe import load_recipe
    from dataset_builder.sampling import sample_jobs

    recipe = load_recipe(recipe_name)
    meters = nvml.visible_meters()
    with Journal(folder) as journal:
        settings = Settings(recipe.name, recipe.digest, seed, count)
        planned = journal.plan(settings)
        if planned is None:
            planned = sample_jobs(recipe, count, seed, min(meter.gpu.total_bytes for meter in meters))
            journal.keep_plan(settings, planned)
        tally = engine.Tally(count, len(journal.finished), started, time_budget)
        run = RunSettings(recipe.name, seed, workers, deadline, folder)
        run = engine.with_history(run, planned, record_history)
        switched_on = [meter for meter in meters if enable_accounting and meter.enable_accounting()]
        line = progress.ProgressLine()
        try:
            with engine.fork_server(folder) as server:
                engine.run_campaign(planned, journal, server, meters, run, tally, line)
        finally:
            line.close(tally)
            for meter in switched_on:
                meter.disable_accounting()
    _collect(folder, folder / "dataset.parquet")


@app.command()
def collect(
    folder: Annotated[Path, typer.Argument(help="Folder of a campaign, running or not.")],
    out: Annotated[Path, typer.Option("--out", help="Parquet file to write.")],
) -> None:
    """Write the finished measurements of a campaign as a dataset."""
    _collect(folder, out)


def _collect(folder: Path, out: Path) -> None:
    from dataset_builder.journal import read_journal
    from gpumemnet.dataset import write_dataset

    print(f"{write_dataset(out, read_journal(folder)):,} measurements written to {out}")


@app.command()
def validate(dataset: Annotated[Path, typer.Argument(help="Parquet file of a dataset.")]) -> None:
    """Look for rows that cannot be true; exit code 1 when there are any."""
    from dataset_builder import validation
    from gpumemnet.dataset import read_dataset

    measurements = read_dataset(dataset)
    findings = validation.validate(measurements)
    for finding in findings:
        print(f"row {finding.row}: {finding.rule}: {finding.sentence}")
    print(f"{len(measurements):,} rows, {len(findings):,} findings")
    if findings:
        raise typer.Exit(1)


@app.command("import-published")
def import_published(
    source: Annotated[Path, typer.Argument(help="mlp_data_step2.csv of the GPUMemNet repository (CC BY 4.0).")],
    out: Annotated[Path, typer.Option("--out", help="Parquet file to write.")] = Path("published.parquet"),
) -> None:
    """Turn the published A100 measurements into a dataset."""
    from dataset_builder import published

    print(f"{published.import_published(source, out):,} published measurements written to {out}")


def main() -> None:
    """Run the command line."""
    try:
        app()
    except GpumemnetError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
