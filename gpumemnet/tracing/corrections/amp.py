"""``torch.autocast("cuda")`` and ``GradScaler("cuda")`` without a GPU: they act instead of switching themselves off.

Python's side of mixed precision asks whether CUDA is there, whether a tensor's device is called ``cuda``, and how large a scale
is.  Inside :func:`cuda_autocast` the answers are those of the GPU that the trace is for; the casts themselves are in
:mod:`gpumemnet.tracing.corrections.autocast`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpumemnet.tracing.corrections.autocast import forget_casts
from gpumemnet.tracing.platform import Platform
from gpumemnet.tracing.torch_private import mixed_precision as names
from gpumemnet.tracing.torch_private.names import replaced


@contextmanager
def cuda_autocast(platform: Platform) -> Iterator[None]:
    """Context in which ``torch.autocast("cuda")`` sets PyTorch's state, gradient scalers scale, and checkpoints know the GPU.

    A scaler's step is never skipped: no gradient of a meta tensor overflows.  Thread-local state and everything replaced here are
    put back on exit.
    """
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    replacements = (
        (names.AMP_UNAVAILABLE, lambda: False),
        (names.BF16_SUPPORT, _bf16_support(platform)),
        (names.CLEAR_AUTOCAST_CACHE, _clearing(names.CLEAR_AUTOCAST_CACHE.value())),
        (names.AUTOCAST_CAST, _cast_as_cuda(names.AUTOCAST_CAST.value())),
        (names.CHECKPOINT_DEVICE, _cuda_for_meta(names.CHECKPOINT_DEVICE.value())),
        (names.SCALER_STEP, _step),
        (names.SCALER_SCALE, names.initial_scale),
        (names.SCALER_GROWTH, names.initial_growth),
    )
    with replaced(replacements):
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", enabled)
            torch.set_autocast_dtype("cuda", dtype)
            forget_casts()


def _bf16_support(platform: Platform) -> Callable[..., bool]:
    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation or platform.compute_capability[0] >= 8

    return is_bf16_supported


def _clearing(original: Callable[[], None]) -> Callable[[], None]:
    def clear_autocast_cache() -> None:
        original()
        forget_casts()

    return clear_autocast_cache


def _cast_as_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``custom_fwd(cast_inputs=…)``: casts tensors on the device that it names, which are the meta tensors here."""

    def cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return original(value, "meta" if device_type == "cuda" else device_type, dtype)

    return cast


def _cuda_for_meta(original: Callable[..., str]) -> Callable[..., str]:
    """For checkpoints, which enter the autocast region of this device again; without tensors PyTorch takes the accelerator."""

    def infer_device_type(*args: Any) -> str:
        device_type = original(*args)
        return "cuda" if device_type in ("meta", "cpu") else device_type

    return infer_device_type


def _step(scaler: Any, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    return optimizer.step(*args, **kwargs)
