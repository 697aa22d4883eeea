"""Published planners of memory: their plans fit, and use options that are allowed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumemnet.planner.chain import KEEP
from gpumemnet.planner.searches import greedy
from research.planner_references import REFERENCES, swarm
from tests.gpumemnet.planner.chains import limit_between, random_chain

SEEDS = st.integers(0, 10**6)


@pytest.mark.parametrize("name", [*REFERENCES, "swarm"])
@settings(max_examples=5, deadline=None)
@given(seed=SEEDS, share=st.floats(0, 1))
def test_no_rule_violates_a_budget_or_takes_an_option_that_is_not_allowed(
    name: str, seed: int, share: float
) -> None:
    chain = random_chain(seed, 6)
    limit = limit_between(chain, share)
    found = swarm(chain, limit, iterations=5) if name == "swarm" else REFERENCES[name](chain, limit)
    if found.choices is None:
        return
    assert chain.fits(found.choices[None], limit)[0]
    assert found.choices[-1] == KEEP


def test_a_swarm_that_starts_with_a_plan_is_no_slower_than_that_plan() -> None:
    chain = random_chain(3, 6)
    limit = limit_between(chain, 0.6)
    start = greedy(chain, limit).choices
    assert start is not None
    found = swarm(chain, limit, start=start, iterations=3).choices
    assert found is not None
    assert chain.step_seconds(found[None])[0] <= chain.step_seconds(start[None])[0] + 1e-9
