"""From labelled jobs to a bundle: the plan of an encoder, its training, ONNX graph, card, checksums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from gpumemnet.predict.bundle import GRAPH_OUTPUTS, Bundle, save_bundle
from gpumemnet.predict.features import SEQUENCE_COLUMNS

from ..networks.inference import SequenceClassifier
from ..networks.mlp import float_tensor
from .card import classifier_card
from .data import LabelledJobs
from .graph_export import export_graph
from .mlp import TrainedClassifier, TrainingPlan, mlp_plan, train_classifier
from .sequence import SequencePlan, batch_of, train_sequence_classifier, transformer_plan

Plan = TrainingPlan | SequencePlan

LONGEST_EXAMPLE: Final = 7
"""Layers of the longest example sequence for the export of a graph."""


def default_plan(encoder: str, data: LabelledJobs, seed: int, epochs: int | None = None) -> Plan:
    """Return the plan of an encoder for ``data``; ``epochs`` replaces the plan's value if given."""
    if encoder == "transformer":
        return transformer_plan(seed, epochs)
    return mlp_plan(data, seed, epochs)


def train(
    data: LabelledJobs, plan: Plan, progress: Callable[[float], None] = lambda share: None
) -> TrainedClassifier:
    """Train the classifier that ``plan`` describes.

    Args:
        data: jobs with layers.
        plan: sizes and schedule; its class decides the encoder.
        progress: called with the share of epochs that are finished.

    Raises:
        ValueError: when there are too few architectures to hold some out.
    """
    torch.set_num_threads(1)  # the networks are too small to benefit from a second thread
    if isinstance(plan, SequencePlan):
        return train_sequence_classifier(data, plan, progress)
    return train_classifier(data, plan, progress)


def save_classifier(
    folder: str | Path,
    classifier: TrainedClassifier,
    data: LabelledJobs,
    plan: Plan,
    *,
    name: str,
    version: str,
    metrics: Sequence[Mapping[str, Any]] = (),
    traces: LabelledJobs | Mapping[str, LabelledJobs] | None = None,
) -> Bundle:
    """Write the bundle of ``classifier``, trained on ``data``, to ``folder``, atomically.

    Args:
        folder: the bundle's folder.
        classifier: the trained model.
        data: the training data, which determines support and provenance; those of one family give a
            bundle for this family.
        plan: the training plan.
        name: the model's name.
        version: the model's version.
        metrics: rows of the evaluation table, measured on held-out folds.
        traces: measured jobs with traced peaks, by family for a common model, that calibrate the
            answers for traced peaks; ``data`` by default.

    Raises:
        BundleError: when ``folder`` exists and is no bundle.
    """
    if isinstance(traces, LabelledJobs):
        traces = {traces.family: traces}
    card = classifier_card(
        classifier, data, plan, name=name, version=version, metrics=metrics, traces=traces or {}
    )
    return save_bundle(folder, export_onnx(classifier, data), card)


def export_onnx(classifier: TrainedClassifier, data: LabelledJobs) -> bytes:
    """Return the classifier's serialised graph; batch dimension and, for sequences, number of
    layers are dynamic."""
    few = data.take(np.unique(np.linspace(0, len(data) - 1, 16).astype(int)))
    rows = np.concatenate((few.features, few.without_layers().features))
    example: tuple[torch.Tensor, ...] = (float_tensor(rows),)
    network = classifier.network
    key: tuple[Any, ...] = network.families
    shapes: dict[str, Any] = {"features_BF": {0: torch.export.Dim.DYNAMIC}}
    names = ["features"]
    if isinstance(network, SequenceClassifier):
        example += batch_of(_any_sequences(len(rows)))
        key = (*key, network.inputs.encoder.heads)
        free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        shapes |= {"sequences_BLF": free, "mask_BL": free}
        names += ["sequences", "mask"]
    return export_graph(
        network,
        example,
        inputs=names,
        outputs=GRAPH_OUTPUTS,
        dynamic_shapes=shapes,
        key=key,
    )


def _any_sequences(count: int) -> list[NDArray[np.float32]]:
    """Return random sequences of one to seven layers; attention over equal layers would not test
    the exported graph."""
    generator = np.random.default_rng(0)
    lengths = (LONGEST_EXAMPLE - row % LONGEST_EXAMPLE for row in range(count))
    return [
        generator.standard_normal((length, len(SEQUENCE_COLUMNS)), dtype=np.float32)
        for length in lengths
    ]
