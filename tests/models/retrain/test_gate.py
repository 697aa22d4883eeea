"""The gate lets through what is shown to be better, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pytest

from gpumemnet.predict.conformal import binomial_tail
from gpumemnet.units import GIB
from models.retrain.gate import RULE, Judged, Rule, Verdict, judge, losses

# Exact answers: every job takes 8 GiB, so shares of it have no rounding error, and no draw of a
# constant difference differs from another.

LABEL = 8.0
SAFE = 12.0
ONE_DRAW = Rule(alpha=0.75, draws=3)
"""Every p-value is 1/4, 1/2, 3/4 or 1, and one test in one part has the level 1/4."""


def exact(
    champion: Sequence[float] | float = LABEL,
    candidate: Sequence[float] | float = LABEL,
    champion_safe: Sequence[float] | float = SAFE,
    candidate_safe: Sequence[float] | float = SAFE,
    *,
    name: str = "part",
    decides: bool = True,
    jobs: int = 20,
    networks: int | None = None,
) -> Judged:
    """Jobs with these answers in GiB, each of a network of its own unless there are fewer."""
    answers = [
        np.stack([np.broadcast_to(np.asarray(one, float), jobs) * GIB for one in pair])
        for pair in ((champion, champion_safe), (candidate, candidate_safe))
    ]
    architectures = np.array([str(at % (networks or jobs)) for at in range(jobs)])
    return Judged(name, decides, np.full(jobs, LABEL * GIB), architectures, *answers)


def above(count: int, jobs: int = 100) -> list[float]:
    """Safe bytes of so many jobs that ``count`` of them take more."""
    return [7.9] * count + [SAFE] * (jobs - count)


def objections(verdict: Verdict) -> set[str]:
    """The measures that speak against the candidate, or ``%`` for its promise."""
    words = ("error", "waste", "above safe", "wrong bin", "bin too low")
    sentences = [one for part in verdict.parts for one in part.objections]
    return {next((w for w in words if one.startswith(w)), "%") for one in sentences}


def test_the_rule_is_as_documented() -> None:
    assert asdict(RULE) == {
        "alpha": 0.05,
        "least_gain": 0.02,
        "most_error": 0.02,
        "most_waste": 0.1,
        "least_error": 0.0005,
        "least_waste": 0.02,
        "most_share": 0.01,
        "worse_alpha": 0.25,
        "coverage": 0.99,
        "coverage_alpha": 0.01,
        "doubtful_coverage": 0.05,
        "fewest_rows": 20,
        "fewest_architectures": 10,
        "fewest_guard_rows": 15,
        "fewest_guard_architectures": 5,
        "draws": 2000,
        "seed": 0,
    }


def test_each_loss() -> None:
    labels = np.full(4, LABEL * GIB)
    answers = np.array([[8.0, 7.9, 9.5, 80.0], [8.0, 7.9, 10.0, 80.0]]) * GIB
    found = losses(labels, answers)
    assert found["error"].tolist() == pytest.approx([0.0, -np.log(7.9 / 8), np.log(9.5 / 8), 0.2])
    assert found["waste"].tolist() == [0.0, 0.0, 0.25, 1.0]
    assert found["above safe"].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert found["wrong bin"].tolist() == [0.0, 1.0, 1.0, 1.0]
    assert found["bin too low"].tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("jobs", "networks", "promotes"), [(20, 10, True), (19, 10, False), (20, 9, False)]
)
def test_a_part_decides_with_enough_jobs_and_networks(
    jobs: int, networks: int, promotes: bool
) -> None:
    verdict = judge([exact(candidate_safe=10.0, jobs=jobs, networks=networks)])
    assert verdict.promote == promotes
    assert promotes or verdict.reasons == (
        f"too few jobs to judge by ({jobs} of part): one part needs 20 jobs of 10 architectures",
    )


def test_a_small_part_that_would_decide_is_a_guard_and_a_guard_needs_15_jobs_of_5_networks() -> (
    None
):
    better = exact(candidate_safe=10.0)
    for jobs, networks, promotes in (
        *((14, 14, True), (15, 15, False), (19, 19, False)),
        *((40, 4, True), (40, 5, False)),
    ):
        worse = exact(candidate=9.5, jobs=jobs, networks=networks)
        assert judge([better, worse]).promote == promotes
    guard = exact(candidate_safe=10.0, decides=False, jobs=40)
    assert judge([guard]).reasons[0].startswith("too few jobs to judge by (none)")
    same = judge([exact(), guard])
    assert same.reasons == ("no significant improvement",)
    assert [part.decides for part in same.parts] == [True, False]


def test_less_waste_is_an_improvement_of_its_own() -> None:
    assert judge([exact(candidate_safe=10.0)]).reasons == ("part: better waste",)
    rule = Rule(least_gain=0.5)
    assert judge([exact(candidate_safe=10.0)], rule).promote
    assert not judge([exact(candidate_safe=10.01)], rule).promote


def test_the_level_is_divided_among_the_parts_that_decide_and_the_measures() -> None:
    part, guard = exact(candidate_safe=10.0), exact(decides=False)
    verdict = judge([part, guard], ONE_DRAW)
    assert verdict.promote
    assert verdict.parts[0].measures["waste"].p_not_better == 0.25
    assert verdict.parts[0].measures["waste"].p_not_worse == 1.0
    unchanged = verdict.parts[0].measures["error"]
    assert (unchanged.p_not_better, unchanged.p_not_worse) == (1.0, 1.0)
    assert not judge([part, exact()], ONE_DRAW).promote
    assert not judge([part], Rule(alpha=0.74, draws=3)).promote


def test_every_draw_counts_once() -> None:
    comparison = judge([exact(candidate_safe=10.0)], Rule(draws=600)).parts[0].measures["waste"]
    assert (comparison.p_not_better, comparison.p_not_worse) == (1 / 601, 1.0)


def test_whole_networks_are_drawn() -> None:
    answers = [10.0 if at % 10 < 6 else 13.0 for at in range(200)]
    alone, clustered = (
        judge([exact(candidate_safe=answers, jobs=200, networks=networks)]).parts[0]
        for networks in (200, 10)
    )
    assert alone.measures["waste"].p_not_better < 0.01
    assert 0.01 < clustered.measures["waste"].p_not_better < 0.2
    assert (alone.architectures, clustered.architectures) == (200, 10)
    # of two networks, both draws are the worse one in a quarter of the samples
    guard = exact(candidate_safe=[10.0, 13.0] * 10, decides=False, networks=2)
    with np.errstate(all="raise"):
        waste = (
            judge([exact(), guard], Rule(fewest_guard_architectures=2)).parts[1].measures["waste"]
        )
    assert 0.2 < waste.p_not_better < 0.3


def test_more_waste_up_to_a_share_and_an_amount_is_allowed() -> None:
    worse = exact(candidate_safe=14.0)  # 0.75 in place of 0.5
    assert objections(judge([worse])) == {"waste"}
    assert not objections(judge([worse], Rule(most_waste=0.5)))
    assert objections(judge([worse], Rule(most_waste=0.49))) == {"waste"}
    assert not objections(judge([worse], Rule(least_waste=0.25)))
    assert not objections(judge([worse], Rule(most_waste=0.5, least_waste=0.0)))


def test_more_error_up_to_a_share_and_an_amount_is_allowed() -> None:
    worse = exact(champion=8.2, candidate=8.25)  # 0.0247 and 0.0308
    assert objections(judge([worse])) == {"error"}
    assert not objections(judge([worse], Rule(most_error=0.25)))
    assert objections(judge([worse], Rule(most_error=0.2, most_waste=0.9))) == {"error"}
    assert not objections(judge([worse], Rule(least_error=0.0062)))
    assert objections(judge([worse], Rule(least_error=0.006, least_waste=0.9))) == {"error"}


def test_a_loss_that_chance_explains_is_no_objection() -> None:
    worse = exact(candidate_safe=14.0)
    assert objections(judge([worse], Rule(draws=3))) == {"waste"}
    assert not objections(judge([worse], Rule(draws=3, worse_alpha=0.24)))


def test_more_jobs_in_a_wrong_bin_are_an_objection() -> None:
    few, many = ([9.5] * count + [LABEL] * (100 - count) for count in (1, 2))
    rule = Rule(least_error=9.0, worse_alpha=1.0)
    assert not objections(judge([exact(candidate=few, jobs=100)], rule))
    assert objections(judge([exact(candidate=many, jobs=100)], rule)) == {"wrong bin"}


def test_fewer_wrong_bins_make_up_for_bins_too_low() -> None:
    champion, candidate = [9.5] * 20, [7.9] * 4 + [LABEL] * 16
    assert not objections(judge([exact(champion, candidate)]))
    both = exact([9.5] * 10 + [LABEL] * 10, [7.9] * 10 + [LABEL] * 10)
    assert objections(judge([both])) == {"bin too low"}
    # p-value and level of the wrong bins are equal
    assert not objections(judge([exact(champion, candidate)], Rule(alpha=0.25, draws=3)))
    assert objections(judge([exact(champion, candidate)], Rule(alpha=0.24, draws=3))) == {
        "bin too low"
    }


def test_few_jobs_above_safe_are_within_the_promise() -> None:
    parts = [exact(champion_safe=SAFE, candidate_safe=above(4), jobs=100)]
    assert objections(judge(parts)) == {"above safe"}
    guards = [exact(decides=False, jobs=100, name=name) for name in ("a", "b")]
    assert not objections(judge([*parts, *guards]))  # 5 % are divided among the parts
    probability = binomial_tail(4, 100, 1.0 - 0.99)
    assert not objections(judge(parts, Rule(doubtful_coverage=probability)))
    assert objections(judge(parts, Rule(doubtful_coverage=probability * 1.01))) == {"above safe"}
    broken = [exact(candidate_safe=above(6), jobs=100)]
    assert objections(judge(broken, Rule(doubtful_coverage=0.0))) == {"%", "above safe"}


def test_the_promise_is_broken_below_a_p_value() -> None:
    parts = [exact(candidate_safe=above(5), jobs=100)]
    probability = binomial_tail(5, 100, 1.0 - 0.99)
    for alpha, keeps in ((probability, True), (probability * 1.01, False)):
        rule = Rule(coverage_alpha=alpha, doubtful_coverage=0.0)
        verdict = judge(parts, rule).parts[0]
        assert verdict.candidate_keeps_coverage == keeps
        assert verdict.champion_keeps_coverage
    [reason] = [one for one in judge(parts).reasons if "promised" in one]
    assert reason == "part: 5.0% of the jobs take more than the safe bytes, and 1% is promised"


def test_a_broken_promise_counts_where_it_decides_or_the_champion_keeps_it() -> None:
    better = exact(candidate_safe=10.0, jobs=100)
    for decides, champion_safe, objects in (
        (True, above(30), True),
        (False, above(30), False),
        (False, SAFE, True),
    ):
        part = exact(
            champion_safe=champion_safe, candidate_safe=above(30), decides=decides, jobs=100
        )
        assert ("%" in objections(judge([better, part]))) == objects


def test_a_candidate_that_breaks_its_promise_does_not_waste_less() -> None:
    breaks, keeps = [7.9] * 30 + [10.0] * 70, [10.0] * 100
    for candidate_safe, better in ((breaks, ()), (keeps, ("waste",))):
        verdict = judge([exact(candidate_safe=candidate_safe, jobs=100)])
        assert verdict.parts[0].better == better
    # what it errs less is said all the same
    verdict = judge([exact(champion=9.5, candidate_safe=breaks, jobs=100)])
    assert verdict.parts[0].better == ("error",)


def test_fewer_jobs_above_safe_are_a_merit_where_the_champion_alone_breaks_its_promise() -> None:
    wide = 20.0
    for champion_safe, candidate_safe, better in (
        (above(30), [wide] * 100, ("above safe",)),
        (above(30), above(20), ()),
        ([7.9] + [SAFE] * 99, SAFE, ()),
    ):
        verdict = judge([exact(LABEL, LABEL, champion_safe, candidate_safe, jobs=100)])
        assert verdict.parts[0].better == better
    kept = exact(champion_safe=[7.9, *[SAFE] * 99], candidate_safe=wide, jobs=100)
    assert objections(judge([kept])) == {"waste"}
    assert not objections(judge([exact(LABEL, LABEL, above(30), [wide] * 100, jobs=100)]))
    level = Rule(alpha=0.75, draws=3)
    assert judge([exact(LABEL, LABEL, above(30), [wide] * 100, jobs=100)], level).promote


def test_a_part_that_does_not_decide_shows_no_improvement() -> None:
    guard = exact(candidate_safe=10.0, decides=False)
    assert judge([exact(), guard]).parts[1].better == ()


def test_chance_seldom_promotes() -> None:
    promoted = 0
    for seed in range(100):
        generator = np.random.default_rng(seed)
        labels = generator.uniform(2.1, 30.0, 60) * GIB
        answers = [
            np.stack((labels * np.exp(generator.normal(0.0, 0.03, 60)), labels * 1.1))
            for _ in range(2)
        ]
        promoted += judge(
            [Judged("held-out", True, labels, np.arange(60).astype(str), *answers)]
        ).promote
    assert promoted <= 6
