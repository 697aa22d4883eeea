"""Jobs with a traced peak: how the peak is calibrated, and what is answered from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpumemnet.job.job_table import JobTable
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import GIB, MIB
from models.training.bounds import COVERAGES
from models.training.card import fit_traced_peak
from models.training.classifier import save_classifier
from models.training.data import LabelledJobs, folds
from models.training.mlp import TrainingPlan, train_classifier
from research.report.candidates import traced_peak_answers

CONTEXT = 700 * MIB


@pytest.fixture(scope="module")
def traced(synthetic: LabelledJobs) -> LabelledJobs:
    """The synthetic jobs with traced peaks that lie 1 % below what the job reserves, give or take
    0.5 %."""
    noise = np.random.default_rng(3).normal(0.99, 0.005, len(synthetic))
    known = np.where(np.isnan(synthetic.label_bytes), 1.5 * GIB, synthetic.label_bytes)
    peaks = ((known - CONTEXT) * noise).astype(int).tolist()
    jobs = JobTable.from_jobs(
        [
            replace(job, traced_peak_bytes=peak)
            for job, peak in zip(synthetic.jobs, peaks, strict=True)
        ]
    )
    return replace(synthetic, jobs=jobs, context_bytes=CONTEXT)


def test_the_shift_is_undone_and_the_bound_holds_on_other_jobs(traced: LabelledJobs) -> None:
    training, test = (traced.take(rows) for rows in folds(traced.groups, 3, seed=0)[0])
    test = test.take(np.flatnonzero(~np.isnan(test.label_bytes)))
    answers = traced_peak_answers(training, test)
    assert answers is not None
    assert np.median(np.abs(answers.expected_bytes / test.label_bytes - 1)) < 0.006
    for level in (0.5, 0.9, 0.99):
        assert np.mean(test.label_bytes <= answers.bounds_bytes[level]) == pytest.approx(
            level, abs=0.12
        )


def test_too_few_rows_for_a_coverage_give_a_wider_bound(traced: LabelledJobs) -> None:
    few = fit_traced_peak(traced.take(np.arange(40)), COVERAGES)
    assert few is not None
    assert list(few.log_bounds) == sorted(few.log_bounds)
    assert few.log_bounds[-1] > 1.5 * few.log_bounds[COVERAGES.index(0.9)]
    assert fit_traced_peak(replace(traced, context_bytes=None), COVERAGES) is None
    below = replace(traced, label_bytes=traced.label_bytes * 0.5).take(np.arange(40))
    too_high = fit_traced_peak(below, COVERAGES)
    assert too_high is not None
    assert list(too_high.log_bounds) == sorted(
        too_high.log_bounds
    )  # twice an error below zero would be a lower bound


@pytest.fixture(scope="module")
def predictor(traced: LabelledJobs, tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    plan = TrainingPlan(epochs=5, hidden=8, members=2)
    folder = tmp_path_factory.mktemp("bundle") / "traced"
    return Predictor(
        [
            save_classifier(
                folder, train_classifier(traced, plan), traced, plan, name="synthetic", version="1"
            )
        ]
    )


def test_a_job_that_sends_its_peak_is_answered_from_it(
    predictor: Predictor, traced: LabelledJobs
) -> None:
    job = traced.jobs[0]
    assert job.traced_peak_bytes is not None
    other = replace(job, traced_peak_bytes=job.traced_peak_bytes + 9 * GIB)
    bare = replace(job, traced_peak_bytes=None)
    one, two, three = predictor.predict_many([job, other, bare])
    assert one.expected_bytes == pytest.approx(1.01 * job.traced_peak_bytes + CONTEXT, rel=0.01)
    assert two.expected_bytes - one.expected_bytes == pytest.approx(9 * GIB, rel=0.03)
    assert three.expected_bytes == pytest.approx(predictor.predict(bare).expected_bytes)
    for estimate in (one, two, three):
        assert estimate.probabilities.sum() == pytest.approx(1)
        lower, upper = estimate.bin_bounds_bytes
        assert lower - 64 * MIB <= estimate.expected_bytes <= (upper or 0) + 64 * MIB


def test_options_that_no_traced_row_was_measured_with_get_no_bound(
    predictor: Predictor, traced: LabelledJobs
) -> None:
    estimate = predictor.predict(replace(traced.jobs[0], precision="bf16"))
    assert estimate.safe_bytes is None
    assert estimate.reasons == ("precision is 'bf16'; traced jobs were measured with 'fp32'",)


def test_the_card_states_its_data(
    predictor: Predictor, traced: LabelledJobs, tmp_path: Path
) -> None:
    stated = predictor.bundles[0].card.document["traced_peak"]
    assert stated["rows"] == int((~np.isnan(traced.label_bytes)).sum())
    assert stated["provenance"] == "measured"
