"""The commands ``gpumemnet train``, ``evaluate`` and ``retrain``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpumemnet.cli.options import AsJson, RegistryFolder, Seed
from gpumemnet.cli.output import print_json, print_result, progress_bar
from gpumemnet.errors import DatasetError, InvalidRequestError
from gpumemnet.job.layers import check_choice
from gpumemnet.predict.bundle import check_replaceable
from gpumemnet.predict.bundle_card import ENCODERS

if TYPE_CHECKING:
    from .training.data import LabelledJobs

Datasets = Annotated[
    list[Path] | None,
    typer.Option(
        "--dataset",
        metavar="FILE",
        help="Parquet datasets, as gpumemnet build writes them; those of the repository unless given.",
    ),
]
Encoders = Annotated[
    list[str] | None,
    typer.Option(
        "--encoder", metavar="|".join(ENCODERS), help="One encoder only; both unless given."
    ),
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


def train(
    out: Annotated[
        Path,
        typer.Option(
            "--out", help="Folder for a bundle of each encoder; those there are replaced."
        ),
    ],
    dataset: Datasets = None,
    encoder: Encoders = None,
    seed: Seed = 0,
    epochs: Epochs = None,
    as_json: AsJson = False,
) -> None:
    """Train the models on datasets of all families, GPUs and label sources, and write their
    bundles."""
    encoders = _encoders(encoder)
    for one in encoders:
        check_replaceable(out / one)
    data = _load(dataset)
    from .training.card import save_classifier
    from .training.classifier import plan_of
    from .training.classifier import train as train_classifier

    made = []
    with progress_bar("training") as progress:
        for one in encoders:
            step = f"training {one}"
            trained = train_classifier(
                data,
                plan_of(one, seed, epochs),
                lambda share, step=step: progress(step, share),  # type: ignore[misc]
            )
            made.append(save_classifier(out / one, trained, data, name=one, version="1"))
    print_result(
        {
            "jobs": len(data),
            "bundles": {
                one.card.name: {"folder": one.source, "sha256": one.sha256} for one in made
            },
        },
        "\n".join(
            f"{one.source}: trained on {len(data):,} jobs, {len(one.model):,} bytes, sha256 {one.sha256[:12]}"
            for one in made
        ),
        as_json=as_json,
    )


def evaluate(
    dataset: Datasets = None,
    encoder: Encoders = None,
    by_source: Annotated[
        bool,
        typer.Option("--by-source", help="Also hold out each dataset in turn."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate both encoders and the line alone on held-out families. Prints a table."""
    encoders, data = _encoders(encoder), _load(dataset)
    from .evaluation import evaluate as run_evaluation
    from .evaluation import markdown_table

    with progress_bar("evaluating") as report:
        figures = run_evaluation(data, encoders, by_source=by_source, progress=report)
    if as_json:
        print_json([asdict(one) for one in figures])
    else:
        typer.echo(markdown_table(figures), nl=False)


def _encoders(asked: list[str] | None) -> list[str]:
    for one in asked or ():
        check_choice(one, ENCODERS, "encoder")
    return [one for one in ENCODERS if not asked or one in asked]


def _load(datasets: list[Path] | None) -> LabelledJobs:
    """Returns the labelled jobs of the given datasets, or of the repository's.

    Raises:
        DatasetError: when there is no such file, or nothing to train on.
    """
    from .training.data import SHIPPED_DATASETS, load_labelled_jobs, shipped_datasets

    paths = datasets or shipped_datasets()
    if not paths:
        raise DatasetError(f"{SHIPPED_DATASETS} holds no dataset: name some with --dataset")
    return load_labelled_jobs(paths)


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
    encoder: Encoders = None,
    seed: Seed = 0,
    epochs: Epochs = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Train and judge, but do not change the registry.")
    ] = False,
    without_promotion: Annotated[
        bool,
        typer.Option(
            "--without-promotion", help="Leave it to a person to promote a better release."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train on new data, and promote what is better than the champion.

    Exit codes: 0 something was promoted (or would have been), 10 nothing is better, 2 a mistake in
    command or data, 1 a failure.
    """
    from .retrain.pipeline import retrain as run_retraining
    from .retrain.release import FAILED, Request, RetrainingError

    if registry is None and not dry_run:
        raise InvalidRequestError(
            "name the registry's folder with --registry, or try it with --dry-run", "registry"
        )
    encoders = tuple(_encoders(encoder))
    from .training.data import SHIPPED_DATASETS, shipped_datasets

    files = (*(shipped_datasets() if committed else ()), *(dataset or ()))
    if not files and not observations:
        raise DatasetError(
            f"no dataset: {SHIPPED_DATASETS} holds none, and neither --dataset nor --observations was given"
        )
    request = Request(
        datasets=files,
        observations=tuple(observations or ()),
        registry=registry,
        work=work,
        encoders=encoders,
        seed=seed,
        epochs=epochs,
        is_dry_run=dry_run,
        promotes=not without_promotion,
    )
    try:
        with progress_bar("retraining") as progress:
            outcome = run_retraining(request, progress)
    except (OSError, RetrainingError) as error:
        typer.echo(
            f"error: {error}: the champion is unchanged; run the same command again to continue",
            err=True,
        )
        raise typer.Exit(FAILED) from None
    if as_json:
        print_json(outcome.document)
    typer.echo(f"{outcome.sentence}\nreport: {outcome.report}", err=as_json)
    raise typer.Exit(outcome.exit_code)
