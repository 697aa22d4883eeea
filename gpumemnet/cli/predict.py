"""``gpumemnet predict``: predicts the memory of the jobs in a file, in process, with the
bundles."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from gpumemnet.cli.arguments import ContextOption, GpuOption, input_file
from gpumemnet.cli.batch import only_file, predict_into_file
from gpumemnet.cli.fitting import fitting, fitting_document, show_fitting
from gpumemnet.cli.output import print_facts, print_table
from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.reader import read_job_tables
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.distribution import PUBLISHED_BINS, BinScheme, bins_of_width, named_bins
from gpumemnet.predict.prediction import DEFAULT_COVERAGE
from gpumemnet.units import MIB, ceil_mib, format_bytes

if TYPE_CHECKING:
    from gpumemnet.predict.fits import Fit
    from gpumemnet.predict.largest_batch import BatchSizes
    from gpumemnet.predict.prediction import Prediction

_SHOWN_BINS: Final = 5
_SHOWN_JOBS: Final = 1000


def predict(
    jobs: Annotated[
        list[str],
        typer.Argument(
            metavar="JOBS...",
            help="A job (.json), or many (.json, .jsonl, .parquet); - reads JSON from standard input. "
            "With --out files, globs or URLs (.parquet, .csv, .jsonl).",
        ),
    ],
    bundle: Annotated[
        list[Path] | None,
        typer.Option(
            "--bundle",
            metavar="FOLDER",
            help="Bundle folder instead of the shipped ones; once per family.",
        ),
    ] = None,
    coverage: Annotated[
        float, typer.Option(help="Share of jobs that the safe bytes cover.")
    ] = DEFAULT_COVERAGE,
    bin_width: Annotated[
        int | None,
        typer.Option("--bin-width", metavar="MIB", help="Width of a bin; 1024 unless given."),
    ] = None,
    bins: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(PUBLISHED_BINS), help="A published bin scheme instead of a width."
        ),
    ] = None,
    gpu: GpuOption = None,
    context_mib: ContextOption = None,
    encoder: Annotated[
        str | None,
        typer.Option(
            metavar="mlp|transformer|common",
            help="Which classifier answers; common is one model for all families.",
        ),
    ] = None,
    fits: Annotated[
        bool,
        typer.Option(
            "--fits", help="Also say which GPUs and MIG profiles of the catalogue the job fits."
        ),
    ] = False,
    largest_batch: Annotated[
        str | None,
        typer.Option(
            metavar="GPU", help="Find the largest batch that fits it, such as A100 or A100/3g.20gb."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: one JSON object a job and line.")
    ] = False,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Stream the answers into this file or URL (.parquet, .csv, .jsonl); a killed run goes on.",
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar="local|ray", help="With --out: this machine's cores, or a Ray cluster."
        ),
    ] = "local",
    workers: Annotated[
        int | None, typer.Option(help="With --out: processes; one for each core unless given.")
    ] = None,
    id_column: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="With --out: the jobs' own ids; job_id or id unless given."
        ),
    ] = None,
) -> None:
    """Predict how much GPU memory jobs take."""
    scheme = _scheme(bin_width, bins)
    context_bytes = None if context_mib is None else context_mib * MIB
    if out is not None:
        if fits or largest_batch is not None or as_json:
            raise InvalidRequestError(
                "--fits, --largest-batch and --json do not go with --out", "out"
            )
        predict_into_file(
            jobs,
            out,
            bundles=bundle or (),
            bins=scheme,
            coverage=coverage,
            gpu=gpu,
            encoder=encoder,
            id_column=id_column,
            context_bytes=context_bytes,
            engine=engine,
            workers=workers,
        )
        return
    if engine != "local" or workers is not None or id_column is not None:
        raise InvalidRequestError("--engine, --workers and --id-column need --out FILE", "out")
    batches = read_job_tables(input_file(only_file(jobs)))
    from gpumemnet.predict.predictor import (
        Predictor,
    )  # onnxruntime takes a tenth of a second that --help need not wait for

    settings = {"context_bytes": context_bytes}
    predictor = Predictor.load(*bundle, **settings) if bundle else Predictor.default(**settings)
    predicted = (
        (
            table,
            predictor.predict_table(
                table, bins=scheme, coverage=coverage, gpu=gpu, encoder=encoder
            ),
        )
        for table in batches
    )
    numbers = itertools.count(1)

    def fit(job: TrainingJob) -> tuple[tuple[Fit, ...] | None, BatchSizes | None]:
        return fitting(predictor, job, fits, largest_batch, coverage=coverage, encoder=encoder)

    if as_json:
        for table, predictions in predicted:
            for job, document in zip(table, predictions.documents(), strict=True):
                sys.stdout.write(
                    json.dumps({"job": next(numbers), **document, **fitting_document(*fit(job))})
                    + "\n"
                )
        return
    answers = ((next(numbers), *pair) for pairs in predicted for pair in zip(*pairs, strict=True))
    shown = list(itertools.islice(answers, _SHOWN_JOBS))
    if len(shown) > 1 and (fits or largest_batch is not None):
        raise InvalidRequestError(
            "the file holds several jobs: --fits and --largest-batch then need --json", "jobs"
        )
    console = Console()
    fitted = fit(shown[0][1]) if len(shown) == 1 else (None, None)
    _show(shown, answers, console)
    show_fitting(*fitted, console)


def _scheme(bin_width_mib: int | None, name: str | None) -> BinScheme | None:
    if name is not None and bin_width_mib is not None:
        raise InvalidRequestError("give either --bin-width or --bins, not both", "bins")
    if name is not None:
        return named_bins(name)
    return None if bin_width_mib is None else bins_of_width(bin_width_mib * MIB)


def _show(
    shown: Sequence[tuple[int, TrainingJob, Prediction]],
    rest: Iterator[tuple[int, TrainingJob, Prediction]],
    console: Console,
) -> None:
    if len(shown) == 1:
        _show_one(*shown[0][1:], console)
        return
    rows = [
        (
            number,
            job.family,
            job.batch_size,
            ceil_mib(estimate.expected_bytes),
            "none" if estimate.safe_bytes is None else f"{ceil_mib(estimate.safe_bytes):,}",
            _bin_text(estimate, estimate.bin_index),
            "; ".join(estimate.reasons),
        )
        for number, job, estimate in shown
    ]
    more = sum(1 for _ in rest)
    columns = (
        "job",
        "family",
        "batch",
        "expected MiB",
        "safe MiB",
        "bin",
        "outside the model's support",
    )
    kept = len(columns) if any(row[-1] for row in rows) else len(columns) - 1
    print_table(
        console, f"{len(shown) + more:,} jobs", columns[:kept], [row[:kept] for row in rows]
    )
    if more:
        console.print(f"… and {more:,} more: --json prints all")


def _show_one(job: TrainingJob, estimate: Prediction, console: Console) -> None:
    safe = "none: the job lies outside what the model was trained on"
    if estimate.safe_bytes is not None:
        safe = f"{ceil_mib(estimate.safe_bytes):,} MiB, covers {estimate.coverage:.4g} of such jobs"
    among = f", one of {job.ranks:,} replicas" if job.is_replica else ""
    options = f"{job.optimizer}, {job.precision}{among}"
    facts = [
        (
            "job",
            f"{job.family}, batch size {job.batch_size:,}, {job.total_parameters:,} parameters, {options}",
        ),
        (
            "GPU",
            estimate.gpu
            + (
                ""
                if estimate.gpu_source == "request"
                else ", as none was named: --gpu or GPUMEMNET_GPU"
            ),
        ),
        (
            "context",
            f"{ceil_mib(estimate.context_bytes):,} MiB, {estimate.context_source.partition(':')[0]}",
        ),
        ("expected", f"{ceil_mib(estimate.expected_bytes):,} MiB"),
        *(
            [("start-up", _startup(estimate))]
            if estimate.startup_peak_bytes > estimate.expected_bytes
            else []
        ),
        ("safe", safe),
        *(("outside", reason) for reason in estimate.reasons),
        ("model", f"{estimate.estimator}, version {estimate.version}"),
    ]
    print_facts(console, "Predicted GPU memory", facts)
    likely = sorted(range(estimate.bins.count), key=lambda index: -estimate.probabilities[index])[
        :_SHOWN_BINS
    ]
    for index in sorted(index for index in likely if estimate.probabilities[index] >= 0.001):
        probability = float(estimate.probabilities[index])
        bar = "█" * round(30 * probability)
        console.print(Text(f"{_bin_text(estimate, index):>26}  {probability:6.1%} {bar}"))


def _startup(estimate: Prediction) -> str:
    most = f"{ceil_mib(estimate.startup_peak_bytes):,} MiB"
    return f"takes up to {most} and gives it back; cuDNN's search takes less where less is free"


def _bin_text(estimate: Prediction, index: int) -> str:
    lower_bytes, upper_bytes = estimate.bins.bounds_bytes(index)
    if upper_bytes is None:
        return f"above {format_bytes(lower_bytes)}"
    return f"{lower_bytes // MIB:,} – {upper_bytes // MIB:,} MiB"
