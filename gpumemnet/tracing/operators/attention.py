"""Attention: runs the kernel that PyTorch would choose on the GPU, and the scratch memory of each.

The choice follows ``scaled_dot_product_attention`` in
``aten/src/ATen/native/transformers/attention.cpp``: head sizes padded for the flash kernel, masks
turned into biases that are padded and expanded for the memory-efficient one.  The kernels
themselves are operators that PyTorch knows on meta tensors, so autograd saves what it saves on
CUDA: queries, keys, values, output and row sums, instead of scores for every pair of positions.

The three fused kernels accumulate the gradient of the query in fp32 in global memory; the math
kernel tests for masked rows.  Shapes are ``[batch, heads, length, width]``.  Sources, by kernel:

- flash: ``flash_api.cpp`` of FlashAttention 2 as PyTorch builds it (``mha_fwd``, ``mha_bwd``);
- memory-efficient: ``aten/src/ATen/native/transformers/cuda/attention_backward.cu`` with
  ``mem_eff_attention/kernel_backward.h`` (``workspace_size``) and ``kernels/cutlassB.h`` (tile
  sizes);
- cuDNN: ``node/scaled_dot_product_flash_attention.h`` of its frontend.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from gpumemnet.errors import InvalidRequestError
from gpumemnet.extract.attention import attention_call, attention_setup
from gpumemnet.physics.attention_kernels import (
    CUDNN,
    EFFICIENT,
    FLASH,
    KERNELS,
    MATH,
    AttentionCall,
    choose_kernel,
    obstacle,
)
from gpumemnet.torch_private.names import aten
from gpumemnet.tracing.operators.elementwise import adding_in_place, copy_bytes
from gpumemnet.tracing.operators.rules import (
    SCRATCH_RULES,
    Call,
    Platform,
    Scratch,
    Scratches,
    ceil_div,
    exactly,
    round_up,
)

_MASKED: Final = {CUDNN: -65504.0}
"""Kernel → what a masked position adds to its score; minus infinity for the others."""


def attention(
    platform: Platform,
    original: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run scaled-dot-product attention by the kernel that the platform takes."""
    requires_grad = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    )
    call = attention_call(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        requires_grad=requires_grad,
    )
    kernel = _chosen(platform, call)
    output: Tensor
    if kernel == MATH:
        if is_causal:
            # PyTorch makes the mask inside the kernel; made from the query, it is recorded as on
            # the GPU.
            pairs = aten.new_ones(query, [query.shape[-2], key.shape[-2]], dtype=torch.bool)
            attn_mask, is_causal = aten.tril(pairs), False
            del pairs
        with adding_in_place():
            output = original(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
    elif kernel == FLASH:
        head_size = query.shape[-1]
        scale = 1 / math.sqrt(head_size) if scale is None else scale
        inputs = [query, key, value]
        if head_size % 8:
            inputs = [aten.constant_pad_nd(tensor, [0, -head_size % 8]) for tensor in inputs]
        output = aten._scaled_dot_product_flash_attention(
            *inputs, dropout_p, is_causal, False, scale=scale
        )[0]
        if head_size % 8:
            output = aten.slice(output, -1, 0, head_size)
    elif kernel == EFFICIENT:
        bias = _bias(attn_mask, query, EFFICIENT)
        if bias is not None:
            bias = _aligned(bias).expand(
                query.shape[0], query.shape[1], query.shape[2], key.shape[2]
            )
        output = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, requires_grad, dropout_p, is_causal, scale=scale
        )[0]
    else:
        bias = _bias(attn_mask, query, CUDNN)
        output = aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, requires_grad, dropout_p, is_causal, False, scale=scale
        )[0]
    return output


def _chosen(platform: Platform, call: AttentionCall) -> str:
    setup = attention_setup(platform.compute_capability, platform.attention_kernel)
    kernel = choose_kernel(call, setup)
    if kernel is not None:
        return kernel
    if platform.attention_kernel is not None:
        forced, gpu = platform.attention_kernel, platform.device.name
        reason = obstacle(forced, call, setup)
        raise InvalidRequestError(
            f"the {forced} kernel cannot run attention of {_sizes(call)} on {gpu}: {reason}",
            "attention_kernel",
        )
    # PyTorch raises this too; the model may catch it.
    reasons = "; ".join(f"{kernel}: {obstacle(kernel, call, setup)}" for kernel in KERNELS)
    raise RuntimeError(f"No available kernel for attention of {_sizes(call)}. {reasons}")


def _sizes(call: AttentionCall) -> str:
    return f"{call.dtype} queries {list(call.query)} and keys {list(call.key)}"


