import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumemnet.predict.predictor import Predictor
from research.cli import main
from research.packing import (
    FITS,
    Amounts,
    Inventory,
    Policy,
    Run,
    Trace,
    TraceRow,
    Workload,
    estimators,
    figures,
    inventory,
    read_trace,
    simulate,
    workload,
)
from tests.jobs import small_job

DATASETS = Path(__file__).parents[2] / "dataset_builder" / "datasets"
REAL = DATASETS / "published_real_models_a100.parquet"
A100_MIB = 40960 - 512

JobNumbers = tuple[float, float, int, int | None]
"""Arrival and duration in seconds, true MiB, estimated MiB or none."""


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor.default()


def a_trace(jobs: Sequence[JobNumbers]) -> Trace:
    rows = tuple(
        TraceRow(
            location=f"row {number}",
            job=small_job(),
            peak_mib=peak,
            arrival_seconds=arrival,
            duration_seconds=duration,
            estimates_mib={} if estimate is None else {"guess": estimate},
        )
        for number, (arrival, duration, peak, estimate) in enumerate(jobs)
    )
    return Trace(rows=rows, left_out={}, sha256_of={})


def runs_of(
    jobs: Sequence[JobNumbers],
    gpus: str,
    predictor: Predictor,
    policy: Policy | None = None,
    only: Sequence[str] = ("exclusive", "oracle", "given"),
) -> tuple[Workload, Inventory, dict[str, tuple[Amounts, Run]]]:
    trace, cards = a_trace(jobs), inventory(gpus)
    work = workload(trace, cards.cards)
    found = estimators(trace.rows, cards, predictor, only=only)
    return work, cards, {one.key: (one, simulate(work, one, cards, policy)) for one in found}


a_job = st.tuples(
    st.integers(0, 50).map(lambda tenths: tenths * 10.0),
    st.integers(1, 60).map(lambda tenths: tenths * 10.0),
    st.integers(1, 90_000),
    st.none() | st.integers(0, 90_000),
)
policies = st.builds(
    Policy,
    fit=st.sampled_from(FITS),
    backfill=st.integers(0, 3),
    ramp_seconds=st.sampled_from([0.0, 25.0, 60.0]),
)


@settings(max_examples=60)
@given(
    jobs=st.lists(a_job, min_size=1, max_size=14),
    gpus=st.sampled_from(["A100", "A100:2", "A100:1,A100-80GB:1"]),
    policy=policies,
)
def test_whatever_is_estimated_jobs_are_conserved_and_no_card_holds_more_than_it_has(
    predictor: Predictor, jobs: Sequence[JobNumbers], gpus: str, policy: Policy
) -> None:
    work, cards, runs = runs_of(jobs, gpus, predictor, policy)
    for key, (amounts, run) in runs.items():
        ran = run.is_run
        assert (ran == (work.peak_mib <= cards.largest_mib)).all()
        assert np.isfinite(run.end_seconds[ran]).all()
        assert (run.card[ran] >= 0).all()
        assert np.isnan(run.end_seconds[~ran]).all()
        assert (run.start_seconds[ran] >= work.arrival_seconds[ran]).all()
        assert (
            run.end_seconds[ran] - run.start_seconds[ran] >= work.duration_seconds[ran] - 1e-6
        ).all()
        assert (run.most_mib <= cards.capacity_mib).all()
        assert (work.peak_mib[ran] <= cards.capacity_mib[run.card[ran]]).all()
        told = figures(run, work, amounts)
        assert told.jobs + told.not_run == len(jobs)
        assert 0 <= told.waste_share <= 1
        assert told.reserved_gib_hours >= told.waste_gib_hours >= 0
        if key == "oracle":
            assert told.ooms == 0
            assert told.waste_gib_hours == 0
            assert most_at_once(work, run, cards) <= 0
        if key == "exclusive":
            assert told.collocated_share == 0
            assert told.jobs_per_gpu in (0, pytest.approx(1))


def most_at_once(work: Workload, run: Run, cards: Inventory) -> int:
    """By how much the true memory on a card ever exceeds its capacity, from the run's intervals
    alone."""
    worst = -(2**31)
    for card, capacity in enumerate(cards.capacity_mib.tolist()):
        mine = np.flatnonzero(run.card == card)
        for moment in run.start_seconds[mine]:
            at_once = mine[(run.start_seconds[mine] <= moment) & (run.end_seconds[mine] > moment)]
            worst = max(worst, int(work.peak_mib[at_once].sum()) - capacity)
    return worst


def test_the_job_that_was_placed_last_dies_and_runs_again_alone(predictor: Predictor) -> None:
    jobs = [(0, 1000, 30_000, 15_000), (10, 1000, 20_000, 15_000), (20, 100, 1000, 1000)]
    work, _, runs = runs_of(jobs, "A100:1", predictor, Policy(ramp_seconds=60))
    amounts, run = runs["given"]
    assert run.ooms.tolist() == [0, 1, 0]
    assert run.lost_seconds.tolist() == [0, 60, 0]
    # at 70 s it leaves; the third stays until 120, the first until 1000, and only then is the card
    # empty
    assert run.start_seconds.tolist() == [0, 1000, 20]
    assert run.reserved_mib.tolist() == [15_000, A100_MIB, 1000]
    told = figures(run, work, amounts)
    assert (told.ooms, told.oom_jobs) == (1, 1)
    assert told.wait_hours == pytest.approx((990 + 0 + 0) / 3 / 3600)
    assert told.waste_gib_hours == pytest.approx(
        ((A100_MIB - 20_000) * 1000 + 15_000 * 60) / 1024 / 3600
    )


