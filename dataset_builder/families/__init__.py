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
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from gpumemnet.errors import DatasetError
from gpumemnet.job.layers import Layer, describe
from gpumemnet.job.training_job import TrainingJob

if TYPE_CHECKING:
    from torch import Tensor, nn

FAMILY_NAMES: Final = ("mlp", "cnn", "transformer", "zoo")
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
class RoughSizes:
    """A network's sizes as its widths and depths give them without building it, within about a
    factor of two of the extracted ones.

    Jobs are drawn and admitted by these: extracting a network takes up to a second, and a draw
    looks at thousands.

    Attributes:
        parameters: elements of all parameters.
        activations: outputs of all layers, elements per sample.
        recomputed_activations: the part that is kept when blocks are recomputed.
        largest: the largest output, elements per sample.
        outputs: logits per sample.
        multiply_adds: operations of one forward pass per sample.
    """

    parameters: float
    activations: float
    recomputed_activations: float
    largest: float
    outputs: float
    multiply_adds: float


class Architecture(Hashable, Protocol):
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

    def obstacle(self, architecture: Any, batch_size: int) -> str | None:
        """Why the network cannot train at this batch size, if so."""
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
    from gpumemnet.extract import ExtractOptions, extract_job

    kernel = getattr(architecture, "attention_kernel", None)
    with _outline(family_name, architecture) as (network, inputs, repeats):
        extraction = extract_job(network, inputs, ExtractOptions(attention_kernel=kernel))
    layers: list[Layer] = []
    for path, group in itertools.groupby(
        zip(extraction.job.layers, extraction.layer_names, strict=True),
        lambda each: next((path for path in repeats if f"{each[1]}.".startswith(f"{path}.")), ""),
    ):
        layers += [layer for layer, _ in group] * repeats.get(path, 1)
    return replace(
        extraction.job,
        family=extraction.job.family if family_name == "zoo" else family_name,
        layers=tuple(layers),
        attention_kernel=kernel,
        total_activations=None,
        total_parameters=None,
        trainable_parameters=None,
    )


@lru_cache(maxsize=8)
def multiply_adds(family_name: str, architecture: Any) -> int:
    """Multiply-add operations of one forward pass for each sample, as torch counts them: the masked
    half of causal attention included, biases not."""
    from torch.utils.flop_counter import FlopCounterMode

    with _outline(family_name, architecture) as (network, inputs, repeats):
        with FlopCounterMode(display=False) as counter:
            network(*inputs)
        counts = {
            module: sum(operators.values())
            for module, operators in counter.get_flop_counts().items()
        }
        root = type(network).__name__
        flops: int = counts["Global"] + sum(
            (times - 1) * counts.get(f"{root}.{path}", 0) for path, times in repeats.items()
        )
    return flops // (2 * _SAMPLES)


@contextmanager
def _outline(
    family_name: str, architecture: Any
) -> Iterator[tuple[nn.Module, tuple[Tensor, ...], dict[str, int]]]:
    """A network with one of each run of equal blocks, its inputs, and path → number of equal
    blocks; on meta tensors, where building and running take no memory."""
    import torch

    from gpumemnet import large_tensors_on_meta

    from .blocks import one_of_equal_blocks

    members = family(family_name)
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
        yield network, inputs, repeats


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
