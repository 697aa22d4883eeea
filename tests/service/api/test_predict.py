"""The answers of /v1/predict and /v1/predict/batch, against the in-process predictor."""

import json
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest

from gpumemnet.job.json_codec import job_from_dict
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.predict.distribution import bins_of_width
from gpumemnet.predict.gpu_fit import Fit, fits, target
from gpumemnet.predict.largest_batch import BatchPoint, batch_sizes
from gpumemnet.predict.prediction import Prediction
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import MIB
from service.api.predictions import Document, PredictionApi, RecordBatch
from tests.conftest import RunningService


def predict(http: httpx.Client, job: Document, **options: object) -> Document:
    response = http.post("/v1/predict", json={"job": job, **options})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return dict(response.json())


def assert_same(answer: Document, estimate: Prediction) -> None:
    assert answer["expected_bytes"] == estimate.expected_bytes
    assert answer["startup_peak_bytes"] == estimate.startup_peak_bytes
    assert answer["safe_bytes"] == estimate.safe_bytes
    assert answer["coverage"] == estimate.coverage
    assert answer["in_support"] == estimate.in_support
    assert tuple(answer["reasons"]) == estimate.reasons
    assert answer["bins"]["probabilities"] == pytest.approx(
        estimate.probabilities.tolist(), abs=1e-15
    )
    assert (answer["gpu"], answer["model"]["name"]) == (estimate.gpu, estimate.estimator)


def without_id(answer: Document) -> Document:
    """The answer without what is never the same twice."""
    return {name: value for name, value in answer.items() if name != "prediction_id"}


def outside(job: Document) -> Document:
    """The same job with an option far beyond those of any training job."""
    return {**job, "gradient_accumulation": 64}


def test_an_answer_is_the_estimate_of_the_predictor(
    http: httpx.Client, predictor: Predictor, job: Document
) -> None:
    answer = predict(http, job)
    estimate = predictor.predict(job_from_dict(job))
    assert_same(answer, estimate)
    assert answer["bin"]["index"] == estimate.bin_index
    assert (answer["bin"]["lower_bytes"], answer["bin"]["upper_bytes"]) == estimate.bin_bounds_bytes
    assert answer["bin"]["probability"] == max(answer["bins"]["probabilities"])


def test_every_prediction_has_an_id_and_ids_sort_by_time(http: httpx.Client, job: Document) -> None:
    single = [predict(http, job)["prediction_id"] for _ in range(3)]
    batch = http.post("/v1/predict/batch", json={"jobs": [job] * 50}).json()
    ids = single + [result["prediction"]["prediction_id"] for result in batch["results"]]
    assert len(set(ids)) == len(ids)
    assert all((uuid.UUID(text).version, str(uuid.UUID(text))) == (7, text) for text in ids)
    made_at = [uuid.UUID(text).int >> 80 for text in ids]
    assert made_at == sorted(made_at)
    assert abs(made_at[0] / 1000 - time.time()) < 60


@pytest.mark.parametrize("gpu", ["H100", "nvidia h200", "RTX 4090"])
def test_another_gpu(http: httpx.Client, predictor: Predictor, job: Document, gpu: str) -> None:
    answer = predict(http, job, gpu=gpu)
    assert_same(answer, predictor.predict(job_from_dict(job), gpu=gpu))
    assert answer["bins"]["count"] > 2


@pytest.mark.parametrize("width_mib", [49, 100, 1024, 196608])
def test_bins_of_any_width(
    http: httpx.Client, predictor: Predictor, job: Document, width_mib: int
) -> None:
    answer = predict(http, job, bin_width_mib=width_mib)
    bins = bins_of_width(width_mib * MIB)
    found = answer["bins"]
    assert (found["width_bytes"], found["count"], found["name"]) == (
        width_mib * MIB,
        bins.count,
        bins.name,
    )
    assert_same(answer, predictor.predict(job_from_dict(job), bins=bins))


def test_outside_the_support_there_are_reasons_and_no_safe_bytes(
    http: httpx.Client, predictor: Predictor, job: Document
) -> None:
    answer = predict(http, outside(job))
    assert not answer["in_support"]
    assert answer["reasons"]
    assert answer["safe_bytes"] is None
    assert answer["expected_bytes"] > 0


