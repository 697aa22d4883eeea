"""Which kernel attention runs on the GPU, and what ``torch.nn.MultiheadAttention`` and the math
kernel execute, as steps.

The facts of a call and PyTorch's switches are read here for the extraction and for the trace;
:mod:`gpumemnet.physics.attention_kernels` has the rule.

PyTorch hands the whole module to one function that owns all the weights and never calls the output
projection's module, so hooks see nothing of it.  The steps are those of
``torch.nn.functional.multi_head_attention_forward`` in training: with the attention weights asked
for (PyTorch's default) they are computed one by one, else by the fused kernel.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from gpumemnet.physics.attention_kernels import (
    MATH,
    AttentionCall,
    AttentionSetup,
    Mask,
    choose_kernel,
)
from gpumemnet.physics.element_types import AUTOCAST_TYPES, MODEL_TYPES
from gpumemnet.torch_private.names import (
    Arguments,
    torch_release,
)
from gpumemnet.torch_private.training import enabled_kernels, kernel_order

_HALF_TYPES: Final = {**AUTOCAST_TYPES, **MODEL_TYPES}


KernelChoice = Callable[[AttentionCall], str]
"""Says which kernel runs an attention of a job."""


def unstated_kernel(
    precision: str, compute_capability: tuple[int, int], call: AttentionCall
) -> str:
    """Return the kernel that PyTorch would choose for ``call``.

    Args:
        precision: of the job, which says the type of queries, keys and values.
        compute_capability: of the GPU, major and minor.
        call: the attention.
    """
    dtype = _HALF_TYPES.get(precision)
    typed = call if dtype is None else replace(call, dtype=dtype, same_dtype=True)
    return choose_kernel(typed, attention_setup(compute_capability)) or MATH


def attention_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    requires_grad: bool = True,
) -> AttentionCall:
    """Return the facts of ``scaled_dot_product_attention(query, key, …)`` on which the choice of
    its kernel depends."""
    mask = None
    if attn_mask is not None:
        rows = attn_mask.stride(-1) == 1 if attn_mask.ndim else True
        mask = Mask(
            shape=tuple(attn_mask.shape),
            requires_grad=attn_mask.requires_grad,
            contiguous_rows=rows,
        )
    return AttentionCall(
        query=tuple(query.shape),
        key=tuple(key.shape),
        value=tuple(value.shape),
        dtype=str(query.dtype).removeprefix("torch."),
        same_dtype=query.dtype == key.dtype == value.dtype,
        contiguous_rows=query.stride(-1) == key.stride(-1) == value.stride(-1) == 1,
        mask=mask,
        dropout=dropout_p,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        requires_grad=requires_grad,
    )


def module_call(args: Arguments, kwargs: Mapping[str, Any]) -> AttentionCall | None:
    """Return the same for ``multi_head_attention_forward(*args, **kwargs)``; ``None`` where it asks
    for attention weights."""
    call = _arguments(args, kwargs)
    if call["need_weights"]:
        return None
    length, *samples, width = call["query"].shape
    batch, heads, keys = samples[0] if samples else 1, call["num_heads"], call["key"].shape[0]
    masks = (call["attn_mask"], call["key_padding_mask"])
    is_masked = any(mask is not None for mask in masks) and not (
        call["is_causal"] and masks[1] is None
    )
    query, key = (batch, heads, length, width // heads), (batch, heads, keys, width // heads)
    return AttentionCall(
        query=query,
        key=key,
        value=key,
        dtype=str(call["query"].dtype).removeprefix("torch."),
        mask=Mask(shape=(batch, heads, length, keys)) if is_masked else None,
        dropout=call["dropout_p"] if call["training"] else 0.0,
        is_causal=call["is_causal"] and not is_masked,
    )


def attention_setup(
    compute_capability: tuple[int, int], forced: str | None = None
) -> AttentionSetup:
    """Return the GPU and PyTorch's current switches: users set them in their code, even around
    single calls.

    Args:
        compute_capability: of the GPU.
        forced: the only kernel that is enabled; ``None`` for those that PyTorch's switches enable.
    """
    return AttentionSetup(
        compute_capability=compute_capability,
        enabled=enabled_kernels() if forced is None else frozenset({forced}),
        order=kernel_order(),
        cudnn_version=cudnn_version(),
        cudnn_first=os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1",
        coarse_dropout=torch_release() >= (2, 12),
        deterministic=torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def cudnn_version() -> int:
    """Return the cuDNN version of this build; for a CPU build, that of the CUDA build on PyPI."""
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if version is not None:
        return version
    return 91900 if torch_release() < (2, 12) else 92000


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """One layer inside a multi-head attention.

    Attributes:
        kind: layer kind.
        shape: shape of its output.
        parameters: the parameters that it uses.
        query_length: positions that attend, for the step that attends.
    """

    kind: str
    shape: tuple[int, ...]
    parameters: tuple[Tensor, ...] = ()
    query_length: int | None = None


def attention_steps(
    args: Arguments, kwargs: Mapping[str, Any], math_kernel: bool
) -> list[AttentionStep]:
    """The steps of one ``multi_head_attention_forward(*args, **kwargs)`` on inputs ``[length,
    batch, embedding]``.

    With ``math_kernel`` the attention weights are computed one by one whether they are asked for or
    not.
    """
    call = _arguments(args, kwargs)
    query, key = call["query"], call["key"]
    length, embedding = query.shape[0], query.shape[-1]
    samples = query.shape[1:-1]
    projections = (
        "in_proj_weight",
        "in_proj_bias",
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
        "bias_k",
        "bias_v",
    )
    steps = [
        AttentionStep(
            "linear",
            (length + 2 * key.shape[0], *samples, embedding),
            tuple(p for n in projections if (p := call[n]) is not None),
        )
    ]
    explicit = call["need_weights"] or math_kernel
    if explicit:
        scores = (*samples, call["num_heads"], length, key.shape[0])
        steps += [AttentionStep("matmul", scores), AttentionStep("softmax", scores)]
        if call["training"] and call["dropout_p"] > 0:
            steps.append(AttentionStep("dropout", scores))
    fused = "attention" if query.shape[0] == key.shape[0] else "cross_attention"
    kind = "matmul" if explicit else fused
    steps.append(AttentionStep(kind, query.shape, query_length=length))
    outputs = tuple(p for n in ("out_proj_weight", "out_proj_bias") if (p := call[n]) is not None)
    return [*steps, AttentionStep("linear", query.shape, outputs)]


def _arguments(args: Arguments, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``multi_head_attention_forward`` by name."""
    bound = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def math_kernel_steps(args: Arguments, kwargs: Mapping[str, Any]) -> list[AttentionStep]:
    """The steps of ``scaled_dot_product_attention(*args, **kwargs)`` under the math kernel, on
    ``[..., heads, length, size]``.

    They are those of ``_scaled_dot_product_attention_math``
    (``aten/src/ATen/native/transformers/attention.cpp``) that keep a matrix of queries by keys, or
    the output.
    """
    call = dict(
        zip(("query", "key", "value", "attn_mask", "dropout_p"), args, strict=False)
    ) | dict(kwargs)
    query, key, value = call["query"], call["key"], call["value"]
    scores = (*query.shape[:-1], key.shape[-2])
    steps = [AttentionStep("matmul", scores), AttentionStep("softmax", scores)]
    if call.get("dropout_p", 0.0) > 0:
        steps.append(AttentionStep("dropout", scores))
    output = (*query.shape[:-1], value.shape[-1])
    return [*steps, AttentionStep("matmul", output, query_length=query.shape[-2])]
