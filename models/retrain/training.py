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

from ..training.classifier import Plan, default_plan, save_classifier, train
from ..training.data import LabelledJobs, labelled_jobs
from ..training.mlp import TrainingPlan
from ..training.sequence import SequencePlan
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
    plan = default_plan(encoder, data.data, seed, epochs)
    name = split.name + ("-layers" if encoder == "transformer" else "")
    traces = calibration if encoder == "mlp" else None
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
        classifier = train(data.weighted, plan)
        bundle = save_classifier(
            Path(scratch) / "bundle",
            classifier,
            data.data,
            plan,
            name=name,
            version=version,
            traces=traces,
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
    data = labelled_jobs([row for row in rows if row.job.has_layers], champion.card.name, "")
    plan = _plan_of(champion)
    classifier = train(data, plan)
    traces = calibration if champion.card.encoder == "mlp" else None
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".training-") as scratch:
        name = champion.card.name
        bundle = save_classifier(
            Path(scratch) / "bundle",
            classifier,
            data,
            plan,
            name=name,
            version="stand-in",
            traces=traces,
        )
    document = dict(bundle.card.document)
    if champion.card.site_calibration is not None:
        levels = len(bundle.card.coverages)  # fewer rows support fewer coverages
        if bundle.card.coverages != champion.card.coverages[:levels]:
            raise ValueError(f"the site's calibration of {name} does not fit a stand-in")
        site = champion.card.document["site_calibration"]
        document["site_calibration"] = {**site, "multiples": site["multiples"][:levels]}
    return save_bundle(folder, bundle.model, document)


def _plan_of(champion: Bundle) -> Plan:
    settings: dict[str, Any] = champion.card.document.get("training") or {}
    plan: Plan = SequencePlan() if champion.card.encoder == "transformer" else TrainingPlan()
    known = {field.name: settings[field.name] for field in fields(plan) if field.name in settings}
    return replace(plan, **known)
