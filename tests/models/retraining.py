"""Measured and observed jobs whose memory follows a known rule, for tests of retraining."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from gpumemnet.job.dataset import write_dataset
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.layers import Layer
from gpumemnet.job.measurement import OBSERVED, Measurement
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.features import FEATURE_NAMES
from gpumemnet.site.releases import Registry
from gpumemnet.units import GIB, MIB
from models.training.card import save_classifier
from models.training.classifier import plan_of, train
from models.training.data import features_on, load_labelled_jobs

GPU = "NVIDIA A100-SXM4-40GB"
EPOCHS = 2


def random_mlp(generator: random.Random) -> TrainingJob:
    width = inputs = generator.randint(16, 4096)
    layers = []
    for _ in range(generator.randint(1, 6)):
        following = generator.randint(8, 4096)
        layers += [Layer("linear", following, (width + 1) * following), Layer("relu", following)]
        width = following
    return TrainingJob(
        family="mlp",
        batch_size=generator.randint(4, 2000),
        input_elements=inputs,
        optimizer="adam",
        precision="fp32",
        layers=(*layers, Layer("linear", 10, (width + 1) * 10)),
    )


CONTEXT = 1400 * MIB


def measured(count: int, seed: int, context_bytes: int = CONTEXT) -> list[Measurement]:
    """Jobs of ``count`` networks, as read on one machine."""
    generator = random.Random(seed)
    jobs = [random_mlp(generator) for _ in range(count)]
    closed_form = features_on(np.full(count, GPU), JobTable.from_jobs(jobs))[
        :, FEATURE_NAMES.index("segment_bytes")
    ]
    noise = np.random.default_rng(seed).normal(0.0, 3 * MIB, count)
    labels = 1.08 * closed_form + context_bytes + noise
    return [
        Measurement(
            job=job,
            status="ok",
            label_source="nvidia_smi_device_1s",
            capacity_bytes=40 * GIB,
            provenance="published",
            gpu=GPU,
            recipe="test",
            architecture="{}",
            peak_device_bytes=round(label),
        )
        for job, label in zip(jobs, labels, strict=True)
    ]


def observed(rows: Sequence[Measurement], since: float = 1.7e9) -> list[Measurement]:
    """The same as a site would have reported them, one an hour."""
    return [
        replace(
            one,
            provenance=OBSERVED,
            options=json.dumps(
                {"observation": str(at + since), "observed_at": since + 3600.0 * at}
            ),
        )
        for at, one in enumerate(rows)
    ]


def relabelled(one: Measurement, label_bytes: float) -> Measurement:
    return replace(one, peak_device_bytes=round(label_bytes))


def champion_of(folder: Path, base: Path) -> Registry:
    """A registry whose champion learned from the dataset ``base``, and has no other model."""
    data = load_labelled_jobs([base])
    trained = train(data, plan_of("mlp", 0, EPOCHS))
    bundle = save_classifier(folder / "first", trained, data, name="mlp", version="first")
    registry = Registry(folder / "registry")
    registry.create_release("first", [bundle.source], parent=None)
    registry.set_champion("first", by="test", reason="")
    return registry


def dataset(path: Path, rows: Sequence[Measurement]) -> Path:
    write_dataset(path, rows)
    return path
