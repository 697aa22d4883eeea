"""The families of networks that the builder measures, and the functions that each family provides.

A family is one module.  It provides:

* ``FEATURES``: the features of the search space, of which a recipe declares every one;
* ``ARCHITECTURE``: the subclass of :class:`Architecture` that describes one network;
* ``compose(values)``: the architecture for one value of every feature;
* ``can_train(architecture, batch_size)``: whether the network trains at this batch size;
* ``rough_sizes(architecture)``: the network's :class:`RoughSizes`, in microseconds;
* ``build(architecture)``: the network, on torch's current default device, returning logits;
* ``tensors(architecture)``: a :class:`TensorSpec` of every input of the forward pass, and one of
  the targets of the loss.

A new family is a new module here, its name in the product's list of families, and a recipe: no
other module of the builder depends on the kind of network.
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
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from gpumemnet.errors import DatasetError
from gpumemnet.job.layers import Layer, describe
from gpumemnet.job.training_job import FAMILIES, TrainingJob

if TYPE_CHECKING:
    from torch import Tensor

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


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The training loss of every family, cross-entropy: of logits ``[batch, classes, …]``, or of a
    language model's ``[batch, tokens, vocabulary]``.

    The logits are not cast first: autocast computes the loss in fp32, pure bf16 in bf16.
    """
    from torch.nn import functional

    if outputs.shape[:-1] == targets.shape and targets.ndim == 2:
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
    return functional.cross_entropy(outputs, targets)


def family(name: str) -> ModuleType:
    """The module of the family called ``name``.

    Raises:
        DatasetError: lists the families.
    """
    if name not in FAMILIES:
        raise DatasetError(f"family must be one of {', '.join(FAMILIES)}, not {describe(name)}")
    return importlib.import_module(f"{__name__}.{name}")


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
