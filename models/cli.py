"""The command line of training and evaluation; a user's error is one sentence and exit code 2."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gpumemnet.cli.arguments import AsJson
from gpumemnet.cli.output import print_result
from gpumemnet.cli.running import command_of, run
from gpumemnet.errors import BundleError, DatasetError, GpumemnetError, InvalidRequestError
from gpumemnet.features.vector import FEATURE_SCHEMA
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.predict.bundle import check_replaceable
from gpumemnet.predict.bundle_card import ALL_FAMILIES, COMMON, ENCODERS

if TYPE_CHECKING:
    from .retrain.request import Outcome, Request
    from .training.data import LabelledJobs
    from .training.plan_file import FoundPlan

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

PUBLISHED_HINT: Final = (
    "for the published A100 measurements, download Datasets/MLP/mlp_data_step2.csv of github.com/itu-rad/GPUMemNet (CC BY 4.0) "
    "and run  gpumemnet build import-published mlp_data_step2.csv --out"
)

Dataset = Annotated[Path, typer.Option("--dataset", metavar="FILE", help="Parquet dataset, as gpumemnet build writes it.")]
Family = Annotated[str, typer.Option("--family", help=f"One of {', '.join(FAMILIES)}.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of folds, initialisation and order.")]
Epochs = Annotated[int, typer.Option("--epochs", min=1, max=10_000, help="Passes over the training jobs.")]
DATASETS: Final = Path("dataset_builder/datasets")
COMMITTED: Final = Path(__file__).resolve().parents[1] / DATASETS
"""Independent of the folder in which a command runs."""
REAL_NETWORKS: Final = DATASETS / "real_networks.jsonl.gz"
REAL_FAMILIES: Final = ("cnn", "transformer")
"""Families whose sampled jobs have real networks beside them."""
SHIPPED: Final = Path("gpumemnet/bundles")
DEFAULT_DATASET: Final = DATASETS / "published_mlp_a100.parquet"


@app.callback()
def _root() -> None:
    """Train, evaluate and export the classifiers."""


@app.command()
def train(
    out: Annotated[Path, typer.Option("--out", help="Bundle folder to write; an existing bundle there is replaced.")],
    dataset: Annotated[
        list[Path] | None,
        typer.Option(
            "--dataset",
            metavar="FILE",
            help=f"Parquet dataset; {DEFAULT_DATASET} unless given; several for the common classifier.",
        ),
    ] = None,
    family: Annotated[
        str | None, typer.Option("--family", help=f"One of {', '.join(FAMILIES)}; mlp unless given. Not with --encoder common.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the model; the folder's name unless given.")] = None,
    version: Annotated[str, typer.Option("--model-version", help="Version of the model.")] = "1",
    metrics: Annotated[
        Path | None, typer.Option("--metrics", help="evaluation.json of the same dataset, to be copied into the card.")
    ] = None,
    encoder: Annotated[str, typer.Option(metavar="|".join(ENCODERS), help="Classifier to train.")] = "mlp",
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Plan file of gpumemnet search; the default plan unless given."),
    ] = None,
    traces: Annotated[
        list[Path] | None,
        typer.Option(
            "--traces",
            metavar="FILE",
            help="Measured rows with traced peaks, which calibrate jobs that send one; the dataset's unless given.",
        ),
    ] = None,
    real_runs: Annotated[
        list[Path] | None,
        typer.Option("--real-runs", metavar="FILE", help="Runs of real networks to train on, too. Not with --encoder common."),
    ] = None,
    seed: Seed = 0,
    epochs: Annotated[int | None, typer.Option("--epochs", min=1, max=10_000, help="Passes over the training jobs.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a classifier on a dataset, and write its bundle. The encoder common learns from several datasets."""
    check_replaceable(out)
    if encoder not in ENCODERS:
        raise InvalidRequestError(f"must be {' or '.join(ENCODERS)}, not {encoder}", "encoder")
    if not (name := name or out.resolve().name) or not version:
        raise BundleError("the model needs a name and a version: give --name and --model-version")
    datasets = dataset or [DEFAULT_DATASET]
    if encoder == COMMON:
        if family not in (None, ALL_FAMILIES):
            raise InvalidRequestError(f"must be left out with --encoder {COMMON}, which learns from all families", "family")
        if real_runs:
            raise InvalidRequestError(f"must be left out with --encoder {COMMON}", "real_runs")
        data, calibration = _load_all(datasets), _load_by_family(traces or [])
    else:
        if len(datasets) > 1 or len(traces or []) > 1:
            raise DatasetError(f"the classifiers of a family learn from one dataset: give one, or --encoder {COMMON}")
        family = family or "mlp"
        data = _load(datasets[0], family)
        if real_runs:
            from .training.data import with_real_networks

            data = with_real_networks(data, real_runs)
        calibration = {family: _load(traces[0], family)} if traces else {}
    found = None if plan_file is None else _found_plan(plan_file, data.family, encoder)
    from .training.export import save_classifier
    from .training.mlp import train_classifier
    from .training.plans import Plan, mlp_plan, transformer_plan
    from .training.sequence import SequencePlan, train_sequence_classifier

    plan: Plan = transformer_plan(seed, epochs) if encoder == "transformer" else mlp_plan(data, seed, epochs)
    if found is not None:
        plan = found.plan(seed, epochs)
    rows = _evaluated_rows(metrics, data, asdict(plan)) if metrics else []
    with _progress("training") as report, _split_errors(datasets[0]):
        if isinstance(plan, SequencePlan):
            classifier = train_sequence_classifier(data, plan, lambda share: report("training", share))
        else:
            classifier = train_classifier(data, plan, lambda share: report("training", share))
    bundle = save_classifier(out, classifier, data, plan, name=name, version=version, metrics=rows, traces=calibration)
    print_result(
        {"bundle": out, "name": name, "version": version, "jobs": len(data), "sha256": bundle.sha256},
        f"{out}: trained on {len(data):,} jobs, {len(bundle.model):,} bytes, sha256 {bundle.sha256[:12]}",
        as_json=as_json,
    )


