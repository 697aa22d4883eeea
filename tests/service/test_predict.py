"""The answers of /v1/predict and /v1/predict/batch, against the in-process predictor."""

import math
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from gpumemnet.bins import PUBLISHED_BINS, bins_of_width
from gpumemnet.job import FAMILIES
from gpumemnet.job_json import job_from_dict
from gpumemnet.units import MIB


def predict(http, job, **options):
    response = http.post("/v1/predict", json={"job": job, **options})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()


def assert_same(answer, estimate):
    assert answer["expected_bytes"] == estimate.expected_bytes
    assert answer["safe_bytes"] == estimate.safe_bytes
    assert answer["coverage"] == estimate.coverage
    assert answer["in_support"] == estimate.in_support
    assert tuple(answer["reasons"]) == estimate.reasons
    assert answer["bins"]["probabilities"] == pytest.approx(estimate.probabilities.tolist(), abs=1e-15)
    assert (answer["gpu"], answer["model"]["name"]) == (estimate.gpu, estimate.estimator)


def without_id(answer):
    """The answer without what is never the same twice."""
    return {name: value for name, value in answer.items() if name != "prediction_id"}


def outside(job):
    """The same job so large that no model was trained on its like."""
    return {**job, "batch_size": 2**31 - 1}


def test_an_answer_is_the_estimate_of_the_predictor(http, predictor, job):
    answer = predict(http, job)
    estimate = predictor.predict(job_from_dict(job))
    assert_same(answer, estimate)
    assert answer["bin"]["index"] == estimate.bin_index
    assert (answer["bin"]["lower_bytes"], answer["bin"]["upper_bytes"]) == estimate.bin_bounds_bytes
    assert answer["bin"]["probability"] == max(answer["bins"]["probabilities"])


def test_probabilities_cover_all_bins_and_add_up_to_one(http, job):
    bins = predict(http, job)["bins"]
    assert len(bins["probabilities"]) == bins["count"]
    assert all(0 <= probability <= 1 for probability in bins["probabilities"])
    assert sum(bins["probabilities"]) == pytest.approx(1)


def test_mib_are_the_bytes_rounded_up(http, job):
    answer = predict(http, job, coverage=0.99)
    for name in ("expected", "safe"):
        assert answer[f"{name}_mib"] == math.ceil(answer[f"{name}_bytes"] / MIB)
    for edge in ("lower", "upper"):
        assert answer["bin"][f"{edge}_mib"] * MIB == answer["bin"][f"{edge}_bytes"]
    assert answer["bins"]["width_mib"] * MIB == answer["bins"]["width_bytes"]


def test_the_model_says_who_it_is(http, predictor, job):
    bundle = predictor.bundles[0]
    answer = predict(http, job)
    model = answer["model"]
    assert (model["name"], model["version"], model["sha256"]) == (bundle.card.name, bundle.card.version, bundle.sha256)
    assert set(model["training_data"]) == {"description", "provenance", "label_source", "licence"}
    assert answer["label_source"] == model["training_data"]["label_source"] == bundle.card.label_source


def test_totals_are_enough(http, predictor, job):
    layers = job.pop("layers")
    job["total_activations"] = sum(layer["activations"] for layer in layers)
    job["total_parameters"] = sum(layer["parameters"] for layer in layers)
    assert_same(predict(http, job), predictor.predict(job_from_dict(job)))


@pytest.mark.parametrize("width_mib", [49, 100, 1024, 196608])
def test_bins_of_any_width(http, predictor, job, width_mib):
    answer = predict(http, job, bin_width_mib=width_mib)
    bins = bins_of_width(width_mib * MIB)
    assert (answer["bins"]["width_mib"], answer["bins"]["count"], answer["bins"]["name"]) == (width_mib, bins.count, bins.name)
    assert_same(answer, predictor.predict(job_from_dict(job), bins=bins))


@pytest.mark.parametrize("name", PUBLISHED_BINS)
def test_published_bins(http, predictor, job, name):
    answer = predict(http, job, bins=name)
    assert answer["bins"]["name"] == name
    assert_same(answer, predictor.predict(job_from_dict(job), bins=PUBLISHED_BINS[name]))


def test_every_calibrated_coverage_is_answered_and_more_coverage_is_never_less_memory(http, predictor, job):
    levels = http.get("/v1/models").json()["models"][0]["coverages"]
    answers = [predict(http, job, coverage=level) for level in levels]
    assert [answer["coverage"] for answer in answers] == levels
    safe = [answer["safe_bytes"] for answer in answers]
    assert safe == sorted(safe)


