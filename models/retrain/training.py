"""Trains a candidate for a split, and a stand-in for a champion that was trained on held-out
rows."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from gpumemnet.job.measurement import OBSERVED, Measurement
from gpumemnet.predict.bundle import Bundle, save_bundle

from ..training.card import save_classifier
from ..training.classifier import TrainingPlan, plan_of, train
from ..training.data import LabelledJobs, labelled_jobs
from .row_splits import HELD_OUT_RULE, RowSplit, TrainingData


def train_candidate(
    folder: Path,
    split: RowSplit,
    data: TrainingData,
    calibration: LabelledJobs | None,
    *,
    encoder: str,
    seed: int,
    epochs: int | None,
    version: str,
) -> Bundle:
    """Train on ``data`` and write the bundle to ``folder``; the same arguments give the same
    bundle.

    Args:
        folder: the bundle's folder.
        split: the split that the candidate is trained for.
        data: the split's training rows.
        calibration: readings with traced peaks, for a split whose labels are traced.
        encoder: ``mlp`` or ``transformer``.
        seed, epochs: the plan's seed and number of epochs; the plan keeps its own epochs unless
            given.
        version: the model's version.

    Raises:
        ValueError: when there are too few architectures to split.
    """
    name = split.name + ("-layers" if encoder == "transformer" else "")
    retraining = {
        "held_out": HELD_OUT_RULE,
        "origins": list(split.origins),
        "learned_until": split.learned_until,
        "own_rows": len(split.training),
        "borrowed_rows": len(split.borrowed),
        "copies_of_own_rows": data.copies,
        "moved_bytes": data.shifts,
    }
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".training-") as scratch:
        classifier = train(data.weighted, plan_of(encoder, seed, epochs))
        bundle = save_classifier(
            Path(scratch) / "bundle", classifier, data.data, name=name, version=version
        )
    document = {**bundle.card.document, "retraining": retraining}
    if split.provenance == OBSERVED:
        description = f"jobs observed on {split.gpu}" + (
            ", with borrowed rows moved to its context" if split.borrowed else ""
        )
        document["training_data"] = {**document["training_data"], "description": description}
    return save_bundle(folder, bundle.model, document)


def train_stand_in(
    folder: Path, champion: Bundle, rows: Sequence[Measurement], calibration: LabelledJobs | None
) -> Bundle:
    """Train the champion's plan again on ``rows``: its own training rows, without those that every
    retraining holds out.

    Raises:
        ValueError: when there are too few architectures to split, or the champion's calibration to
            a site does not fit.
    """
    name = champion.card.name
    data = labelled_jobs(list(rows), name)
    if data is None:
        raise ValueError(f"{name} has no rows to be trained on again")
    classifier = train(data, _plan_of(champion))
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".training-") as scratch:
        bundle = save_classifier(
            Path(scratch) / "bundle", classifier, data, name=name, version="stand-in"
        )
    document = dict(bundle.card.document)
    if champion.card.site_calibration is not None:
        levels = len(bundle.card.coverages)  # fewer rows support fewer coverages
        if bundle.card.coverages != champion.card.coverages[:levels]:
            raise ValueError(f"the site's calibration of {name} does not fit a stand-in")
        site = champion.card.document["site_calibration"]
        document["site_calibration"] = {**site, "multiples": site["multiples"][:levels]}
    return save_bundle(folder, bundle.model, document)


def _plan_of(champion: Bundle) -> TrainingPlan:
    settings: dict[str, Any] = champion.card.document.get("training") or {}
    plan = plan_of(champion.card.encoder)
    known = {field.name: settings[field.name] for field in fields(plan) if field.name in settings}
    return replace(plan, **known)
