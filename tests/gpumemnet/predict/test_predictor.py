"""The predictor with the shipped bundle: what it answers inside its support, outside, and to
questions without sense."""

import math
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from gpumemnet.errors import BundleError, InvalidRequestError
from gpumemnet.gpu import context, device_profile
from gpumemnet.job.dataset import read_dataset
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.json_codec import job_from_json
from gpumemnet.job.layers import Layer
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.bundle import save_bundle
from gpumemnet.predict.distribution import PUBLISHED_BINS, bins_of_width
from gpumemnet.predict.prediction import Prediction
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import GIB, MIB
from tests.jobs import jobs, mlp, small_job, totals_only
from tests.registries import shipped

DATASETS = Path(__file__).parents[3] / "dataset_builder" / "datasets"
PREDICTOR = DEFAULT = Predictor.default()
EXAMPLE = Path(__file__).parents[3] / "examples" / "mlp_job.json"


def test_the_example_of_the_readme() -> None:
    estimate = PREDICTOR.predict(job_from_json(EXAMPLE.read_bytes()), coverage=0.99)
    assert estimate.in_support
    assert estimate.reasons == ()
    assert estimate.gpu == "NVIDIA A100-SXM4-40GB"
    assert estimate.bins.bounds_bytes(estimate.bin_index) == (GIB, 2 * GIB)
    assert (estimate.gpu_source, estimate.context_bytes) == ("default", 524 * MIB)
    assert estimate.safe_bytes is not None
    assert (
        1400 * MIB < estimate.expected_bytes < estimate.safe_bytes < 1.2 * estimate.expected_bytes
    )


@pytest.mark.parametrize("width", [64, 512, 2048, 4096])
def test_totals_alone_are_answered_much_like_layers(width: int) -> None:
    full, bare = PREDICTOR.predict(mlp(width)), PREDICTOR.predict(totals_only(mlp(width)))
    assert bare.in_support
    assert bare.expected_bytes == pytest.approx(full.expected_bytes, rel=0.06)


@settings(max_examples=60)
@given(jobs())
def test_any_mlp_job_gets_a_whole_answer(job: TrainingJob) -> None:
    assume(job.family == "mlp")
    estimate = PREDICTOR.predict(job)
    assert estimate.expected_bytes > 0
    assert estimate.probabilities.sum() == pytest.approx(1, abs=1e-9)
    assert estimate.probabilities.min() >= 0
    assert estimate.in_support == (not estimate.reasons)
    assert estimate.safe_bytes is None or estimate.safe_bytes >= estimate.expected_bytes


SOME_ROWS = [
    row
    for name in (
        "published_mlp_a100",
        "published_cnn_a100",
        "published_transformer_a100",
        "traced_cnn_h200",
    )
    for row in read_dataset(DATASETS / f"{name}.parquet")[:: 167 if name.endswith("a100") else 200]
]


def is_same(one: Prediction, other: Prediction) -> bool:
    """Every field to the last digit, probabilities but for the rounding of a sum."""
    differs = [field.name for field in fields(Prediction) if field.name != "probabilities"]
    return all(getattr(one, name) == getattr(other, name) for name in differs) and bool(
        np.allclose(one.probabilities, other.probabilities, rtol=0, atol=1e-12)
    )


def test_a_job_has_the_same_answer_in_any_company() -> None:
    many = [
        change
        for row in SOME_ROWS
        for change in (replace(row.job, traced_peak_bytes=None), totals_only(row.job))
    ]
    many = [replace(job, ranks=1 + place % 3) for place, job in enumerate(many)]
    for size in (2, 3, 7, len(many)):
        for start in range(0, len(many), size):
            some = many[start : start + size]
            for job, among_others in zip(some, DEFAULT.predict_many(some), strict=True):
                assert is_same(DEFAULT.predict(job), among_others)


@pytest.mark.parametrize(
    ("job", "reason", "has_bound"),
    [
        (
            small_job(layers=(Layer("conv2d", 9, 9), Layer("magic", 3, 4))),
            "layers of kind magic; the model was trained on",
            True,
        ),
        (
            small_job(layers=(Layer("conv2d", 9, 9), Layer("magic", 300, 4))),
            "layers of kind magic; the model was trained on",
            False,
        ),
        (
            small_job(gradient_accumulation=8),
            "gradient_accumulation is 8; the model was trained on 1 to 4",
            True,
        ),
        (
            small_job(gradient_accumulation=64),
            "gradient_accumulation is 64; the model was trained on 1 to 4",
            False,
        ),
    ],
)
def test_outside_the_support_there_is_a_reason_and_a_wider_bound_or_none(
    job: TrainingJob, reason: str, has_bound: bool
) -> None:
    estimate = PREDICTOR.predict(job)
    assert not estimate.in_support
    assert any(one.startswith(reason) for one in estimate.reasons), estimate.reasons
    assert (estimate.safe_bytes is not None) == has_bound


