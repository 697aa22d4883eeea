"""Training: what is learned, what is exported, and that safe bytes hold on jobs never seen."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from gpumemnet.job.job_table import JobTable
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import MIB
from models.evaluation import REGRESSIONS, SCHEMES, commonest_bin, regression_answers
from models.networks.mlp import (
    BACKGROUND_SCALE,
    BACKGROUND_WEIGHT,
    MemberMLPs,
    centre_and_spread,
    float_tensor,
)
from models.training.bounds import COVERAGES, conformal_bounds, grouped_multiples
from models.training.classifier import save_classifier
from models.training.data import LabelledJobs, features_on
from models.training.mlp import (
    TrainedClassifier,
    TrainingPlan,
    train_classifier,
)

PLAN = TrainingPlan(epochs=15, hidden=16, members=3)


@pytest.fixture(scope="module")
def trained(halves: tuple[LabelledJobs, LabelledJobs]) -> TrainedClassifier:
    return train_classifier(halves[0], PLAN)


@pytest.fixture(scope="module")
def predictor(
    trained: TrainedClassifier,
    halves: tuple[LabelledJobs, LabelledJobs],
    tmp_path_factory: pytest.TempPathFactory,
) -> Predictor:
    folder = tmp_path_factory.mktemp("bundles") / "synthetic"
    return Predictor(
        [save_classifier(folder, trained, halves[0], PLAN, name="synthetic", version="1")]
    )


def test_the_exported_graph_equals_the_network(
    trained: TrainedClassifier, predictor: Predictor, halves: tuple[LabelledJobs, LabelledJobs]
) -> None:
    session = onnxruntime.InferenceSession(predictor.bundles[0].model)
    for jobs in (halves[1], halves[1].without_layers()):
        features = float_tensor(jobs.features)
        with torch.no_grad():
            of_network = trained.network(features)
        of_graph = session.run(None, {"features": features.numpy()})
        for one, other in zip(of_network, of_graph, strict=True):
            np.testing.assert_allclose(one.numpy(), other, rtol=1e-5, atol=1e-5)


def test_unseen_jobs_are_predicted_and_bounded(
    predictor: Predictor, halves: tuple[LabelledJobs, LabelledJobs]
) -> None:
    test = halves[1]
    estimates = predictor.predict_many(test.jobs, coverage=0.95)
    errors = np.abs([estimate.expected_bytes for estimate in estimates] - test.label_bytes)
    assert np.median(errors) < 12 * MIB  # the rule's own noise is 4
    bounded = [
        (label, estimate.safe_bytes)
        for label, estimate in zip(test.label_bytes, estimates, strict=True)
        if estimate.safe_bytes
    ]
    assert len(bounded) > 0.9 * len(test)
    assert np.mean([label <= safe for label, safe in bounded]) > 0.9


def test_the_same_seed_gives_the_same_network(halves: tuple[LabelledJobs, LabelledJobs]) -> None:
    plan = TrainingPlan(epochs=2, hidden=8, members=2)
    first, second = (train_classifier(halves[0], plan).network.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_model_of_one_fold_is_not_used_in_the_next(
    halves: tuple[LabelledJobs, LabelledJobs],
) -> None:
    plan = TrainingPlan(epochs=1, hidden=8, members=2)
    seen: list[float] = []
    train_classifier(halves[0], plan, seen.append)
    fresh = train_classifier(halves[0], plan).network.state_dict()
    train_classifier(halves[1], plan)
    again = train_classifier(halves[0], plan).network.state_dict()
    assert all(torch.equal(fresh[name], again[name]) for name in fresh)
    assert seen == [1.0]


def test_the_card_says_what_was_trained_on(
    predictor: Predictor, halves: tuple[LabelledJobs, LabelledJobs]
) -> None:
    card = predictor.bundles[0].card
    assert card.document["training_data"]["rows"] == len(halves[0])
    assert card.options["optimizer"] == ("adam",)
    low, high = card.ranges["batch_size"]
    assert (low, high) == (
        min(job.batch_size for job in halves[0].jobs),
        max(job.batch_size for job in halves[0].jobs),
    )
    assert card.coverages[-1] < 0.999  # two hundred rows cannot bear witness for one in a thousand


def test_baselines_learn_the_rule_approximately(halves: tuple[LabelledJobs, LabelledJobs]) -> None:
    training, test = halves
    known = training.take(np.flatnonzero(~np.isnan(training.label_bytes)))
    errors = {}
    for name, fit in REGRESSIONS.items():
        answers = regression_answers(fit, known, test, SCHEMES)
        errors[name] = np.median(np.abs(answers.expected_bytes - test.label_bytes)) / MIB
        assert (test.label_bytes <= answers.safe_bytes).mean() > 0.9
    assert errors["calibrated closed form"] < 5  # the rule is a line in the closed form
    majority = commonest_bin(known, test, SCHEMES)
    assert len(set(majority.bins[SCHEMES[0].name])) == 1
    assert all(
        error < np.median(np.abs(majority.expected_bytes - test.label_bytes)) / MIB
        for error in errors.values()
    )


def test_a_bundle_is_registered_whole_or_not_at_all(
    tmp_path: Path, trained: TrainedClassifier, halves: tuple[LabelledJobs, LabelledJobs]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    from gpumemnet.errors import BundleError

    with pytest.raises(BundleError, match="choose another folder"):
        save_classifier(tmp_path / "mine", trained, halves[0], PLAN, name="x", version="1")
    assert [entry.name for entry in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_jobs_that_ran_out_of_memory_are_trained_on(synthetic: LabelledJobs) -> None:
    data = synthetic.take(np.arange(150))
    assert np.isnan(data.label_bytes).any()
    trained = train_classifier(data, PLAN)
    assert min(trained.best_epochs) > 0
    network: Any = trained.network
    before = MemberMLPs(
        network.transform.width, PLAN.members, PLAN.hidden, PLAN.components, PLAN.seed
    )
    for old, new in zip(before.parameters(), trained.members.parameters(), strict=True):
        assert torch.isfinite(new).all()
        assert not torch.equal(old, new)


def test_benchmark_jobs_have_separate_bounds(synthetic: LabelledJobs) -> None:
    generator = np.random.default_rng(4)
    benchmark = np.arange(len(synthetic)) % 3 == 0
    jobs = JobTable.from_jobs(
        [
            replace(job, cudnn_benchmark=bool(one))
            for job, one in zip(synthetic.jobs, benchmark, strict=True)
        ]
    )
    data = replace(synthetic, jobs=jobs, features=features_on(synthetic.gpu, jobs))
    scores = np.where(
        benchmark, generator.exponential(30.0, len(data)), generator.normal(0.0, 1.0, len(data))
    )
    multiples = grouped_multiples("layers", scores, data, COVERAGES)
    level = COVERAGES.index(0.95)
    assert multiples["layers"][level] < 2.5
    assert multiples["layers, cudnn_benchmark"][level] > 50
    alike = grouped_multiples("layers", scores[:90], data.take(np.arange(90)), COVERAGES)
    assert (
        alike["layers"] == alike["layers, cudnn_benchmark"]
    )  # thirty scores are too few to stand alone


def test_coverages_beyond_the_scores_use_twice_the_largest() -> None:
    scores = np.linspace(-1.0, 3.0, 50)
    multiples = conformal_bounds(scores, COVERAGES)
    assert list(multiples) == sorted(multiples)
    assert multiples[COVERAGES.index(0.98)] == 3.0
    assert multiples[COVERAGES.index(0.99)] == 6.0
    assert conformal_bounds(scores, COVERAGES, least=4.0) == (*multiples[:6], 8.0, 8.0, 8.0)


def test_the_network_equals_its_members(
    trained: TrainedClassifier, halves: tuple[LabelledJobs, LabelledJobs]
) -> None:
    """Side by side in the graph the members say what they learned one by one, and the bounds are
    what was calibrated."""
    network: Any = trained.network
    for mode, jobs in (("layers", halves[1]), ("totals", halves[1].without_layers())):
        features = float_tensor(jobs.features)
        with torch.no_grad():
            inputs, reference, units, groups = network.transform(features)
            weights, locations, scales = (
                part.flatten(1) for part in trained.members(inputs.unsqueeze(0))
            )
            centre, spread = centre_and_spread(weights, locations, scales)
            answer = network(features)
        assert groups.sum(1).tolist() == [1.0] * len(groups)
        np.testing.assert_allclose(
            answer[0][:, :-1],
            weights * (1.0 - BACKGROUND_WEIGHT) / PLAN.members,
            rtol=1e-5,
            atol=1e-7,
        )
        np.testing.assert_allclose(answer[0].sum(1), 1.0, rtol=1e-6)
        np.testing.assert_allclose(
            answer[1], reference + nn.functional.pad(locations, (0, 1)) * units, rtol=1e-6
        )
        np.testing.assert_allclose(
            answer[2], nn.functional.pad(scales, (0, 1), value=BACKGROUND_SCALE) * units, rtol=1e-5
        )
        expected = reference + centre * units
        np.testing.assert_allclose(
            answer[3][:, :2], torch.cat((reference, expected), dim=1), rtol=1e-6
        )
        multiples = torch.tensor(trained.multiples[mode])
        bounds = expected + (spread / PLAN.members + trained.added_spread) * units * multiples
        np.testing.assert_allclose(answer[3][:, 2:], bounds, rtol=1e-5)
