"""Layers and optimizers of ``bitsandbytes``, with the tensors on meta that they have on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumemnet.named.methods import EIGHT_BIT, Method


def quantise(model: nn.Module, method: Method, head: nn.Module | None) -> None:
    """Replace the linear layers of a model by those of 4 bits.

    Args:
        model: the model, on meta.
        method: says how the scales are kept.
        head: a layer that stays as it is, as Llama 4's routers do, which give a pair.
    """
    import bitsandbytes

    for parent in list(model.modules()):
        for name, child in parent.named_children():
            is_transposed = type(child).__name__ == "Conv1D"  # of GPT-2
            is_linear = is_transposed or isinstance(child, nn.Linear)
            if not is_linear or child is head or name == "router":
                continue
            weight: Any = child.weight
            outputs, inputs = weight.shape[::-1] if is_transposed else weight.shape
            layer = bitsandbytes.nn.Linear4bit(
                inputs,
                outputs,
                bias=False,
                compute_dtype=weight.dtype,
                compress_statistics=method.quantisation != "nf4",
                quant_type="nf4",
                # of one type with norms
                quant_storage=weight.dtype if method.is_sharded else torch.uint8,
                device="meta",
            )
            layer.bias = child.bias
            _pack(layer.to(weight.dtype))
            setattr(parent, name, layer.requires_grad_(requires_grad=False))


def _pack(layer: Any) -> None:
    """Let ``bitsandbytes`` quantise the weight of a layer, and name the tensors of that."""
    state = layer.weight._quantize("meta").quant_state
    layer.register_buffer("absmax", state.absmax)
    layer.register_buffer("code", state.code)
    if state.nested:
        layer.register_buffer("nested_absmax", state.state2.absmax)
        layer.register_buffer("offset", state.offset)
    layer.register_forward_pre_hook(_use_buffers)


def _use_buffers(layer: Any, inputs: object) -> None:
    """Let the quantisation's state be the layer's buffers, which the trace replaces by its own."""
    state = layer.quant_state
    state.absmax = layer.absmax
    if state.nested:
        state.offset, state.state2.absmax = layer.offset, layer.nested_absmax


@contextmanager
def patches(model: nn.Module, method: Method) -> Iterator[None]:
    """Context in which layers of 4 bits allocate on meta what they do on CUDA."""
    if not any(hasattr(each, "quant_state") for each in model.modules()):
        yield
        return
    import bitsandbytes
    from bitsandbytes.autograd._functions import MatMul4Bit

    def product(rows: Any, weight: Any, bias: Any, quant_state: Any) -> Any:
        return MatMul4Bit.apply(rows, weight, None, bias, quant_state)

    forward = staticmethod(partial(_dequantised, method=method))
    with (
        patch.object(bitsandbytes, "matmul_4bit", product),
        patch.object(MatMul4Bit, "forward", forward),
    ):
        yield


def _dequantised(
    ctx: Any,
    rows: Tensor,
    weight: Tensor,
    out: None,
    bias: Tensor | None,
    state: Any,
    *,
    method: Method,
) -> Tensor:
    """The forward pass of ``MatMul4Bit`` for more than a few rows: its kernel dequantises the weight
    inside (``bitsandbytes/backends/cuda/ops.py``, ``_dequant_linear_fallback``)."""
    from bitsandbytes.functional import dequantize_4bit

    ctx.is_empty, ctx.state = False, state
    ctx.dtype_bias = None if bias is None else bias.dtype
    ctx.tensors = (None, weight)
    if method.keeps_quantised_inputs and method.library == "litgpt" and method.year > 2023:
        # The loop's variable `loss` holds the graph, and this attribute of it, through the next
        # forward pass.  Trainer drops the graph, and in 2023 only the first batch was long.
        ctx.tensors = (rows, weight)
    elif method.keeps_quantised_inputs:
        ctx.save_for_backward(rows)
    return F.linear(rows, dequantize_4bit(weight, state).to(rows.dtype), bias)


def optimizer_of(method: Method) -> Callable[..., torch.optim.Optimizer] | None:
    """Makes the optimizer of a method; ``None`` for PyTorch's of that name."""
    if method.optimizer.startswith("paged_"):
        return lambda trained: torch.optim.SGD(trained, 1e-3, foreach=False)  # allocates nothing
    if method.optimizer not in EIGHT_BIT:
        return None
    from bitsandbytes.optim import AdamW8bit

    class Adam(AdamW8bit):  # type: ignore[misc]
        """Its state; its kernel allocates nothing."""

        def update_step(self, *arguments: object) -> None:
            """Do nothing."""

    return Adam
