"""How a planned job is trained: the project's training options, the batch size, and the share of
frozen layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpumemnet.errors import DatasetError, InvalidJobError
from gpumemnet.job.layers import Layer, check_count, describe
from gpumemnet.job.training_job import MAX_BATCH_SIZE, TRAINING_OPTIONS, Option, TrainingOptions
from gpumemnet.physics.optimizers import OPTIMIZER_RULES

from ..families import Feature

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

    Raises:
        DatasetError: on a value that :data:`FEATURES` does not allow.
    """

    batch_size: int
    optimizer: str = "adam"
    frozen_share: float = 0.0

    def __post_init__(self) -> None:
        try:
            TrainingOptions.__post_init__(self)
            check_count(self.batch_size, "batch_size", 1, MAX_BATCH_SIZE)
        except InvalidJobError as error:
            raise DatasetError(f"option {error.field} {error.reason}") from None
        if (
            type(self.frozen_share) not in (int, float)
            or not 0.0 <= self.frozen_share <= MAX_FROZEN_SHARE
        ):
            raise DatasetError(
                f"option frozen_share must be a number from 0 to {MAX_FROZEN_SHARE}, not {describe(self.frozen_share)}"
            )

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
        raise DatasetError(f"these are not the options of a job: {error}") from None


def option_obstacle(options: Options) -> str | None:
    """Why torch cannot run these options together, if so."""
    if (
        options.optimizer_implementation == "fused"
        and not OPTIMIZER_RULES[options.optimizer].has_fused
    ):
        return f"{options.optimizer} has no fused implementation"
    return None


def kernel_obstacle(attention_kernel: str | None, precision: str) -> str | None:
    """Why a scaled-dot-product kernel cannot run in a precision, if so
    (``ATen/native/transformers/cuda/sdp_utils.cpp``)."""
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
