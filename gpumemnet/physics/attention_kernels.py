"""Chooses the kernel that ``scaled_dot_product_attention`` runs on a CUDA GPU, without calling
PyTorch.

The rules are those of PyTorch 2.13 for dense tensors
(``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` and ``sdp_utils_cpp.h``).  PyTorch tries
the kernels in order.  The first that is enabled and supports the call runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

FLASH: Final = "flash"
EFFICIENT: Final = "memory_efficient"
CUDNN: Final = "cudnn"
MATH: Final = "math"
KERNELS: Final = (FLASH, EFFICIENT, CUDNN, MATH)
"""The names of the kernels."""

DEFAULT_ORDER: Final = (FLASH, EFFICIENT, MATH, CUDNN)
"""Default of ``at::Context::sdp_priority_order``."""

_HALF: Final = frozenset({"float16", "bfloat16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """An attention mask.

    Attributes:
        shape: its shape, two to four dimensions.
        requires_grad: whether the mask requires a gradient.
        contiguous_rows: whether its last dimension has stride 1.
    """

    shape: tuple[int, ...]
    requires_grad: bool = False
    contiguous_rows: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """The properties of a call on which the choice depends.

    Attributes:
        query, key, value: shapes, ``[batch, heads, length, head size]`` for all kernels but the
            math kernel.
        dtype: name of the query's type.
        same_dtype: whether key and value have the query's type.
        contiguous_rows: whether the last dimension of query, key and value has stride 1.
        mask: the mask; ``None`` without one.
        dropout: probability of dropout.
        is_causal, enable_gqa: as in the call.
        requires_grad: whether gradients are recorded and query, key or value requires one.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: str
    same_dtype: bool = True
    contiguous_rows: bool = True
    mask: Mask | None = None
    dropout: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False
    requires_grad: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSetup:
    """The GPU and the settings on which the choice depends.

    Attributes:
        compute_capability: major and minor.
        enabled: names of the kernels that are enabled.
        order: the priority order, see :data:`DEFAULT_ORDER`.
        cudnn_version: such as 91900 for cuDNN 9.19.0.
        cudnn_first: whether cuDNN may move to the front; ``TORCH_CUDNN_SDPA_DEPRIORITIZED`` forbids
            it.
        coarse_dropout: whether the cuDNN kernel requires ``dropout`` to be a multiple of 1/16, as
            in PyTorch 2.12 and later.
        deterministic: whether deterministic algorithms are required, not only preferred.
    """

    compute_capability: tuple[int, int]
    enabled: frozenset[str] = frozenset(KERNELS)
    order: tuple[str, ...] = DEFAULT_ORDER
    cudnn_version: int = 92000
    cudnn_first: bool = True
    coarse_dropout: bool = True
    deterministic: bool = False


def choose_kernel(call: AttentionCall, setup: AttentionSetup) -> str | None:
    """Return the name of the kernel that runs, or ``None`` if no kernel supports the call and
    PyTorch raises."""
    return next((kernel for kernel in _order(setup) if obstacle(kernel, call, setup) is None), None)


def obstacle(kernel: str, call: AttentionCall, setup: AttentionSetup) -> str | None:
    """Return why ``kernel`` cannot run the call, or ``None`` if it can."""
    if kernel not in setup.enabled:
        return "it is switched off"
    if kernel == MATH:
        return None
    if not len(call.query) == len(call.key) == len(call.value) == 4:
        return "query, key and value must have four dimensions"
    reason = _OBSTACLES[kernel](call, setup)
    if reason is not None:
        return reason
    if call.query[-2] == 0 or call.key[-2] == 0:
        return "a sequence is empty"
    if not (call.contiguous_rows or (kernel != EFFICIENT and call.query[-1] == 1)):
        return "the last dimension of query, key and value must have stride 1"
    if call.mask is not None and not call.mask.contiguous_rows:
        return "the last dimension of the mask must have stride 1"
    return _heads_obstacle(kernel, call)


def _order(setup: AttentionSetup) -> tuple[str, ...]:
    major, minor = setup.compute_capability
    prefers_cudnn = (
        setup.cudnn_first and setup.cudnn_version > 91500 and major in (9, 10) and minor in (0, 3)
    )
    # PyTorch moves cuDNN once, at the first call, and keeps an order that the user sets later.
    return (
        (CUDNN, FLASH, EFFICIENT, MATH)
        if prefers_cudnn and setup.order == DEFAULT_ORDER
        else setup.order
    )


def _heads_obstacle(kernel: str, call: AttentionCall) -> str | None:
    if not call.query[0] == call.key[0] == call.value[0]:
        return "query, key and value must have the same batch size"
    queries, keys, values = call.query[1], call.key[1], call.value[1]
    if not call.enable_gqa or kernel == EFFICIENT:
        return (
            None
            if queries == keys == values
            else "query, key and value must have the same number of heads"
        )
    if kernel == FLASH and keys != values:
        return "key and value must have the same number of heads"
    if queries % keys or (kernel == CUDNN and queries % values):
        return "the heads of key and value must divide the heads of the query"
    return None


