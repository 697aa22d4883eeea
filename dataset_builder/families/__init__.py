"""The families of networks that the builder measures, and the functions that each family provides.

A family is one module with the functions that :class:`Family` lists.  A new family is a new module
here, its entry in :func:`family`, and a recipe: no other module of the builder depends on the kind
of network.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from gpumemnet.errors import DatasetError
from gpumemnet.job.layers import Layer, describe
from gpumemnet.job.training_job import TrainingJob

if TYPE_CHECKING:
    from torch import Tensor, nn

FAMILY_NAMES: Final = ("mlp", "cnn", "transformer")
_SAMPLES: Final = 2
"""Batch size of an extraction: batch norm does not accept a single sample."""


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
    choices: Sequence[str] = ()


_KINDS: Final = {"int": int, "float": float, "str": str, "bool": bool}


def features(family_name: str) -> Mapping[str, Feature]:
    """The features of a family in ``features.json``, which each recipe of the family declares."""
    document = json.loads(Path(__file__).with_name("features.json").read_text())
    entries = document[family_name].items()
    return {name: Feature(_KINDS[entry.pop("kind")], **entry) for name, entry in entries}


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
class RoughSizes:
    """A network's sizes as its widths and depths give them without building it, within about a
    factor of two of the extracted ones.

    Jobs are drawn and admitted by these: extracting a network takes up to a second, and a draw
    looks at thousands.

    Attributes:
        parameters: elements of all parameters.
        activations: outputs of all layers, elements per sample.
        outputs: logits per sample.
        multiply_adds: operations of one forward pass per sample.
    """

    parameters: float
    activations: float
    outputs: float
    multiply_adds: float


@dataclass(frozen=True, slots=True)
class Architecture:
    """Every parameter of a network of one family; equal networks are equal architectures."""


class Family(Protocol):
    """The functions of a family's module."""

    FEATURES: Mapping[str, Feature]
    """The features of the search space; a recipe declares every one of them."""
    ARCHITECTURE: type[Architecture]

    def compose(self, values: Mapping[str, Any]) -> Architecture:
        """The architecture for one value of every feature."""
        ...

    def can_train(self, architecture: Any, batch_size: int) -> bool:
        """Whether the network trains at this batch size."""
        ...

    def rough_sizes(self, architecture: Any) -> RoughSizes:
        """The network's sizes, in microseconds."""
        ...

    def build(self, architecture: Any) -> nn.Module:
        """The network, on torch's current default device, returning logits."""
        ...

    def tensors(self, architecture: Any) -> tuple[tuple[TensorSpec, ...], TensorSpec]:
        """The inputs of the forward pass, and the targets of the loss."""
        ...


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The training loss of every family, cross-entropy: of logits ``[batch, classes, …]``, or of a
    language model's ``[batch, tokens, vocabulary]``.

    The logits are not cast first: autocast computes the loss in fp32, pure bf16 in bf16.
    """
    from torch.nn import functional

    if outputs.shape[:-1] == targets.shape and targets.ndim == 2:
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
    return functional.cross_entropy(outputs, targets)


def family(name: str) -> Family:
    """The family called ``name``.

    Raises:
        DatasetError: lists the families.
    """
    if name not in FAMILY_NAMES:
        raise DatasetError(f"family must be one of {', '.join(FAMILY_NAMES)}, not {describe(name)}")
    return cast(Family, importlib.import_module(f"{__name__}.{name}"))


def parse_architecture(family_name: str, document: Any) -> Architecture:
    """The architecture from :meth:`Architecture.to_dict`.

    Raises:
        DatasetError: on unknown or missing values.
    """
    try:
        values = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in document.items()
        }
        return family(family_name).ARCHITECTURE(**values)
    except (AttributeError, TypeError) as error:
        raise DatasetError(f"the architecture is not that of a {family_name}: {error}") from None


@lru_cache(maxsize=8)
def extracted_job(family_name: str, architecture: Any) -> TrainingJob:
    """The job that trains a network, with its layers in the order in which they run, and default
    options.

    The layers are what :mod:`gpumemnet.extract` reads off the family's modules: no network is
    described a second time.

    Raises:
        DatasetError: when the network's library is not installed.
        ExtractError: when the network does not run.
    """
    import torch

    from gpumemnet import large_tensors_on_meta
    from gpumemnet.extract import ExtractOptions, extract_job

    from .blocks import one_of_equal_blocks

    members = family(family_name)
    kernel = getattr(architecture, "attention_kernel", None)
    inputs = tuple(
        torch.empty(
            (_SAMPLES, *spec.shape),
            dtype=torch.float32 if spec.high is None else torch.int64,
            device="meta",
        )
        for spec in members.tensors(architecture)[0]
    )
    with large_tensors_on_meta():
        with one_of_equal_blocks():
            network = members.build(architecture)
        repeats = {
            path: int(module.repeats)
            for path, module in network.named_modules()
            if hasattr(module, "repeats")
        }
        extraction = extract_job(network, inputs, ExtractOptions(attention_kernel=kernel))
    layers: list[Layer] = []
    for path, group in itertools.groupby(
        zip(extraction.job.layers, extraction.layer_names, strict=True),
        lambda each: next((path for path in repeats if f"{each[1]}.".startswith(f"{path}.")), ""),
    ):
        layers += [layer for layer, _ in group] * repeats.get(path, 1)
    return replace(
        extraction.job,
        family=family_name,
        layers=tuple(layers),
        attention_kernel=kernel,
        total_activations=None,
        total_parameters=None,
        trainable_parameters=None,
    )
