"""Checks on real data that a model under a plan computes the same, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gpumemnet.planner.decisions import Plan
from gpumemnet.planner.executor import applied


def verify(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any], Tensor],
    plan: Plan | Mapping[str, str],
    *,
    seed: int = 0,
) -> tuple[str, ...]:
    """Run one forward and backward pass without and with ``plan``, and compare loss, gradients and
    buffers bit by bit.

    The model is left as it was, gradients included.  Operators that PyTorch runs in a random order
    differ without a plan, too: call ``torch.use_deterministic_algorithms(True)`` first.

    Args:
        model: the model, on the device and in the mode that it is trained in.
        batch: what it is called with: a tensor, a tuple or list of arguments, or a dict of keyword
            arguments.
        loss: function from the model's output to a scalar.
        plan: the plan, or a decision for each module by its name.
        seed: of the random numbers of both runs.

    Returns:
        one sentence for each value that differs; nothing if all are equal.

    Raises:
        PlanError: the plan cannot be applied.
    """
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        plain = _results(model, batch, loss, seed)
        _restore(model, buffers)
        with applied(model, plan):
            planned = _results(model, batch, loss, seed)
    finally:
        _restore(model, buffers)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
    return tuple(
        f"{name} differs by up to {(planned[name].double() - value.double()).abs().max().item():.3g}"
        for name, value in plain.items()
        if not _same(value, planned[name])
    )


def _results(
    model: nn.Module, batch: Any, loss: Callable[[Any], Tensor], seed: int
) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    devices = {tensor.device.index for tensor in model.parameters() if tensor.is_cuda}
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        inputs = batch if isinstance(batch, tuple | list) else (batch,)
        output = model(**batch) if isinstance(batch, Mapping) else model(*inputs)
        value = loss(output)
        torch.autograd.backward(value)
    found = {"the loss": value.detach()}
    found |= {
        f"the gradient of '{name}'": p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return found | {f"buffer '{name}'": buffer.clone() for name, buffer in model.named_buffers()}


def _restore(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


def _same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.nan_to_num(), second.nan_to_num()) and torch.equal(
        first.isnan(), second.isnan()
    )
