"""Makes ``torch.autocast("cuda")`` and ``GradScaler("cuda")`` work without a GPU, where they would
switch themselves off.

PyTorch's Python code for mixed precision checks whether CUDA is available, whether a tensor's
device is ``cuda``, and how large a scale is.  Inside :func:`cuda_autocast` the answers are those of
the simulated GPU.  The casts themselves are in :mod:`gpumemnet.tracing.corrections.autocast`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpumemnet.torch_private import training as names
from gpumemnet.torch_private.names import replaced
from gpumemnet.tracing.corrections.autocast import forget_casts
from gpumemnet.tracing.platform import Platform


@contextmanager
def cuda_autocast(platform: Platform) -> Iterator[None]:
    """Context in which ``torch.autocast("cuda")``, gradient scalers and checkpoints work as on a
    GPU.

    A scaler never skips a step: no gradient of a meta tensor overflows.  Thread-local state and
        replaced names are restored
    on exit.
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
    """For ``custom_fwd(cast_inputs=…)``: cast meta tensors where it names ``cuda``."""

    def cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return original(value, "meta" if device_type == "cuda" else device_type, dtype)

    return cast


def _cuda_for_meta(original: Callable[..., str]) -> Callable[..., str]:
    """For checkpoints, which enter the autocast region of this device again: name ``cuda`` for meta
    tensors."""

    def infer_device_type(*args: Any) -> str:
        device_type = original(*args)
        return "cuda" if device_type in ("meta", "cpu") else device_type

    return infer_device_type


def _step(
    scaler: Any, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    return optimizer.step(*args, **kwargs)
