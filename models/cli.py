"""The commands ``gpumemnet train``, ``evaluate`` and ``retrain``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gpumemnet.cli.options import AsJson, RegistryFolder, Seed
from gpumemnet.cli.output import print_json, print_result, progress_bar
from gpumemnet.errors import BundleError, DatasetError, GpumemnetError, InvalidRequestError
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.predict.bundle import check_replaceable
from gpumemnet.predict.bundle_card import ALL_FAMILIES, COMMON, ENCODERS
from gpumemnet.predict.features import FEATURE_SCHEMA

if TYPE_CHECKING:
    from .retrain.release import Outcome, Request
    from .training.data import LabelledJobs

DATASETS: Final = Path("dataset_builder/datasets")
"""From the folder in which a command runs."""
COMMITTED_DATASETS: Final = Path(__file__).resolve().parents[1] / DATASETS
"""From any folder."""
DEFAULT_DATASET: Final = DATASETS / "published_mlp_a100.parquet"

Dataset = Annotated[
    Path,
    typer.Option(
        "--dataset", metavar="FILE", help="Parquet dataset, as gpumemnet build writes it."
    ),
]
Family = Annotated[
    str, typer.Option("--family", metavar="FAMILY", help=f"One of {', '.join(FAMILIES)}.")
]
Epochs = Annotated[
    int | None,
    typer.Option(
        "--epochs",
        min=1,
        max=10_000,
        help="Passes over the training jobs; the plan decides unless given.",
    ),
]
Folds = Annotated[
    int, typer.Option("--folds", metavar="N", min=2, max=20, help="Folds, split by architecture.")
]


def train(
    out: Annotated[
        Path,
        typer.Option("--out", help="Bundle folder to write; an existing bundle there is replaced."),
    ],
    dataset: Annotated[
        list[Path] | None,
        typer.Option(
            "--dataset",
            metavar="FILE",
            help=f"Parquet dataset; {DEFAULT_DATASET} unless given; several for the common classifier.",
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            "--family",
            help=f"One of {', '.join(FAMILIES)}; mlp unless given. Not with --encoder common.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of the model; the folder's name unless given."),
    ] = None,
    version: Annotated[str, typer.Option("--model-version", help="Version of the model.")] = "1",
    metrics: Annotated[
        Path | None,
        typer.Option(
            "--metrics", help="evaluation.json of the same dataset, to be copied into the card."
        ),
    ] = None,
    encoder: Annotated[
        str, typer.Option(metavar="|".join(ENCODERS), help="Classifier to train.")
    ] = "mlp",
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
        typer.Option(
            "--real-runs",
            metavar="FILE",
            help="Runs of real networks to train on, too. Not with --encoder common.",
        ),
    ] = None,
    seed: Seed = 0,
    epochs: Epochs = None,
    as_json: AsJson = False,
) -> None:
    """Train a classifier on a dataset, and write its bundle. The encoder common learns from several
    datasets."""
    check_replaceable(out)
    if encoder not in ENCODERS:
        raise InvalidRequestError(f"must be {' or '.join(ENCODERS)}, not {encoder}", "encoder")
    if not (name := name or out.resolve().name) or not version:
        raise BundleError("the model needs a name and a version: give --name and --model-version")
    datasets = dataset or [DEFAULT_DATASET]
    load_jobs = _jobs_of_all_families if encoder == COMMON else _jobs_of_one_family
    data, calibration = load_jobs(datasets, traces or [], family, real_runs or [])
    from .training import classifier

    plan = classifier.default_plan(encoder, data, seed, epochs)
    rows = _evaluated_rows(metrics, data, asdict(plan)) if metrics else []
    with progress_bar("training") as progress, split_errors(datasets[0]):
        trained = classifier.train(data, plan, lambda share: progress("training", share))
    bundle = classifier.save_classifier(
        out, trained, data, plan, name=name, version=version, metrics=rows, traces=calibration
    )
    print_result(
        {
            "bundle": out,
            "name": name,
            "version": version,
            "jobs": len(data),
            "sha256": bundle.sha256,
        },
        f"{out}: trained on {len(data):,} jobs, {len(bundle.model):,} bytes, sha256 {bundle.sha256[:12]}",
        as_json=as_json,
    )


def _jobs_of_one_family(
    datasets: list[Path], traces: list[Path], family: str | None, real_runs: list[Path]
) -> tuple[LabelledJobs, dict[str, LabelledJobs]]:
    """Returns the jobs to train on, and family → the rows with traced peaks of ``--traces``."""
    if len(datasets) > 1 or len(traces) > 1:
        raise DatasetError(
            f"the classifiers of a family learn from one dataset: give one, or --encoder {COMMON}"
        )
    family = family or "mlp"
    data = _load(datasets[0], family)
    if real_runs:
        from .training.data import with_real_networks

        data = with_real_networks(data, real_runs)
    return data, {family: _load(traces[0], family)} if traces else {}


def _jobs_of_all_families(
    datasets: list[Path], traces: list[Path], family: str | None, real_runs: list[Path]
) -> tuple[LabelledJobs, dict[str, LabelledJobs]]:
    """Returns the jobs to train on, and family → the rows with traced peaks of ``--traces``."""
    if family not in (None, ALL_FAMILIES):
        raise InvalidRequestError(
            f"must be left out with --encoder {COMMON}, which learns from all families", "family"
        )
    if real_runs:
        raise InvalidRequestError(f"must be left out with --encoder {COMMON}", "real_runs")
    return _load_all(datasets), _load_by_family(traces)


def _evaluated_rows(
    path: Path, data: LabelledJobs, plan: dict[str, object]
) -> list[dict[str, object]]:
    """Returns the rows of an ``evaluation.json``, which must be of the same dataset and training
    plan."""
    try:
        document = json.loads(path.read_text("utf-8"))
        rows, evaluated = (
            document["candidates"],
            [document[name] for name in ("data_sha256", "feature_schema", "plan")],
        )
    except (OSError, ValueError, KeyError, TypeError):
        raise DatasetError(
            f"{path} is no evaluation.json as 'gpumemnet evaluate --out' writes it"
        ) from None
    if evaluated != [data.sha256, FEATURE_SCHEMA, plan]:
        raise DatasetError(
            f"{path} was measured on another dataset, or with another training plan: evaluate this one first"
        )
    return list(rows)


def evaluate(
    dataset: Dataset = DEFAULT_DATASET,
    family: Family = "mlp",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for evaluation.md and evaluation.json."),
    ] = None,
    folds: Folds = 3,
    seed: Seed = 0,
    epochs: Epochs = 80,
    as_json: AsJson = False,
) -> None:
    """Evaluate every estimator on held-out architectures. Prints a table."""
    data = _load(dataset, family)
    from .evaluation import evaluate as run_evaluation
    from .evaluation import heading, markdown_table, write_report
    from .training.mlp import mlp_plan

    with progress_bar("evaluating") as report, split_errors(dataset):
        evaluation = run_evaluation(
            data, plan=mlp_plan(data, seed, epochs), fold_count=folds, progress=report
        )
    paths = write_report(evaluation, out) if out else []
    if as_json:
        typer.echo(json.dumps(evaluation.rows(), indent=2))
    else:
        typer.echo(f"{heading(evaluation)}\n{markdown_table(evaluation)}", nl=False)
        for path in paths:
            typer.echo(f"wrote {path}", err=True)


def retrain(
    registry: RegistryFolder = None,
    dataset: Annotated[
        list[Path] | None,
        typer.Option(
            "--dataset",
            metavar="FILE",
            help="Parquet dataset to train on, in addition to the committed ones.",
        ),
    ] = None,
    observations: Annotated[
        list[Path] | None,
        typer.Option(
            "--observations",
            metavar="FILE",
            help="Observations, as gpumemnet observations export writes them.",
        ),
    ] = None,
    committed: Annotated[
        bool,
        typer.Option(
            "--committed/--without-committed",
            help="Whether to train on the datasets of the repository.",
        ),
    ] = True,
    work: Annotated[
        Path, typer.Option("--work", help="Folder for reports and finished steps.")
    ] = Path("runs/retrain"),
    encoder: Annotated[
        list[str] | None,
        typer.Option(
            metavar="mlp|transformer",
            help="Classifier to train, may be given twice; mlp unless given.",
        ),
    ] = None,
    seed: Seed = 0,
    epochs: Epochs = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Train and judge, but do not change the registry.")
    ] = False,
    challenger: Annotated[
        bool, typer.Option("--challenger", help="Make a better release challenger, not champion.")
    ] = False,
    mlflow: Annotated[
        str | None,
        typer.Option(
            "--mlflow",
            metavar="URI",
            help="Log the run and register the release in MLflow, too: sqlite:///mlflow.db, or a server, https://…",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train on new data, and promote what is better than the champion.

    Exit codes: 0 something was promoted (or would have been), 10 nothing is better, 2 a mistake in
    command or data, 1 a failure.
    """
    from .retrain.pipeline import retrain as run_retraining
    from .retrain.release import FAILED, RETRAINED, Request, RetrainingError

    if registry is None and not dry_run:
        raise InvalidRequestError(
            "name the registry's folder with --registry, or try it with --dry-run", "registry"
        )
    chosen = tuple(dict.fromkeys(encoder or ["mlp"]))
    if unknown := [name for name in chosen if name not in RETRAINED]:
        raise InvalidRequestError(
            f"must be of {', '.join(RETRAINED)}, not '{unknown[0]}'", "encoder"
        )
    files = (*(sorted(COMMITTED_DATASETS.glob("*.parquet")) if committed else ()), *(dataset or ()))
    if not files and not observations:
        raise DatasetError(
            f"no dataset: {COMMITTED_DATASETS} holds none, and neither --dataset nor --observations was given"
        )
    if mlflow is not None:
        from .retrain.mlflow_log import check_store

        check_store(mlflow, "mlflow")
    request = Request(
        datasets=files,
        observations=tuple(observations or ()),
        registry=registry,
        work=work,
        encoders=chosen,
        seed=seed,
        epochs=epochs,
        is_dry_run=dry_run,
        as_challenger=challenger,
    )
    try:
        with progress_bar("retraining") as progress:
            outcome = run_retraining(request, progress)
    except (OSError, RetrainingError) as error:
        reason = (
            f"{error.strerror} ({error.filename})"
            if isinstance(error, OSError) and error.filename
            else str(error)
        )
        typer.echo(
            f"error: {reason}: the champion is unchanged; run the same command again to continue",
            err=True,
        )
        raise typer.Exit(FAILED) from None
    if as_json:
        print_json(outcome.document)
    typer.echo(f"{outcome.sentence}\nreport: {outcome.report}", err=as_json)
    if mlflow is not None:
        _log_to_mlflow(request, outcome, mlflow)
    raise typer.Exit(outcome.exit_code)


