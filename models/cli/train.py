"""``gpumemnet train``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpumemnet.cli.options import AsJson
from gpumemnet.cli.output import print_result, progress_bar
from gpumemnet.errors import BundleError, DatasetError, InvalidRequestError
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.predict.bundle import check_replaceable
from gpumemnet.predict.bundle_card import ALL_FAMILIES, COMMON, ENCODERS
from gpumemnet.predict.features import FEATURE_SCHEMA

from .datasets import load, load_all, load_by_family, split_errors
from .options import DEFAULT_DATASET, Seed
from .plans import found_plan

if TYPE_CHECKING:
    from ..training.data import LabelledJobs


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
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            help="Training plan, a JSON file; the default plan unless given.",
        ),
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
        typer.Option(
            "--real-runs",
            metavar="FILE",
            help="Runs of real networks to train on, too. Not with --encoder common.",
        ),
    ] = None,
    seed: Seed = 0,
    epochs: Annotated[
        int | None,
        typer.Option("--epochs", min=1, max=10_000, help="Passes over the training jobs."),
    ] = None,
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
    found = None if plan_file is None else found_plan(plan_file, data.family, encoder)
    from ..training.export import save_classifier
    from ..training.mlp import train_classifier
    from ..training.plans import Plan, mlp_plan, transformer_plan
    from ..training.sequence import SequencePlan, train_sequence_classifier

    plan: Plan
    if found is not None:
        plan = found.plan(seed, epochs)
    else:
        plan = (
            transformer_plan(seed, epochs)
            if encoder == "transformer"
            else mlp_plan(data, seed, epochs)
        )
    rows = _evaluated_rows(metrics, data, asdict(plan)) if metrics else []
    with progress_bar("training") as progress, split_errors(datasets[0]):
        if isinstance(plan, SequencePlan):
            classifier = train_sequence_classifier(
                data, plan, lambda share: progress("training", share)
            )
        else:
            classifier = train_classifier(data, plan, lambda share: progress("training", share))
    bundle = save_classifier(
        out, classifier, data, plan, name=name, version=version, metrics=rows, traces=calibration
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
    data = load(datasets[0], family)
    if real_runs:
        from ..training.data import with_real_networks

        data = with_real_networks(data, real_runs)
    return data, {family: load(traces[0], family)} if traces else {}


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
    return load_all(datasets), load_by_family(traces)


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
