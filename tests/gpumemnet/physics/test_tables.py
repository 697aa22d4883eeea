"""The tables of the physics agree with PyTorch and with one another."""

from __future__ import annotations

import inspect

import pytest
import torch

from gpumemnet.job.layers import LAYER_GROUPS
from gpumemnet.job.training_job import OPTIMIZERS, PRECISIONS
from gpumemnet.physics.element_types import (
    AUTOCAST_TYPES,
    ELEMENT_BYTES,
    FLOAT32,
    FLOAT32_RESULT,
    FULL_BYTES,
    HALF_BYTES,
    LOWER_PRECISION,
    MODEL_TYPES,
)
from gpumemnet.physics.optimizers import OPTIMIZER_RULES, optimizer_copies
from gpumemnet.physics.saved_tensors import KIND_RULES
from gpumemnet.tracing.losses_and_optimizers import named_optimizer

_OPERATORS = {
    "attention": "scaled_dot_product_attention",
    "cross_attention": "scaled_dot_product_attention",
}
"""Operators of kinds that have another name."""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_has_the_state_of_its_rule(name: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(64, 64))
    weight.grad = torch.ones(64, 64)
    optimizer = named_optimizer(name)([weight])
    optimizer.step()
    elements = sum(
        value.numel()
        for value in optimizer.state[weight].values()
        if torch.is_tensor(value) and value.numel() > 1
    )
    rule = OPTIMIZER_RULES[name]
    assert elements == (2 * 64 if rule.is_factored else rule.state_copies * weight.numel())
    assert ("fused" in inspect.signature(type(optimizer)).parameters) >= rule.has_fused
    assert optimizer_copies(name, "default").is_foreach == rule.is_foreach_by_default


@pytest.mark.parametrize("precision", PRECISIONS)
def test_element_bytes_are_those_of_the_types(precision: str) -> None:
    size = ELEMENT_BYTES[precision]
    model = getattr(torch, MODEL_TYPES.get(precision, "float32"))
    computed = getattr(torch, AUTOCAST_TYPES[precision]) if size.is_autocast else model
    assert size.is_autocast == (precision in AUTOCAST_TYPES)
    assert (size.weight, size.activation, size.uncast) == (
        model.itemsize,
        computed.itemsize,
        model.itemsize,
    )


def test_autocast_lists_of_kinds_follow_those_of_operators() -> None:
    lowered = {name.partition(".")[0] for name in LOWER_PRECISION}
    raised = {name.partition(".")[0] for name in (*FLOAT32, *FLOAT32_RESULT)}
    by_cell = {
        *LAYER_GROUPS["recurrent"],
        "bilinear",
    }  # run by operators that are not named like them
    kinds_of = {
        size: {kind for kind, rule in KIND_RULES.items() if rule.autocast_input_bytes == size}
        for size in (HALF_BYTES, FULL_BYTES)
    }
    assert {_OPERATORS.get(kind, kind) for kind in kinds_of[HALF_BYTES] - by_cell} <= lowered
    assert raised >= kinds_of[FULL_BYTES]
