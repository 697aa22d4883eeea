"""Draws how a real architecture is trained: training options, what is frozen, and the GPU, as far
as they go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from gpumemnet.gpu import device_profile
from gpumemnet.job.training_job import TrainingOptions
from gpumemnet.physics.optimizers import OPTIMIZER_RULES

FROZEN: Final = ("none", "backbone", "half")
"""What does not train: nothing, all but the last module with parameters, or the first half of the
parameters."""
_GPUS: Final[Mapping[str, float]] = {
    "A100-40GB": 0.2,
    "A100-80GB": 0.22,
    "H100": 0.16,
    "H200": 0.1,
    "RTX 3090": 0.09,
    "RTX 4090": 0.08,
    "RTX 3060": 0.05,
    "L4": 0.05,
    "T4": 0.05,
}
"""GPU → share of the traces.  Their generations differ in attention kernels, cuBLAS workspaces, and
convolution workspaces."""
_OPTIMIZERS: Final[Mapping[str, float]] = {
    "adamw": 0.34,
    "adam": 0.15,
    "sgd_momentum": 0.19,
    "sgd": 0.1,
    "rmsprop": 0.07,
    "adagrad": 0.07,
    "adafactor": 0.08,
}
_IMPLEMENTATIONS: Final[Mapping[str, float]] = {
    "default": 0.52,
    "foreach": 0.16,
    "for_loop": 0.16,
    "fused": 0.16,
}
_PRECISIONS: Final[Mapping[str, float]] = {
    "fp32": 0.34,
    "tf32": 0.06,
    "amp_bf16": 0.26,
    "amp_fp16": 0.2,
    "bf16": 0.14,
}
_PRECISIONS_BEFORE_AMPERE: Final[Mapping[str, float]] = {"fp32": 0.6, "amp_fp16": 0.4}
_ACCUMULATION: Final[Mapping[int, float]] = {1: 0.88, 2: 0.08, 4: 0.04}
_FROZEN: Final[Mapping[str, float]] = {"none": 0.8, "backbone": 0.1, "half": 0.1}
_AMPERE: Final = (8, 0)


@dataclass(frozen=True, slots=True)
class RealOptions:
    """How one network is trained.

    Attributes:
        training: the options of the job.
        frozen: one of :data:`FROZEN`.
        gpu: alias of the GPU whose rules the trace follows.
    """

    training: TrainingOptions
    frozen: str
    gpu: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"training": asdict(self.training), "frozen": self.frozen, "gpu": self.gpu}


def draw_options(draw: np.random.Generator, has_images: bool, keeps_keys: bool) -> RealOptions:
    """Options that go together.

    Args:
        draw: the random generator.
        has_images: whether the network reads images, so that memory format and cuDNN's search
            matter.
        keeps_keys: whether its attention keeps keys and values of the forward pass (``use_cache``):
            it cannot run again then.
    """
    gpu = _weighted(draw, _GPUS)
    is_ampere = device_profile(gpu).compute_capability >= _AMPERE
    optimizer = _weighted(draw, _OPTIMIZERS)
    implementation = _weighted(draw, _IMPLEMENTATIONS)
    if implementation == "fused" and not OPTIMIZER_RULES[optimizer].has_fused:
        implementation = "default"
    training = TrainingOptions(
        optimizer=optimizer,
        optimizer_implementation=implementation,
        precision=_weighted(draw, _PRECISIONS if is_ampere else _PRECISIONS_BEFORE_AMPERE),
        checkpointing="every_block" if draw.random() < 0.22 and not keeps_keys else "none",
        channels_last=bool(has_images and draw.random() < 0.3),
        cudnn_benchmark=bool(draw.random() < (0.45 if has_images else 0.1)),
        gradient_accumulation=_weighted(draw, _ACCUMULATION),
    )
    return RealOptions(training, _weighted(draw, _FROZEN), gpu)


def _weighted(draw: np.random.Generator, shares: Mapping[Any, float]) -> Any:
    choices: Sequence[Any] = tuple(shares)
    weights = np.array(list(shares.values()))
    return choices[int(draw.choice(len(choices), p=weights / weights.sum()))]