@app.command()
def evaluate(
    dataset: Dataset = DEFAULT_DATASET,
    family: Family = "mlp",
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for evaluation.md, evaluation.json and confusion.png.")
    ] = None,
    folds: Annotated[int, typer.Option("--folds", min=2, max=20, help="Folds, split by architecture.")] = 3,
    seed: Seed = 0,
    epochs: Epochs = 80,
    as_json: AsJson = False,
) -> None:
    """Evaluate every estimator on held-out architectures. Prints a table."""
    data = _load(dataset, family)
    from .evaluation.folds import evaluate as run_evaluation
    from .evaluation.folds_report import heading, markdown_table, write_report
    from .training.plans import mlp_plan

    with _progress("evaluating") as report, _split_errors(dataset):
        evaluation = run_evaluation(data, plan=mlp_plan(data, seed, epochs), fold_count=folds, progress=report)
    paths = write_report(evaluation, out) if out else []
    if as_json:
        typer.echo(json.dumps(evaluation.rows(), indent=2))
    else:
        typer.echo(f"{heading(evaluation)}\n{markdown_table(evaluation)}", nl=False)
        for path in paths:
            typer.echo(f"wrote {path}", err=True)


@app.command()
def report(
    out: Annotated[Path, typer.Option("--out", help="Folder for report.md, report.json and the pictures.")] = Path("report"),
    datasets: Annotated[Path, typer.Option("--datasets", help="Folder of Parquet datasets, all of which are used.")] = DATASETS,
    seed: Seed = 0,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one for each core unless given.")] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Few rows, folds and epochs: checks that the report runs; its figures say nothing.")
    ] = False,
    common: Annotated[
        bool, typer.Option("--common", help="Only networks of all families, and of both label sources, beside the families' own.")
    ] = False,
    encoder: Annotated[
        list[str] | None,
        typer.Option(metavar="mlp|transformer", help="Networks for --common, may be given twice; both unless given."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate every estimator on every dataset, with tables and pictures."""
    from .evaluation.candidates import OWN_CANDIDATES
    from .evaluation.full_report import write_common_report, write_full_report

    if smoke and common:
        raise InvalidRequestError("is a short run of its own: leave out --smoke", "common")
    if encoder and not common:
        raise InvalidRequestError("is for --common: the full report tries both", "encoder")
    if unknown := [name for name in encoder or () if name not in OWN_CANDIDATES]:
        raise InvalidRequestError(f"must be {' or '.join(OWN_CANDIDATES)}, not '{unknown[0]}'", "encoder")
    with _progress("reporting") as progress, _split_errors(datasets):
        if common:
            encoders = encoder or tuple(OWN_CANDIDATES)
            paths = write_common_report(datasets, out, seed=seed, workers=workers, encoders=encoders, progress=progress)
        else:
            paths = write_full_report(datasets, out, seed=seed, workers=workers, is_smoke=smoke, progress=progress)
    print_result({"written": list(map(str, paths))}, "\n".join(f"wrote {path}" for path in paths), as_json=as_json)


@app.command("real-networks")
def real_networks(
    out: Annotated[Path, typer.Option("--out", help="Folder for report.md.")] = Path("report"),
    families: Annotated[list[str] | None, typer.Option("--family", help="cnn or transformer; both unless given.")] = None,
    real_runs: Annotated[
        list[Path] | None, typer.Option("--real-runs", metavar="FILE", help="Runs of real networks; the committed unless given.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Evaluate the estimators on real networks, each on architecture families that it has not seen."""
    chosen = families or list(REAL_FAMILIES)
    if unknown := [name for name in chosen if name not in REAL_FAMILIES]:
        raise InvalidRequestError(f"must be of {', '.join(REAL_FAMILIES)}, not '{unknown[0]}'", "family")
    import torch

    from .evaluation.real_networks import write_report

    torch.set_num_threads(1)
    datasets = {family: DATASETS / f"traced_{family}_h200.parquet" for family in chosen}
    runs = real_runs or _committed_runs()
    with _progress("evaluating") as progress:
        typer.echo(f"wrote {write_report(datasets, runs, out, seed, progress)}")


@app.command("calibrate-closed-form")
def calibrate_closed_form(
    bundles: Annotated[list[Path], typer.Argument(metavar="FOLDER", help="Bundles whose cards get the calibration.")],
    rows: Annotated[Path, typer.Option("--rows", metavar="FILE", help="Traced ordinary networks.")] = REAL_NETWORKS,
    real_runs: Annotated[
        list[Path] | None, typer.Option("--real-runs", metavar="FILE", help="Runs of real networks; the committed unless given.")
    ] = None,
    union: Annotated[
        Path, typer.Option("--union", metavar="FOLDER", help="Bundle of all families, whose options and ranges were tested.")
    ] = SHIPPED / "all-h200-traced",
) -> None:
    """Calibrate the closed form on real networks, in the cards of bundles, without training anything."""
    from gpumemnet.predict.bundle import load_bundle

    from .evaluation.closed_form import (
        calibration,
        extend_bundle,
        networks_of_runs,
        ordinary_networks,
        rows_like_labels,
        together,
    )

    real = together([ordinary_networks(rows), networks_of_runs(real_runs or _committed_runs())])
    support = load_bundle(union).card.document["support"]
    entries: dict[tuple[str, tuple[float, ...]], dict[str, Any]] = {}
    for folder in bundles:
        card = load_bundle(folder).card
        networks = rows_like_labels(card, real, DATASETS)
        key = (str(networks.families[0]), card.coverages)
        if key not in entries:
            entries[key] = calibration(networks, card.coverages)
            _print_calibration(folder.name, card.coverages, entries[key])
        extend_bundle(folder, entries[key], support)
        typer.echo(f"wrote {folder}: {len(networks):,} rows")


def _print_calibration(name: str, coverages: Sequence[float], entry: Mapping[str, Any]) -> None:
    slopes = ", ".join(f"{term} {slope:.3g}" for term, slope in entry["slopes"].items() if slope)
    typer.echo(f"{name}: {entry['rows']:,} rows of {entry['families']:,} families; slopes: {slopes}")
    for group, part in entry["groups"].items():
        if not part["rows"]:
            continue
        typer.echo(f"{group}: {part['rows']:,} rows")
        for coverage, bound, held_out in zip(coverages, part["log_bounds"], part["held_out_coverage"], strict=True):
            typer.echo(f"  coverage {coverage:g}: {math.exp(bound):.2f} times the centre; held out {held_out:.1%}")


def _committed_runs() -> list[Path]:
    return sorted((DATASETS / "real_runs").glob("*_*.parquet"))


@app.command()
def retrain(
    registry: Annotated[
        Path | None, typer.Option("--registry", envvar="GPUMEMNET_REGISTRY", help="The registry's folder; a dry run needs none.")
    ] = None,
    dataset: Annotated[
        list[Path] | None,
        typer.Option("--dataset", metavar="FILE", help="Parquet dataset to train on, in addition to the committed ones."),
    ] = None,
    observations: Annotated[
        list[Path] | None,
        typer.Option("--observations", metavar="FILE", help="Observations, as gpumemnet observations export writes them."),
    ] = None,
    committed: Annotated[
        bool, typer.Option("--committed/--without-committed", help="Whether to train on the datasets of the repository.")
    ] = True,
    work: Annotated[Path, typer.Option("--work", help="Folder for reports and finished steps.")] = Path("runs/retrain"),
    encoder: Annotated[
        list[str] | None,
        typer.Option(metavar="mlp|transformer", help="Classifier to train, may be given twice; mlp unless given."),
    ] = None,
    seed: Seed = 0,
    epochs: Annotated[
        int | None,
        typer.Option("--epochs", min=1, max=10_000, help="Passes over the training jobs; the plans decide unless given."),
    ] = None,
    plan: Annotated[
        list[Path] | None,
        typer.Option("--plan", metavar="FILE", help="Plan file of gpumemnet search; the default plan unless given."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Train and judge, but do not change the registry.")] = False,
    challenger: Annotated[bool, typer.Option("--challenger", help="Make a better release challenger, not champion.")] = False,
    tracking: Annotated[
        str | None, typer.Option("--tracking", metavar="mlflow", help="Log the run and register the release in MLflow, too.")
    ] = None,
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            "--tracking-uri",
            envvar="MLFLOW_TRACKING_URI",
            metavar="URI",
            help="sqlite:///mlflow.db or a server, https://…; an SQLite file in the work folder unless given.",
        ),
    ] = None,
    tracking_model: Annotated[str, typer.Option("--tracking-model", help="Name of the model registered there.")] = "gpumemnet",
    as_json: AsJson = False,
) -> None:
    """Train on new data, and promote what is better than the champion.

    Exit codes: 0 something was promoted (or would have been), 10 nothing is better, 2 a mistake in command or data, 1 a failure.
    """
    from .retrain.pipeline import retrain as run_retraining
    from .retrain.request import FAILED, RETRAINED, Request, RetrainingError

    if registry is None and not dry_run:
        raise InvalidRequestError("name the registry's folder with --registry, or try it with --dry-run", "registry")
    chosen = tuple(dict.fromkeys(encoder or ["mlp"]))
    if unknown := [name for name in chosen if name not in RETRAINED]:
        raise InvalidRequestError(f"must be of {', '.join(RETRAINED)}, not '{unknown[0]}'", "encoder")
    files = (*(sorted(COMMITTED.glob("*.parquet")) if committed else ()), *(dataset or ()))
    if not files and not observations:
        raise DatasetError(f"no dataset: {COMMITTED} holds none, and neither --dataset nor --observations was given")
    store = _tracking_store(tracking, tracking_uri, tracking_model, work)
    request = Request(
        datasets=files,
        observations=tuple(observations or ()),
        registry=registry,
        work=work,
        encoders=chosen,
        seed=seed,
        epochs=epochs,
        plans=_found_plans(plan or []),
        is_dry_run=dry_run,
        as_challenger=challenger,
    )
    try:
        with _progress("retraining") as progress:
            outcome = run_retraining(request, progress)
    except (OSError, RetrainingError) as error:
        reason = f"{error.strerror} ({error.filename})" if isinstance(error, OSError) and error.filename else str(error)
        typer.echo(f"error: {reason}: the champion is unchanged; run the same command again to continue", err=True)
        raise typer.Exit(FAILED) from None
    if as_json:
        typer.echo(json.dumps(outcome.document, indent=2))
    typer.echo(f"{outcome.sentence}\nreport: {outcome.report}", err=as_json)
    if store is not None:
        _track(request, outcome, store, tracking_model)
    raise typer.Exit(outcome.exit_code)


@app.command()
def scoreboard(
    out: Annotated[Path, typer.Option("--out", help="Folder of the page; answers that it keeps are used again.")],
    networks: Annotated[
        str, typer.Option("--networks", metavar="MODULE:FUNCTION", help="What makes the model of a dataset's row.")
    ] = "dataset_builder.traced.rebuilt:rebuilt",
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
        float, typer.Option("--cpu-budget", min=0, metavar="SECONDS", help="Time for real runs on the CPU, which xMem needs.")
    ] = 600,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="A small part, in a minute: two sets, few rows, nothing trained.")
    ] = False,
) -> None:
    """Compare published estimators and ours on published runs; what was asked before is kept in the folder."""
    import torch

    from .evaluation.scoreboard.run import make_scoreboard

    torch.set_num_threads(1)  # seconds are those of one core
    with _progress("scoreboard") as progress:
        page = make_scoreboard(
            out,
            COMMITTED,
            networks,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            smoke=smoke,
            command=f"python -m models scoreboard --out {out}",
            progress=progress,
            warn=lambda text: typer.echo(f"warning: {text}", err=True),
        )
    print_result({"page": page}, f"{page}: written", as_json=False)


