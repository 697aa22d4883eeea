"""Turns GPUMemNet's published measurements (one A100, CC BY 4.0) into the dataset's schema: MLPs here, others beside.

The source of the MLPs is ``Datasets/MLP/mlp_data_step2.csv`` of github.com/itu-rad/GPUMemNet (arXiv 2602.17817).  Its label is
the maximum of one-second ``nvidia-smi`` readings of the whole GPU, so the process's own parts are unknown here.  The published
list gives a PReLU no parameter, and counts an identity as a layer with activations; the rows made here hold what the network
really has and stores.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from gpumemnet.data.dataset import write_dataset
from gpumemnet.data.measurement import PUBLISHED_GPU, Measurement
from gpumemnet.errors import DatasetError, GpumemnetError
from gpumemnet.job.layers import Layer, describe
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.units import MIB

from ..families import mlp

PUBLISHED_CAPACITY_BYTES: Final = 40_960 * MIB
"""The card's nominal memory; what its driver offered is not published."""
PUBLISHED_SECONDS: Final = 60.0

WHERE_TO_GET_IT: Final = (
    "it is Datasets/MLP/mlp_data_step2.csv, CNN/cnn_data_step1.csv or Transformers/transformer_data.csv of "
    "github.com/itu-rad/GPUMemNet (CC BY 4.0): download it from there and give its path"
)

_COLUMNS: Final = (
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


class LeftOutError(DatasetError):
    """A row that is as it was published, and whose network nobody can rebuild from it."""


def import_published(source: str | Path, out: str | Path, left_out: Counter[str] | None = None) -> int:
    """Write the dataset of the published measurements to ``out``; returns the number of rows.

    Args:
        source: the published table.
        out: the file to write.
        left_out: counts the rows whose network cannot be rebuilt, by reason.

    Raises:
        DatasetError: when the file is missing or foreign; names the line and what is wrong with it.
    """
    return write_dataset(out, read_published(source, left_out))


def read_published(source: str | Path, left_out: Counter[str] | None = None) -> Iterator[Measurement]:
    """The published measurements, in the order of the file.

    Raises:
        DatasetError: as :func:`import_published`.
    """
    path = Path(source)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            measurement_of_row = _reader_of(path, reader.fieldnames or ())
            for row in reader:
                try:
                    yield measurement_of_row(row)
                except LeftOutError as error:
                    if left_out is not None:
                        left_out[str(error)] += 1
                except GpumemnetError as error:
                    raise DatasetError(f"{path}, line {reader.line_num}: {error}") from None
    except FileNotFoundError:
        raise DatasetError(f"{path} does not exist; {WHERE_TO_GET_IT}") from None
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(f"{path} is no CSV text: {error}") from None


def _reader_of(path: Path, columns: Sequence[str]) -> Callable[[Mapping[str, str | None]], Measurement]:
    """What reads a row of the table with these columns."""
    from . import cnn as published_cnn
    from . import transformer as published_transformer

    if set(published_transformer.COLUMNS) <= set(columns):
        return published_transformer.measurement_of_row
    if set(published_cnn.COLUMNS) <= set(columns):
        return published_cnn.measurement_of_row
    missing = [name for name in _COLUMNS if name not in columns]
    if missing:
        raise DatasetError(f"{path} is not the published table: it lacks the column '{missing[0]}'; {WHERE_TO_GET_IT}")
    return _measurement


def _measurement(row: Mapping[str, str | None]) -> Measurement:
    layers = _layers(_text(row, "Activations-Params"))
    architecture = _architecture(_text(row, "Filename"), layers)
    network = mlp.describe_network(architecture)
    if [_as_published(layer) for layer in network.layers] != [layer for layer in layers if layer.kind != "identity"]:
        raise DatasetError("Activations-Params and Filename describe different networks")
    for column, total in (
        ("Total Activations", sum(layer.activations for layer in layers)),
        ("Total Parameters", sum(layer.parameters for layer in layers)),
    ):
        if _count(row, column) != total:
            raise DatasetError(f"{column} is {row[column]}, but the layers add up to {total}")
    job = TrainingJob(
        family="mlp",
        batch_size=_count(row, "Batch Size"),
        input_elements=network.input_elements,
        optimizer="adam",
        precision="fp32",
        layers=network.layers,
        activation_function=network.activation_function,
    )
    return Measurement(
        job=job,
        status="ok",
        label_source="nvidia_smi_device_1s",
        capacity_bytes=PUBLISHED_CAPACITY_BYTES,
        provenance="published",
        gpu=PUBLISHED_GPU,
        recipe="published",
        architecture=json.dumps(architecture.to_dict(), sort_keys=True),
        peak_device_bytes=_count(row, "Max GPU Memory (MiB)") * MIB,
        seconds=PUBLISHED_SECONDS,
        neighbours=0,
    )


def _as_published(layer: Layer) -> Layer:
    """``layer`` as the published list has it: without the one parameter that a PReLU really owns."""
    return Layer("prelu", layer.activations) if layer.kind == "prelu" else layer


def _layers(text: str) -> tuple[Layer, ...]:
    triples = _TRIPLE.findall(text)
    if not triples or text != "[" + ", ".join(f"('{kind}', {size}, {own})" for kind, size, own in triples) + "]":
        raise DatasetError(f"Activations-Params is no list of (kind, activations, parameters): {describe(text)}")
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
        raise DatasetError("Activations-Params must begin with a linear layer and hold at least two")
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


def _text(row: Mapping[str, str | None], column: str) -> str:
    value = row[column]
    if value is None:
        raise DatasetError(f"{column} is missing")
    return value


def _count(row: Mapping[str, str | None], column: str) -> int:
    text = _text(row, column)
    if not re.fullmatch(r"\d{1,15}", text):
        raise DatasetError(f"{column} must be a whole number, not {describe(text)}")
    return int(text)
