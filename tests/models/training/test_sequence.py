"""The transformer-based classifier: what it learns, that padding changes nothing, and that its
graph equals the network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.training_job import totals_only
from gpumemnet.predict.features import layer_sequence
from gpumemnet.predict.predictor import Predictor
from models.networks.mlp import float_tensor
from models.training.classifier import save_classifier
from models.training.data import LabelledJobs
from models.training.mlp import TrainedClassifier
from models.training.sequence import SequencePlan, train_sequence_classifier

PLAN = SequencePlan(epochs=10, width=8, depth=1, hidden=16)


@pytest.fixture(scope="module")
def trained(halves: tuple[LabelledJobs, LabelledJobs]) -> TrainedClassifier:
    return train_sequence_classifier(halves[0], PLAN)


@pytest.fixture(scope="module")
def predictor(
    trained: TrainedClassifier,
    halves: tuple[LabelledJobs, LabelledJobs],
    tmp_path_factory: pytest.TempPathFactory,
) -> Predictor:
    folder = tmp_path_factory.mktemp("bundles") / "sequence"
    return Predictor(
        [save_classifier(folder, trained, halves[0], PLAN, name="sequence", version="1")]
    )


def test_the_exported_graph_equals_the_network_for_any_length(
    trained: TrainedClassifier, predictor: Predictor, halves: tuple[LabelledJobs, LabelledJobs]
) -> None:
    session = onnxruntime.InferenceSession(predictor.bundles[0].model)
    test = halves[1]
    lengths = np.array([len(job.layers) for job in test.jobs])
    for rows in (np.flatnonzero(lengths == lengths.min())[:3], np.arange(len(test))):
        some = test.take(rows)
        sequences, mask = layer_sequence(JobTable.from_jobs(some.jobs))
        inputs = {
            "features": some.features.astype(np.float32),
            "sequences": sequences,
            "mask": mask.astype(np.float32),
        }
        with torch.no_grad():
            of_network = trained.network(
                float_tensor(some.features), *map(torch.from_numpy, list(inputs.values())[1:])
            )
        for one, other in zip(of_network, session.run(None, inputs), strict=True):
            np.testing.assert_allclose(one.numpy(), other, rtol=1e-5, atol=2e-5)


def test_padding_changes_nothing(
    predictor: Predictor, halves: tuple[LabelledJobs, LabelledJobs]
) -> None:
    jobs = halves[1].jobs[:12]
    assert len({len(job.layers) for job in jobs}) > 1
    for job, together in zip(jobs, predictor.predict_many(jobs), strict=True):
        assert predictor.predict(job).expected_bytes == pytest.approx(
            together.expected_bytes, rel=1e-5
        )


def test_unseen_jobs_are_predicted_and_bounded(
    predictor: Predictor, halves: tuple[LabelledJobs, LabelledJobs]
) -> None:
    test = halves[1]
    estimates = predictor.predict_many(test.jobs, coverage=0.9)
    errors = np.abs([estimate.expected_bytes for estimate in estimates] / test.label_bytes - 1)
    assert np.median(errors) < 0.02
    bounded = [
        (e.safe_bytes, label)
        for e, label in zip(estimates, test.label_bytes, strict=True)
        if e.safe_bytes is not None
    ]
    assert (
        np.mean([label > safe for safe, label in bounded]) < 0.25
    )  # about thirty rows calibrate it


def test_totals_alone_are_refused(
    predictor: Predictor, halves: tuple[LabelledJobs, LabelledJobs]
) -> None:
    with pytest.raises(InvalidRequestError, match="needs `layers`"):
        predictor.predict(totals_only(halves[1].jobs[0]))


def test_the_same_seed_gives_the_same_weights(
    halves: tuple[LabelledJobs, LabelledJobs], trained: TrainedClassifier
) -> None:
    torch.manual_seed(99)
    again = train_sequence_classifier(halves[0], PLAN)
    for one, other in zip(trained.network.parameters(), again.network.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_bundle_of_an_unknown_shape_is_refused(predictor: Predictor, tmp_path: Path) -> None:
    from gpumemnet.errors import BundleError
    from gpumemnet.predict.bundle import save_bundle

    bundle = predictor.bundles[0]
    card = {**bundle.card.document, "encoder": "mlp"}
    with pytest.raises(BundleError, match="the graph must map features"):
        Predictor([save_bundle(tmp_path / "wrong", bundle.model, card)])
