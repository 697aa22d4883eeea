"""What would silently be computed wrong under a plan is refused, with the module, the reason and
what to do."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from gpumemnet.errors import PlanError
from gpumemnet.planner import applied


class Block(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def scaled(change: Callable[[Any], Any]) -> nn.Module:
    """A layer that calls ``change`` with itself in each forward pass, and multiplies by what it
    returns."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            factor = change(self)
            out: Tensor = super().forward(x) * (1.0 if factor is None else factor)
            return out

    layer = Scaled(4, 4)
    layer.register_buffer("mean", torch.zeros(4))
    return layer


CALLS = count(1)
STATES: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "a buffer": (lambda layer: layer.mean.add_(1), r"\(layers.0.mean\)"),
    "Python": (lambda layer: random.random(), "random numbers of Python"),
    "NumPy": (lambda layer: numpy.random.rand(), "random numbers of NumPy"),  # noqa: NPY002
}


def checkpointing() -> nn.Module:
    model = nn.Sequential(Block(nn.Linear(4, 4)))
    vars(model[0])["gradient_checkpointing"] = True  # as transformers sets it
    return model


def hooked() -> nn.Module:
    model = nn.Sequential(Block(nn.Linear(4, 4)))
    model[0].layers[0].register_forward_hook(lambda module, args, output: None)  # type: ignore[union-attr, index]
    return model


LAYER = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("model", "decisions", "sentence"),
    [
        (Block(LAYER), {"layer.0": "recompute"}, r"did you mean 'layers.0'\?"),
        (
            nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4))),
            {"0": "recompute"},
            "'0' has a parametrization with a state, .* keep or swap",
        ),
        (
            nn.Sequential(Block(nn.utils.spectral_norm(nn.Linear(4, 4)))),
            {"0": "recompute"},
            "'0.layers.0' has a parametrization with a state, .* keep or swap",
        ),
        (
            nn.Sequential(Block(LAYER)),
            {"0": "recompute", "0.layers.0": "swap"},
            "'0.layers.0' is inside of '0'",
        ),
        (
            nn.Sequential(LAYER, LAYER),
            {"0": "recompute", "1": "swap"},
            "'0' and '1' are one module",
        ),
        (hooked(), {"0": "recompute"}, "'0.layers.0' has the forward hook .*<lambda>"),
        (checkpointing(), {"0": "keep"}, "module '0' is checkpointed already"),
        (nn.DataParallel(LAYER), {"module": "recompute"}, "use DistributedDataParallel"),
    ],
)
def test_refused_when_it_is_applied(
    model: nn.Module, decisions: Mapping[str, str], sentence: str
) -> None:
    forwards = [module.forward for module in model.modules()]
    with pytest.raises(PlanError, match=sentence):
        applied(model, decisions)
    assert [module.forward for module in model.modules()] == forwards


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        *(
            (Block(scaled(change)), f"'1' changes its own state in the forward pass .*{names}")
            for change, names in STATES.values()
        ),
        (
            Block(scaled(lambda layer: next(CALLS))),
            "'1' computes something else when it runs again .output 0 differs",
        ),
        (
            Block(nn.ReLU(inplace=True), nn.Linear(4, 4)),
            r"'1' changes its input of shape \[2, 4\] in place",
        ),
    ],
)
def test_refused_in_the_first_step(block: nn.Module, sentence: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), block)
    with applied(model, {"1": "recompute"}), pytest.raises(PlanError, match=sentence):
        model(torch.ones(2, 4))
    with applied(model, {"1": "swap"}):
        model(torch.ones(2, 4)).sum().backward()


def test_what_comes_back_from_host_memory_must_be_what_was_let_go() -> None:
    class Changed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.data.mul_(2)  # without autograd's knowledge
            return x.sum()

    class Exponential(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).exp()

    model = nn.Sequential(Exponential(256, 256), Changed())
    decisions = {"0": "swap", "1": "keep"}
    with applied(model, decisions), pytest.raises(PlanError, match="262,144 bytes comes back"):
        model(torch.ones(256, 256)).backward()


def test_a_forward_pass_may_fill_a_cache_once() -> None:
    def cached(layer: Any) -> float:
        vars(layer).setdefault("factor", torch.tensor(2.0))
        return float(layer.factor)

    with applied(nn.Sequential(block := Block(scaled(cached))), {"0": "recompute"}):
        block(torch.ones(2, 4)).sum().backward()


def test_a_cache_of_keys_and_values_is_refused_which_a_recomputation_would_extend() -> None:
    class Cache:
        def update(self, keys: Tensor) -> Tensor:
            return keys

        def get_seq_length(self) -> int:
            return 0

    class Layer(nn.Linear):
        def forward(self, x: Tensor, past_key_values: Cache | None = None) -> Tensor:
            return super().forward(x)

    layer = nn.ModuleDict({"h": Layer(4, 4)})
    with (
        applied(layer, {"h": "recompute"}),
        pytest.raises(PlanError, match=r"'h' adds keys .* to a Cache, .*use_cache = False"),
    ):
        layer["h"](torch.ones(2, 4), past_key_values=Cache())
    with applied(layer, {"h": "swap"}):
        layer["h"](torch.ones(2, 4), past_key_values=Cache()).sum().backward()


def test_a_second_plan_is_refused_while_one_is_applied() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with (
        applied(model, {"0": "recompute"}),
        pytest.raises(PlanError, match="a plan is applied to '0' already: undo"),
    ):
        applied(model, {"0": "swap"})
    with applied(model, {"0": "swap"}):
        pass
