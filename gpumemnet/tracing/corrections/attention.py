"""Attention: runs the kernel that PyTorch would choose on the GPU, instead of the math kernel.

Follows ``scaled_dot_product_attention`` in ``aten/src/ATen/native/transformers/attention.cpp``: head sizes padded for the
flash kernel, masks turned into biases that are padded and expanded for the memory-efficient one.  The kernels themselves are
operators that PyTorch knows on meta tensors, so autograd saves what it saves on CUDA: queries, keys, values, output and row
sums, instead of scores for every pair of positions.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.torch_private.attention import enabled_kernels, kernel_order
from gpumemnet.torch_private.names import torch_release
from gpumemnet.torch_private.operators import aten
from gpumemnet.tracing.corrections.attention_choice import (
    CUDNN,
    EFFICIENT,
    FLASH,
    KERNELS,
    MATH,
    AttentionCall,
    AttentionSetup,
    Mask,
    choose_kernel,
    obstacle,
)
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
        raise InvalidRequestError(f"unknown kernel {describe(forced)}: choose from {', '.join(KERNELS)}", "attention_kernel")
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
    requires_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    kernel = _chosen(platform, _facts(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, requires_grad))
    output: Tensor
    if kernel == MATH:
        if is_causal:
            # PyTorch makes the mask inside the kernel; made from the query, it is recorded as on the GPU.
            pairs = aten.new_ones(query, [query.shape[-2], key.shape[-2]], dtype=torch.bool)
            attn_mask, is_causal = aten.tril(pairs), False
            del pairs
        with adding_in_place():
            output = original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    elif kernel == FLASH:
        head_size = query.shape[-1]
        scale = 1 / math.sqrt(head_size) if scale is None else scale
        inputs = [query, key, value]
        if head_size % 8:
            inputs = [aten.constant_pad_nd(tensor, [0, -head_size % 8]) for tensor in inputs]
        output = aten._scaled_dot_product_flash_attention(*inputs, dropout_p, is_causal, False, scale=scale)[0]
        if head_size % 8:
            output = aten.slice(output, -1, 0, head_size)
    elif kernel == EFFICIENT:
        bias = _bias(attn_mask, query, EFFICIENT)
        if bias is not None:
            bias = _aligned(bias).expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
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
    setup = _setup(platform)
    kernel = choose_kernel(call, setup)
    if kernel is not None:
        return kernel
    if platform.attention_kernel is not None:
        forced, gpu = platform.attention_kernel, platform.device.name
        reason = obstacle(forced, call, setup)
        raise InvalidRequestError(
            f"the {forced} kernel cannot run attention of {_sizes(call)} on {gpu}: {reason}", "attention_kernel"
        )
    # PyTorch raises this too; the model may catch it.
    reasons = "; ".join(f"{kernel}: {obstacle(kernel, call, setup)}" for kernel in KERNELS)
    raise RuntimeError(f"No available kernel for attention of {_sizes(call)}. {reasons}")


def _sizes(call: AttentionCall) -> str:
    return f"{call.dtype} queries {list(call.query)} and keys {list(call.key)}"


def _facts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    enable_gqa: bool,
    requires_grad: bool,
) -> AttentionCall:
    return AttentionCall(
        query=tuple(query.shape),
        key=tuple(key.shape),
        value=tuple(value.shape),
        dtype=str(query.dtype).removeprefix("torch."),
        same_dtype=query.dtype == key.dtype == value.dtype,
        contiguous_rows=query.stride(-1) == key.stride(-1) == value.stride(-1) == 1,
        mask=None
        if mask is None
        else Mask(shape=tuple(mask.shape), requires_grad=mask.requires_grad, contiguous_rows=mask.stride(-1) == 1),
        dropout=dropout,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        requires_grad=requires_grad,
    )


def _setup(platform: Platform) -> AttentionSetup:
    """Return the current switches: users set them in their code, even around single calls."""
    forced = platform.attention_kernel
    return AttentionSetup(
        compute_capability=platform.compute_capability,
        enabled=enabled_kernels() if forced is None else frozenset({forced}),
        order=kernel_order(),
        cudnn_version=_cudnn_version(),
        cudnn_first=os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1",
        coarse_dropout=torch_release() >= (2, 12),
        deterministic=torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _cudnn_version() -> int:
    """Return the cuDNN version of this build; for a CPU build, that of the CUDA build on PyPI."""
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if version is not None:
        return version
    return 91900 if torch_release() < (2, 12) else 92000


def _bias(mask: Tensor | None, query: Tensor, kernel: str) -> Tensor | None:
    """Return a mask as a bias for the scores (``convert_boolean_attn_mask``)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    masked = aten.scalar_tensor(_MASKED.get(kernel, -math.inf), dtype=query.dtype, device=mask.device)
    bias: Tensor = aten.where.ScalarSelf(mask, 0.0, masked)
    return bias


def _aligned(bias: Tensor) -> Tensor:
    """Return ``bias`` with rows that start at multiples of eight elements (``preprocess_mask``)."""
    if bias.stride(-1) == 1 and all(stride % 8 == 0 for stride in bias.stride()[:-1]):
        return bias
    columns = bias.shape[-1]
    rows: Tensor = aten.slice(aten.constant_pad_nd(bias, [0, 8 - columns % 8]), -1, 0, columns)
    return rows
