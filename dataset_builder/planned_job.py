"""A planned job: one network with the options of its run, before anything has been measured.

It holds everything that a measuring process needs.  A resumed campaign recognises finished jobs by
their keys.  :func:`rough_bytes` estimates its memory closely enough to spread samples and to admit
jobs side by side.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from gpumemnet.atomic_files import Document
from gpumemnet.job.layers import Layer
from gpumemnet.job.training_job import (
    MAX_BATCH_SIZE,
    TRAINING_OPTIONS,
    Option,
    TrainingJob,
    TrainingOptions,
)
from gpumemnet.physics.element_types import ELEMENT_BYTES
from gpumemnet.physics.optimizers import OPTIMIZER_RULES, optimizer_copies
from gpumemnet.physics.saved_tensors import LOSS_TENSORS
from gpumemnet.units import MIB

from .families import Architecture, Feature, extracted_job, family, parse_architecture

PROTOCOL: Final = "step-3"
"""Version of the training conventions of :mod:`dataset_builder.measure.training` and of the reading
protocol; stored in every row.

``step-2`` since fp32 leaves convolutions the TF32 that PyTorch lets them use, ``step-3`` since the
label is the steady state.
"""


HALF_PRECISION_KERNELS: Final = ("flash", "cudnn")
"""Attention kernels that take no fp32 tensors."""
MAX_FROZEN_SHARE: Final = 0.99


def _feature(option: Option) -> Feature:
    if option.is_count:
        return Feature(int, option.minimum, option.maximum)
    return Feature(bool) if option.is_switch else Feature(str, choices=option.choices)


_OF_NETWORK_OR_SITE: Final = ("attention_kernel", "ranks")
"""Training options that a recipe does not vary: the architecture has the first, and one process is
measured at a time."""
FEATURES: Final[Mapping[str, Feature]] = {
    "batch_size": Feature(int, 1, MAX_BATCH_SIZE),
    **{
        name: _feature(option)
        for name, option in TRAINING_OPTIONS.items()
        if name not in _OF_NETWORK_OR_SITE
    },
    "frozen_share": Feature(float, 0.0, MAX_FROZEN_SHARE),
}
"""Options that a recipe may declare; the others keep the default of :class:`Options`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(TrainingOptions):
    """How a planned job is trained.

    Attributes:
        batch_size: samples per forward pass.
        optimizer: as in :class:`~gpumemnet.job.training_job.TrainingOptions`, with the default
            of the published datasets.
        frozen_share: share of the layers with parameters, counted from the input, that receive no
            gradient.
    """

    batch_size: int
    optimizer: str = "adam"
    frozen_share: float = 0.0

    def to_dict(self) -> Document:
        """JSON-ready: the arguments of this class."""
        return {name: getattr(self, name) for name in FEATURES}


def can_run(options: Options, attention_kernel: str | None) -> bool:
    """Whether torch can run these options together, and with this scaled-dot-product kernel
    (``ATen/native/transformers/cuda/sdp_utils.cpp``)."""
    if attention_kernel in HALF_PRECISION_KERNELS and options.precision in ("fp32", "tf32"):
        return False
    has_fused = OPTIMIZER_RULES[options.optimizer].has_fused
    return has_fused or options.optimizer_implementation != "fused"


def frozen_layers(share: float, owners: int) -> int:
    """How many of ``owners`` layers with parameters are frozen; the last is always trained."""
    return min(int(share * owners), owners - 1) if owners else 0