def test_the_bound_widens_by_what_the_card_says() -> None:
    inside = PREDICTOR.predict(mlp(2048, 512))
    outside = PREDICTOR.predict(replace(mlp(2048, 512), gradient_accumulation=5))
    [card] = [bundle.card for bundle in PREDICTOR.bundles if bundle.card.encoder == "mlp"]
    widening = math.exp(card.widenings[card.coverages.index(0.99)])
    assert widening > 1.05
    assert inside.safe_bytes is not None
    assert outside.safe_bytes is not None
    assert outside.safe_bytes / outside.expected_bytes > inside.safe_bytes / inside.expected_bytes
    assert outside.probabilities.max() < inside.probabilities.max()


def test_the_support_does_not_depend_on_the_batch() -> None:
    answers = [PREDICTOR.predict(mlp(512, batch)) for batch in (1, 64, 2**20)]
    assert all(answer.in_support for answer in answers)


def of_activation(kind: str) -> TrainingJob:
    """A network with ``kind`` for each of its activations, all of which keep their inputs."""
    plain = mlp(512)
    layers = tuple(
        layer if layer.kind == "linear" else Layer(kind, layer.activations)
        for layer in plain.layers
    )
    return replace(plain, layers=layers, activation_function=None)


def test_activations_that_keep_the_same_tensors_are_one_to_the_support() -> None:
    seen, unseen = PREDICTOR.predict(of_activation("elu")), PREDICTOR.predict(of_activation("celu"))
    assert "celu" not in PREDICTOR.bundles[0].card.kinds
    assert unseen.in_support
    assert is_same(seen, unseen)


def test_far_beyond_the_training_data_the_answer_is_physics_and_grows() -> None:
    sizes = [
        PREDICTOR.predict(mlp(16_384, batch_size)).expected_bytes
        for batch_size in (1024, 4096, 16_384, 65_536)
    ]
    assert all(
        larger > 0.99 * smaller for smaller, larger in pairwise(sizes)
    )  # tensors that grow may come to share segments
    # Weights of 16,384² twice and their Adam state alone are 8 GiB; activations of the largest
    # batch some 24 GiB more.
    assert sizes[0] > 8 * GIB
    assert sizes[-1] > sizes[0] + 12 * GIB


@given(st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.99, 0.995]))
def test_more_coverage_needs_more_memory(coverage: float) -> None:
    less, more = (
        PREDICTOR.predict(mlp(1500), coverage=level).safe_bytes for level in (coverage, 0.999)
    )
    assert less is not None
    assert more is not None
    assert less < more


def test_a_coverage_between_levels_takes_the_next_higher() -> None:
    assert (
        PREDICTOR.predict(mlp(800), coverage=0.985).safe_bytes
        == PREDICTOR.predict(mlp(800), coverage=0.99).safe_bytes
    )


@pytest.mark.parametrize("coverage", [0, 0.1, 0.9999, 1, 5, -1, math.nan, True, "0.9", None])
def test_a_coverage_without_sense_is_refused(coverage: float) -> None:
    with pytest.raises(InvalidRequestError, match="coverage: must be"):
        PREDICTOR.predict(small_job(), coverage=coverage)


