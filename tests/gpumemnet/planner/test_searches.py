from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpumemnet.planner.chain import KEEP, OPTIONS, Chain
from gpumemnet.planner.plans import Decision
from gpumemnet.planner.searches import exact, greedy
from tests.gpumemnet.planner.chains import every_plan, limit_between, random_chain

SEEDS = st.integers(0, 10**6)
SHARES = st.floats(0, 1)


def fastest(chain: Chain, limit: float) -> float:
    plans = every_plan(chain)
    plans = plans[chain.fits(plans, limit)]
    return float(chain.step_seconds(plans).min()) if len(plans) else np.inf


@settings(max_examples=10, deadline=None)
@example(546, 0.921875, 4, False)  # HiGHS fails with its presolve
@given(SEEDS, SHARES, st.integers(2, 5), st.booleans())
def test_the_exact_search_finds_the_fastest_of_all_plans(
    seed: int, share: float, units: int, equal: bool
) -> None:
    chain = random_chain(seed, units, equal=equal)
    limit = limit_between(chain, share)
    best, found = fastest(chain, limit), exact(chain, limit)
    if np.isinf(best):
        assert found.choices is None
        return
    assert found.choices is not None
    assert chain.fits(found.choices[None], limit)[0]
    assert chain.step_seconds(found.choices[None])[0] == pytest.approx(best, rel=2e-4)
    assert found.bound_seconds is not None
    assert found.bound_seconds <= best * (1 + 1e-6)


@settings(max_examples=10, deadline=None)
@given(SEEDS, SHARES, st.integers(2, 6))
def test_the_greedy_search_is_close_to_the_fastest_of_all_plans(
    seed: int, share: float, units: int
) -> None:
    chain = random_chain(seed, units)
    limit = limit_between(chain, share)
    assert not len(chain.peak_bytes(every_plan(chain)[:0]))
    best, found = fastest(chain, limit), greedy(chain, limit)
    if found.choices is None:
        return
    assert chain.fits(found.choices[None], limit)[0]
    seconds = chain.step_seconds(found.choices[None])[0]
    keep = chain.step_seconds(chain.keep_all()[None])[0]
    assert best <= seconds + 1e-9
    assert (
        seconds - best <= 0.25 * keep
    )  # small random chains are coarse; the benchmark has real ones


def test_the_greedy_search_is_within_a_point_of_the_optimum_where_units_are_evicted_together() -> (
    None
):
    chain = random_chain(1, 40)
    keep = float(chain.step_seconds(chain.keep_all()[None])[0])
    limit = 0.8 * float(chain.peak_bytes(chain.keep_all()[None])[0])
    found, bound = greedy(chain, limit).choices, exact(chain, limit).bound_seconds
    assert found is not None
    assert bound is not None
    assert chain.fits(found[None], limit)[0]
    assert chain.step_seconds(found[None])[0] <= bound + 0.01 * keep


def chain_of_two(copy_seconds: float) -> Chain:
    """Three units of 10 seconds forward and 20 backward; only the first two may swap or
    recompute."""
    n, o = 3, len(OPTIONS)
    swap, recompute = OPTIONS.index(Decision.SWAP), OPTIONS.index(Decision.RECOMPUTE)
    allowed = np.zeros((n, o), dtype=bool)
    allowed[:, KEEP] = True
    allowed[:2, [swap, recompute]] = True
    seconds = np.zeros((n, o))
    copy, again = seconds.copy(), seconds.copy()
    copy[:2, swap], again[:2, recompute] = copy_seconds, 10.0
    return Chain(
        allowed=allowed,
        forward_seconds=np.full(n, 10.0),
        backward_seconds=np.full(n, 20.0),
        turn_forward_seconds=1.0,
        turn_backward_seconds=2.0,
        other_seconds=7.0,
        recompute_seconds=again,
        copy_seconds=copy,
        host_bytes=np.zeros((n, o)),
        backward_order=(2, 1, 0),
        live_bytes=np.zeros(1),
        gone_bytes=np.zeros((n, o, 1)),
    )


@pytest.mark.parametrize(
    ("first", "second", "copy_seconds", "expected"),
    [
        (Decision.KEEP, Decision.KEEP, 5, 100),  # 30 + 1 + 2 + 60 + 7
        (Decision.RECOMPUTE, Decision.KEEP, 5, 110),
        (Decision.SWAP, Decision.KEEP, 10, 100),  # beside the second unit, both ways
        (Decision.SWAP, Decision.KEEP, 15, 105),  # the second unit waits 5 seconds at its end
        (Decision.SWAP, Decision.KEEP, 25, 120),  # it waits 15, and 5 for what comes back
        (Decision.SWAP, Decision.SWAP, 10, 100),
        (Decision.KEEP, Decision.SWAP, 25, 120),  # the third waits 15 at its end
    ],
)
def test_step_times_are_those_computed_by_hand(
    first: Decision, second: Decision, copy_seconds: float, expected: float
) -> None:
    chain = chain_of_two(copy_seconds)
    choices = np.array([[OPTIONS.index(first), OPTIONS.index(second), KEEP]])
    assert chain.step_seconds(choices)[0] == pytest.approx(expected)
