"""Private and replaced names of how a training step computes: optimizers, mixed precision, the
order of attention kernels, and Dynamo, which a trace keeps from being imported.

Optimizers, checkpoints and reference kernels are wrapped in a function that imports
``torch._dynamo`` on its first call, which takes more than a second, only to exclude itself from
compilation (``torch/_compile.py``).  A placeholder module answers that call.  Any other access
loads the real module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch
from torch.optim import LBFGS

from gpumemnet.torch_private.names import (
    Function,
    replaced,
    value_of,
)

_CAPTURABLE: Final = tuple(
    f"torch.optim.{module}:_get_capturable_supported_devices"
    for module in ("adadelta", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop")
)
"""To let optimizers count their steps on a GPU."""


_SUPPORTED: Final = tuple(
    f"{module}:_get_{kind}_kernels_supported_devices"
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils")
    for kind in ("foreach", "fused")
)
"""To let optimizers choose the implementation that they choose on a GPU."""


def gpu_optimizers() -> AbstractContextManager[None]:
    """Context in which optimizers treat meta parameters as CUDA's: foreach by default, fused where
    asked for."""

    def with_meta(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
        @wraps(original)  # TorchScript, of torch.distributed.optim, compiles the original
        def supported(*args: object, **kwargs: object) -> list[str]:
            return [*original(*args, **kwargs), "cuda", "meta"]

        return supported

    return replaced((name, with_meta(value_of(name))) for name in (*_SUPPORTED, *_CAPTURABLE))


def history_of_first_step(optimizer: LBFGS) -> list[torch.Tensor]:
    """Return what the updates take that ``optimizer`` keeps while it makes its first step."""
    group = optimizer.param_groups[0]
    size = sum(each.numel() for each in group["params"])
    updates = 0 if optimizer.state else min(group["history_size"], group["max_iter"] - 1)
    return [group["params"][0].new_empty(size) for _ in range(2 * updates)]


def fill_history(optimizer: LBFGS) -> None:
    """Give ``optimizer``, which has made a step, as many past updates as it keeps at most."""
    group = optimizer.param_groups[0]
    state = optimizer.state[group["params"][0]]
    missing = group["history_size"] - len(state["old_dirs"])
    state["old_dirs"] += [torch.empty_like(state["d"]) for _ in range(missing)]
    state["old_stps"] += [torch.empty_like(state["d"]) for _ in range(missing)]
    state["H_diag"] = state["d"].new_empty(())
    state["ro"] += [state["d"].new_empty(()) for _ in range(missing)]


AMP_UNAVAILABLE: Final = "torch.cuda.amp.common:amp_definitely_not_available"
"""To let gradient scalers scale without a GPU."""
BF16_SUPPORT: Final = "torch.cuda:is_bf16_supported"
"""To let autocast use bfloat16 where the GPU has it."""
CLEAR_AUTOCAST_CACHE: Final = "torch:clear_autocast_cache"
"""To forget casts when PyTorch does."""
AUTOCAST_ENTRY: Final = "torch:autocast_increment_nesting"
AUTOCAST_EXIT: Final = "torch:autocast_decrement_nesting"
"""To count regions of autocast, each returning how many there are."""
AUTOCAST_CAST: Final = "torch.amp.autocast_mode:_cast"
"""To cast for custom_fwd(cast_inputs=…)."""
CHECKPOINT_DEVICE: Final = "torch.utils.checkpoint:_infer_device_type"
"""To let checkpoints enter autocast again as on a GPU."""
AUTOCAST_BY_DEVICE: Final = (
    "torch.amp.autocast_mode:autocast.__init__",
    "torch:is_autocast_enabled",
    "torch:get_autocast_dtype",
)
"""Functions of autocast that take a device by its name."""
SCALER_STEP: Final = "torch.amp.grad_scaler:GradScaler._maybe_opt_step"
"""To let gradient scalers step without reading whether gradients overflow."""
SCALER_SCALE: Final = "torch.amp.grad_scaler:GradScaler.get_scale"
"""To answer for the scale, which has no value."""
SCALER_GROWTH: Final = "torch.amp.grad_scaler:GradScaler._get_growth_tracker"
"""To answer for the growth tracker, which has no value."""


def initial_scale(scaler: Any) -> float:
    """The scale that a ``GradScaler`` begins with; 1 for one that is switched off."""
    return float(scaler._init_scale) if scaler._enabled else 1.0


def initial_growth(scaler: Any) -> int:
    """The growth tracker that a ``GradScaler`` begins with; 0 for one that is switched off."""
    return int(scaler._init_growth_tracker) if scaler._enabled else 0


SDP_BACKENDS: Final = {0: "math", 1: "flash", 2: "memory_efficient", 3: "cudnn"}
"""Number in ``at::SDPBackend`` → name of the kernel."""


def kernel_order() -> tuple[str, ...]:
    """The kernels in the order in which PyTorch tries them."""
    return tuple(
        SDP_BACKENDS[number]
        for number in torch._C._get_sdp_priority_order()
        if number in SDP_BACKENDS
    )


def enabled_kernels() -> frozenset[str]:
    """The kernels that are switched on: users switch them in their code, even around single
    calls."""
    cuda: Any = torch.backends.cuda
    switches = {
        "flash": cuda.flash_sdp_enabled,
        "memory_efficient": cuda.mem_efficient_sdp_enabled,
        "cudnn": cuda.cudnn_sdp_enabled,
        "math": cuda.math_sdp_enabled,
    }
    return frozenset(name for name, is_enabled in switches.items() if is_enabled())


_DYNAMO: Final = "torch._dynamo"
_DISABLED: Final = "__dynamo_disable"
"""Attribute in which PyTorch keeps the function that Dynamo has excluded from compilation."""


class _Placeholder(ModuleType):
    """``torch._dynamo`` until something needs the real one."""

    def __init__(self) -> None:
        super().__init__(_DYNAMO)
        self.disabled: list[Any] = []

    def disable(self, function: Function | None = None, *args: Any, **kwargs: Any) -> Function:
        """Return the function unchanged, because without Dynamo nothing compiles it; without one,
        return a decorator."""
        if function is None:
            return self.disable
        self.disabled.append(function)
        return function

    def graph_break(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no graph is recorded."""

    def __getattr__(self, name: str) -> Any:
        if name in (
            "__spec__",
            "__wrapped__",
            "__file__",
        ):  # ``inspect`` reads these of every loaded module
            raise AttributeError(name)
        _withdraw(self)
        return getattr(import_module(_DYNAMO), name)


def _withdraw(placeholder: _Placeholder) -> None:
    """Remove the placeholder, so that the next import of ``torch._dynamo`` loads the real
    module."""
    if sys.modules.get(_DYNAMO) is placeholder:
        del sys.modules[_DYNAMO]
        vars(torch).pop("_dynamo", None)
    for function in placeholder.disabled:
        vars(function).pop(_DISABLED, None)
    placeholder.disabled.clear()


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Context in which only code that uses Dynamo loads it; without effect where it is loaded
    already."""
    if _DYNAMO in sys.modules:
        yield
        return
    placeholder = _Placeholder()
    sys.modules[_DYNAMO] = placeholder
    vars(torch)["_dynamo"] = placeholder
    try:
        yield
    finally:
        _withdraw(placeholder)
