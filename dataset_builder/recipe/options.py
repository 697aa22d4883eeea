"""Options of a training run that every family shares and that move memory: optimizer, precision, checkpointing and so on.

All but the share of frozen layers are fields of :class:`~gpumemnet.job.training_job.TrainingJob` under the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpumemnet.errors import DatasetError
from gpumemnet.job.layers import Layer, describe
from gpumemnet.job.training_job import MAX_BATCH_SIZE
from gpumemnet.job.training_options import CHECKPOINTING, OPTIMIZER_IMPLEMENTATIONS, OPTIMIZERS, PRECISIONS

from ..families import Feature

FUSED_OPTIMIZERS: Final = ("sgd", "sgd_momentum", "adam", "adamw")
"""Optimizers with a fused CUDA kernel in torch 2.11."""

HALF_PRECISION_KERNELS: Final = ("flash", "cudnn")
"""Attention kernels that take no fp32 tensors."""

FEATURES: Final[Mapping[str, Feature]] = {
    "batch_size": Feature(int, 1, MAX_BATCH_SIZE),
    "optimizer": Feature(str, choices=OPTIMIZERS),
    "optimizer_implementation": Feature(str, choices=OPTIMIZER_IMPLEMENTATIONS),
    "precision": Feature(str, choices=PRECISIONS),
    "checkpointing": Feature(str, choices=CHECKPOINTING),
    "gradient_accumulation": Feature(int, 1, 1024),
    "channels_last": Feature(bool),
    "cudnn_benchmark": Feature(bool),
    "frozen_share": Feature(float, 0.0, 0.99),
}
"""Options that a recipe may declare; what it leaves out keeps the default of :class:`Options`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a network is trained.

    Attributes:
        batch_size: samples per forward pass.
        optimizer, optimizer_implementation, precision, checkpointing, gradient_accumulation, channels_last,
            cudnn_benchmark: as in :class:`~gpumemnet.job.training_job.TrainingJob`.
        frozen_share: share of the layers with parameters, counted from the input, that receive no gradient.

    Raises:
        DatasetError: on a value that :data:`FEATURES` does not allow.
    """

    batch_size: int
    optimizer: str = "adam"
    optimizer_implementation: str = "default"
    precision: str = "fp32"
    checkpointing: str = "none"
    gradient_accumulation: int = 1
    channels_last: bool = False
    cudnn_benchmark: bool = False
    frozen_share: float = 0.0

    def __post_init__(self) -> None:
        for name, feature in FEATURES.items():
            value = getattr(self, name)
            if feature.kind is str:
                allowed = value in feature.choices
            elif feature.kind is bool:
                allowed = isinstance(value, bool)
            else:
                number = type(value) in ((int,) if feature.kind is int else (int, float))
                allowed = number and feature.minimum <= value <= feature.maximum
            if not allowed:
                raise DatasetError(f"the option {name} cannot be {describe(value)}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; :func:`parse_options` is the inverse."""
        return {name: getattr(self, name) for name in FEATURES}


def parse_options(document: Mapping[str, Any]) -> Options:
    """Options from :meth:`Options.to_dict`.

    Raises:
        DatasetError: on unknown, missing or impossible values.
    """
    try:
        return Options(**document)
    except TypeError as error:
        raise DatasetError(f"no options: {error}") from None


def option_obstacle(options: Options) -> str | None:
    """Why torch cannot run these options together, if so."""
    if options.optimizer_implementation == "fused" and options.optimizer not in FUSED_OPTIMIZERS:
        return f"{options.optimizer} has no fused implementation"
    return None


def kernel_obstacle(attention_kernel: str | None, precision: str) -> str | None:
    """Why a scaled-dot-product kernel cannot run in a precision, if so (``ATen/native/transformers/cuda/sdp_utils.cpp``)."""
    if attention_kernel in HALF_PRECISION_KERNELS and precision in ("fp32", "tf32"):
        return f"the {attention_kernel} attention kernel runs in fp16 and bf16 only, not in {precision}"
    return None


def frozen_layers(share: float, owners: int) -> int:
    """How many of ``owners`` layers with parameters are frozen; the last is always trained."""
    return min(int(share * owners), owners - 1) if owners else 0


def trainable_parameters(layers: tuple[Layer, ...], share: float) -> int:
    """Parameters that receive gradients when ``share`` of the layers with parameters is frozen."""
    owned = [layer.parameters for layer in layers if layer.parameters]
    return sum(owned[frozen_layers(share, len(owned)) :])
