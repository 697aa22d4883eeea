"""Transformers: encoder, decoder, encoder–decoder and vision transformer, with a chosen attention
kernel.

GPUMemNet's transformers (arXiv 2602.17817, section 4) were PyTorch's stock blocks; these are the
blocks of networks that people train, see :mod:`~dataset_builder.families.transformer.architecture`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from .. import Network, TensorSpec
from .architecture import (
    FEATURES,
    IMAGE_CHANNELS,
    TransformerArchitecture,
    compose,
    parse,
)
from .survey import Survey

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

_GATED: Final = {"silu": "swiglu", "gelu": "geglu"}


def describe_network(architecture: TransformerArchitecture) -> Network:
    """Layers in execution order, as :func:`build` makes them."""
    survey = Survey(architecture)
    inputs, _ = tensors(architecture)
    gated = _GATED.get(architecture.activation, architecture.activation)
    return Network(
        layers=tuple(survey.layers),
        input_elements=sum(math.prod(each.shape) for each in inputs),
        activation_function=gated if architecture.gated else architecture.activation,
        multiply_adds=survey.multiply_adds,
        sequence_length=architecture.sequence_length,
        attention_kernel=architecture.attention_kernel,
    )


def obstacle(architecture: TransformerArchitecture, batch_size: int) -> str | None:
    """Why the network cannot train: the loss needs at least two classes or tokens; every batch size
    is possible."""
    if max(architecture.classes, architecture.vocabulary) < 2:
        return "cross-entropy needs at least two classes"
    return None


def build(architecture: TransformerArchitecture) -> nn.Module:
    """The network on torch's current default device.

    It maps tokens ``[batch, sequence_length]`` (and, in an ``encoder_decoder``, target tokens
    ``[batch, target_length]``), or images ``[batch, 3, image_size, image_size]``, to logits:
    ``[batch, classes]``, or over the vocabulary at every position ``[batch, sequence_length or
    target_length, vocabulary]``.
    """
    from .modules import Transformer

    return Transformer(architecture)


def tensors(architecture: TransformerArchitecture) -> tuple[tuple[TensorSpec, ...], TensorSpec]:
    """Tokens or one image; one class, or one token for every position.

    The targets of a language model are the next tokens.  The data loader has shifted them, so no
    logits are cut off or copied.
    """
    a = architecture
    inputs = [TensorSpec((a.sequence_length,), a.vocabulary)]
    if a.style == "vision":
        inputs = [TensorSpec((IMAGE_CHANNELS, a.image_size, a.image_size))]
    elif a.style == "encoder_decoder":
        inputs.append(TensorSpec((a.target_length,), a.vocabulary))
    target = (
        TensorSpec((), a.classes)
        if a.head == "classes"
        else TensorSpec((a.predicted_length,), a.vocabulary)
    )
    return tuple(inputs), target


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the logits ``[batch, classes]`` or ``[batch, length, vocabulary]``, every
    position alike.

    The logits are not cast first: autocast computes the loss in fp32, pure bf16 in bf16.
    """
    from torch.nn import functional

    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
