"""Attention: runs the kernel that PyTorch would choose on the GPU, instead of the math kernel.

Follows ``scaled_dot_product_attention`` in ``aten/src/ATen/native/transformers/attention.cpp``:
head sizes padded for the flash kernel, masks turned into biases that are padded and expanded for
the memory-efficient one.  The kernels themselves are operators that PyTorch knows on meta tensors,
so autograd saves what it saves on CUDA: queries, keys, values, output and row sums, instead of
    scores for every pair of positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from gpumemnet.errors import InvalidRequestError
from gpumemnet.extract.attention import attention_call, attention_setup
from gpumemnet.job.layers import describe
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
from gpumemnet.torch_private.operators import aten
from gpumemnet.tracing.corrections.in_place import adding_in_place
from gpumemnet.tracing.corrections.overrides import Override
from gpumemnet.tracing.platform import Platform

_MASKED: Final = {CUDNN: -65504.0}
"""Kernel → what a masked position adds to its score; minus infinity for the others."""


def attention_overrides(platform: Platform) -> tuple[Override, ...]:
    """Overrides of this module.

    Raises:
        InvalidRequestError: ``platform.attention_kernel`` names no kernel.
    """
    forced = platform.attention_kernel
    if forced is not None and forced not in KERNELS:
        raise InvalidRequestError(
            f"unknown kernel {describe(forced)}: choose from {', '.join(KERNELS)}",
            "attention_kernel",
        )
    return (Override(aten.scaled_dot_product_attention.default, partial(_attention, platform)),)


def _attention(
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
    bias: Tensor = aten.where.ScalarSelf(mask, 0.0, masked)
    return bias


def _aligned(bias: Tensor) -> Tensor:
    """Return ``bias`` with rows that start at multiples of eight elements (``preprocess_mask``)."""
    if bias.stride(-1) == 1 and all(stride % 8 == 0 for stride in bias.stride()[:-1]):
        return bias
    columns = bias.shape[-1]
    rows: Tensor = aten.slice(aten.constant_pad_nd(bias, [0, 8 - columns % 8]), -1, 0, columns)
    return rows
