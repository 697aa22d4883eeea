"""Networks that differ in their numbers alone are exported once; what is filled in is what the
exporter would have written."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from gpumemnet.job.job_table import JobTable
from gpumemnet.predict.features import layer_sequence
from models.training import graph_export
from models.training.classifier import export_onnx
from models.training.data import LabelledJobs
from models.training.graph_export import export_graph
from models.training.mlp import TrainedClassifier, TrainingPlan, train_classifier
from models.training.sequence import SequencePlan, train_sequence_classifier


class Small(nn.Module):
    """A network with what the classifiers have: a linear layer, a matrix of its own, a buffer, and
    a number that is no state."""

    offset: Tensor

    def __init__(self, seed: int, width: int = 4, factor: float = 2.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(3, width)
        self.matrix = nn.Parameter(torch.randn(width, 2))
        self.register_buffer("offset", torch.randn(2))
        self.factor = factor

    def forward(self, rows_BF: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.relu(self.linear(rows_BF)) @ self.matrix + self.offset
        return out * self.factor, out.sum(1)


EXAMPLE = (torch.arange(12, dtype=torch.float32).reshape(4, 3) / 7,)


@pytest.fixture(autouse=True)
def exports(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """What has gone through the exporter."""
    done: list[nn.Module] = []
    export = torch.onnx.export

    def counted(network: nn.Module, *arguments: Any, **named: Any) -> object:
        done.append(network)
        return export(network, *arguments, **named)

    monkeypatch.setattr(torch.onnx, "export", counted)
    monkeypatch.setattr(graph_export, "_templates", {})
    return done


def _export(network: nn.Module) -> bytes:
    shapes = {"rows_BF": {0: torch.export.Dim.DYNAMIC}}
    return export_graph(
        network, EXAMPLE, inputs=["rows"], outputs=["scaled", "sums"], dynamic_shapes=shapes
    )


def _is_right(graph: bytes, network: nn.Module) -> bool:
    answers = onnxruntime.InferenceSession(graph).run(None, {"rows": EXAMPLE[0].numpy()})
    with torch.no_grad():
        return all(
            np.allclose(ours, theirs.numpy(), atol=1e-6)
            for ours, theirs in zip(answers, network(*EXAMPLE), strict=True)
        )


def test_only_the_first_of_a_shape_is_exported(
    exports: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Small(0), Small(1)
    graphs = [_export(first), _export(second)]
    assert exports == [first]
    assert all(
        _is_right(graph, network) for graph, network in zip(graphs, (first, second), strict=True)
    )
    monkeypatch.setattr(graph_export, "_templates", {})
    assert _export(second) == graphs[1]
    assert exports == [first, second]


def test_another_shape_is_exported(exports: list[nn.Module]) -> None:
    networks = [Small(0), Small(1, width=5)]
    assert all(_is_right(_export(network), network) for network in networks)
    assert exports == networks


def test_constants_outside_the_state_are_noticed(exports: list[nn.Module]) -> None:
    networks = [Small(0), Small(1, factor=3.0)]
    assert all(_is_right(_export(network), network) for network in networks)
    assert exports == networks


def _mlp_based(data: LabelledJobs, seed: int) -> TrainedClassifier:
    return train_classifier(data, TrainingPlan(epochs=1, hidden=8, members=2, seed=seed))


def _transformer_based(data: LabelledJobs, seed: int) -> TrainedClassifier:
    return train_sequence_classifier(
        data, SequencePlan(epochs=1, width=8, depth=1, hidden=8, seed=seed)
    )


@pytest.mark.parametrize("train", [_mlp_based, _transformer_based])
def test_a_second_classifier_of_a_shape_is_not_exported_again(
    exports: list[nn.Module],
    synthetic: LabelledJobs,
    train: Callable[[LabelledJobs, int], TrainedClassifier],
) -> None:
    trained = [train(synthetic, seed) for seed in (0, 1)]
    graphs = [export_onnx(one, synthetic) for one in trained]
    assert exports == [trained[0].network]
    others = synthetic.take(np.arange(20, 60))
    sequences, mask = layer_sequence(JobTable.from_jobs(others.jobs))
    inputs: dict[str, np.ndarray] = {
        "features": others.features,
        "sequences": sequences,
        "mask": mask,
    }
    for one, graph in zip(trained, graphs, strict=True):
        session = onnxruntime.InferenceSession(graph)
        given = {name.name: inputs[name.name].astype(np.float32) for name in session.get_inputs()}
        with torch.no_grad():
            of_network = one.network(*map(torch.from_numpy, given.values()))
        for ours, theirs in zip(session.run(None, given), of_network, strict=True):
            np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=2e-5)


@pytest.mark.nightly
def test_heads_differ(exports: list[nn.Module], synthetic: LabelledJobs) -> None:
    """They show in no shape of the numbers."""
    plans = [SequencePlan(epochs=1, width=8, depth=1, hidden=8, heads=heads) for heads in (2, 4)]
    trained = [train_sequence_classifier(synthetic, plan) for plan in plans]
    for one in trained:
        export_onnx(one, synthetic)
    assert exports == [one.network for one in trained]