def with_frozen_layers(layers: tuple[Layer, ...], share: float) -> tuple[Layer, ...]:
    """The layers as they say that the first of those with parameters, ``share`` of them, are
    frozen."""
    owners = [number for number, layer in enumerate(layers) if layer.parameters]
    frozen = owners[: frozen_layers(share, len(owners))]
    # a layer that trains without parameters of its own has those of the first, the embedding
    shared = [
        number for number, layer in enumerate(layers) if layer.trains and not layer.parameters
    ]
    frozen += shared if frozen else []
    return tuple(
        layer._replace(trains=False) if number in frozen else layer
        for number, layer in enumerate(layers)
    )


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A network of a family, with its training options."""

    family: str
    architecture: Architecture
    options: Options

    @property
    def architecture_json(self) -> str:
        """The architecture as stored in the dataset."""
        return json.dumps(asdict(self.architecture), sort_keys=True)

    @property
    def options_json(self) -> str:
        """The options as stored in the dataset."""
        return json.dumps(self.options.to_dict(), sort_keys=True)

    @property
    def key(self) -> str:
        """16 hexadecimal digits, the same for the same job wherever and whenever it is planned."""
        text = "\n".join((self.family, self.architecture_json, self.options_json))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> Document:
        """JSON-ready; :func:`parse_planned` is the inverse."""
        return asdict(self) | {"options": self.options.to_dict()}


def parse_planned(document: Mapping[str, Any]) -> PlannedJob:
    """A planned job from :meth:`PlannedJob.to_dict`.

    Raises:
        DatasetError: on unknown or missing values of the architecture.
    """
    name = document["family"]
    architecture = parse_architecture(name, document["architecture"])
    return PlannedJob(name, architecture, Options(**document["options"]))


def unextracted_job(planned: PlannedJob) -> TrainingJob:
    """The job with rough totals in place of its layers, for a row that is not yet collected."""
    options = planned.options.to_dict()
    sizes = family(planned.family).rough_sizes(planned.architecture)
    trainable = int(sizes.parameters * (1 - options.pop("frozen_share")))
    return TrainingJob(
        family=planned.family,
        input_elements=_input_elements(planned),
        total_parameters=int(sizes.parameters),
        total_activations=int(sizes.activations),
        trainable_parameters=trainable,
        **options,
    )


def training_job(planned: PlannedJob) -> TrainingJob:
    """The job as a scheduler knows it, with every layer.

    Raises:
        ExtractError: when the network does not run.
    """
    job = extracted_job(planned.family, planned.architecture)
    options = planned.options.to_dict()
    layers = with_frozen_layers(job.layers, options.pop("frozen_share"))
    trainable = sum(layer.parameters for layer in layers if layer.trains)
    return replace(job, layers=layers, trainable_parameters=trainable, **options)


ALLOWANCE_BYTES: Final = 664 * MIB
"""CUDA context, and two cuBLAS workspaces of a Hopper GPU, because forward and backward run on
different host threads."""
RECOMPUTED_SHARE: Final = 0.3
"""Activations that are kept when blocks are recomputed, roughly."""


def rough_bytes(planned: PlannedJob) -> int:
    """Memory of the process that runs ``planned``, CUDA context included, within about a factor of
    two."""
    options = planned.options
    sizes = family(planned.family).rough_sizes(planned.architecture)
    element, trained = ELEMENT_BYTES[options.precision], 1 - options.frozen_share
    weights = sizes.parameters * (element.weight + element.weight_copy)
    gradients = trained * sizes.parameters * element.weight
    copies = optimizer_copies(options.optimizer, options.optimizer_implementation)
    kept = trained * sizes.activations * element.activation
    if options.checkpointing == "every_block":
        kept *= RECOMPUTED_SHARE
    of_loss = LOSS_TENSORS * sizes.outputs * element.uncast
    activations = options.batch_size * (kept + of_loss + 4 * _input_elements(planned))
    tensors = weights + gradients * (1 + copies.state)
    tensors += max(activations, gradients * copies.temporary)
    return int(tensors) + ALLOWANCE_BYTES


def _input_elements(planned: PlannedJob) -> int:
    inputs, _ = family(planned.family).tensors(planned.architecture)
    return sum(math.prod(spec.shape) for spec in inputs)


def operations_per_step(planned: PlannedJob) -> float:
    """Floating-point operations of one optimizer step: forward two, backward four per multiply-add
    (Kaplan et al., 2020)."""
    options = planned.options
    recomputed = 2 if options.checkpointing == "every_block" else 0
    forward = family(planned.family).rough_sizes(planned.architecture).multiply_adds
    return (6 + recomputed) * forward * options.batch_size * options.gradient_accumulation
