"""What ``torch.nn.MultiheadAttention`` and the math kernel execute, as steps: projections, attention, output projection.

PyTorch hands the whole module to one function that owns all the weights and never calls the output projection's module, so hooks
see nothing of it.  The steps are those of ``torch.nn.functional.multi_head_attention_forward`` in training: with the
attention weights asked for (PyTorch's default) they are computed one by one, else by the fused kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor


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


def attention_steps(args: tuple[Any, ...], kwargs: Mapping[str, Any], math_kernel: bool = False) -> list[AttentionStep]:
    """The steps of one ``multi_head_attention_forward(*args, **kwargs)`` on inputs ``[length, batch, embedding]``.

    With ``math_kernel`` the attention weights are computed one by one whether they are asked for or not.
    """
    bound = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    bound.apply_defaults()
    call = bound.arguments
    query, key = call["query"], call["key"]
    length, embedding = query.shape[0], query.shape[-1]
    samples = query.shape[1:-1]
    projections = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight", "bias_k", "bias_v")
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
    kind = "matmul" if explicit else "attention" if query.shape[0] == key.shape[0] else "cross_attention"
    steps.append(AttentionStep(kind, query.shape, query_length=length))
    outputs = tuple(p for n in ("out_proj_weight", "out_proj_bias") if (p := call[n]) is not None)
    return [*steps, AttentionStep("linear", query.shape, outputs)]


def math_kernel_steps(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[AttentionStep]:
    """The steps of ``scaled_dot_product_attention(*args, **kwargs)`` under the math kernel, on ``[..., heads, length, size]``.

    They are those of ``_scaled_dot_product_attention_math`` (``aten/src/ATen/native/transformers/attention.cpp``) that keep a
    matrix of queries by keys, or the output.
    """
    call = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args, strict=False)) | dict(kwargs)
    query, key, value = call["query"], call["key"], call["value"]
    scores = (*query.shape[:-1], key.shape[-2])
    steps = [AttentionStep("matmul", scores), AttentionStep("softmax", scores)]
    if call.get("dropout_p", 0.0) > 0:
        steps.append(AttentionStep("dropout", scores))
    output = (*query.shape[:-1], value.shape[-1])
    return [*steps, AttentionStep("matmul", output, query_length=query.shape[-2])]
