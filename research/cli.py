"""The command line of the research record, ``python -m research``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from dataset_builder.measure.journal import read_journal
from dataset_builder.recipe import load_recipe
from gpumemnet.cli.commands import App, run
from gpumemnet.cli.options import AsJson, Seed
from gpumemnet.cli.output import print_result, progress_bar
from models.training.data import SHIPPED_DATASETS
from research.packing.command import pack

_COMPARE: Final = "Compare estimators"
_TRACES: Final = "Label jobs by tracing them"
_PUBLISHED: Final = "Published data"
app = App(add_completion=False)

Folder = Annotated[
    Path, typer.Option("--out", help="Folder of the campaign; a campaign continues in its folder.")
]
Budget = Annotated[
    float | None,
    typer.Option("--time-budget", min=10, help="Seconds after which the campaign stops."),
]


@app.callback()
def _root() -> None:
    """Compare gpumemnet with published work, and make the shipped data."""


@app.command(rich_help_panel=_COMPARE)
def scoreboard(
    out: Annotated[
        Path,
        typer.Option("--out", help="Folder of the page; answers that it keeps are used again."),
    ],
    seconds: Annotated[
        float | None,
        typer.Option(
            "--time-budget",
            min=0,
            metavar="SECONDS",
            help="Time for estimators that need the model; 0: judge what is kept.",
        ),
    ] = None,
    cpu_seconds: Annotated[
        float,
        typer.Option(
            "--cpu-budget",
            min=0,
            metavar="SECONDS",
            help="Time for real runs on the CPU, which xMem needs.",
        ),
    ] = 600,
    renew: Annotated[
        list[str] | None,
        typer.Option("--renew", metavar="NAME", help="Ask this estimator again, once for each."),
    ] = None,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke", help="A small part, in a minute: two sets, few rows, nothing trained."
        ),
    ] = False,
) -> None:
    """Compare published estimators and ours on published runs; what was asked before is kept in the
    folder."""
    import torch

    from research.scoreboard.run import make_scoreboard

    torch.set_num_threads(1)  # seconds are those of one core
    with progress_bar("scoreboard") as progress:
        page = make_scoreboard(
            out,
            SHIPPED_DATASETS,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            renew=renew or (),
            smoke=smoke,
            command=f"python -m research scoreboard --out {out}",
            progress=progress,
            warn=lambda text: typer.echo(f"warning: {text}", err=True),
        )
    print_result({"page": page}, f"{page}: written", as_json=False)


@app.command(rich_help_panel=_COMPARE)
def readings(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Tables of readings.")],
    write: Annotated[
        bool, typer.Option("--write", help="Calibrate the safe bytes of `gpumemnet fit`.")
    ] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Trace each job, in seconds.")] = False,
    kept: Annotated[
        Path | None,
        typer.Option("--kept", help="File that keeps the answers; a stopped run continues."),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--source",
            help="Compare with this table alone, once for each, or its first letters; timm: largest batches of its models.",
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--time-budget",
            min=0,
            help="Seconds after which kept answers of earlier code stand for jobs that are not asked again.",
        ),
    ] = None,
) -> None:
    """Compare `gpumemnet fit` and traces with published readings of training runs."""
    from research.readings import LADDERS, TABLES, compare
    from research.vision_runs import TABLES as VISION

    asked = tuple(source or TABLES)
    sources = [table for table in (*TABLES, LADDERS, *VISION) if table.startswith(asked)]
    typer.echo(
        compare(folder, write=write, exact=exact, kept=kept, sources=sources, seconds=seconds)
    )


@app.command(rich_help_panel=_PUBLISHED)
def catalogue(
    table: Annotated[Path, typer.Argument(metavar="CSV", help="Configurations, one a row.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the catalogue.")] = Path(
        "gpumemnet/named"
    ),
) -> None:
    """Make the catalogue of named models, and check the totals of their parameters."""
    from research.named_catalogue import make_catalogue, make_networks

    typer.echo(make_networks(table, out / "networks.json"))
    typer.echo(make_catalogue(table, out / "networks.json", out / "catalogue.json"))


app.command(rich_help_panel=_COMPARE)(pack)


@app.command(rich_help_panel=_PUBLISHED)
def card(
    dataset: Annotated[Path, typer.Argument(metavar="FILE", help="Parquet file of a dataset.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the card and its pictures.")],
    as_json: AsJson = False,
) -> None:
    """Write the data card of a dataset, in Markdown with pictures, from the file alone."""
    from research.data_card import write_card

    text, *pictures = write_card(dataset, out)
    sentence = f"{text} written, with {len(pictures)} pictures"
    print_result({"card": text, "pictures": list(map(str, pictures))}, sentence, as_json=as_json)


@app.command(rich_help_panel=_TRACES)
def compare(
    datasets: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Parquet files of datasets, all of one GPU."),
    ],
    rows: Annotated[
        int | None,
        typer.Option(min=10, help="Rows of each family, drawn at random; all unless given."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the table and the traced rows.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draw.")] = 0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; one for each core unless given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Trace measured jobs, and compare the traces with the measurements and with FakeTensor
    alone."""
    from research.traces.compare import compare as run

    run(datasets, rows, seed, workers, out, as_json=as_json)