@pytest.mark.parametrize("bins", [*PUBLISHED_BINS.values(), bins_of_width(GIB // 4)])
def test_any_bins_agree_on_where_memory_lies(bins: object) -> None:
    estimate = PREDICTOR.predict(mlp(2900), bins=bins)
    lower, upper = estimate.bins.bounds_bytes(estimate.bin_index)
    assert lower <= estimate.expected_bytes
    assert upper is None or estimate.expected_bytes < upper


def test_without_bundles_there_is_no_predictor() -> None:
    with pytest.raises(BundleError, match="no bundle to predict with"):
        Predictor([])


# Several models.


def test_an_encoder_that_is_not_there_is_refused() -> None:
    one = Predictor([shipped("mlp")])
    with pytest.raises(InvalidRequestError, match="encoder: must be one of mlp, not 'transformer'"):
        one.predict(mlp(64), encoder="transformer")


# Other GPUs.


def test_on_another_gpu_its_context_takes_the_place_of_the_one_learned() -> None:
    job = mlp(4096)
    own, named, other = (PREDICTOR.predict(job, gpu=gpu) for gpu in (None, "A100", "A30"))
    assert (own.expected_bytes, own.bins.count) == (named.expected_bytes, named.bins.count)
    assert other.gpu == "NVIDIA A30"
    contexts = own.context_bytes - other.context_bytes
    assert other.context_bytes == context(device_profile("A30")).expected_bytes != own.context_bytes
    assert contexts == pytest.approx(own.expected_bytes - other.expected_bytes, abs=MIB)
    assert other.bins.count == math.ceil(device_profile("A30").capacity_bytes / GIB) + 1
    assert other.safe_bytes is not None
    assert other.safe_bytes > other.expected_bytes
    moved = own.probabilities @ np.arange(own.bins.count) - other.probabilities @ np.arange(
        other.bins.count
    )
    assert moved == pytest.approx(contexts / GIB, abs=0.7)


# Columns.


def test_the_layers_of_a_batch_are_asked_for_where_a_model_needs_them() -> None:
    table = JobTable.from_jobs([mlp(64), totals_only(mlp(64))])
    assert len(DEFAULT.predict_table(table[:1], encoder="transformer")) == 1
    with pytest.raises(
        InvalidRequestError, match="encoder: 'transformer' needs `layers`; send them"
    ):
        DEFAULT.predict_table(table, encoder="transformer")
    assert len(DEFAULT.predict_table(table[:0])) == 0


def test_jobs_for_which_a_graph_gives_no_number_are_outside_its_support(tmp_path: Path) -> None:
    bundle = shipped("mlp")
    model = onnx.load_model_from_string(bundle.model)
    for node in model.graph.node:
        for place, name in enumerate(node.output):
            if name == "amounts":
                node.output[place] = "sound"
    model.graph.initializer.extend(
        numpy_helper.from_array(np.array(value), name)
        for name, value in (
            ("first", np.array([0], dtype=np.int64)),
            ("most", np.float32(1000)),
            ("none", np.float32(np.nan)),
        )
    )
    model.graph.node.extend(
        [
            helper.make_node("Gather", ["features", "first"], ["batch_sizes"], axis=1),
            helper.make_node("Greater", ["batch_sizes", "most"], ["is_large"]),
            helper.make_node("Where", ["is_large", "none", "sound"], ["amounts"]),
        ]
    )
    spoilt = Predictor(
        [save_bundle(tmp_path / "spoilt", model.SerializeToString(), bundle.card.document)]
    )
    small, large = totals_only(mlp(512, 500)), totals_only(mlp(512, 2000))
    alone, together = (
        [spoilt.predict(job) for job in (small, large)],
        spoilt.predict_many([small, large]),
    )
    for found in (alone, together):
        assert found[0].in_support
        assert found[0].expected_bytes == pytest.approx(
            PREDICTOR.predict(small).expected_bytes, rel=1e-5
        )
        assert found[1].reasons[-1] == "the model gives no number for it"
        assert (found[1].safe_bytes, found[1].in_support) == (None, False)
        assert found[1].probabilities.sum() == pytest.approx(1.0)


def test_predictors_share_the_graphs_that_they_have_in_common(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A change of release then loads what has changed, and nothing else."""
    loaded: list[bytes] = []
    session = onnxruntime.InferenceSession

    class Counted(session):  # type: ignore[misc, valid-type]
        def __init__(self, graph: bytes, *arguments: object, **settings: object) -> None:
            loaded.append(graph)
            super().__init__(graph, *arguments, **settings)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Counted)
    bundle = shipped("mlp")
    graph = onnx.load_from_string(bundle.model)
    graph.doc_string = "the same graph in other bytes"
    other = save_bundle(tmp_path / "other", graph.SerializeToString(), bundle.card.document)
    first, again, different = (Predictor([each]) for each in (bundle, bundle, other))
    assert [graph for graph in loaded if graph in (bundle.model, other.model)][-1] == other.model
    assert loaded.count(bundle.model) <= 1
    expected = {
        predictor.predict(small_job()).expected_bytes for predictor in (first, again, different)
    }
    assert len(expected) == 1
