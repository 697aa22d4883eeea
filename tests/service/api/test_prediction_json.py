"""A batch is answered as its jobs are one by one, whatever is asked and whichever way it is read."""

import json

import pytest

from gpumemnet.predict.predictor import Predictor
from service.api.answers import Answerer
from service.api.examples import EXAMPLE_JOBS
from service.api.prediction_id import prediction_ids

ANSWERER = Answerer(Predictor.default(), max_jobs=100)
MLP = EXAMPLE_JOBS["mlp"]
AMOUNTS = ("request_mib", "limit_mib", "expected_bytes", "expected_mib", "safe_bytes", "safe_mib")
JOBS = [
    *EXAMPLE_JOBS.values(),
    {**MLP, "batch_size": 4096, "input_elements": 10**6},  # outside every range
    {**MLP, "precision": "bf16"},
    {**MLP, "optimizer": "sgd", "layers": [*MLP["layers"], {"kind": "magic", "activations": 3, "parameters": 4}]},
    {**MLP, "layers": [list(layer.values()) for layer in MLP["layers"]]},
    {**MLP, "layers": [[*MLP["layers"][0].values()], *MLP["layers"][1:]]},  # both forms of a layer: read one by one
    {**MLP, "layers": None, "total_activations": 5000, "total_parameters": 10**6},
    {**MLP, "traced_peak_bytes": 2**31},
    {**MLP, "batch_size": 2**31 - 1, "input_elements": 2**50},  # more bytes than 64 bits count
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"coverage": 0.95, "gpu": "H200"},
        {"bin_width_mib": 512},
        {"fits": ["A100", "H100/1g.10gb"], "bins": "published-1000mib"},
        {"devices": [{"id": "50%d%b", "gpu": "A100", "free_mib": 3000}]},
    ],
)
def test_a_batch_is_answered_as_its_jobs_alone(options: dict[str, object]) -> None:
    together = json.loads(ANSWERER.predict_batch(json.dumps({"jobs": 3 * JOBS, **options}).encode()))
    alone = [json.loads(ANSWERER.predict(json.dumps({"job": job, **options}).encode())) for job in JOBS]
    assert together["failed"] == 0
    for result, theirs_read in zip(together["results"], 3 * alone, strict=True):
        ours_read = result["prediction"]
        assert ours_read["bin"]["probability"] == max(ours_read["bins"]["probabilities"])
        assert list(ours_read) == list(theirs_read)
        for number in AMOUNTS:  # those of transformer-based models are rounded by the company
            assert (ours_read[number] is None) == (theirs_read[number] is None), number
            assert (ours_read[number] or 0) == pytest.approx(theirs_read[number] or 0, rel=1e-5, abs=1), number
        for same in ours_read.keys() - {"prediction_id", "bin", "bins", "fits", "margin", *AMOUNTS}:
            assert ours_read[same] == theirs_read[same], same
        assert ours_read["bins"]["probabilities"] == pytest.approx(theirs_read["bins"]["probabilities"], abs=1e-4)
        assert {**ours_read["bins"], "probabilities": None} == {**theirs_read["bins"], "probabilities": None}
        assert ours_read["bin"].keys() == theirs_read["bin"].keys()
        assert [fit["device"] for fit in ours_read.get("fits", ())] == [fit["device"] for fit in theirs_read.get("fits", ())]


def test_problems_stand_in_their_places() -> None:
    jobs = [MLP, {**MLP, "batch_size": 0}, 7, {**MLP, "layers": [{"kind": "relu", "activations": -1}]}, MLP]
    answer = json.loads(ANSWERER.predict_batch(json.dumps({"jobs": jobs}).encode()))
    assert answer["failed"] == 3
    assert [next(iter(result)) for result in answer["results"]] == ["prediction", *["problem"] * 3, "prediction"]
    fields = [result["problem"]["errors"][0]["field"] for result in answer["results"][1:4]]
    assert fields == ["jobs[1].batch_size", "jobs[2]", "jobs[3].layers[0].activations"]


def test_jobs_of_a_family_without_a_model_are_problems_of_their_own() -> None:
    only = Answerer(Predictor(bundle for bundle in Predictor.default().bundles if bundle.card.family == "mlp"), max_jobs=100)
    jobs = [EXAMPLE_JOBS["cnn"], MLP, EXAMPLE_JOBS["transformer"], MLP]
    answer = json.loads(only.predict_batch(json.dumps({"jobs": jobs}).encode()))
    assert answer["failed"] == 2
    assert [next(iter(result)) for result in answer["results"]] == ["problem", "prediction", "problem", "prediction"]


def test_ids_of_a_batch_are_distinct() -> None:
    assert len(set(prediction_ids(1, 1000))) == 1000