def test_a_job_that_dies_alone_goes_to_a_larger_card(predictor: Predictor) -> None:
    _, cards, runs = runs_of(
        [(0, 100, 60_000, None)], "A100:1,A100-80GB:1", predictor, Policy(fit="first")
    )
    run = runs["exclusive"][1]
    assert run.ooms.tolist() == [1]
    assert cards.capacity_mib[run.card[0]] > 60_000


def test_without_backfill_nobody_overtakes(predictor: Predictor) -> None:
    jobs = [(0, 100, 30_000, 30_000), (1, 100, 20_000, 20_000), (2, 100, 1000, 1000)]
    starts = [
        runs_of(jobs, "A100:1", predictor, Policy(backfill=depth))[2]["oracle"][
            1
        ].start_seconds.tolist()
        for depth in (0, 1)
    ]
    assert starts == [[0, 100, 100], [0, 100, 2]]


def test_best_fills_and_spread_empties(predictor: Predictor) -> None:
    jobs = [(0, 100, 30_000, 30_000), (1, 100, 1000, 1000), (2, 100, 9000, 9000)]
    cards = {
        fit: runs_of(jobs, "A100:2", predictor, Policy(fit=fit))[2]["oracle"][1].card.tolist()
        for fit in FITS
    }
    assert cards == {"best": [0, 0, 0], "first": [0, 0, 0], "spread": [0, 1, 1]}


def test_where_an_estimator_has_no_answer_a_fixed_guess_may_stand(predictor: Predictor) -> None:
    trace, cards = a_trace([(0, 10, 500, None), (0, 10, 500, 700)]), inventory("A100:1")
    for unknown, expected in ((None, [[-1], [800]]), (40_000, [[40_000], [800]])):
        found = estimators(
            trace.rows, cards, predictor, only=["given"], unknown_mib=unknown, headroom_mib=100
        )[0]
        assert found.mib.tolist() == expected
        assert found.title == "guess (1 of 2)"
        assert found.is_alone.tolist() == [unknown is None, False]


def test_gpumemnet_answers_for_each_kind(predictor: Predictor) -> None:
    trace, cards = read_trace([REAL]), inventory("A100:1,H200:1")
    found = {one.key: one for one in estimators(trace.rows, cards, predictor)}
    assert {"naive", "horus", "closed-form", "traced-peak", "given", "oracle"} <= found.keys()
    traced = found["traced-limit"]
    for row, one in enumerate(trace.rows[:3]):
        for kind, target in enumerate(cards.kinds):
            estimate = predictor.predict(one.job, gpu=target.gpu)
            assert estimate.safe_bytes is not None
            assert traced.mib[row, kind] == -(-estimate.safe_bytes // 2**20)
    assert found["limit"].unanswered == traced.unanswered == 0


def test_drawn_times_have_the_load_that_was_asked_for_and_depend_on_the_seed_alone() -> None:
    trace = read_trace([REAL])
    work, again, other = (
        workload(trace, 64, jobs=20_000, load=3, median_seconds=600, seed=seed)
        for seed in (1, 1, 2)
    )
    rate = len(work.row_of) / work.arrival_seconds[-1]
    assert rate * work.duration_seconds.mean() / 64 == pytest.approx(3, rel=0.05)
    assert np.median(work.duration_seconds) == pytest.approx(600, rel=0.05)
    assert (again.arrival_seconds == work.arrival_seconds).all()
    assert (again.row_of == work.row_of).all()
    assert (other.arrival_seconds != work.arrival_seconds).any()


def test_an_inventory_counts_what_the_driver_keeps_and_knows_mig() -> None:
    cards = inventory("A100:2, A100/3g.20gb, A100:1")
    assert cards.counts == (3, 1)
    assert cards.capacity_mib.tolist()[:3] == [A100_MIB] * 3
    assert 15_000 < cards.capacity_mib[3] < 20_480


def test_the_command_line_prints_the_same_table_twice_and_writes_json_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "packing.json"
    arguments = ["pack", str(REAL), "--gpus", "A100:4", "--jobs", "60", "--seed", "3"]
    assert main([*arguments, "--out", str(out), "--plot", str(tmp_path / "packing.svg")]) == 0
    said = capsys.readouterr().out
    assert "60 jobs on 4 × NVIDIA A100-SXM4-40GB" in said
    assert "do not slow each other down" in said
    assert "synthetic" in said
    svg = (tmp_path / "packing.svg").read_text()
    assert svg.startswith("<?xml")
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())
    document = json.loads(out.read_text())
    lines = {line["key"]: line for line in document["estimators"] if line["key"] != "given"}
    assert lines["oracle"]["ooms"] == lines["exclusive"]["collocated_share"] == 0
    assert lines["oracle"]["waste_gib_hours"] == 0
    assert all(line["jobs"] == 60 for line in document["estimators"])
    assert document["seen_by"] == {}
    assert main([*arguments, "--plot", str(tmp_path / "again.svg")]) == 0
    assert capsys.readouterr().out == said
    assert (tmp_path / "again.svg").read_text() == svg
