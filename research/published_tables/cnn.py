"""GPUMemNet's published CNNs: the network of a row, rebuilt from the row's file name, and the row
as a measurement.

The rows are ``Datasets/CNN/cnn_data_step1.csv`` of github.com/itu-rad/GPUMemNet (arXiv 2602.17817),
its datasets being CC BY 4.0. What ran is ``NeuroNetGen_scripts/CNN/cnn.py`` there, without its
later poolings; what moves memory in it:

* fp32 with PyTorch's switches as they are, so convolutions may run on TF32; ``torch.optim.Adam``;
  the network ends in a softmax, whose output goes to cross-entropy; ``cudnn.benchmark`` is off.
* Convolutions of 3 x 3 keep the image's size, but for every second residual block, which halves it;
  plain networks never pool.
* ``zero_grad`` (to ``None``) stands at the beginning of a step; the loop has no function of its own
  for a step, so batch, output and loss live until the next step has its own.
* ``nvidia-smi`` was read once a second, for the whole GPU, one job at a time; the label is the
  largest reading.

Networks of the shape ``dense`` are refused: how often they were thinned out hung on a random number
that is not in the row."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from dataset_builder.families import TensorSpec
from gpumemnet.errors import DatasetError
from gpumemnet.job.layers import describe
from gpumemnet.job.measurement import Measurement
from research.published_tables.rows import (
    PUBLISHED_OPTIONS,
    LeftOutError,
    Row,
    count_in,
    published_measurement,
    text_in,
)

if TYPE_CHECKING:
    from torch import Tensor, nn


def convolution(
    given: int, channels: int, stride: int, activation: str, norm: bool, dropout: float
) -> nn.Sequential:
    """A convolution of 3 x 3 with its normalisation, activation and dropout."""
    layers: list[nn.Module] = [nn.Conv2d(given, channels, 3, stride, 1)]
    if norm:
        layers.append(nn.BatchNorm2d(channels))
    layers.append(getattr(nn, activation)())
    if dropout:
        layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


class ResidualUnit(nn.Module):
    """Two convolutions beside a shortcut, which is a convolution of 1 x 1 where the shape
    changes."""

    def __init__(
        self, given: int, channels: int, stride: int, activation: str, norm: bool, dropout: float
    ) -> None:
        super().__init__()
        self.first = convolution(given, channels, stride, activation, norm, dropout)
        self.second = convolution(channels, channels, 1, activation, norm, dropout)
        changes = given != channels or stride != 1
        projection: list[nn.Module] = [nn.Conv2d(given, channels, 1, stride)] if changes else []
        self.shortcut = nn.Sequential(
            *projection, *([nn.BatchNorm2d(channels)] if changes and norm else [])
        )

    def forward(self, images: Tensor) -> Tensor:
        """The sum; the shortcut goes first."""
        shortcut: Tensor = self.shortcut(images)
        summed: Tensor = self.second(self.first(images)) + shortcut
        return summed


COLUMNS: Final = (
    "Filename",
    "Total Parameters",
    "Batch Size",
    "Max GPU Memory (MiB)",
    "Conv2d Count",
    "Status",
)
"""The columns that are read; the published table has more."""

SHAPES: Final = (
    "uniform",
    "pyramid",
    "reverse_pyramid",
    "bottleneck",
    "gradual",
    "hourglass",
    "residual",
)
STATUS_OF: Final[Mapping[str, str]] = {"SUCCESSFUL": "ok", "OOM_CRASH": "oom"}
MAX_FILTERS: Final = 2048
SMALLEST_IMAGE: Final = 7
"""Images are not halved below this."""

_FILENAME: Final = re.compile(
    r"input_channels:(?P<input_channels>\d{1,4})_num_classes:(?P<num_classes>\d{1,9})_depth:(?P<depth>\d{1,4})"
    r"_arch:(?P<arch>\w+?)_base_filters:(?P<base_filters>\d{1,6})_batch:(?P<batch>\d{1,9})_input_size:(?P<input_size>\d{1,6})"
    r"_act:(?P<act>\w+?)_dropout:(?P<rate>\d\.\d{1,24})_dropout:(?P<dropout>True|False)_batchnorm:(?P<batchnorm>True|False)\.out"
)


@dataclass(frozen=True, slots=True)
class PublishedCnn:
    """The fields of a published file name.

    Attributes:
        arch: one of :data:`SHAPES`.
        input_channels, num_classes, depth, base_filters, input_size: of the network and of its
        square images.
        act: activation function.
        dropout: rate, 0 for none.
        batchnorm: whether every convolution is normalised.

    Raises:
        DatasetError: on a value that no such network can have.
    """

    arch: str
    input_channels: int
    num_classes: int
    depth: int
    base_filters: int
    input_size: int
    act: str
    dropout: float
    batchnorm: bool

    def __post_init__(self) -> None:
        if self.arch == "dense":
            raise LeftOutError(
                "a dense network depends on a random number that its row does not hold"
            )
        if self.arch not in SHAPES:
            raise DatasetError(
                f"a published CNN's arch must be one of {', '.join(SHAPES)}, not {describe(self.arch)}"
            )
        for name in ("input_channels", "num_classes", "depth", "base_filters", "input_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise DatasetError(
                    f"a published CNN's {name} must be a positive whole number, not {describe(value)}"
                )
        if self.act not in _ACTIVATIONS:
            raise DatasetError(
                f"a published CNN's act must be one of {', '.join(_ACTIVATIONS)}, not {describe(self.act)}"
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; :func:`parse` is the inverse."""
        return dataclasses.asdict(self)


