from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gpumemnet.errors import InvalidRequestError
from gpumemnet.planner import Decision, plan_from_dict, plan_to_dict
from gpumemnet.units import GIB
from tests.gpumemnet.planner.plans import a_plan

PLAN = a_plan(
    ("blocks.0", "blocks.1", "blocks.2"),
    {"blocks.0": "recompute", "blocks.1": "swap"},
    host_bytes=GIB,
    notes=("a note",),
)


def test_a_plan_is_the_same_after_json() -> None:
    assert plan_from_dict(json.loads(json.dumps(plan_to_dict(PLAN)))) == PLAN
    assert PLAN.slowdown == pytest.approx(0.25)
    assert PLAN.gap == pytest.approx(0.05)
    assert replace(PLAN, bound_step_seconds=None).gap is None
    assert PLAN.decision("blocks.2") is Decision.KEEP


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"decisions": {"blocks.0": "forget"}}, "plan.decisions"),
        ({"version": 2}, "plan"),
        ({"gpu": ...}, "plan"),
    ],
)
def test_a_wrong_plan_is_refused_with_its_field(change: dict[str, object], place: str) -> None:
    document = {**plan_to_dict(PLAN), **change}
    with pytest.raises(InvalidRequestError) as raised:
        plan_from_dict({name: value for name, value in document.items() if value is not ...})
    assert raised.value.field.startswith(place)
