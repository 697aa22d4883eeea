"""The gate lets through what is shown to be better, and nothing else."""

from __future__ import annotations

import numpy as np

from gpumemnet.units import GIB
from models.retrain.gate import Judged, judge, losses

JOBS = 200


def part(
    champion: float,
    candidate: float,
    *,
    name: str = "held-out architectures",
    decides: bool = True,
    jobs: int = JOBS,
    networks: int = JOBS,
    champion_margin: float = 1.2,
    candidate_margin: float = 1.2,
) -> Judged:
    """Jobs on which both err with the spreads given and bound with the margins given."""
    generator = np.random.default_rng(jobs)
    labels = generator.uniform(2.1, 30.0, jobs) * GIB

    def answers(spread: float, margin: float) -> np.ndarray:
        expected = labels * np.exp(generator.normal(0.0, spread, jobs))
        return np.stack((expected, np.maximum(labels * margin, 0.0)))

    architectures = np.array([f"{at % networks:016x}" for at in range(jobs)])
    return Judged(
        name,
        decides,
        labels,
        architectures,
        answers(champion, champion_margin),
        answers(candidate, candidate_margin),
    )


def test_a_clearly_better_candidate_is_promoted() -> None:
    verdict = judge([part(0.05, 0.02)])
    assert verdict.promote
    assert "held-out architectures: better error" in verdict.reasons


def test_the_same_model_again_is_not_promoted() -> None:
    same = part(0.05, 0.05)
    same = Judged(
        same.name, True, same.label_bytes, same.architectures, same.champion, same.champion
    )
    assert judge([same]).reasons == ("no significant improvement",)


def test_a_worse_one_is_refused_with_its_figures() -> None:
    verdict = judge([part(0.02, 0.05)])
    assert not verdict.promote
    assert any("error" in reason and "worse" in reason for reason in verdict.reasons)


def test_a_bare_difference_on_few_jobs_is_not_significant() -> None:
    assert not judge([part(0.05, 0.048, jobs=30)]).promote


def test_many_jobs_of_few_networks_count_as_few() -> None:
    verdict = judge([part(0.05, 0.01, networks=4)])
    assert not verdict.promote
    assert "too few jobs to judge by (200 of held-out architectures)" in verdict.reasons[0]


def test_broken_coverage_outweighs_better_accuracy() -> None:
    verdict = judge([part(0.05, 0.02, candidate_margin=0.99)])
    assert not verdict.promote
    assert any("1% is promised" in reason for reason in verdict.reasons)


def test_a_champion_that_breaks_its_promise_is_replaced_by_one_that_wastes_more() -> None:
    verdict = judge([part(0.05, 0.04, champion_margin=0.99, candidate_margin=1.3)])
    assert verdict.promote
    assert "held-out architectures: better above safe" in verdict.reasons


def test_more_waste_is_no_improvement() -> None:
    assert not judge([part(0.05, 0.04, candidate_margin=1.5)]).promote


def test_a_candidate_that_is_worse_on_another_part_is_refused() -> None:
    guard = part(0.02, 0.05, name="the champion's own jobs", decides=False)
    verdict = judge([part(0.05, 0.02), guard])
    assert not verdict.promote
    assert all(reason.startswith("the champion's own jobs") for reason in verdict.reasons)


def test_a_guard_of_few_jobs_is_left_out() -> None:
    assert judge([part(0.05, 0.02), part(0.02, 0.05, name="few", decides=False, jobs=10)]).promote


def test_one_extreme_answer_does_not_outweigh_the_rest() -> None:
    absurd = part(0.05, 0.02)
    absurd.candidate[0, 0] *= 1e9
    absurd.candidate[1, 0] *= 1e9
    assert judge([absurd]).promote
    assert losses(absurd.label_bytes, absurd.candidate)["waste"].max() == 1.0


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
