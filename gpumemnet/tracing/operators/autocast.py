"""Mixed precision on meta tensors: the casts of autocast for CUDA, and ``GradScaler``.

The lists are those of :mod:`gpumemnet.physics.element_types`, the rules those of
``aten/src/ATen/autocast_mode.cpp``, whose kernels look for tensors on a GPU.  All casts happen
ahead of autograd, with the cache of cast weights.  Whether a region is entered, with which type, is
PyTorch's own thread-local state.

PyTorch's Python code for mixed precision checks whether CUDA is available, whether a tensor's
device is ``cuda``, and how large a scale is.  Inside :func:`cuda_kernels` the answers are those of
the simulated GPU, so that ``torch.autocast("cuda")`` and ``GradScaler("cuda")`` do not switch
themselves off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gpumemnet.extract.known_layouts import argument_tensors
from gpumemnet.physics.element_types import (
    BANNED,
    FLOAT32,
    FLOAT32_APPENDED,
    FLOAT32_RESULT,
    LOWER_PRECISION,
    PROMOTE,
)
from gpumemnet.torch_private import training
from gpumemnet.torch_private.engine import backward_runs
from gpumemnet.torch_private.names import (
    Arguments,
    Function,
    InferenceMode,
    Keywords,
    aten,
    find_operator,
    is_view,
    overriding_kernels,
    replaced,
    schema,
    value_of,
    without_function_modes,
)
from gpumemnet.tracing.operators.attention import attention
from gpumemnet.tracing.operators.rules import OVERRIDES, Kernel, Platform

_CASTABLE: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})

_casts: Final[MutableMapping[Tensor, Tensor]] = WeakTensorKeyDictionary()
"""Leaf → its copy in lower precision, made since the outermost region was entered."""


def forget_casts() -> None:
    """Empty the cache, as PyTorch does at the end of the outermost region."""
    _casts.clear()


def autocast_overrides() -> dict[Any, Kernel]:
    """Return the kernels that cast, without operators that this version of PyTorch lacks."""
    return {
        **_overrides(LOWER_PRECISION, lambda operator: _lower_precision),
        **_overrides(
            FLOAT32,
            lambda operator: (
                lambda original, *args, **kwargs: _with_casts(original, torch.float32, args, kwargs)
            ),
        ),
        **_overrides(
            FLOAT32_RESULT, lambda operator: partial(_float32_result, _dtype_position(operator))
        ),
        **_overrides(
            FLOAT32_APPENDED,
            lambda operator: partial(
                _float32_appended, find_operator(FLOAT32_APPENDED[_name(operator)])
            ),
        ),
        **_overrides(PROMOTE, lambda operator: _promote),
        **_overrides(BANNED, lambda operator: _banned),
    }


def _overrides(names: Iterable[str], kernel_of: Callable[[Any], Kernel]) -> dict[Any, Kernel]:
    operators = filter(None, map(find_operator, names))
    return {operator: _in_region(kernel_of(operator)) for operator in operators}


def _in_region(kernel: Kernel) -> Kernel:
    """Return a kernel that runs ``kernel`` inside a region of autocast, and the operator itself
    elsewhere."""

    def run(original: Function, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cuda"):
            return original(*args, **kwargs)
        torch.set_autocast_enabled("cuda", False)
        try:
            return kernel(original, *args, **kwargs)
        finally:
            torch.set_autocast_enabled("cuda", True)

    return run


def _lower_precision(original: Function, *args: Any, **kwargs: Any) -> Any:
    # Factors lie on one device: beside a meta tensor, small ones with values are on the GPU too.
    has_meta = any(map(_is_castable, argument_tensors(args, kwargs)))
    return _with_casts(original, torch.get_autocast_dtype("cuda"), args, kwargs, has_meta)


def _promote(original: Function, *args: Any, **kwargs: Any) -> Any:
    lower = torch.get_autocast_dtype("cuda")
    widest = lower
    for tensor in filter(_is_castable, argument_tensors(args, kwargs)):
        if tensor.dtype == torch.float32:
            widest = torch.float32
        elif tensor.is_floating_point() and tensor.dtype not in (lower, torch.float64):
            raise RuntimeError(f"autocast to {lower} cannot promote {tensor.dtype}")
    return _with_casts(original, widest, args, kwargs)


def _float32_result(position: int | None, original: Function, *args: Any, **kwargs: Any) -> Any:
    if _is_castable(args[0]):
        if position is not None and len(args) > position:
            args = (
                *args[:position],
                torch.float32 if args[position] is None else args[position],
                *args[position + 1 :],
            )
        elif kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.float32
    return original(*args, **kwargs)


def _float32_appended(with_dtype: Any, original: Function, *args: Any, **kwargs: Any) -> Any:
    defaults = {1: (2,), 3: (False,)}.get(len(args), ())
    return with_dtype(
        *args, *defaults, **kwargs, dtype=torch.float32 if _is_castable(args[0]) else args[0].dtype
    )


def _banned(original: Function, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "binary_cross_entropy is unsafe under autocast: use binary_cross_entropy_with_logits, without the sigmoid"
    )


def _with_casts(
    original: Function,
    dtype: torch.dtype,
    args: Arguments,
    kwargs: Keywords,
    with_real: bool = False,
) -> Any:
    """Call with cast tensors: the last argument is cast first, as GCC compiles it, and the first
    one is freed first."""
    named = [_cast(value, dtype, with_real) for value in reversed(kwargs.values())]
    placed = [_cast(value, dtype, with_real) for value in reversed(args)]
    return original(*reversed(placed), **dict(zip(kwargs, reversed(named), strict=True)))


def _cast(value: Any, dtype: torch.dtype, with_real: bool) -> Any:
    if isinstance(value, Tensor):
        if value.dtype == dtype or not _is_castable(value, with_real):
            return value
        is_cached = _is_cached(value, dtype)
        cast = _casts.get(value) if is_cached else None
        if cast is None:
            # The code did not request it; a later pass with gradients uses it as well.
            with_gradient = is_cached or torch.is_grad_enabled()
            with without_function_modes(), torch.set_grad_enabled(with_gradient):
                cast = value.to(dtype)
            if is_cached:
                _casts[value] = cast
        return cast
    if isinstance(value, list | tuple):
        return [_cast(entry, dtype, with_real) for entry in value]
    return value


def _is_castable(value: Any, with_real: bool = False) -> bool:
    return isinstance(value, Tensor) and (value.is_meta or with_real) and value.dtype in _CASTABLE


def _is_cached(tensor: Tensor, dtype: torch.dtype) -> bool:
    return (
        tensor.dtype == torch.float32
        and dtype == torch.get_autocast_dtype("cuda")
        and tensor.requires_grad
        and tensor.is_leaf
        and not is_view(tensor)
        and torch.is_autocast_cache_enabled()
        and not InferenceMode.is_on
    )


def _dtype_position(operator: Any) -> int | None:
    """Return the position of ``dtype`` among the positional arguments; ``None`` if it is
    keyword-only."""
    for position, argument in enumerate(schema(operator).arguments):
        if argument.name == "dtype":
            return None if argument.kwarg_only else position
    raise AssertionError(f"{operator} has no dtype")


def _name(operator: Any) -> str:
    return str(operator).removeprefix("aten.").removesuffix(".default")


@contextmanager
def cuda_kernels(platform: Platform) -> Iterator[None]:
    """Context in which operators, autocast, gradient scalers and optimizers run as on CUDA.

    Autocast casts before any other kernel sees a tensor's type.
    """
    own: dict[Any, Kernel] = {
        aten.scaled_dot_product_attention.default: partial(attention, platform),
        **OVERRIDES,
    }
    casts = autocast_overrides()
    both = {each: _cast_first(casts[each], own[each]) for each in casts.keys() & own.keys()}
    kernels = overriding_kernels({**own, **casts, **both})
    with _cuda_autocast(platform), training.gpu_optimizers(), kernels:
        yield


def _cast_first(cast: Kernel, kernel: Kernel) -> Kernel:
    return lambda original, *args, **kwargs: cast(partial(kernel, original), *args, **kwargs)


@contextmanager
def _cuda_autocast(platform: Platform) -> Iterator[None]:
    """Context in which ``torch.autocast("cuda")``, gradient scalers and checkpoints work as on a
    GPU.

    A scaler never skips a step: no gradient of a meta tensor overflows.  Thread-local state and
    replaced names are restored on exit.
    """
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    regions = Counter[bool]()

    def nested(change: int) -> int:
        # The engine's thread has regions of its own: the end of its outermost one empties the cache.
        regions[backward_runs()] += change
        return regions[backward_runs()]

    replacements = (
        (training.AMP_UNAVAILABLE, lambda: False),
        (
            training.BF16_SUPPORT,
            lambda including_emulation=True: (
                including_emulation or platform.compute_capability[0] >= 8
            ),
        ),
        (training.AUTOCAST_ENTRY, lambda: nested(1)),
        (training.AUTOCAST_EXIT, lambda: nested(-1)),
        (training.CLEAR_AUTOCAST_CACHE, _clearing(value_of(training.CLEAR_AUTOCAST_CACHE))),
        (training.AUTOCAST_CAST, _cast_as_cuda(value_of(training.AUTOCAST_CAST))),
        (training.CHECKPOINT_DEVICE, _cuda_for_meta(value_of(training.CHECKPOINT_DEVICE))),
        (
            training.SCALER_STEP,
            lambda scaler, optimizer, state, *args, **kwargs: optimizer.step(*args, **kwargs),
        ),
        (training.SCALER_SCALE, training.initial_scale),
        (training.SCALER_GROWTH, training.initial_growth),
    )
    with replaced(replacements):
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", enabled)
            torch.set_autocast_dtype("cuda", dtype)
            forget_casts()


def _clearing(original: Callable[[], None]) -> Callable[[], None]:
    def clear_autocast_cache() -> None:
        original()
        forget_casts()

    return clear_autocast_cache


def _cast_as_cuda(original: Function) -> Function:
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