def _log_to_mlflow(request: Request, outcome: Outcome, uri: str) -> None:
    """Log the result of a retraining; a failure here is reported, but changes neither the champion
    nor the exit code."""
    from .retrain.mlflow_log import log_retraining

    try:
        typer.echo(f"tracking: {log_retraining(request, outcome, uri)}", err=True)
    except GpumemnetError as error:
        typer.echo(
            f"warning: not tracked: {error}: the decision is unchanged, and the next run moves the aliases",
            err=True,
        )


_PUBLISHED_HINT: Final = (
    "for the published A100 measurements, download Datasets/MLP/mlp_data_step2.csv of github.com/itu-rad/GPUMemNet (CC BY 4.0) "
    "and run  python -m research import-published mlp_data_step2.csv --out"
)


def _load(dataset: Path, family: str) -> LabelledJobs:
    """Returns the labelled jobs of one family in the file ``dataset``.

    Raises:
        DatasetError: when there is no such file, or no such job in it.
    """
    if not dataset.is_file():
        raise DatasetError(
            f"{dataset} does not exist: measure one with gpumemnet build campaign; {_PUBLISHED_HINT} {dataset}"
        )
    import torch

    from .training.data import load_labelled_jobs

    torch.set_num_threads(1)  # the networks are too small for a second thread to pay
    return load_labelled_jobs(dataset, family)