def test_many_at_once_get_the_answers_that_one_alone_gets(
    service: RunningService, predictor: Predictor, job: Document
) -> None:
    jobs = [{**job, "batch_size": size} for size in range(1, 65)]
    with (
        httpx.Client(base_url=service.url, timeout=300) as shared,
        ThreadPoolExecutor(16) as threads,
    ):
        answers = list(threads.map(lambda job: predict(shared, job), jobs * 4))
    for document, answer in zip(jobs * 4, answers, strict=True):
        assert_same(answer, predictor.predict(job_from_dict(document)))


def test_a_long_body_gets_the_same_answer_as_a_short_one(http: httpx.Client, job: Document) -> None:
    """Bodies above a length are answered in another thread."""
    padded = b" " * 100_000 + httpx.Request("POST", "http://x", json={"job": job}).content
    response = http.post(
        "/v1/predict", content=padded, headers={"Content-Type": "application/json; charset=utf-8"}
    )
    assert without_id(response.json()) == without_id(predict(http, job))


def test_a_batch_answers_every_job_in_order(
    http: httpx.Client, predictor: Predictor, job: Document
) -> None:
    jobs = [{**job, "batch_size": size} for size in (1, 32, 1000, 2**31 - 1, 32)]
    response = http.post(
        "/v1/predict/batch", json={"jobs": jobs, "bin_width_mib": 512, "coverage": 0.9}
    )
    assert response.status_code == 200
    document = response.json()
    assert document["failed"] == 0
    estimates = predictor.predict_many(
        [job_from_dict(job) for job in jobs], bins=bins_of_width(512 * MIB), coverage=0.9
    )
    for result, estimate in zip(document["results"], estimates, strict=True):
        assert set(result) == {"prediction"}
        assert_same(result["prediction"], estimate)


def test_a_bad_job_does_not_fail_the_others(
    http: httpx.Client, predictor: Predictor, job: Document
) -> None:
    loaded = {family for bundle in predictor.bundles for family in bundle.card.families}
    unsupported = [{**job, "family": family} for family in FAMILIES if family not in loaded]
    bad_layer = {**job, "layers": [{"kind": "Linear!", "activations": 1}]}
    jobs = [job, bad_layer, 7, job, {**job, "batch_size": -3}, *unsupported]
    document = http.post("/v1/predict/batch", json={"jobs": jobs}).json()
    assert document["failed"] == 3 + len(unsupported)
    results = document["results"]
    assert [set(result) for result in results] == [
        {"prediction"},
        {"problem"},
        {"problem"},
        {"prediction"},
        {"problem"},
    ] + [{"problem"} for _ in unsupported]
    fields = [result["problem"]["errors"][0]["field"] for result in results if "problem" in result]
    assert fields == ["jobs[1].layers[0].kind", "jobs[2]", "jobs[4].batch_size"] + [
        f"jobs[{5 + index}].family" for index in range(len(unsupported))
    ]
    assert without_id(results[0]["prediction"]) == without_id(results[3]["prediction"])


DEVICES = [
    {"id": "0", "gpu": "A100", "free_mib": 1},
    {"id": "MIG-7", "gpu": "A100", "mig": "3g.20gb", "free_mib": None},
]


def test_what_a_job_fits_is_answered_in_the_order_asked(
    http: httpx.Client, predictor: Predictor, job: Document
) -> None:
    answer = predict(http, job, fits=["T4", "A100/3g.20gb"], devices=DEVICES, coverage=0.9)
    targets = [target("T4"), target("A100/3g.20gb")]
    targets += [
        target("A100", free_mib=1, device="0"),
        target("A100/3g.20gb", free_mib=None, device="MIG-7"),
    ]
    expected = fits(predictor, job_from_dict(job), targets, coverage=0.9)
    assert [Fit(**fit) for fit in answer["fits"]] == list(expected)
    assert [fit["verdict"] for fit in answer["fits"]] == ["yes", "yes", "no", "yes"]


def test_what_a_job_fits_of_the_whole_catalogue_but_laptops(
    http: httpx.Client, job: Document
) -> None:
    answer = predict(http, job, fits=True)
    gpus = [gpu for gpu in http.get("/v1/gpus").json()["gpus"] if "Laptop" not in gpu["name"]]
    named = [
        (gpu["name"], mig) for gpu in gpus for mig in (None, *(mig["name"] for mig in gpu["mig"]))
    ]
    assert [(fit["gpu"], fit["mig"]) for fit in answer["fits"]] == named
    assert predict(http, job, fits=[])["fits"] == predict(http, job, devices=[])["fits"] == []
    assert "fits" not in predict(http, job, fits=False)


