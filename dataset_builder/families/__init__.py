"""The families of networks that the builder measures, and the functions that each family provides.

A family is one module with the functions that :class:`Family` lists.  A new family is a new module
here, its entry in :func:`family`, and a recipe: no other module of the builder depends on the kind
of network.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from gpumemnet.errors import DatasetError
from gpumemnet.job.layers import Layer, describe

if TYPE_CHECKING:
    from torch import Tensor, nn

FAMILY_NAMES = ("mlp", "cnn", "transformer", "zoo")


@dataclass(frozen=True, slots=True)
class Feature:
    """The values that a recipe may declare for one feature of a search space.

    Attributes:
        kind: ``int``, ``float``, ``str`` or ``bool``.
        minimum, maximum: bounds of a number.
        choices: the values of a string.
    """

    kind: type[int] | type[float] | type[str] | type[bool]
    minimum: float = -math.inf
    maximum: float = math.inf
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or target tensor.

    Attributes:
        shape: per sample, without the batch.
        high: integers below this bound (classes, tokens); ``None`` for floating-point values.
    """

    shape: tuple[int, ...]
    high: int | None = None


@dataclass(frozen=True, slots=True)
class Network:
    """Layers and sizes of a network, without building it.

    Attributes:
        layers: the leaf layers in the order in which they run.
        input_elements: elements of the input per sample.
        activation_function: the main activation function, if there is one.
        multiply_adds: multiply-add operations of one forward pass, per sample.
        sequence_length, attention_kernel: for models of sequences.
        family: the family of the job, for networks of the zoo.
    """

    layers: tuple[Layer, ...]
    input_elements: int
    activation_function: str | None
    multiply_adds: int
    sequence_length: int | None = None
    attention_kernel: str | None = None
    family: str | None = None


class Architecture(Protocol):
    """A frozen dataclass with every parameter of a network of one family."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready object from which the family's ``parse`` makes the same architecture."""
        ...


class Family(Protocol):
    """The functions of a family's module."""

    FEATURES: Mapping[str, Feature]
    """The features of the search space; a recipe declares every one of them."""

    def compose(self, values: Mapping[str, Any]) -> Architecture:
        """The architecture for one value of every feature."""
        ...

    def parse(self, document: Mapping[str, Any]) -> Architecture:
        """The architecture from its JSON object; ``DatasetError`` on anything else."""
        ...

    def describe_network(self, architecture: Any) -> Network:
        """Layers and sizes, equal to what :meth:`build` makes and runs."""
        ...

    def obstacle(self, architecture: Any, batch_size: int) -> str | None:
        """Why the network cannot train at this batch size, if so."""
        ...

    def build(self, architecture: Any) -> nn.Module:
        """The network, on torch's current default device, returning logits."""
        ...

    def tensors(self, architecture: Any) -> tuple[tuple[TensorSpec, ...], TensorSpec]:
        """The inputs of the forward pass, and the targets of the loss."""
        ...

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """The training loss of the network's outputs."""
        ...


def family(name: str) -> Family:
    """The family called ``name``.

    Raises:
        DatasetError: lists the families.
    """
    if name not in FAMILY_NAMES:
        raise DatasetError(f"family must be one of {', '.join(FAMILY_NAMES)}, not {describe(name)}")
    return cast(Family, importlib.import_module(f"{__name__}.{name}"))


def rebuild(family_name: str, architecture: str) -> nn.Module:
    """The network of a dataset row, from its ``family`` and ``architecture`` columns.

    Raises:
        DatasetError: when the architecture is not a valid network of the family.
    """
    try:
        document = json.loads(architecture)
    except ValueError:
        raise DatasetError(f"architecture is not JSON: {describe(architecture)}") from None
    in_zoo = (
        isinstance(document, dict) and "model" in document
    )  # whose rows have the family that a scheduler would see
    members = family("zoo" if in_zoo else family_name)
    return members.build(members.parse(document))
