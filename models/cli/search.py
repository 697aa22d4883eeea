"""``gpumemnet search``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gpumemnet.cli.options import AsJson
from gpumemnet.cli.output import check_writable, print_result, progress_bar, write_text
from gpumemnet.errors import DatasetError, InvalidRequestError

from .options import DEFAULT_DATASET, Dataset, Family, Folds, Seed


def search(
    out: Annotated[Path, typer.Option("--out", help="JSON file of the plan that is found.")],
    trials: Annotated[
        int,
        typer.Option(
            "--trials",
            min=1,
            max=10_000,
            help="Number of plans to try, including those of earlier runs.",
        ),
    ],
    storage: Annotated[
        str,
        typer.Option(
            "--storage",
            metavar="URL",
            help="SQLite file of the trials; the same command resumes the search in it.",
        ),
    ] = "sqlite:///search.db",
    family: Family = "mlp",
    encoder: Annotated[
        str, typer.Option(metavar="mlp|transformer", help="Classifier to train.")
    ] = "mlp",
    dataset: Dataset = DEFAULT_DATASET,
    folds: Folds = 3,
    seed: Seed = 0,
    epochs: Annotated[
        int | None,
        typer.Option(
            "--epochs", min=1, max=10_000, help="Passes of every plan; searched for unless given."
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="local|ray", help="Where folds are trained.")
    ] = "local",
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Ray tasks at a time; as many as it has cores unless given."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Search for a training plan with Optuna. The file that it writes is for train --plan and
    retrain --plan."""
    check_writable(out)
    if encoder not in (encoders := ("mlp", "transformer")):
        raise InvalidRequestError(f"must be {' or '.join(encoders)}, not {encoder}", "encoder")
    if engine not in (engines := ("local", "ray")):
        raise InvalidRequestError(f"must be {' or '.join(engines)}, not {engine}", "engine")
    if not dataset.is_file():
        raise DatasetError(f"{dataset} does not exist: measure one with gpumemnet build measure")
    from ..search.engines import open_engine
    from ..search.objective import load_task
    from ..search.run import search, search_report
    from ..training.plan_file import document_of

    task = load_task(dataset, family, encoder, folds, seed)
    with progress_bar("searching") as progress:
        result = search(
            task, trials, storage, lambda: open_engine(engine, task, workers), epochs, progress
        )
    document = document_of(family, encoder, result.plan, search_report(task, result, epochs))
    write_text(out, json.dumps(document, indent=2) + "\n")
    counts = ", ".join(f"{count} {state}" for state, count in result.trials.items() if count)
    print_result(
        {"plan": out, "trials": result.trials},
        f"{out}: the best of {sum(result.trials.values())} trials ({counts}); not yet judged: run gpumemnet retrain --plan {out}",
        as_json=as_json,
    )
