"""The answers of /v1/predict and /v1/predict/batch, against the in-process predictor."""

import json
import time
import uuid
from types import SimpleNamespace

import httpx
import pytest

from gpumemnet.atomic_files import Document
from gpumemnet.job.json_codec import job_from_dict
from gpumemnet.predict.predictor import Predictor
from service.api.predictions import PredictionApi, RecordBatch


def predict(http: httpx.Client, job: Document, **options: object) -> Document:
    response = http.post("/v1/predict", json={"job": job, **options})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return dict(response.json())


def without_id(answer: Document) -> Document:
    """The answer without what is never the same twice."""
    return {name: value for name, value in answer.items() if name != "prediction_id"}


def test_every_prediction_has_an_id_and_ids_sort_by_time(http: httpx.Client, job: Document) -> None:
    single = [predict(http, job)["prediction_id"] for _ in range(3)]
    batch = http.post("/v1/predict/batch", json={"jobs": [job] * 50}).json()
    ids = single + [result["prediction"]["prediction_id"] for result in batch["results"]]
    assert len(set(ids)) == len(ids)
    assert all((uuid.UUID(text).version, str(uuid.UUID(text))) == (7, text) for text in ids)
    made_at = [uuid.UUID(text).int >> 80 for text in ids]
    assert made_at == sorted(made_at)
    assert abs(made_at[0] / 1000 - time.time()) < 60


def test_a_long_body_gets_the_same_answer_as_a_short_one(http: httpx.Client, job: Document) -> None:
    """Bodies above a length are answered in another thread."""
    padded = b" " * 100_000 + httpx.Request("POST", "http://x", json={"job": job}).content
    response = http.post(
        "/v1/predict", content=padded, headers={"Content-Type": "application/json; charset=utf-8"}
    )
    assert without_id(response.json()) == without_id(predict(http, job))


DEVICES = [
    {"id": "0", "gpu": "A100", "free_mib": 1},
    {"id": "MIG-7", "gpu": "A100/3g.20gb", "free_mib": None},
]


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
        ({"coverage": 10**400}, "coverage"),
        ({"bin_width_mib": 48}, "bin_width_mib"),
        ({"bin_width_mib": 10**400}, "bin_width_mib"),
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


def test_the_largest_batch_of_the_models_gpu(
    http: httpx.Client, predictor: Predictor, job: Document
) -> None:
    own = http.post("/v1/batch-sizes", json={"job": job, "free_mib": 2000}).json()
    gpu = predictor.bundles[0].card.gpu
    assert (own["gpu"], own["available_mib"], own["max_batch"]) == (gpu, 2000, 65536)
    assert own["release"] == "shipped"


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
