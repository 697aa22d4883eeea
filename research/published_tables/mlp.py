"""GPUMemNet's published MLPs: the network of a row, from the row's file name and layers, and the
row as a measurement.

The rows are ``Datasets/MLP/mlp_data_step2.csv`` of github.com/itu-rad/GPUMemNet (arXiv 2602.17817).
Its layer list gives a PReLU no parameter, and counts an identity as a layer with activations.  The
rows made here hold what the network has and stores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast

from dataset_builder.families import extracted_job, loss, mlp, parse_architecture
from dataset_builder.families.mlp import build, tensors
from gpumemnet.errors import DatasetError
from gpumemnet.job.layers import Layer, describe
from gpumemnet.job.measurement import Measurement
from gpumemnet.job.training_job import TrainingJob

from .rows import PUBLISHED_OPTIONS, Row, count_in, published_measurement, text_in

__all__ = ["build", "loss", "parse", "tensors"]

COLUMNS: Final = (
    *("Filename", "Activations-Params", "Total Activations", "Total Parameters", "Batch Size"),
    *("Activation Function", "Max GPU Memory (MiB)"),
)
_FILENAME: Final = re.compile(
    r"input:(?P<input>\d{1,9})_output:(?P<output>\d{1,9})_depth:\d+_arch:(?P<shape>\w+)_batch:(?P<batch>\d{1,9})"
    r"_act:(?P<activation>\w+)_dropout:(?P<rate>\d\.\d{1,24})_dropout:(?P<dropout>True|False)"
    r"_batchnorm:(?P<norm>True|False)\.out"
)
_TRIPLE: Final = re.compile(r"\('([A-Za-z_]{1,32})', (\d{1,15}), (\d{1,15})\)")
_KINDS: Final[Mapping[str, str]] = {
    "linear": "linear",
    "batch_normalization": "batch_norm1d",
    "dropout": "dropout",
    "Softmax": "softmax",
    "Sigmoid": "sigmoid",
    "Identity": "identity",
    "ReLU": "relu",
    "LeakyReLU": "leaky_relu",
    "PReLU": "prelu",
    "ELU": "elu",
    "SELU": "selu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Mish": "mish",
    "Softplus": "softplus",
    "Tanh": "tanh",
}


def measurement_of_row(row: Row) -> Measurement:
    """One row of the published table, a mapping from :data:`COLUMNS` to text.

    Raises:
        DatasetError: when a column is missing or contradicts another.
    """
    layers = _layers(text_in(row, "Activations-Params"))
    architecture = _architecture(text_in(row, "Filename"), layers)
    network = extracted_job("mlp", architecture)
    if [_as_published(layer) for layer in network.layers] != [
        layer for layer in layers if layer.kind != "identity"
    ]:
        raise DatasetError("Activations-Params and Filename describe different networks")
    for column, total in (
        ("Total Activations", sum(layer.activations for layer in layers)),
        ("Total Parameters", sum(layer.parameters for layer in layers)),
    ):
        if count_in(row, column) != total:
            raise DatasetError(f"{column} is {row[column]}, but the layers add up to {total}")
    job = TrainingJob(
        family="mlp",
        batch_size=count_in(row, "Batch Size"),
        input_elements=network.input_elements,
        layers=network.layers,
        activation_function=None
        if architecture.activation == "identity"
        else architecture.activation,
        **PUBLISHED_OPTIONS.job_fields(),
    )
    return published_measurement(job, architecture, row)


def _as_published(layer: Layer) -> Layer:
    """``layer`` as the published list has it: kind and sizes, without the one parameter that a
    PReLU really owns."""
    parameters = 0 if layer.kind == "prelu" else layer.parameters
    return Layer(layer.kind, layer.activations, parameters)


def _layers(text: str) -> tuple[Layer, ...]:
    triples = _TRIPLE.findall(text)
    if (
        not triples
        or text
        != "[" + ", ".join(f"('{kind}', {size}, {own})" for kind, size, own in triples) + "]"
    ):
        raise DatasetError(
            f"Activations-Params is not a list of (kind, activations, parameters): {describe(text)}"
        )
    for kind, _, _ in triples:
        if kind not in _KINDS:
            raise DatasetError(f"Activations-Params holds the unknown layer kind {describe(kind)}")
    return tuple(Layer(_KINDS[kind], int(size), int(own)) for kind, size, own in triples)


def _architecture(filename: str, layers: tuple[Layer, ...]) -> mlp.MlpArchitecture:
    """The network that the file's name and its layers describe; both must agree."""
    named = _FILENAME.fullmatch(filename)
    if named is None:
        raise DatasetError(f"Filename does not have the published form: {describe(filename)}")
    linear = [layer for layer in layers if layer.kind == "linear"]
    if len(linear) < 2 or layers[0] != linear[0]:
        raise DatasetError(
            "Activations-Params must begin with a linear layer and hold at least two"
        )
    input_width = int(named["input"])
    if linear[0].parameters != (input_width + 1) * linear[0].activations:
        raise DatasetError(
            f"Filename says {input_width} inputs, but the first linear layer has {linear[0].parameters} parameters"
        )
    activation = "silu" if named["activation"] == "swish" else named["activation"]
    return mlp.MlpArchitecture(
        shape=named["shape"],
        input_width=input_width,
        output_width=int(named["output"]),
        hidden_widths=tuple(layer.activations for layer in linear[:-1]),
        activation=activation,
        norm="batch_norm" if named["norm"] == "True" else "none",
        dropout=float(named["rate"]) if named["dropout"] == "True" else 0.0,
        output_activation="none" if layers[-1].kind == "linear" else layers[-1].kind,
    )


def parse(document: Mapping[str, Any]) -> mlp.MlpArchitecture:
    """The architecture from a row's JSON object.

    Raises:
        DatasetError: on unknown or missing values.
    """
    return cast(mlp.MlpArchitecture, parse_architecture("mlp", document))
