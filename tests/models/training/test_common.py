"""The model that all families have in common: how rows are joined, what is calibrated apart, and
how its bundle answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from gpumemnet.errors import BundleError, DatasetError, InvalidRequestError
from gpumemnet.job.job_table import JobTable
from gpumemnet.predict.bundle import CARD_FILE, load_bundle, save_bundle
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import GIB, MIB
from models.networks.mlp import float_tensor, group_names
from models.training.classifier import save_classifier
from models.training.data import LabelledJobs, features_on, folds, joined
from models.training.mlp import TrainedClassifier, TrainingPlan, train_classifier

PLAN = TrainingPlan(epochs=15, hidden=16, members=3)
OFFSET = 2 * GIB


@pytest.fixture(scope="module")
def parts(synthetic: LabelledJobs) -> tuple[LabelledJobs, LabelledJobs]:
    """MLP jobs, and CNN jobs of the same layers that take much more and are less certain; only
    these were run channels-last."""
    noise = np.random.default_rng(8).normal(0, 80 * MIB, len(synthetic))
    jobs = JobTable.from_jobs(
        [
            replace(job, family="cnn", channels_last=bool(row % 2), batch_size=2 * job.batch_size)
            for row, job in enumerate(synthetic.jobs)
        ]
    )
    cnn = replace(
        synthetic,
        jobs=jobs,
        features=features_on(synthetic.gpu, jobs),
        label_bytes=synthetic.label_bytes + OFFSET + noise,
        lower_bytes=synthetic.lower_bytes + OFFSET + noise,
        upper_bytes=synthetic.upper_bytes + OFFSET + noise,
        sha256="1" * 64,
    )
    return synthetic, cnn


@pytest.fixture(scope="module")
def data(parts: tuple[LabelledJobs, LabelledJobs]) -> LabelledJobs:
    return joined(parts)


@pytest.fixture(scope="module")
def trained(data: LabelledJobs) -> TrainedClassifier:
    return train_classifier(data.take(folds(data.groups, 3, seed=1)[0][0]), PLAN)


@pytest.fixture(scope="module")
def folder(
    trained: TrainedClassifier, data: LabelledJobs, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "common"
    save_classifier(
        folder,
        trained,
        data.take(folds(data.groups, 3, seed=1)[0][0]),
        PLAN,
        name="common",
        version="1",
    )
    return folder


def test_architectures_of_the_families_stay_separate_groups(
    parts: tuple[LabelledJobs, LabelledJobs], data: LabelledJobs
) -> None:
    assert (data.family, data.families) == ("all", ("mlp", "cnn"))
    assert len(np.unique(data.groups)) == sum(len(np.unique(part.groups)) for part in parts)
    assert [len(data.rows_of(family)) for family in data.families] == [len(part) for part in parts]
    assert data.sha256 == joined(tuple(reversed(parts))).sha256
    assert joined(parts[:1]) is parts[0]
    with pytest.raises(DatasetError, match="a family in common"):
        joined((parts[0], parts[0]))
    changes: list[dict[str, Any]] = [
        {"gpu": "NVIDIA L4"},
        {"provenance": "published"},
        {"label_source": "traced"},
    ]
    for change in changes:
        with pytest.raises(DatasetError, match=f"of different {next(iter(change))}"):
            joined((parts[0], replace(parts[1], **change)))


def test_each_family_has_bounds_and_fallbacks_of_its_own(trained: TrainedClassifier) -> None:
    assert set(trained.multiples) == set(group_names(("mlp", "cnn")))
    assert set(trained.range_log_scales) == {"mlp", "cnn"}
    assert trained.multiples["mlp, layers"] != trained.multiples["cnn, layers"]


def test_the_exported_graph_equals_the_network(
    folder: Path, trained: TrainedClassifier, data: LabelledJobs
) -> None:
    session = onnxruntime.InferenceSession(load_bundle(folder).model)
    for jobs in (data, data.without_layers()):
        features = float_tensor(jobs.features)
        with torch.no_grad():
            of_network = trained.network(features)
        for one, other in zip(
            of_network, session.run(None, {"features": features.numpy()}), strict=True
        ):
            np.testing.assert_allclose(one.numpy(), other, rtol=1e-5, atol=1e-5)


def test_bounds_hold_in_every_family(folder: Path, data: LabelledJobs) -> None:
    predictor = Predictor.load(folder)
    test = data.take(folds(data.groups, 3, seed=1)[0][1])
    test = test.take(np.flatnonzero(~np.isnan(test.label_bytes)))
    estimates = predictor.predict_many(
        test.jobs, coverage=0.9
    )  # the only model, so it need not be asked for
    for family, error in (("mlp", 30 * MIB), ("cnn", 120 * MIB)):
        rows = test.rows_of(family).tolist()
        own = [(float(test.label_bytes[row]), estimates[row]) for row in rows]
        assert np.median([abs(label - estimate.expected_bytes) for label, estimate in own]) < error
        bounded = [label <= estimate.safe_bytes for label, estimate in own if estimate.safe_bytes]
        assert len(bounded) > 0.85 * len(own)
        assert np.mean(bounded) > 0.8


def test_the_support_of_one_family_is_not_that_of_another(folder: Path, data: LabelledJobs) -> None:
    predictor = Predictor.load(folder)
    (bundle,) = predictor.bundles
    assert (bundle.card.family, bundle.card.encoder, bundle.card.families) == (
        "all",
        "common",
        ("mlp", "cnn"),
    )
    assert bundle.card.options["channels_last"] == (False, True)
    job = next(job for job in data.jobs if job.family == "mlp")
    estimate = predictor.predict(replace(job, channels_last=True), encoder="common")
    assert estimate.reasons == ("channels_last is true; the model was trained on false",)
    assert predictor.predict(replace(job, family="cnn", channels_last=True)).in_support
    with pytest.raises(InvalidRequestError, match="encoder: must be one of common"):
        predictor.predict(job, encoder="mlp")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda card: card.update(encoder="mlp"), "belong together"),
        (lambda card: card.update(families={}), "unknown family 'all'"),
        (lambda card: card.pop("families"), "incomplete card"),
        (
            lambda card: card["families"].update(oracle=card["families"]["cnn"]),
            "unknown family 'oracle'",
        ),
        (
            lambda card: card["families"]["cnn"].pop("support") and card.pop("support"),
            "incomplete card",
        ),
        (
            lambda card: card["families"]["cnn"]["fallback"].update(range_log_scale=0),
            "not above zero",
        ),
        (
            lambda card: card["families"]["cnn"]["support"]["ranges"].update(warmth=[0, 1]),
            "unknown feature column 'warmth'",
        ),
    ],
)
def test_an_invalid_card_is_refused(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    bundle = load_bundle(folder)
    document = json.loads((folder / CARD_FILE).read_text())
    change(document)
    with pytest.raises(BundleError, match=says):
        save_bundle(tmp_path / "changed", bundle.model, document)
    assert not (tmp_path / "changed").exists()


def test_the_common_model_answers_only_when_requested_or_alone(
    folder: Path, tmp_path: Path, data: LabelledJobs
) -> None:
    own = data.take(data.rows_of("mlp"))
    shutil.copytree(folder, tmp_path / "common")
    save_classifier(
        tmp_path / "own", train_classifier(own, PLAN), own, PLAN, name="own", version="1"
    )
    predictor = Predictor.load(tmp_path / "common", tmp_path / "own")
    job = own.jobs[0]
    assert predictor.predict(job).estimator == "own"
    assert predictor.predict(job, encoder="common").estimator == "common"
    assert predictor.predict(replace(job, family="cnn")).estimator == "common"
