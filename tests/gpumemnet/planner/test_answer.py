"""The answer of a plan: its words and its JSON."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import gpumemnet
from gpumemnet.errors import InvalidRequestError
from gpumemnet.gpu import find_profile, with_available
from gpumemnet.planner import applied, load_plan, plan_to_dict
from gpumemnet.planner.costs import find_machine
from gpumemnet.planner.plans import (
    Alternative,
    Decision,
    PlanAnswer,
    plan_answer_from_dict,
    plan_answer_to_dict,
    units_by_decision,
)
from gpumemnet.tracing import TraceAnswer
from gpumemnet.units import MIB
from tests.gpumemnet.planner.examples import blocks
from tests.gpumemnet.planner.plans import a_plan


def test_units_with_one_decision_are_named_as_ranges() -> None:
    plan = a_plan(
        (
            "stem",
            "layers.0",
            "layers.1",
            "layers.2",
            "layers.3",
            "layers.5",
            "layers.6",
            "10",
            "11",
            "head",
        ),
        {
            **dict.fromkeys(("layers.0", "layers.1", "layers.5", "10", "11"), "recompute"),
            "layers.2": "swap",
        },
    )
    assert units_by_decision(plan) == {
        Decision.KEEP: "stem, layers.3, layers.6, head",
        Decision.RECOMPUTE: "layers.0–1, layers.5, 10–11",
        Decision.SWAP: "layers.2",
    }


@pytest.fixture(scope="module")
def traced() -> TraceAnswer:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    device = with_available(find_profile("RTX-4090"), 500 * MIB)
    return gpumemnet.trace(model, torch.empty(8, 64), gpu=device)


def planned(traced: TraceAnswer) -> PlanAnswer:
    after = replace(traced, expected_bytes=traced.expected_bytes - MIB, safe_bytes=400 * MIB)
    alternative = Alternative(
        name="bf16",
        change="all in <bf16>",
        expected_bytes=1,
        safe_bytes=2,
        verdict="yes",
        effect="rounding",
        time="none",
        how="model.to(…)",
    )
    plan = a_plan(("0", "1", "2", "3"), {"1": "recompute"})
    return PlanAnswer(before=traced, plan=plan, after=after, alternatives=(alternative,))


def test_the_outcome_is_whether_the_safe_bytes_fit(traced: TraceAnswer) -> None:
    assert not traced.fits
    assert planned(traced).outcome == "planned"
    assert PlanAnswer(before=replace(traced, safe_bytes=400 * MIB)).outcome == "fits"
    assert PlanAnswer(before=traced, reason="no plan fits").outcome == "no_plan_fits"


def test_the_answer_survives_json(traced: TraceAnswer) -> None:
    answer = planned(traced)
    document = plan_answer_to_dict(answer)
    assert plan_answer_from_dict(json.loads(json.dumps(document))) == answer
    assert document["outcome"] == "planned"
    assert document["budget_bytes"] == 500 * MIB


def test_a_plan_of_a_file_is_applied(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = a_plan(("0", "1"), {"0": "recompute"})
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_to_dict(plan)))
    assert load_plan(path) == plan
    with applied(model, str(path)):
        assert "forward" in vars(model[0])
    path.write_text("{")
    with pytest.raises(InvalidRequestError, match="is no JSON file"):
        load_plan(path)
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        applied(model, tmp_path / "none.json")


def test_a_model_object_gets_a_plan() -> None:
    answer = gpumemnet.plan(
        blocks.build(),
        torch.empty(64, 64, 256),
        gpu="RTX-4090",
        budget_bytes=900 * MIB,
        with_alternatives=False,
    )
    assert answer.outcome == "planned"
    assert answer.after is not None
    assert answer.after.fits
    assert "planned in 0.88 GiB" in repr(answer)
    with pytest.raises(InvalidRequestError, match="must be one of greedy"):
        gpumemnet.plan(blocks.build(), torch.empty(64, 64, 256), planner="genetic")


def test_a_gpu_without_rates_has_those_of_another_which_the_plan_names() -> None:
    gpu = replace(find_profile("H100"), fp32_tflops=None)
    assert "A100" in find_machine(gpu).source
    assert "as NVIDIA H100 80GB HBM3 states none" in find_machine(gpu).source
