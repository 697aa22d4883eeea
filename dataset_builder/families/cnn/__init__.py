"""Convolutional networks: plain, residual, dense, inverted residual, separable, ConvNeXt-like,
U-Net and hourglass.

GPUMemNet's convolutional networks (arXiv 2602.17817, section 4) had neither residuals nor pooling;
these are the designs that people train, each a plan of parts that is described and built by two
functions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from .. import Network, TensorSpec
from .architecture import DENSE_PREDICTION, FEATURES, CnnArchitecture, compose, parse
from .styles import plan_network
from .survey import ShapeError, Survey

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "FEATURES",
    "compose",
    "parse",
    "describe_network",
    "obstacle",
    "build",
    "tensors",
    "loss",
]


def describe_network(architecture: CnnArchitecture) -> Network:
    """Layers in execution order, as :func:`build` makes them.

    Raises:
        ShapeError: where :func:`obstacle` names an obstacle to any batch size.
    """
    survey = _survey(architecture)
    if isinstance(survey, ShapeError):
        raise survey
    return Network(
        layers=tuple(survey.layers),
        input_elements=architecture.input_channels * architecture.image_size**2,
        activation_function=architecture.activation,
        multiply_adds=survey.multiply_adds,
    )


def obstacle(architecture: CnnArchitecture, batch_size: int) -> str | None:
    """Why the network cannot train: a map that is too small or does not fit its partner, or a norm
    over a single value."""
    survey = _survey(architecture)
    if isinstance(survey, ShapeError):
        return str(survey)
    if batch_size == 1 and survey.batch_norm_values == 1:
        return "batch norm cannot train on one value per channel"
    if survey.group_norm_values == 1:
        return "group norm makes zeros of groups of one value"
    if architecture.classes < 2:
        return "cross-entropy needs at least two classes"
    return None


@lru_cache(maxsize=4)
def _survey(architecture: CnnArchitecture) -> Survey | ShapeError:
    """The survey of ``architecture``, cached because a sampler asks for its obstacle, layers and
    sizes in turn."""
    if architecture.image_size // architecture.reduction < 1:
        return ShapeError(
            f"{architecture.image_size} pixels cannot be shrunk by {architecture.reduction}"
        )
    try:
        return Survey(
            plan_network(architecture), architecture.input_channels, architecture.image_size
        )
    except ShapeError as error:
        return error


def build(architecture: CnnArchitecture) -> nn.Module:
    """The network on torch's current default device.

    It maps ``[batch, input_channels, image_size, image_size]`` to logits ``[batch, classes]``, or
    ``[batch, classes, image_size, image_size]`` in dense prediction.
    """
    from .modules import module

    return module(plan_network(architecture))


def tensors(architecture: CnnArchitecture) -> tuple[tuple[TensorSpec, ...], TensorSpec]:
    """One image; one class, or one for every pixel."""
    size = architecture.image_size
    per_pixel = (size, size) if architecture.style in DENSE_PREDICTION else ()
    return (TensorSpec((architecture.input_channels, size, size)),), TensorSpec(
        per_pixel, architecture.classes
    )


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the logits, ``[batch, classes]`` or ``[batch, classes, height, width]``."""
    from torch.nn import functional

    return functional.cross_entropy(outputs, targets)
