"""Multilayer perceptrons: pyramid, uniform, bottleneck, gradual and residual.

The first four shapes, the activation functions and the block (linear, norm, activation, dropout)
are those that GPUMemNet measured (arXiv 2602.17817, section 4); the residual shape is the tabular
ResNet of Gorishniy et al. (arXiv 2106.11959).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from . import Architecture, RoughSizes, TensorSpec, features

if TYPE_CHECKING:
    from torch import nn

FEATURES: Final = features("mlp")
MIN_WIDTH: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpArchitecture(Architecture):
    """Every parameter of an MLP.

    Attributes:
        shape: the rule that made the widths; ``residual`` also changes the wiring.
        input_width, output_width: elements per sample.
        hidden_widths: output width of every hidden block; all equal when the shape is ``residual``.
        activation, norm: their names, see :data:`FEATURES`.
        dropout: probability; 0 leaves the dropout layers out.
        output_activation: ``none``, or the layer after the last linear one: ``softmax``, ``sigmoid``
            or ``identity``; only published networks have one.
    """

    shape: str
    input_width: int
    output_width: int
    hidden_widths: tuple[int, ...]
    activation: str
    norm: str = "none"
    dropout: float = 0.0
    output_activation: str = "none"


ARCHITECTURE: Final = MlpArchitecture


def hidden_widths(shape: str, depth: int, width: int, output_width: int) -> tuple[int, ...]:
    """Widths of the hidden blocks: the first is ``width``, none is below 4.

    ``pyramid`` halves, ``bottleneck`` narrows to an eighth in the middle and widens again
    (geometrically), ``gradual`` goes to the output width in equal steps, ``uniform`` and
    ``residual`` stay.
    """
    if shape == "pyramid":
        widths = [width // 2**index for index in range(depth)]
    elif shape == "bottleneck":
        half = (depth - 1) / 2
        widths = [
            round(width * 8 ** (abs(index - half) / half - 1)) if half else width
            for index in range(depth)
        ]
    elif shape == "gradual":
        widths = [width + (output_width - width) * index // depth for index in range(depth)]
    else:
        widths = [width] * depth
    return tuple(max(MIN_WIDTH, each) for each in widths)


def compose(values: Mapping[str, Any]) -> MlpArchitecture:
    """The architecture for one value of every feature in :data:`FEATURES`."""
    rest = {name: value for name, value in values.items() if name not in ("depth", "width")}
    widths = hidden_widths(
        values["shape"], values["depth"], values["width"], values["output_width"]
    )
    return MlpArchitecture(hidden_widths=widths, **rest)


def can_train(architecture: MlpArchitecture, batch_size: int) -> bool:
    """Whether the network trains: batch norm needs more than one sample."""
    return batch_size > 1 or architecture.norm != "batch_norm"


def rough_sizes(architecture: MlpArchitecture) -> RoughSizes:
    """See :class:`~dataset_builder.families.RoughSizes`."""
    a, hidden = architecture, architecture.hidden_widths
    residual = a.shape == "residual"
    inputs = (a.input_width, *hidden[:-1])
    linear = sum(first * second for first, second in zip(inputs, hidden, strict=True))
    if residual:
        linear = (a.input_width + 2 * len(hidden) * hidden[0]) * hidden[0]
    linear += hidden[-1] * a.output_width
    layers = 2 + residual + (a.norm != "none") + (a.dropout > 0)
    activations = layers * sum(hidden) + a.output_width
    return RoughSizes(linear, activations, a.output_width, linear)


def build(architecture: MlpArchitecture) -> nn.Module:
    """The network on torch's current default device; logits ``[batch, output_width]`` from
    ``[batch, input_width]``."""
    from torch import nn

    from .blocks import Blocks, Residual, activation_class, repeated

    a = architecture

    def block(inputs: int, width: int) -> nn.Module:
        norm = _norm(a.norm, width)
        activation = activation_class(a.activation)()
        dropout = [nn.Dropout(a.dropout)] if a.dropout else []
        if a.shape == "residual":
            first, second = nn.Linear(width, width), nn.Linear(width, width)
            return Residual(nn.Sequential(*norm, first, activation, second, *dropout))
        return nn.Sequential(nn.Linear(inputs, width), *norm, activation, *dropout)

    widths = [a.input_width, *a.hidden_widths]
    stem: list[nn.Module] = []
    if a.shape == "residual":
        stem, widths[0] = [nn.Linear(a.input_width, widths[1])], widths[1]
    blocks: list[nn.Module] = []
    for (inputs, width), equal in itertools.groupby(itertools.pairwise(widths)):
        blocks += repeated(partial(block, inputs, width), len(list(equal)))
    outputs: dict[str, list[nn.Module]] = {
        "none": [],
        "softmax": [nn.Softmax(dim=1)],
        "sigmoid": [nn.Sigmoid()],
        "identity": [nn.Identity()],
    }
    last = outputs[a.output_activation]
    return nn.Sequential(*stem, Blocks(*blocks), nn.Linear(widths[-1], a.output_width), *last)


def tensors(architecture: MlpArchitecture) -> tuple[tuple[TensorSpec, ...], TensorSpec]:
    """One vector of features; one class."""
    return (TensorSpec((architecture.input_width,)),), TensorSpec((), architecture.output_width)


def _norm(name: str, width: int) -> list[nn.Module]:
    from torch import nn

    if name == "none":
        return []
    return [nn.BatchNorm1d(width) if name == "batch_norm" else nn.LayerNorm(width)]
