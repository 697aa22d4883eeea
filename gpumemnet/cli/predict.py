"""``gpumemnet predict``: predict the memory of jobs in a file."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text

from gpumemnet.cli.options import Bundles, ContextMib, Coverage, Encoder, Gpu, input_file
from gpumemnet.cli.output import UNKNOWN_SEARCH, print_facts, print_table
from gpumemnet.errors import InvalidRequestError
from gpumemnet.gpu import VERDICT_TEXTS
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.prediction import DEFAULT_COVERAGE
from gpumemnet.units import MIB, ceil_mib, format_bytes

if TYPE_CHECKING:
    from gpumemnet.predict.distribution import BinScheme
    from gpumemnet.predict.gpu_fit import Fit
    from gpumemnet.predict.prediction import Prediction

_SHOWN_BINS: Final = 5
_SHOWN_JOBS: Final = 1000


def predict(
    jobs: Annotated[
        list[str],
        typer.Argument(
            metavar="JOBS",
            help="A job (.json), or many (.json, .jsonl, .parquet); - reads JSON from standard input. "
            "With --out files, globs or URLs (.parquet, .csv, .jsonl).",
        ),
    ],
    bundle: Bundles = None,
    coverage: Coverage = DEFAULT_COVERAGE,
    bin_width: Annotated[
        int | None,
        typer.Option("--bin-width", metavar="MIB", help="Width of a bin; 1024 by default."),
    ] = None,
    gpu: Gpu = None,
    context_mib: ContextMib = None,
    encoder: Encoder = None,
    fits: Annotated[
        bool,
        typer.Option(
            "--fits", help="Also say which GPUs and MIG profiles of the catalogue the job fits."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: one JSON object a job and line.")
    ] = False,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Stream the predictions into this file (.parquet, .csv, .jsonl); a killed run continues.",
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar="local|ray", help="With --out: this machine's cores, or a Ray cluster."
        ),
    ] = "local",
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="With --out: processes; one for each core by default."
        ),
    ] = None,
    id_column: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="With --out: the jobs' own ids; job_id or id by default."
        ),
    ] = None,
) -> None:
    """Predict how much GPU memory jobs take."""
    from gpumemnet.job.table_reader import read_job_tables
    from gpumemnet.predict import gpu_fit
    from gpumemnet.predict.distribution import bins_of_width
    from gpumemnet.predict.predictor import Predictor  # onnxruntime takes a tenth of a second

    bins = None if bin_width is None else bins_of_width(bin_width * MIB)
    context_bytes = None if context_mib is None else context_mib * MIB
    if out is not None:
        if fits or as_json:
            raise InvalidRequestError("--fits and --json do not go with --out", "out")
        _predict_into_file(
            jobs,
            out,
            engine,
            workers,
            bundles=tuple(str(folder.resolve()) for folder in bundle or ()),
            bins=bins,
            coverage=coverage,
            gpu=gpu,
            encoder=encoder,
            id_column=id_column,
            context_bytes=context_bytes,
        )
        return
    if engine != "local" or workers is not None or id_column is not None:
        raise InvalidRequestError("--engine, --workers and --id-column need --out FILE", "out")
    if len(jobs) > 1:
        raise InvalidRequestError("several files need --out FILE for the predictions", "jobs")
    tables = read_job_tables(input_file(Path(jobs[0])))
    predictor = Predictor.load(*bundle or (), context_bytes=context_bytes)
    predicted = (
        (
            table,
            predictor.predict_table(table, bins=bins, coverage=coverage, gpu=gpu, encoder=encoder),
        )
        for table in tables
    )
    numbers = itertools.count(1)

    def fitting(job: TrainingJob) -> tuple[Fit, ...]:
        return gpu_fit.fits(predictor, job, coverage=coverage, encoder=encoder)

    if as_json:
        for table, predictions in predicted:
            for job, document in zip(table, predictions.documents(), strict=True):
                whole = {"job": next(numbers), **document}
                if fits:
                    whole["fits"] = [asdict(fit) for fit in fitting(job)]
                sys.stdout.write(json.dumps(whole) + "\n")
        return
    rows = ((next(numbers), *pair) for pairs in predicted for pair in zip(*pairs, strict=True))
    shown = list(itertools.islice(rows, _SHOWN_JOBS))
    if len(shown) > 1 and fits:
        raise InvalidRequestError("the file holds several jobs: --fits then needs --json", "jobs")
    console = Console()
    if len(shown) == 1:
        _, job, prediction = shown[0]
        _show_job(job, prediction, predictor.prediction_gpu(gpu).context.advice, console)
        if fits:
            _show_fits(fitting(job), console)
    else:
        _show_jobs(shown, rows, console)


def _predict_into_file(
    jobs: Sequence[str], out: str, engine: str, workers: int | None, **options: Any
) -> None:
    """Predicts files of jobs into a file, and prints a summary on standard error."""
    from gpumemnet.batch.part_predictions import BatchOptions
    from gpumemnet.batch.run import predict_files

    outcome = predict_files(jobs, out, BatchOptions(**options), engine=engine, workers=workers)
    tally = outcome.tally
    lines = [
        f"{tally.answered:,} jobs predicted in {outcome.seconds:.1f} s, {outcome.rate:,.0f} rows a second: {out}"
    ]
    if tally.outside:
        lines.append(f"{tally.outside:,} of them are unlike the training data, and have no limit")
    if outcome.rejected:
        lines.append(f"{tally.rejected:,} rows were rejected: {outcome.rejected} says why")
    sys.stderr.write("\n".join(lines) + "\n")


def _show_fits(fits: Sequence[Fit], console: Console) -> None:
    from gpumemnet.gpu import device_profile

    rows = [
        (
            device_profile(fit.gpu).aliases[0] + (f"/{fit.mig}" if fit.mig else ""),
            fit.available_mib,
            fit.request_mib,
            "none" if fit.limit_mib is None else f"{fit.limit_mib:,}",
            VERDICT_TEXTS[fit.verdict],
            f"{fit.probability:.1%}",
        )
        for fit in fits
    ]
    columns = ("GPU", "available MiB", "expected MiB", "safe MiB", "verdict", "likely")
    print_table(console, "What holds the job", columns, rows)


def _show_jobs(
    shown: Sequence[tuple[int, TrainingJob, Prediction]],
    rest: Iterator[tuple[int, TrainingJob, Prediction]],
    console: Console,
) -> None:
    rows = [
        (
            number,
            job.family,
            job.batch_size,
            ceil_mib(prediction.expected_bytes),
            "none" if prediction.safe_bytes is None else f"{ceil_mib(prediction.safe_bytes):,}",
            _bin_text(prediction.bins, prediction.bin_index),
            "; ".join(prediction.reasons),
        )
        for number, job, prediction in shown
    ]
    more = sum(1 for _ in rest)
    columns = ("job", "family", "batch", "expected MiB", "safe MiB", "bin", "no limit, because")
    kept = len(columns) if any(row[-1] for row in rows) else len(columns) - 1
    title = f"{len(shown) + more:,} jobs"
    print_table(console, title, columns[:kept], [row[:kept] for row in rows])
    if more:
        console.print(f"… and {more:,} more: --json prints all")


def _show_job(job: TrainingJob, prediction: Prediction, advice: str, console: Console) -> None:
    safe = "none: the job is unlike the training data"
    if prediction.safe_bytes is not None:
        covers = f"covers {prediction.coverage:.4g} of such jobs"
        safe = f"{ceil_mib(prediction.safe_bytes):,} MiB, {covers}"
    among = f", one of {job.ranks:,} replicas" if job.is_replica else ""
    size = f"batch size {job.batch_size:,}, {job.total_parameters:,} parameters"
    is_asked = prediction.gpu_source == "request"
    context = f"{ceil_mib(prediction.context_bytes):,} MiB"
    facts = [
        ("job", f"{job.family}, {size}, {job.optimizer}, {job.precision}{among}"),
        (
            "GPU",
            prediction.gpu
            + ("" if is_asked else ", as none was named: use --gpu or GPUMEMNET_GPU"),
        ),
        ("context", f"{context}, {prediction.context_source.partition(':')[0]}"),
        ("expected", f"{ceil_mib(prediction.expected_bytes):,} MiB"),
    ]
    if prediction.startup_peak_bytes is None:
        facts.append(("start-up", UNKNOWN_SEARCH))
    facts += [
        ("safe", safe),
        *(("outside", reason) for reason in prediction.reasons),
        *([("note", advice)] if advice else []),
        ("model", f"{prediction.estimator}, version {prediction.version}"),
    ]
    print_facts(console, "Predicted GPU memory", facts)
    probabilities = prediction.probabilities
    likely = sorted(range(prediction.bins.count), key=lambda index: -probabilities[index])
    for index in sorted(index for index in likely[:_SHOWN_BINS] if probabilities[index] >= 0.001):
        probability = float(probabilities[index])
        bar = "█" * round(30 * probability)
        text = f"{_bin_text(prediction.bins, index):>26}  {probability:6.1%} {bar}"
        console.print(Text(text))


def _bin_text(bins: BinScheme, index: int) -> str:
    lower_bytes, upper_bytes = bins.bounds_bytes(index)
    if upper_bytes is None:
        return f"above {format_bytes(lower_bytes)}"
    return f"{lower_bytes // MIB:,} – {upper_bytes // MIB:,} MiB"