@app.command("trace-recipe", rich_help_panel=_TRACES)
def trace_recipe(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="Path of a YAML file, or name of a shipped recipe."),
    ],
    out: Folder,
    gpu: Annotated[str, typer.Option(help="GPU to trace for.")] = "H200",
    jobs: Annotated[int, typer.Option(min=1, help="How many jobs to draw.")] = 1_000,
    seed: Seed = 0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; one for each core unless given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Label the jobs of a recipe by tracing them, without a GPU; the rows are marked as traced."""
    from research.traces.labels import trace_recipe

    trace_recipe(load_recipe(recipe), gpu, jobs, seed, out, workers)
    _collect(out, as_json)


@app.command("trace-real-jobs", rich_help_panel=_TRACES)
def trace_real_jobs(
    out: Folder,
    architectures: Annotated[int, typer.Option(min=1, help="Real architectures to draw.")] = 600,
    options_each: Annotated[
        int, typer.Option(min=1, help="Ways in which each is trained: traces of it.")
    ] = 3,
    rows_each: Annotated[int, typer.Option(min=1, help="Batch sizes of each trace.")] = 4,
    time_budget: Budget = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Trace jobs of real architectures (timm 1.0.9, torchvision, transformers); the rows are marked
    as traced."""
    from research.traces.real_jobs.campaign import trace_real_jobs

    progress = trace_real_jobs(
        out,
        architectures,
        options_each,
        rows_each,
        seed,
        time_budget,
        lambda line: print(line, file=sys.stderr),
    )
    statuses = ", ".join(f"{count:,} {status}" for status, count in progress.rows.most_common())
    made = f"{progress.traced:,} traces made, {progress.left_out:,} left out (see left_out.jsonl); rows: {statuses or 'none'}"
    print(made, file=sys.stderr if as_json else sys.stdout)
    _collect(out, as_json)


@app.command("add-traces", rich_help_panel=_TRACES)
def add_traces(
    dataset: Annotated[Path, typer.Argument(metavar="FILE", help="Parquet file of a dataset.")],
    out: Annotated[
        Path, typer.Option("--out", help="Parquet file to write; it may be the dataset itself.")
    ],
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; one for each core unless given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Add the traced peak to each job of a dataset."""
    from research.traces.labels import add_traces as run

    traced, failed = run(dataset, out, workers)
    sentence = f"{traced:,} jobs traced, {failed:,} could not be; written to {out}"
    print_result({"traced": traced, "failed": failed, "dataset": out}, sentence, as_json=as_json)


@app.command("import-published", rich_help_panel=_PUBLISHED)
def import_published(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.csv",
            help="mlp_data_step2.csv, cnn_data_step1.csv or transformer_data.csv of GPUMemNet (CC BY 4.0).",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Parquet file to write.")] = Path(
        "published.parquet"
    ),
    as_json: AsJson = False,
) -> None:
    """Turn the published A100 measurements into a dataset."""
    from research.published_tables import importing

    left_out: Counter[str] = Counter()
    written = importing.import_published(source, out, left_out)
    reasons = dict(left_out.most_common())
    lines = [f"{written:,} published measurements written to {out}"]
    lines += [f"{count:,} rows were left out: {reason}" for reason, count in reasons.items()]
    print_result(
        {"rows": written, "left_out": reasons, "dataset": out}, "\n".join(lines), as_json=as_json
    )


@app.command("import-real-models", rich_help_panel=_PUBLISHED)
def import_real_models(
    out: Annotated[Path, typer.Option("--out", help="Parquet file to write.")] = Path(
        "published_real_models.parquet"
    ),
    as_json: AsJson = False,
) -> None:
    """Turn the published A100 readings of real vision models into a dataset for testing; needs
    torchvision and timm."""
    from research.published_tables import real_models as published_real_models
    from research.traces.labels import PROTOCOL

    written = published_real_models.import_real_models(out, PROTOCOL)
    print_result(
        {"rows": written, "dataset": out},
        f"{written:,} published readings written to {out}",
        as_json=as_json,
    )


@app.command("import-real-runs", rich_help_panel=_PUBLISHED)
def import_real_runs(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.csv",
            help="published_timm_a100.csv (needs timm 1.0.9) or published_xmem_runs.csv.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Parquet file to write.")],
    runs: Annotated[
        Path,
        typer.Option(
            "--runs", help="Folder of the traced runs; the command continues in its folder."
        ),
    ],
    time_budget: Annotated[
        float | None,
        typer.Option(
            "--time-budget",
            min=0,
            help="Seconds for tracing; models that it does not reach are left out.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn published runs of real models into a dataset, with layers and traced parts; run it again
    to continue."""
    from gpumemnet.job.dataset import write_dataset
    from research.traces.real_runs import build_real_runs

    rows, progress = build_real_runs(
        source, runs, time_budget, lambda line: print(line, file=sys.stderr)
    )
    written = write_dataset(out, rows)
    outcomes = dict(progress.rows.most_common())
    lines = [f"{written:,} published runs written to {out}; {progress.traced:,} models traced"]
    lines += [f"{count:,} rows {outcome}" for outcome, count in outcomes.items()]
    lines += [f"{model}: {error}" for model, error in progress.failed.items()]
    if progress.left:
        lines.append(f"{progress.left:,} models are not traced yet: run the command again")
    document = {
        "rows": written,
        "outcomes": outcomes,
        "models_traced": progress.traced,
        "models_failed": progress.failed,
        "models_left": progress.left,
        "dataset": out,
    }
    print_result(document, "\n".join(lines), as_json=as_json)


def _collect(folder: Path, as_json: bool) -> None:
    from gpumemnet.job.dataset import write_dataset

    out = folder / "dataset.parquet"
    written = write_dataset(out, list(read_journal(folder)))
    print_result(
        {"rows": written, "dataset": out},
        f"{written:,} rows written to {out}",
        as_json=as_json,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line, by default ``sys.argv``, and returns its exit code."""
    return run(typer.main.get_command(app), arguments, f"python -m {__package__}")