@app.command()
def search(
    out: Annotated[Path, typer.Option("--out", help="JSON file of the plan that is found.")],
    trials: Annotated[
        int, typer.Option("--trials", min=1, max=10_000, help="Number of plans to try, including those of earlier runs.")
    ],
    storage: Annotated[
        str,
        typer.Option("--storage", metavar="URL", help="SQLite file of the trials; the same command resumes the search in it."),
    ] = "sqlite:///search.db",
    family: Family = "mlp",
    encoder: Annotated[str, typer.Option(metavar="mlp|transformer", help="Classifier to train.")] = "mlp",
    dataset: Dataset = DEFAULT_DATASET,
    folds: Annotated[int, typer.Option("--folds", min=2, max=20, help="Folds, split by architecture.")] = 3,
    seed: Seed = 0,
    epochs: Annotated[
        int | None, typer.Option("--epochs", min=1, max=10_000, help="Passes of every plan; searched for unless given.")
    ] = None,
    engine: Annotated[str, typer.Option(metavar="local|ray", help="Where folds are trained.")] = "local",
    workers: Annotated[int | None, typer.Option(min=1, help="Ray tasks at a time; as many as it has cores unless given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Search for a training plan with Optuna. The file that it writes is for train --plan and retrain --plan."""
    from gpumemnet.cli.output import check_writable, write_atomically

    check_writable(out)
    if encoder not in (encoders := ("mlp", "transformer")):
        raise InvalidRequestError(f"must be {' or '.join(encoders)}, not {encoder}", "encoder")
    if engine not in (engines := ("local", "ray")):
        raise InvalidRequestError(f"must be {' or '.join(engines)}, not {engine}", "engine")
    if not dataset.is_file():
        raise DatasetError(f"{dataset} does not exist: measure one with gpumemnet build measure")
    from .search.engines import open_engine
    from .search.objective import load_task
    from .search.run import search, search_report
    from .training.plan_file import document_of

    task = load_task(dataset, family, encoder, folds, seed)
    with _progress("searching") as progress:
        result = search(task, trials, storage, lambda: open_engine(engine, task, workers), epochs, progress)
    document = document_of(family, encoder, result.plan, search_report(task, result, epochs))
    write_atomically(out, json.dumps(document, indent=2) + "\n")
    counts = ", ".join(f"{count} {state}" for state, count in result.trials.items() if count)
    print_result(
        {"plan": out, "trials": result.trials},
        f"{out}: the best of {sum(result.trials.values())} trials ({counts}); not yet judged: run gpumemnet retrain --plan {out}",
        as_json=as_json,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for what the user can mend, 130 for an interrupt."""
    return run(command_of(app), arguments, f"python -m {__package__}")


def _tracking_store(tracking: str | None, uri: str | None, model: str, work: Path) -> str | None:
    """The address of the MLflow store, checked before any work starts; ``None`` if there is none."""
    if tracking is None:
        return None
    if tracking != "mlflow":
        raise InvalidRequestError(f"must be mlflow, not '{tracking}'", "tracking")
    from gpumemnet.registry.mlflow_store import check_name, check_store

    from .retrain.tracking import default_store

    uri = uri or default_store(work)
    check_store(uri, "tracking_uri")
    check_name(model, "tracking_model")
    return uri


def _track(request: Request, outcome: Outcome, uri: str, model: str) -> None:
    """Log the result of a retraining; a failure here is reported, but changes neither the champion nor the exit code."""
    from .retrain.tracking import track

    try:
        typer.echo(f"tracking: {track(request, outcome, uri, model)}", err=True)
    except (OSError, GpumemnetError) as error:
        typer.echo(f"warning: not tracked: {error}: the decision is unchanged, and the next run logs it", err=True)


def _found_plan(path: Path, family: str, encoder: str) -> FoundPlan:
    from .training.plan_file import read_plan

    found = read_plan(path)
    if (found.family, found.encoder) != (family, encoder):
        raise InvalidRequestError(
            f"{path} is for {found.family} jobs and the encoder {found.encoder}, not for {family} jobs and {encoder}", "plan"
        )
    return found


def _found_plans(paths: list[Path]) -> tuple[FoundPlan, ...]:
    if not paths:
        return ()
    from .training.plan_file import read_plan

    plans = tuple(map(read_plan, paths))
    for number, plan in enumerate(plans):
        for earlier in plans[:number]:
            if (plan.family, plan.encoder) == (earlier.family, earlier.encoder):
                raise InvalidRequestError(
                    f"{earlier.name} and {plan.name} are both for {plan.family} jobs and the encoder {plan.encoder}: give one",
                    "plan",
                )
    return plans


def _load(dataset: Path, family: str) -> LabelledJobs:
    if not dataset.is_file():
        raise DatasetError(f"{dataset} does not exist: measure one with gpumemnet build measure; {PUBLISHED_HINT} {dataset}")
    import torch

    from .training.data import load_labelled_jobs

    torch.set_num_threads(1)  # the networks are too small for a second thread to pay
    return load_labelled_jobs(dataset, family)


def _load_all(datasets: list[Path]) -> LabelledJobs:
    """The jobs of all families of several datasets together."""
    from .training.data import joined

    data = joined(list(_load_by_family(datasets).values()))
    if len(data.families) == 1:
        raise DatasetError(f"{datasets[0]} has {data.family} jobs only: the common classifier learns from several families")
    return data


def _load_by_family(datasets: list[Path]) -> dict[str, LabelledJobs]:
    found: dict[str, LabelledJobs] = {}
    for path in datasets:
        families = _families(path)
        if not found.keys().isdisjoint(families):
            raise DatasetError(f"{path} has jobs of a family that another dataset has too: merge them first")
        found |= {family: _load(path, family) for family in families}
    return found


def _families(dataset: Path) -> list[str]:
    if not dataset.is_file():
        raise DatasetError(f"{dataset} does not exist: measure one with gpumemnet build measure")
    from .training.data import labelled_families

    return labelled_families(dataset)


def _evaluated_rows(path: Path, data: LabelledJobs, plan: dict[str, object]) -> list[dict[str, object]]:
    try:
        document = json.loads(path.read_text("utf-8"))
        rows, evaluated = document["candidates"], [document[name] for name in ("data_sha256", "feature_schema", "plan")]
    except (OSError, ValueError, KeyError, TypeError):
        raise DatasetError(f"{path} is no evaluation.json as 'gpumemnet evaluate --out' writes it") from None
    if evaluated != [data.sha256, FEATURE_SCHEMA, plan]:
        raise DatasetError(f"{path} was measured on another dataset, or with another training plan: evaluate this one first")
    return list(rows)


@contextmanager
def _split_errors(dataset: Path) -> Iterator[None]:
    """Turn too few architectures to split into an error about the dataset."""
    try:
        yield
    except ValueError as error:
        raise DatasetError(f"{dataset}: {error}") from None


@contextmanager
def _progress(title: str) -> Iterator[Callable[[str, float], None]]:
    """A progress bar on standard error, or a line for each step if that is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    if not sys.stderr.isatty():
        shown: list[str] = []

        def show_line(step: str, share: float) -> None:
            if step not in shown[-1:]:
                shown.append(step)
                typer.echo(f"{share:4.0%} {step}", err=True)

        yield show_line
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=1.0)
        yield lambda step, share: progress.update(task, description=step, completed=share)
