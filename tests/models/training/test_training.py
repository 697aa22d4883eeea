"""Training: the line stays inside the network, answers grow with the batch, the graph is the
network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from gpumemnet.cli import main
from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.layers import Layer
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.conformal import COVERAGES
from gpumemnet.predict.features import FEATURE_NAMES, layer_sequence, model_features
from gpumemnet.predict.predictor import SLACK_BYTES, Predictor
from gpumemnet.units import MIB
from models.networks.line import GROUP_NAMES, Line
from models.training.card import export_classifier, save_classifier, widenings
from models.training.classifier import (
    TrainedClassifier,
    _grouped_bounds,
    float_tensor,
    plan_of,
    train,
)
from models.training.data import LabelledJobs
from tests.jobs import small_job, totals_only
from tests.models.conftest import FEW
from tests.nightly import nightly
from tests.sites import DATASETS

PLANS = {
    "mlp": replace(plan_of("mlp"), epochs=3, folds=3, hidden=16),
    "transformer": replace(plan_of("transformer"), epochs=1, folds=2, hidden=16, width=8, depth=1),
}


@pytest.fixture(scope="module", params=["mlp", "transformer"])
def trained(request: pytest.FixtureRequest, few: LabelledJobs) -> TrainedClassifier:
    return train(few, PLANS[request.param])


@pytest.fixture(scope="module")
def predictor(
    trained: TrainedClassifier, few: LabelledJobs, tmp_path_factory: pytest.TempPathFactory
) -> Predictor:
    folder = tmp_path_factory.mktemp("bundle")
    save_classifier(folder / "mine", trained, few, name="mine", version="7")
    return Predictor.load(folder / "mine")


def amounts_of(classifier: TrainedClassifier, data: LabelledJobs) -> np.ndarray:
    given: tuple[torch.Tensor, ...] = (float_tensor(data.features),)
    if classifier.plan.encoder == "transformer":
        sequences, mask = layer_sequence(data.jobs)
        given += (torch.from_numpy(sequences), torch.from_numpy(mask.astype(np.float32)))
    with torch.no_grad():
        amounts: np.ndarray = classifier.network(*given)[-1].double().exp().numpy()
    return amounts


def test_without_a_correction_the_line_answers(few: LabelledJobs) -> None:
    for data in (few, few.without_layers()):
        amounts = amounts_of(train(few, replace(PLANS["mlp"], learning_rate=0.0)), data)
        assert amounts[:, 1] == pytest.approx(amounts[:, 0], rel=1e-5)


def test_the_line_is_found_and_kept(few: LabelledJobs) -> None:
    """Labels that a line over the closed form makes are answered by that line."""
    segments = few.features[:, FEATURE_NAMES.index("segment_bytes")]
    labels = 0.8 * segments + 40 * MIB
    data = replace(few, label_bytes=labels, lower_bytes=labels - MIB, upper_bytes=labels + MIB)
    found = train(data, PLANS["mlp"])
    slopes = found.network.inputs.line.slopes
    assert float(slopes[1] + slopes[2]) == pytest.approx(0.8, abs=0.02)
    errors = np.log((amounts_of(found, data)[:, 1] + SLACK_BYTES) / (labels + SLACK_BYTES))
    assert np.abs(errors).max() < 0.02


def test_the_correction_keeps_the_line_where_labels_are_noise(few: LabelledJobs) -> None:
    trained = train(few, PLANS["mlp"])
    corrections = np.log(np.divide(*amounts_of(trained, few)[:, [1, 0]].T))
    assert np.median(np.abs(corrections)) < 0.05


def test_bounds_rise_with_the_coverage(trained: TrainedClassifier, few: LabelledJobs) -> None:
    bounds = amounts_of(trained, few)[:, 2:]
    assert bounds.shape == (len(few), len(COVERAGES))
    assert (np.diff(bounds, axis=1) >= 0).all()
    covered = (few.label_bytes <= bounds[:, COVERAGES.index(0.9)])[few.is_measured]
    assert 0.8 < covered.mean() <= 1.0


@pytest.mark.nightly  # a candidate that is trained again is the same, too
def test_the_same_seed_gives_the_same_graph(few: LabelledJobs) -> None:
    one, two = (export_classifier(train(few, PLANS["mlp"]), few) for _ in range(2))
    assert one == two


def test_the_graph_answers_like_the_network(
    trained: TrainedClassifier, few: LabelledJobs, predictor: Predictor
) -> None:
    wanted = amounts_of(trained, few)
    encoder = trained.plan.encoder
    assert onnxruntime.InferenceSession(predictor.bundles[0].model).get_inputs()
    found = predictor.model(encoder).run(few.jobs, few.features)
    assert found.expected_bytes == pytest.approx(wanted[:, 1], rel=1e-3)
    assert found.bounds_bytes == pytest.approx(wanted[:, 2:], rel=1e-3)


def test_answers_grow_with_the_batch(few: LabelledJobs, predictor: Predictor) -> None:
    batches = np.array([*range(1, 65), 100, 128, 200, 512], dtype=np.float64)
    for row in range(0, len(few), 29):
        jobs = few.jobs.take(np.full(len(batches), row)).with_numbers("batch_size", batches)
        answers = predictor.predict_table(
            jobs.with_numbers("traced_peak_bytes", np.zeros(len(batches)))
        )
        for amounts in (answers.expected_bytes, answers.safe_bytes):
            falls = -np.diff(amounts) / amounts[:-1]
            assert falls.max() < 0.01  # the closed form over three powers of two
            assert (falls > 1e-5).mean() < 0.02  # float32


def test_the_card_says_what_was_learned(few: LabelledJobs, predictor: Predictor) -> None:
    [bundle] = predictor.bundles
    card = bundle.card
    assert (card.name, card.version) == ("mine", "7")
    assert card.families == ("mlp", "cnn", "transformer")
    assert card.document["training_data"]["sources"].keys() == few.files.keys()
    assert card.provenance == "published, traced"
    assert card.contexts == {}  # nobody measured here
    assert len(card.widenings) == len(card.coverages)
    assert list(card.widenings) == sorted(card.widenings)


def test_totals_are_answered_by_the_mlp_alone(few: LabelledJobs, predictor: Predictor) -> None:
    totals = few.jobs.without_layers().with_numbers("traced_peak_bytes", np.zeros(len(few)))
    if predictor.bundles[0].card.encoder == "mlp":
        answers = predictor.predict_table(totals)
        assert not np.ma.getmaskarray(answers.safe_bytes).any()
        with_layers = predictor.predict_table(
            few.jobs.with_numbers("traced_peak_bytes", np.zeros(len(few)))
        )
        ratios = [
            np.median(one.safe_bytes.data / one.expected_bytes) for one in (answers, with_layers)
        ]
        assert ratios[0] > ratios[1]  # the limit says what totals cost
    else:
        with pytest.raises(InvalidRequestError, match="needs `layers`"):
            predictor.predict_table(totals)


def test_beyond_the_support_bounds_widen_by_what_left_out_sources_missed(few: LabelledJobs) -> None:
    found = widenings(few)
    assert found[COVERAGES.index(0.99)] > 0
    one_source = few.take(np.flatnonzero(few.sources == "published_transformer_a100"))
    assert all(amount >= 0 for amount in widenings(one_source))


@pytest.mark.nightly
def test_a_bundle_of_one_family_refuses_others(few: LabelledJobs, tmp_path: Path) -> None:
    own = few.take(np.flatnonzero(few.jobs.option_column("family") == "transformer"))
    save_classifier(tmp_path / "b", train(own, PLANS["mlp"]), own, name="b", version="1")
    predictor = Predictor.load(tmp_path / "b")
    assert predictor.bundles[0].card.family == "transformer"
    refused = predictor.refusals(few.jobs)
    is_other = few.jobs.option_column("family") != "transformer"
    assert set(refused) == set(np.flatnonzero(is_other).tolist())


def test_recommenders_and_recurrent_networks_are_no_plain_mlps(few: LabelledJobs) -> None:
    """Their errors are larger, so pooled with plain MLPs they would exceed the limits."""
    plain = Layer("linear", 64, 4_160)
    networks = {
        "mlp": (plain,),
        "embedding": (Layer("embedding", 64, 64_000), plain, Layer("linear", 1, 65)),
        "language_model": (Layer("lstm", 64, 33_280), Layer("linear", 64_000, 4_160_000)),
    }
    jobs = [
        TrainingJob(
            family="mlp",
            batch_size=8,
            input_elements=64,
            optimizer="adam",
            precision="fp32",
            layers=layers,
        )
        for layers in networks.values()
    ]
    table = JobTable.from_jobs([*jobs, replace(totals_only(jobs[0]), sequence_length=32)])
    own, reference = np.split(float_tensor(model_features(table, 0)), 2, axis=1)
    _, groups = Line()(own, reference)
    named = [GROUP_NAMES[code] for code in groups.argmax(1)]
    assert named == [*(f"{name}, layers" for name in networks), "embedding, totals"]


def test_bounds_of_few_families_are_no_narrower_than_those_of_all(few: LabelledJobs) -> None:
    """What one family has in common says nothing of the next."""
    alone = np.arange(len(few)) % 2 == 0
    groups = np.where(alone, few.groups[0], few.groups)
    scores = np.where(alone, 0.1, np.random.default_rng(0).normal(size=len(few)))
    code, other = GROUP_NAMES.index("embedding, layers"), GROUP_NAMES.index("mlp, layers")
    codes = np.where(alone, code, other)
    bounds, counts = _grouped_bounds(scores, codes, np.ones(len(few), dtype=np.bool_), groups)
    assert counts[code] == alone.sum()
    assert bounds[code][-1] > bounds[other][-1] / 2 > scores[alone].max()


@pytest.mark.parametrize("encoders", [["mlp"], *nightly([["mlp", "transformer"]])])
def test_the_command_makes_a_bundle_of_each_encoder(
    encoders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [word for encoder in encoders for word in ("--encoder", encoder)]
    words = [word for path in FEW for word in ("--dataset", str(path))]
    out = ("--out", str(tmp_path / "mine"), "--epochs", "1", "--json")
    assert main(["train", *words, *asked, *out]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document["bundles"]) == encoders
    predictor = Predictor.load(tmp_path / "mine")
    assert [one.card.encoder for one in predictor.bundles] == encoders
    for encoder in encoders:
        estimate = predictor.predict(small_job(), encoder=encoder)
        assert estimate.estimator == encoder
        assert estimate.safe_bytes is not None
        assert estimate.safe_bytes > estimate.expected_bytes > estimate.context_bytes


def test_a_missing_dataset_and_an_unknown_encoder_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    out = ("--out", tmp_path / "bundles")
    zoo = DATASETS / "published_real_models_a100.parquet"
    for said, arguments in {
        "none.parquet cannot be read: No such file": (
            "evaluate",
            "--dataset",
            tmp_path / "none.parquet",
        ),
        "must be one of mlp, transformer, not 'rnn'": ("train", "--encoder", "rnn", *out),
        "no whole Parquet file": ("train", "--dataset", tmp_path / "x.parquet", *out),
        "holds no row to train on": ("train", "--dataset", zoo, *out),
    }.items():
        assert main([*map(str, arguments)]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "bundles").exists()
