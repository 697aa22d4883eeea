"""Settings of libraries that have the effect of a plan, and the script of a plan: the code runs and
does what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpumemnet.planner.decisions import Plan
from gpumemnet.planner.knobs import knobs_of, script_of
from tests.gpumemnet.planner.plans import a_plan

UNITS = ("embed", *(f"layers.{n}" for n in range(4)))


def plan_of(decisions: dict[str, str], units: tuple[str, ...] = UNITS) -> Plan:
    return a_plan(units, decisions, step_seconds=1.2, bound_step_seconds=None)


def every(decision: str, step: int = 1) -> dict[str, str]:
    return {f"layers.{n}": decision for n in range(0, 4, step)}


@pytest.mark.parametrize(
    ("decisions", "call"),
    [
        (every("recompute"), "model.activation_checkpointing_enable()"),
        (every("recompute", 2), "model.activation_checkpointing_enable(every_n_layers=2)"),
        (
            every("recompute_and_swap_input", 2),
            "model.activation_checkpointing_enable(every_n_layers=2, offload=True)",
        ),
    ],
)
def test_regular_plans_are_arguments_of_transformers(decisions: dict[str, str], call: str) -> None:
    assert knobs_of(plan_of(decisions))[0].code == call


@pytest.mark.parametrize(
    ("decisions", "reason"),
    [
        (
            {"layers.0": "recompute", "layers.1": "recompute"},
            "every n-th from the first one on, not these 2",
        ),
        (
            {"layers.0": "recompute", "layers.1": "swap"},
            "recomputes blocks in one way, and the plan has recompute, swap",
        ),
        (
            {"embed": "recompute"},
            "one stack of blocks alone, and the plan has a decision for 'embed' too",
        ),
    ],
)
def test_irregular_plans_say_why_not(decisions: dict[str, str], reason: str) -> None:
    knob = knobs_of(plan_of(decisions))[0]
    assert knob.code == ""
    assert reason in knob.note


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model(torch.ones(2, 8)).sum().backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_wrappers_and_the_script_compute_the_same() -> None:
    torch.manual_seed(0)
    model = Stack()
    plain = gradients(model)
    plan = plan_of({"layers.1": "recompute", "layers.2": "recompute"})
    names: dict[str, Any] = {"model": model}
    exec(script_of(plan), names)
    assert all(torch.equal(one, other) for one, other in zip(gradients(model), plain, strict=True))
    names["in_force"].undo()
    exec(knobs_of(plan)[1].code, {"model": model})
    assert [type(layer).__name__ for layer in model.layers] == [
        "Sequential",
        *["CheckpointWrapper"] * 2,
        "Sequential",
    ]
    assert all(torch.equal(one, other) for one, other in zip(gradients(model), plain, strict=True))


def test_the_wrappers_refuse_what_they_cannot_do_and_name_what_they_do_otherwise() -> None:
    assert knobs_of(plan_of(every("recompute_cheap")))[1].note.startswith(
        "They recompute a module as a whole"
    )
    swapping = knobs_of(plan_of({"layers.0": "swap", "layers.1": "recompute_and_swap_input"}))[1]
    assert "offload_wrapper(checkpoint_wrapper(module))" in swapping.code
    assert swapping.note.endswith("Copies to the host wait for the GPU, and include weights.")


def test_a_budget_of_compiled_code_keeps_the_share_of_blocks_that_the_plan_keeps() -> None:
    assert "activation_memory_budget = 0.50" in knobs_of(plan_of(every("recompute", 2)))[2].code
    assert "does not swap" in knobs_of(plan_of(every("recompute_and_swap_input")))[2].note


def test_a_script_names_the_neighbours_of_swapped_units() -> None:
    script = script_of(plan_of({"layers.1": "swap"}))
    assert '"embed": "keep",' in script
    assert '"layers.1": "swap",' in script
    assert "+20.0 %, modelled" in script
    assert "# Not by Hugging Face transformers: It recomputes blocks in one way" in script
    assert "# Instead, by PyTorch's wrappers for FSDP:" in script
