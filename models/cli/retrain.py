"""``gpumemnet retrain``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpumemnet.cli.options import AsJson
from gpumemnet.cli.output import progress_bar
from gpumemnet.errors import DatasetError, GpumemnetError, InvalidRequestError

from .options import COMMITTED_DATASETS, Seed
from .plans import found_plans

if TYPE_CHECKING:
    from ..retrain.request import Outcome, Request


def retrain(
    registry: Annotated[
        Path | None,
        typer.Option(
            "--registry",
            envvar="GPUMEMNET_REGISTRY",
            help="The registry's folder; a dry run needs none.",
        ),
    ] = None,
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
    epochs: Annotated[
        int | None,
        typer.Option(
            "--epochs",
            min=1,
            max=10_000,
            help="Passes over the training jobs; the plans decide unless given.",
        ),
    ] = None,
    plan: Annotated[
        list[Path] | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            help="Training plan, a JSON file; the default plan unless given.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Train and judge, but do not change the registry.")
    ] = False,
    challenger: Annotated[
        bool, typer.Option("--challenger", help="Make a better release challenger, not champion.")
    ] = False,
    tracking: Annotated[
        str | None,
        typer.Option(
            "--tracking",
            metavar="mlflow",
            help="Log the run and register the release in MLflow, too.",
        ),
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
    tracking_model: Annotated[
        str, typer.Option("--tracking-model", help="Name of the model registered there.")
    ] = "gpumemnet",
    as_json: AsJson = False,
) -> None:
    """Train on new data, and promote what is better than the champion.

    Exit codes: 0 something was promoted (or would have been), 10 nothing is better, 2 a mistake in
        command or data, 1 a failure.
    """
    from ..retrain.pipeline import retrain as run_retraining
    from ..retrain.request import FAILED, RETRAINED, Request, RetrainingError

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
    store = _tracking_store(tracking, tracking_uri, tracking_model, work)
    request = Request(
        datasets=files,
        observations=tuple(observations or ()),
        registry=registry,
        work=work,
        encoders=chosen,
        seed=seed,
        epochs=epochs,
        plans=found_plans(plan or []),
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
        typer.echo(json.dumps(outcome.document, indent=2))
    typer.echo(f"{outcome.sentence}\nreport: {outcome.report}", err=as_json)
    if store is not None:
        _track(request, outcome, store, tracking_model)
    raise typer.Exit(outcome.exit_code)


def _tracking_store(tracking: str | None, uri: str | None, model: str, work: Path) -> str | None:
    """The address of the MLflow store, checked before any work starts; ``None`` if there is
    none."""
    if tracking is None:
        return None
    if tracking != "mlflow":
        raise InvalidRequestError(f"must be mlflow, not '{tracking}'", "tracking")
    from gpumemnet.site.mlflow import check_name, check_store

    from ..retrain.tracking import default_store

    uri = uri or default_store(work)
    check_store(uri, "tracking_uri")
    check_name(model, "tracking_model")
    return uri


def _track(request: Request, outcome: Outcome, uri: str, model: str) -> None:
    """Log the result of a retraining; a failure here is reported, but changes neither the champion
    nor the exit code."""
    from ..retrain.tracking import track

    try:
        typer.echo(f"tracking: {track(request, outcome, uri, model)}", err=True)
    except (OSError, GpumemnetError) as error:
        typer.echo(
            f"warning: not tracked: {error}: the decision is unchanged, and the next run logs it",
            err=True,
        )