def _bias(mask: Tensor | None, query: Tensor, kernel: str) -> Tensor | None:
    """Return a mask as a bias for the scores (``convert_boolean_attn_mask``)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    masked = aten.scalar_tensor(
        _MASKED.get(kernel, -math.inf), dtype=query.dtype, device=mask.device
    )
    return aten.where.ScalarSelf(mask, 0.0, masked)


def _aligned(bias: Tensor) -> Tensor:
    """Return ``bias`` with rows that start at multiples of eight elements (``preprocess_mask``)."""
    if bias.stride(-1) == 1 and all(stride % 8 == 0 for stride in bias.stride()[:-1]):
        return bias
    columns = bias.shape[-1]
    return aten.slice(aten.constant_pad_nd(bias, [0, 8 - columns % 8]), -1, 0, columns)


KIND: Final = "attention"
LOCK_BYTES: Final = 16
"""Size of the lock and counter before each tile of the memory-efficient kernel's sums
(``GradQTempStorage``)."""
TILE: Final = 64
LARGE_TILE: Final = 128
LARGE_TILE_SHARED_MEMORY: Final = frozenset({(8, 0), (8, 7), (9, 0), (10, 0), (10, 3)})
"""Compute capabilities with 160 KiB of shared memory per block, which tiles of 128 rows need."""
KEY_SPLITS_LIMIT: Final = 200
CUDNN_SCORES_LIMIT: Final = 256 * 2**20
"""On compute capability 9.0 and up, cuDNN keeps gradients of the scores up to this size instead of
sums of the query."""


def _flash_backward(call: Call) -> Scratches:
    query, key = call.arguments["query"], call.arguments["key"]
    batch, heads, rows, width = query.shape
    padded = round_up(rows, 128)
    rounded = round_up(width, 32) if width <= 192 else 256
    sums = batch * padded * heads * rounded * 4
    if torch.are_deterministic_algorithms_enabled():
        sums *= ceil_div(call.platform.device.multiprocessors, batch * heads)
    pieces = [
        *_copies(call, "grad_out", "out"),
        *exactly(KIND, batch * heads * padded * 4, sums),
    ]
    if (
        key.shape[1] != heads
    ):  # grouped queries: gradients of every head, then summed over the group
        pieces += 2 * exactly(KIND, batch * heads * key.shape[2] * width * key.element_size())
    return tuple(pieces)


def _copies(call: Call, *names: str) -> Scratches:
    """Return the copies of non-contiguous arguments, which the kernel reads as ``[batch, length,
    heads, width]``."""
    transposed = (call.arguments[name].transpose(1, 2) for name in names)
    return exactly("copy", *map(copy_bytes, transposed))


def _efficient_forward(call: Call) -> Scratches:
    """Return the fp32 sums of the output, needed if a head is too wide for a block's registers."""
    query, value = call.arguments["query"], call.arguments["value"]
    if query.element_size() == 4 or value.shape[3] <= 128:
        return ()
    batch, heads, rows, _ = query.shape
    return exactly(KIND, batch * heads * rows * value.shape[3] * 4)


def _efficient_backward(call: Call) -> Scratches:
    query, key, value = (call.arguments[name] for name in ("query", "key", "value"))
    batch, heads, rows, _ = query.shape
    # in fp32, PyTorch, not the kernel, sums output x gradient by row
    is_fp32 = query.element_size() == 4
    return (
        *_copies(call, "grad_out_"),
        *exactly(KIND, value.nbytes // value.shape[2] * rows if is_fp32 else 0, held=False),
        *exactly(
            KIND, batch * heads * rows * 4, efficient_workspace(query, key, value, call.platform)
        ),
    )


def efficient_workspace(query: Tensor, key: Tensor, value: Tensor, platform: Platform) -> int:
    """Return the bytes of the memory-efficient kernel's fp32 sums in the backward pass.

    Args:
        query: shape ``[batch, heads, rows, width]``.
        key, value: shape ``[batch, heads, keys, width]``, with the same batch and heads.
        platform: the GPU, which decides the tile sizes.
    """
    batch, heads, rows, width = query.shape
    widest = max(width, value.shape[3])
    is_half = query.element_size() == 2
    row_tile, key_tile = _tiles(widest, is_half, platform.compute_capability)
    sums = (
        ceil_div(rows, row_tile)
        * ceil_div(width, key_tile)
        * (row_tile * key_tile * 4 + LOCK_BYTES)
    )
    if (
        is_half and widest > row_tile
    ):  # outputs exceed the registers: gradients of key and value are summed in memory too
        splits = max(1, min(ceil_div(key.shape[2], key_tile), KEY_SPLITS_LIMIT // (batch * heads)))
        sums += (
            splits * key_tile * (round_up(width, row_tile) + round_up(value.shape[3], row_tile)) * 4
        )
    return batch * heads * round_up(sums, 16)


def _tiles(widest: int, is_half: bool, capability: tuple[int, int]) -> tuple[int, int]:
    """Return rows and keys of a thread block's tile, by the first kernel in ``cutlassB.h`` that
    supports the call."""
    if widest <= TILE:
        return TILE, TILE
    if is_half and widest <= 96 and capability in ((8, 6), (8, 9)):
        return LARGE_TILE, TILE
    if capability not in LARGE_TILE_SHARED_MEMORY:
        return TILE, TILE
    return LARGE_TILE, LARGE_TILE if is_half and widest <= LARGE_TILE else TILE


def _cudnn_backward(call: Call) -> Scratches:
    query, key = call.arguments["query"], call.arguments["key"]
    batch, heads, rows, width = query.shape
    row_sums, sums = batch * heads * rows * 4, batch * heads * rows * width * 4
    scores = batch * heads * round_up(rows, 64) * round_up(key.shape[2], 64) * query.element_size()
    most = (
        scores if scores <= CUDNN_SCORES_LIMIT and call.platform.compute_capability >= (9, 0) else 0
    )
    return (Scratch(row_sums + sums, row_sums + max(sums, most), KIND, held=True),)


def _safe_softmax(call: Call) -> Scratches:
    """Return the masks of scores, and of whole rows, that are minus infinity, and a zero
    (``transformers/attention.cpp``)."""
    scores: Tensor = call.arguments["self"]
    rows = scores.numel() // max(1, scores.shape[call.arguments["dim"]]) if scores.dim() else 1
    return exactly(KIND, scores.numel(), rows, scores.element_size())


SCRATCH_RULES.update(
    {
        aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
        aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
        aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
        aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
        aten._safe_softmax.default: _safe_softmax,
    }
)
