"""Exports trained classifiers as ONNX graphs."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor

from gpumemnet.predict.bundle import GRAPH_OUTPUTS
from gpumemnet.predict.features import SEQUENCE_COLUMNS

from .classifier import TrainedClassifier, batch_of, float_tensor
from .data import LabelledJobs

TOLERANCE: Final = 1e-4
"""Largest absolute and relative difference between the outputs of a network and of its graph."""
LONGEST_EXAMPLE: Final = 7
"""Layers of the longest example sequence."""


def export_classifier(classifier: TrainedClassifier, data: LabelledJobs) -> bytes:
    """Return the classifier's serialised graph; batch dimension and, for sequences, number of
    layers are dynamic.

    Args:
        classifier: the trained model.
        data: its training data, for example inputs.

    Raises:
        RuntimeError: when the graph gives other outputs than the network.
    """
    few = data.take(np.unique(np.linspace(0, len(data) - 1, 16).astype(int)))
    rows = np.concatenate((few.features, few.without_layers().features))
    example: dict[str, Tensor] = {"features": float_tensor(rows)}
    shapes: tuple[Any, ...] = ({0: torch.export.Dim.DYNAMIC},)
    if classifier.plan.encoder == "transformer":
        # attention over equal layers would not test the exported graph
        generator = np.random.default_rng(0)
        lengths = (LONGEST_EXAMPLE - row % LONGEST_EXAMPLE for row in range(len(rows)))
        size = len(SEQUENCE_COLUMNS)
        random = [generator.standard_normal((length, size), np.float32) for length in lengths]
        example["sequences"], example["mask"] = batch_of(random)
        free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        shapes = *shapes, (free, free)
    model = _run_exporter(classifier.network, example, shapes)
    graph = bytes(model.SerializeToString())
    with torch.no_grad():
        expected = classifier.network(*example.values())
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    given = session.run(
        list(GRAPH_OUTPUTS), {name: value.numpy() for name, value in example.items()}
    )
    for name, ours, theirs in zip(GRAPH_OUTPUTS, expected, given, strict=True):
        if not np.allclose(ours.numpy(), theirs, rtol=TOLERANCE, atol=TOLERANCE):
            raise RuntimeError(f"the exported graph gives other {name} than the network")
    return graph


def _run_exporter(
    network: torch.nn.Module, example: dict[str, Tensor], shapes: tuple[Any, ...]
) -> onnx.ModelProto:
    exporter_log = logging.getLogger("torch.onnx")
    level = exporter_log.level
    exporter_log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter uses deprecated functions of torch
            program = torch.onnx.export(
                network,
                tuple(example.values()),
                input_names=list(example),
                output_names=list(GRAPH_OUTPUTS),
                dynamic_shapes=shapes,
                dynamo=True,
                verbose=False,
            )
    finally:
        exporter_log.setLevel(level)
    assert program is not None
    model = program.model_proto
    for entry in (
        model,
        model.graph,
        *model.graph.node,
        *model.graph.value_info,
        *model.graph.input,
        *model.graph.output,
    ):
        del entry.metadata_props[:]  # the exporter adds stack traces, which hold local paths
    return model