_ACTIVATIONS: Final[Mapping[str, str]] = {
    "relu": "ReLU",
    "leaky_relu": "LeakyReLU",
    "prelu": "PReLU",
    "elu": "ELU",
    "selu": "SELU",
    "gelu": "GELU",
    "tanh": "Tanh",
    "swish": "SiLU",
    "softplus": "Softplus",
    "mish": "Mish",
}


def parse(document: Mapping[str, Any]) -> PublishedCnn:
    """The architecture from :meth:`PublishedCnn.to_dict`.

    Raises:
        DatasetError: on unknown, missing or impossible values.
    """
    try:
        return PublishedCnn(**document)
    except TypeError as error:
        raise DatasetError(f"the architecture is not that of a published CNN: {error}") from None


def filters(architecture: PublishedCnn) -> list[int]:
    """Output channels of every convolution, or of every residual block."""
    base, depth, top = architecture.base_filters, architecture.depth, MAX_FILTERS

    def grown(steps: int, over: float) -> int:
        return min(int(base * ((top / base) ** (1 / over)) ** steps), top)

    match architecture.arch:
        case "pyramid":
            return [grown(i, depth) for i in range(depth)]
        case "gradual":
            return [grown(i, 2 * depth) for i in range(depth)]
        case "reverse_pyramid":
            return [max(int(base / ((top / base) ** (1 / depth)) ** i), 1) for i in range(depth)]
        case "bottleneck":
            later = [
                min(base * 2**i, top) if depth <= 2 else grown(i, depth - 1)
                for i in range(depth - 1)
            ]
            return [2 * base, *later]
        case "hourglass":
            half = depth // 2
            falling = [
                max(int(base * ((top / base) ** (1 / (depth - half))) ** (depth - i - 1)), base)
                for i in range(half, depth)
            ]
            return [grown(i, half) for i in range(half)] + falling
        case "residual":
            return [grown(i, depth) for i in range(depth // 2)]
    return [base] * depth


def build(architecture: PublishedCnn) -> nn.Module:
    """The network on torch's current default device: images ``[batch, channels, size, size]`` to
    class probabilities."""
    from torch import nn

    a = architecture
    given, size = a.input_channels, a.input_size
    blocks: list[nn.Module] = []
    for index, channels in enumerate(filters(a)):
        if a.arch == "residual":
            stride = 2 if index % 2 and size > SMALLEST_IMAGE else 1
            blocks.append(
                ResidualUnit(given, channels, stride, _ACTIVATIONS[a.act], a.batchnorm, a.dropout)
            )
            size //= stride
        else:
            blocks.append(
                convolution(given, channels, 1, _ACTIVATIONS[a.act], a.batchnorm, a.dropout)
            )
        given = channels
        if a.arch == "residual" and size <= SMALLEST_IMAGE:
            break
    last = nn.Softmax(dim=1) if a.num_classes > 1 else nn.Sigmoid()
    return nn.Sequential(
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, a.num_classes), last
    )


def tensors(architecture: PublishedCnn) -> tuple[tuple[TensorSpec, ...], TensorSpec]:
    """One square image; its class."""
    image = (architecture.input_channels, architecture.input_size, architecture.input_size)
    return (TensorSpec(image),), TensorSpec((), architecture.num_classes)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the outputs ``[batch, num_classes]``."""
    from torch.nn import functional

    return functional.cross_entropy(outputs, targets)


def measurement_of_row(row: Row) -> Measurement:
    """One row of the published table, a mapping from :data:`COLUMNS` to text; its layers are read
    from the rebuilt network.

    Raises:
        DatasetError: when a column is missing or contradicts the file name, or the network cannot
            be rebuilt.
    """
    import torch

    from gpumemnet.extract import ExtractOptions, extract_job

    named = _FILENAME.fullmatch(text_in(row, "Filename"))
    if named is None:
        raise DatasetError(
            f"Filename does not have the published form: {describe(row['Filename'])}"
        )
    architecture = PublishedCnn(
        arch=named["arch"],
        input_channels=int(named["input_channels"]),
        num_classes=int(named["num_classes"]),
        depth=int(named["depth"]),
        base_filters=int(named["base_filters"]),
        input_size=int(named["input_size"]),
        act=named["act"],
        dropout=float(named["rate"]) if named["dropout"] == "True" else 0.0,
        batchnorm=named["batchnorm"] == "True",
    )
    with torch.device("meta"):
        network = build(architecture)
    slopes = sum(
        m.num_parameters for m in network.modules() if isinstance(m, torch.nn.PReLU)
    )  # which the table leaves out
    found = sum(parameter.numel() for parameter in network.parameters()) - slopes
    if count_in(row, "Total Parameters") == 0:
        raise LeftOutError("the table holds no layers of the network")
    if found != count_in(row, "Total Parameters"):
        raise DatasetError(
            f"Total Parameters is {row['Total Parameters']}, but the network that Filename describes has {found}"
        )
    batch_size = int(named["batch"])
    (image,), _ = tensors(architecture)
    job = extract_job(
        network,
        torch.empty(batch_size, *image.shape, device="meta"),
        ExtractOptions(**PUBLISHED_OPTIONS.job_fields()),
    ).job
    job = dataclasses.replace(job, family="cnn")
    status = STATUS_OF.get(text_in(row, "Status"))
    if status is None:
        raise DatasetError(
            f"Status must be one of {', '.join(STATUS_OF)}, not {describe(row['Status'])}"
        )
    return published_measurement(
        job, architecture, row, status, "out of memory" if status == "oom" else None
    )