def test_null_options_are_as_absent_ones(http, job):
    nulls = dict.fromkeys(("coverage", "bins", "bin_width_mib", "gpu", "encoder", "fits", "devices"))
    assert without_id(predict(http, job, **nulls)) == without_id(predict(http, job))


def test_outside_the_support_there_are_reasons_and_no_safe_bytes(http, predictor, job):
    answer = predict(http, outside(job))
    assert not answer["in_support"]
    assert answer["reasons"]
    assert answer["safe_bytes"] is None
    assert answer["safe_mib"] is None
    assert answer["expected_bytes"] > 0


def test_a_job_at_the_upper_end_of_every_count_is_answered(http, job):
    largest = {**job, "batch_size": 2**31 - 1, "input_elements": 2**50, "total_activations": 2**50, "total_parameters": 2**50}
    del largest["layers"]
    answer = predict(http, largest)
    assert answer["expected_mib"] == math.ceil(answer["expected_bytes"] / MIB) or answer["expected_bytes"] > 2**53
    assert answer["bin"]["upper_bytes"] is None


def test_many_at_once_get_the_answers_that_one_alone_gets(service, predictor, job):
    jobs = [{**job, "batch_size": size} for size in range(1, 65)]
    with httpx.Client(base_url=service.url, timeout=30) as shared, ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda job: predict(shared, job), jobs * 4))
    for document, answer in zip(jobs * 4, answers, strict=True):
        assert_same(answer, predictor.predict(job_from_dict(document)))


def test_a_long_body_gets_the_same_answer_as_a_short_one(http, job):
    """Bodies above a length are answered in another thread."""
    padded = b" " * 100_000 + httpx.Request("POST", "http://x", json={"job": job}).content
    response = http.post("/v1/predict", content=padded, headers={"Content-Type": "application/json; charset=utf-8"})
    assert without_id(response.json()) == without_id(predict(http, job))


def test_a_batch_answers_every_job_in_order(http, predictor, job):
    jobs = [{**job, "batch_size": size} for size in (1, 32, 1000, 2**31 - 1, 32)]
    response = http.post("/v1/predict/batch", json={"jobs": jobs, "bin_width_mib": 512, "coverage": 0.9})
    assert response.status_code == 200
    document = response.json()
    assert document["failed"] == 0
    estimates = predictor.estimate([job_from_dict(job) for job in jobs], bins=bins_of_width(512 * MIB), coverage=0.9)
    for result, estimate in zip(document["results"], estimates, strict=True):
        assert set(result) == {"prediction"}
        assert_same(result["prediction"], estimate)


def test_a_bad_job_does_not_fail_the_others(http, predictor, job):
    unsupported = [{**job, "family": family} for family in FAMILIES if family not in {b.card.family for b in predictor.bundles}]
    bad_layer = {**job, "layers": [{"kind": "Linear!", "activations": 1}]}
    jobs = [job, bad_layer, 7, job, {**job, "batch_size": -3}, *unsupported]
    document = http.post("/v1/predict/batch", json={"jobs": jobs}).json()
    assert document["failed"] == 3 + len(unsupported)
    results = document["results"]
    assert [set(result) for result in results] == [{"prediction"}, {"problem"}, {"problem"}, {"prediction"}, {"problem"}] + [
        {"problem"} for _ in unsupported
    ]
    fields = [result["problem"]["errors"][0]["field"] for result in results if "problem" in result]
    assert fields == ["jobs[1].layers[0].kind", "jobs[2]", "jobs[4].batch_size"] + [
        f"jobs[{5 + index}].family" for index in range(len(unsupported))
    ]
    assert without_id(results[0]["prediction"]) == without_id(results[3]["prediction"])


def test_an_empty_batch_is_answered(http):
    response = http.post("/v1/predict/batch", json={"jobs": []})
    assert (response.status_code, response.json()) == (200, {"failed": 0, "results": []})


def test_a_batch_of_a_thousand_jobs_fits_the_limits(http, job):
    response = http.post("/v1/predict/batch", json={"jobs": [job] * 1000})
    assert response.status_code == 200
    assert len(response.json()["results"]) == 1000


def test_the_models_are_those_of_the_predictor(http, predictor):
    models = http.get("/v1/models").json()["models"]
    assert [model["sha256"] for model in models] == [bundle.sha256 for bundle in predictor.bundles]
    assert [model["card"] for model in models] == [bundle.card.document for bundle in predictor.bundles]


def test_health(http, predictor):
    assert http.get("/healthz").json() == {"status": "ok"}
    families = list(dict.fromkeys(bundle.card.family for bundle in predictor.bundles))
    assert http.get("/readyz").json() == {"status": "ready", "families": families}
