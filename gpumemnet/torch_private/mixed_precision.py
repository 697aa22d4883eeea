"""Replaced names of mixed precision: whether CUDA is there, how values are cast, what a gradient
scaler does with its scale."""

from __future__ import annotations

from typing import Any, Final

import torch

from gpumemnet.torch_private.names import check, declare, has_parameters

AMP_UNAVAILABLE: Final = declare(
    "torch.cuda.amp.common:amp_definitely_not_available", "let gradient scalers scale without a GPU"
)
BF16_SUPPORT: Final = declare(
    "torch.cuda:is_bf16_supported", "let autocast use bfloat16 where the GPU has it"
)
CLEAR_AUTOCAST_CACHE: Final = declare(
    "torch:clear_autocast_cache", "forget casts when PyTorch does"
)
AUTOCAST_CAST: Final = declare(
    "torch.amp.autocast_mode:_cast",
    "cast for custom_fwd(cast_inputs=…)",
    probe=has_parameters("torch.amp.autocast_mode:_cast", "value", "device_type", "dtype"),
)
CHECKPOINT_DEVICE: Final = declare(
    "torch.utils.checkpoint:_infer_device_type",
    "let checkpoints enter autocast again as on a GPU",
    probe=has_parameters("torch.utils.checkpoint:_infer_device_type", "args"),
)
AUTOCAST_BY_DEVICE: Final = (
    declare(
        "torch.amp.autocast_mode:autocast.__init__",
        "enter autocast for the device of a meta tensor",
    ),
    declare(
        "torch:is_autocast_enabled", "answer for the device of a meta tensor whether autocast is on"
    ),
    declare(
        "torch:get_autocast_dtype", "answer for the device of a meta tensor which type autocast has"
    ),
)
"""Functions of autocast that take a device by its name."""
SCALER_STEP: Final = declare(
    "torch.amp.grad_scaler:GradScaler._maybe_opt_step",
    "let gradient scalers step without reading whether gradients overflow",
    probe=has_parameters(
        "torch.amp.grad_scaler:GradScaler._maybe_opt_step", "self", "optimizer", "optimizer_state"
    ),
)
SCALER_SCALE: Final = declare(
    "torch.amp.grad_scaler:GradScaler.get_scale", "answer for the scale, which has no value"
)
SCALER_GROWTH: Final = declare(
    "torch.amp.grad_scaler:GradScaler._get_growth_tracker",
    "answer for the growth tracker, which has no value",
)


def initial_scale(scaler: Any) -> float:
    """The scale that a ``GradScaler`` begins with; 1 for one that is switched off."""
    return float(scaler._init_scale) if scaler._enabled else 1.0


def initial_growth(scaler: Any) -> int:
    """The growth tracker that a ``GradScaler`` begins with; 0 for one that is switched off."""
    return int(scaler._init_growth_tracker) if scaler._enabled else 0


def _probe_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    check(
        initial_scale(scaler) == 8.0 and initial_growth(scaler) == 0,
        "a scaler does not begin with the scale that it is given",
    )
    check(
        initial_scale(torch.amp.GradScaler("cpu", enabled=False)) == 1.0,
        "a scaler that is switched off has a scale",
    )


declare(
    "torch.amp.grad_scaler:GradScaler.__init__",
    "read the scale that a scaler begins with",
    probe=_probe_scaler,
)
