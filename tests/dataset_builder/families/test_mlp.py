"""The MLP family: what it says about a network is what torch builds and runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dataset_builder.families import mlp, multiply_adds, rebuild
from dataset_builder.measure.training import build_network
from dataset_builder.recipe.planned_job import Options, PlannedJob, parse_planned, training_job
from gpumemnet.errors import DatasetError
from gpumemnet.job.layers import GROUP_OF_KIND, Layer
from gpumemnet.job.training_job import OPTIMIZERS

KINDS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.BatchNorm1d: "batch_norm1d",
    nn.LayerNorm: "layer_norm",
    nn.Dropout: "dropout",
    nn.ReLU: "relu",
    nn.LeakyReLU: "leaky_relu",
    nn.PReLU: "prelu",
    nn.ELU: "elu",
    nn.SELU: "selu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Mish: "mish",
    nn.Softplus: "softplus",
    nn.Tanh: "tanh",
    nn.Softmax: "softmax",
    nn.Sigmoid: "sigmoid",
}


@st.composite
def architectures(draw: Any) -> mlp.MlpArchitecture:
    return mlp.compose(
        {
            "shape": draw(st.sampled_from(mlp.SHAPES)),
            "depth": draw(st.integers(1, 9)),
            "width": draw(st.integers(4, 16_384)),
            "input_width": draw(st.integers(1, 16_384)),
            "output_width": draw(st.integers(2, 16_384)),
            "activation": draw(st.sampled_from(mlp.ACTIVATIONS)),
            "norm": draw(st.sampled_from(mlp.NORMS)),
            "dropout": draw(st.sampled_from([0.0, 0.1, 0.5])),
        }
    )


def executed_layers(network: nn.Module, inputs: torch.Tensor) -> list[Layer]:
    """Every leaf as it runs on meta tensors, and every residual sum, which is the output of a
    module called Residual."""
    layers: list[Layer] = []

    def note(module: nn.Module, _: Any, output: torch.Tensor) -> None:
        if isinstance(module, nn.Identity):
            return
        kind = "add" if type(module).__name__ == "Residual" else KINDS[type(module)]
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        layers.append(Layer(kind, output[0].numel(), own))

    for module in network.modules():
        if not list(module.children()) or type(module).__name__ == "Residual":
            module.register_forward_hook(note)
    network(inputs)
    return layers


@settings(max_examples=40)
@given(architectures(), st.floats(0.0, 0.99))
def test_the_job_is_what_the_network_runs(
    architecture: mlp.MlpArchitecture, frozen_share: float
) -> None:
    planned = PlannedJob("mlp", architecture, Options(batch_size=2, frozen_share=frozen_share))
    job = training_job(planned)
    network = build_network(planned, torch.device("meta"))
    assert executed_layers(
        network, torch.empty(2, architecture.input_width, device="meta")
    ) == list(job.layers)
    assert job.total_parameters == sum(each.numel() for each in network.parameters())
    assert job.trainable_parameters == sum(
        each.numel() for each in network.parameters() if each.requires_grad
    )
    assert {layer.kind for layer in job.layers} <= set(GROUP_OF_KIND)
    assert multiply_adds("mlp", architecture) == sum(
        module.in_features * module.out_features
        for module in network.modules()
        if isinstance(module, nn.Linear)
    )


@settings(max_examples=25)
@given(architectures())
def test_an_architecture_survives_json_and_is_rebuilt_from_a_row(
    architecture: mlp.MlpArchitecture,
) -> None:
    planned = PlannedJob(
        "mlp", architecture, Options(batch_size=8, optimizer="sgd", precision="bf16")
    )
    assert parse_planned(json.loads(json.dumps(planned.to_dict()))) == planned
    assert parse_planned(planned.to_dict()).key == planned.key
    with torch.device("meta"):
        network = rebuild("mlp", planned.architecture_json)
    assert [tuple(each.shape) for each in network.parameters()] == [
        tuple(each.shape) for each in build_network(planned, torch.device("meta")).parameters()
    ]


def test_keys_differ_when_an_option_does() -> None:
    architecture = mlp.MlpArchitecture(
        shape="uniform", input_width=3, output_width=2, hidden_widths=(4,), activation="relu"
    )
    keys = {
        PlannedJob("mlp", architecture, Options(batch_size=8, optimizer=name)).key
        for name in OPTIMIZERS
    }
    assert len(keys) == len(OPTIMIZERS)


@pytest.mark.parametrize(
    ("shape", "widths"),
    [
        ("pyramid", (1024, 512, 256, 128, 64)),
        ("uniform", (1024,) * 5),
        ("bottleneck", (1024, 362, 128, 362, 1024)),
        ("gradual", (1024, 821, 618, 415, 212)),
        ("residual", (1024,) * 5),
    ],
)
def test_shapes(shape: str, widths: tuple[int, ...]) -> None:
    assert mlp.hidden_widths(shape, 5, 1024, 10) == widths


@pytest.mark.parametrize("batch_norm", [True, False])
def test_batch_norm_cannot_train_on_single_samples(batch_norm: bool) -> None:
    norm = "batch_norm" if batch_norm else "layer_norm"
    architecture = mlp.MlpArchitecture(
        shape="uniform",
        input_width=3,
        output_width=2,
        hidden_widths=(4,),
        activation="relu",
        norm=norm,
    )
    assert (mlp.obstacle(architecture, 1) is not None) == batch_norm
    assert mlp.obstacle(architecture, 2) is None


@pytest.mark.parametrize(
    ("family_name", "architecture", "sentence"),
    [
        ("mlp", "{", "not JSON"),
        ("mlp", "{}", "not that of an MLP"),
        ("rnn", "{}", "family must be one of mlp"),
        (
            "mlp",
            '{"shape": "round", "input_width": 1, "output_width": 2, "hidden_widths": [3], "activation": "relu"}',
            "shape",
        ),
        (
            "mlp",
            '{"shape": "uniform", "input_width": 1, "output_width": 2, "hidden_widths": [], "activation": "relu"}',
            "hidden",
        ),
        (
            "mlp",
            '{"shape": "uniform", "input_width": 1, "output_width": 2, "hidden_widths": [0], "activation": "relu"}',
            "widths",
        ),
        (
            "mlp",
            '{"shape": "residual", "input_width": 1, "output_width": 2, "hidden_widths": [3, 4], "activation": "relu"}',
            "wide",
        ),
    ],
)
def test_a_foreign_architecture_is_refused(
    family_name: str, architecture: str, sentence: str
) -> None:
    with pytest.raises(DatasetError, match=sentence):
        rebuild(family_name, architecture)