def test_a_batch_answers_what_each_job_fits(http: httpx.Client, job: Document) -> None:
    jobs = [job, {**job, "batch_size": 0}, {**job, "batch_size": 3}]
    results = http.post(
        "/v1/predict/batch", json={"jobs": jobs, "fits": ["A100"], "devices": DEVICES}
    ).json()["results"]
    for index in (0, 2):
        assert (
            results[index]["prediction"]["fits"]
            == predict(http, jobs[index], fits=["A100"], devices=DEVICES)["fits"]
        )
    assert results[1]["problem"]["errors"][0]["field"] == "jobs[1].batch_size"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"gpu": "Z80"}, "gpu"),
        ({"encoder": "cnn"}, "encoder"),
        ({"fits": "A100"}, "fits"),
        ({"fits": ["A100", "Z80"]}, "fits[1]"),
        ({"fits": ["A100"] * 257}, "fits"),
        ({"devices": [1]}, "devices[0]"),
        ({"devices": [{"id": "0"}]}, "devices[0].gpu"),
        ({"devices": [{"id": "0", "gpu": "A100", "free": 1}]}, "devices[0].free"),
        ({"devices": [{"id": "0", "gpu": "A100", "free_mib": 2**40}]}, "devices[0].free_mib"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/predict", "/v1/predict/batch"])
def test_an_option_without_sense_is_named(
    http: httpx.Client, job: Document, path: str, options: dict[str, object], field: str
) -> None:
    content = {"job": job} if path == "/v1/predict" else {"jobs": [job]}
    response = http.post(path, json={**content, **options})
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == field


def test_the_largest_batch(http: httpx.Client, predictor: Predictor, job: Document) -> None:
    question = {"job": job, "gpu": "A100/1g.5gb", "coverage": 0.9, "max_batch": 3000}
    response = http.post("/v1/batch-sizes", json=question)
    assert response.status_code == 200
    answer = response.json()
    expected = batch_sizes(
        predictor, job_from_dict(job), target("A100/1g.5gb"), coverage=0.9, max_batch=3000
    )
    for name in (
        "gpu",
        "mig",
        "available_mib",
        "coverage",
        "max_batch",
        "safe_batch",
        "likely_batch",
    ):
        assert answer[name] == getattr(expected, name), name
    assert [BatchPoint(**point) for point in answer["curve"]] == list(expected.curve)
    assert (answer["release"], answer["reasons"]) == ("shipped", [])
    own = http.post("/v1/batch-sizes", json={"job": job, "free_mib": 2000}).json()
    assert (own["gpu"], own["available_mib"], own["max_batch"]) == (
        predictor.bundles[0].card.gpu,
        2000,
        65536,
    )


def test_every_prediction_is_handed_to_the_recorder(predictor: Predictor, job: Document) -> None:
    kept: list[RecordBatch] = []
    api = PredictionApi(predictor, SimpleNamespace(record=kept.append), release="r7")
    first = api.predict(json.dumps({"job": job, "gpu": "H100"}).encode())
    batch = api.predict_batch(json.dumps({"jobs": [job, 1, job]}).encode())
    answers = [
        first,
        *(result["prediction"] for result in batch["results"] if "prediction" in result),
    ]
    assert {answer["release"] for answer in answers} == {"r7"}
    assert [len(records) for records in kept] == [1, 2]
    rows = [(records, row) for records in kept for row in range(len(records))]
    for (records, row), answer in zip(rows, answers, strict=True):
        assert records.prediction_ids[row] == answer["prediction_id"]
        assert records.jobs[row] == job_from_dict(job)
        assert records.model_sha256 == answer["model"]["sha256"]
        assert records.estimates[row].gpu == answer["gpu"]
        assert abs(records.made_at_seconds - time.time()) < 60
    api.batch_sizes(json.dumps({"job": job}).encode())
    assert len(kept) == 2


def test_the_models_are_those_of_the_predictor(http: httpx.Client, predictor: Predictor) -> None:
    models = http.get("/v1/models").json()["models"]
    assert [model["sha256"] for model in models] == [bundle.sha256 for bundle in predictor.bundles]
    assert [model["card"] for model in models] == [
        bundle.card.document for bundle in predictor.bundles
    ]


def test_health(http: httpx.Client, predictor: Predictor) -> None:
    assert http.get("/healthz").json() == {"status": "ok"}
    families = list(
        dict.fromkeys(family for bundle in predictor.bundles for family in bundle.card.families)
    )
    assert http.get("/readyz").json() == {"status": "ready", "families": families}