def _load_all(datasets: list[Path]) -> LabelledJobs:
    """Returns the jobs of all families of several datasets together.

    Raises:
        DatasetError: when a dataset cannot be read, or all jobs are of one family.
    """
    from .training.data import joined

    data = joined(list(_load_by_family(datasets).values()))
    if len(data.families) == 1:
        raise DatasetError(
            f"{datasets[0]} has {data.family} jobs only: the common classifier learns from several families"
        )
    return data


def _load_by_family(datasets: list[Path]) -> dict[str, LabelledJobs]:
    """Returns family → its labelled jobs; a dataset may have several families.

    Raises:
        DatasetError: when a dataset cannot be read, or two have jobs of one family.
    """
    found: dict[str, LabelledJobs] = {}
    for path in datasets:
        families = _families(path)
        if not found.keys().isdisjoint(families):
            raise DatasetError(
                f"{path} has jobs of a family that another dataset has too: merge them first"
            )
        found |= {family: _load(path, family) for family in families}
    return found


def _families(dataset: Path) -> list[str]:
    if not dataset.is_file():
        raise DatasetError(f"{dataset} does not exist: measure one with gpumemnet build campaign")
    from .training.data import labelled_families

    return labelled_families(dataset)


@contextmanager
def split_errors(dataset: Path) -> Iterator[None]:
    """Turns too few architectures to split into an error about the dataset."""
    try:
        yield
    except ValueError as error:
        raise DatasetError(f"{dataset}: {error}") from None