def _flash_obstacle(call: AttentionCall, setup: AttentionSetup) -> str | None:
    head = call.query[-1]
    if call.mask is not None:
        return "it takes no mask"
    if not head == call.key[-1] == call.value[-1] <= 256:
        return "query, key and value must have one head size of at most 256"
    if not (8, 0) <= setup.compute_capability <= (12, 1):
        return "it needs compute capability 8.0 to 12.1"
    consumer = (8, 6) <= setup.compute_capability <= (8, 9) or (
        12,
        0,
    ) <= setup.compute_capability <= (12, 1)
    if call.requires_grad and consumer and head > 192 and (head <= 224 or call.dropout > 0):
        return "its backward pass does not run at this head size on this GPU"
    if call.is_causal and call.query[-2] != call.key[-2]:
        return "causal attention needs queries and keys of one length"
    return _half_obstacle(call, setup)


def _efficient_obstacle(call: AttentionCall, setup: AttentionSetup) -> str | None:
    if not (5, 0) <= setup.compute_capability <= (12, 1):
        return "it needs compute capability 5.0 to 12.1"
    alignment = _alignment(call.dtype, setup.compute_capability[0])
    if call.query[-1] != call.key[-1] or any(
        not size or size % alignment for size in (call.query[-1], call.value[-1])
    ):
        return f"head sizes must be multiples of {alignment}, and those of query and key the same"
    types = {"float16", "float32"} | ({"bfloat16"} if setup.compute_capability[0] >= 8 else set())
    return _dtype_obstacle(call, types)


def _alignment(dtype: str, major: int) -> int:
    """Return ``minimum_gemm_alignment`` of ``sdp_utils.cpp``, in elements."""
    half = dtype in _HALF
    tensor_cores = major >= 8 or (major == 7 and half)
    return max(4 if major >= 8 else 1, (8 if half else 4) if tensor_cores else 1)


def _cudnn_obstacle(call: AttentionCall, setup: AttentionSetup) -> str | None:
    version, (major, minor) = setup.cudnn_version, setup.compute_capability
    if version < 90000 or (call.dropout > 0 and 91100 < version < 91400):
        return "this version of cuDNN does not support it"
    if setup.deterministic:
        return "it is not deterministic"
    reason = _half_obstacle(call, setup) or _mask_obstacle(call)
    if reason is not None:
        return reason
    if not (8, 0) <= setup.compute_capability <= (12, 1):
        return "it needs compute capability 8.0 to 12.1"
    if setup.coarse_dropout and not (call.dropout * 16).is_integer():
        return "the dropout probability must be a multiple of 1/16"
    if max(call.query[0], call.query[1]) > 65535:
        return "batch size and heads must not exceed 65,535"
    limit = 128
    if (major, minor) == (9, 0) and version >= 91000:
        limit = 256
    elif major == 10 and version >= 91100 and (call.query[-1], call.value[-1]) == (192, 128):
        limit = 192
    if max(call.query[-1], call.value[-1]) > limit or call.query[-1] % 8 or call.value[-1] % 8:
        return f"head sizes must be multiples of 8 of at most {limit}"
    if call.key[-2] == 1 or (call.query[-2] == 1 and call.dropout > 0):
        return "a sequence of length 1 is not supported"
    return None


def _mask_obstacle(call: AttentionCall) -> str | None:
    """Return why cuDNN cannot use the mask, by ``check_attn_mask_shape`` of ``sdp_utils_cpp.h``."""
    if call.mask is None:
        return None
    if call.mask.requires_grad:
        return "the mask requires a gradient"
    full = (*call.query[:2], call.query[-2], call.key[-2])
    shape = call.mask.shape
    if len(shape) not in (2, 4) or any(
        size not in (1, full_size)
        for size, full_size in zip(shape, full[-len(shape) :], strict=True)
    ):
        return "the mask must broadcast in two or four dimensions"
    return None


def _half_obstacle(call: AttentionCall, setup: AttentionSetup) -> str | None:
    return _dtype_obstacle(call, _HALF if setup.compute_capability[0] >= 8 else {"float16"})


def _dtype_obstacle(call: AttentionCall, types: frozenset[str] | set[str]) -> str | None:
    if call.same_dtype and call.dtype in types:
        return None
    return f"query, key and value must all be {' or '.join(sorted(types))}"


_OBSTACLES: Final[dict[str, Callable[[AttentionCall, AttentionSetup], str | None]]] = {
    FLASH: _flash_obstacle,
    EFFICIENT: _efficient_obstacle,
    CUDNN: _cudnn_obstacle,
}
