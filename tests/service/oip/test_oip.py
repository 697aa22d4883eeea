"""The Open Inference Protocol over HTTP: every path, both forms of tensors, and its own shape of
errors."""

import asyncio
import copy
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openapi_spec_validator import validate
from starlette.applications import Starlette

from gpumemnet.job.job_table import JobTable
from gpumemnet.job.json_codec import job_from_dict
from gpumemnet.predict.bins import bins_of_width
from gpumemnet.predict.prediction_table import PredictionTable
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import GIB, MIB
from service.api.examples import EXAMPLE_JOBS
from service.api.operations import openapi_document
from service.api.predictions import Document, PredictionApi
from service.api.records import PredictionRecord, RecordBatch
from service.oip import OipApplication
from service.oip.schemas import (
    OipAnswer,
    OipIndexEntry,
    OipLive,
    OipModelMetadata,
    OipModelReady,
    OipReady,
    OipRequest,
    OipServer,
)
from service.oip.tensors import join_bytes, split_bytes
from tests.conftest import StartService

HEADER = "Inference-Header-Content-Length"
INFER = "/v2/models/gpumemnet/infer"
OUTPUTS = [
    "prediction_id",
    *(
        "expected_bytes",
        "startup_peak_bytes",
        "safe_bytes",
        "in_support",
        "reasons",
        "bin_index",
        "probabilities",
    ),
    *("gpu", "model", "model_version", "model_sha256"),
]
NUMPY_TYPES = {"INT64": "<i8", "INT32": "<i4", "FP64": "<f8", "BOOL": "?"}


def tensor(
    *jobs: str | Mapping[str, Any], shape: list[int] | None = None, data: list[Any] | None = None
) -> Document:
    texts = [job if isinstance(job, str) else json.dumps(job) for job in jobs]
    return {
        "name": "job",
        "datatype": "BYTES",
        "shape": shape or [len(texts)],
        "data": data or texts,
    }


def ask(
    http: "httpx.Client | Local",
    *jobs: str | Mapping[str, Any],
    path: str = INFER,
    **members: object,
) -> Document:
    response = http.post(path, json={"inputs": [tensor(*jobs)], **members})
    assert response.status_code == 200, response.text
    return dict(response.json())


@dataclass
class Served:
    api: PredictionApi
    is_ready: bool = True


class Notes:
    """A recorder that keeps all predictions."""

    def __init__(self) -> None:
        self.records: list[PredictionRecord] = []

    def record(self, records: RecordBatch) -> None:
        self.records.extend(records)


class Local:
    """Asks the routes in this process, where the service itself must be held in hand."""

    def __init__(self, serving: Served) -> None:
        self.routes = Starlette(routes=OipApplication(serving).routes)

    def get(self, path: str) -> httpx.Response:
        return asyncio.run(self._request("GET", path))

    def post(self, path: str, json: object) -> httpx.Response:
        return asyncio.run(self._request("POST", path, json=json))

    async def _request(self, *arguments: str, **content: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.routes, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://local") as client:
            return await client.request(*arguments, **content)


def columns(answer: Document) -> dict[str, list[Any]]:
    return {output["name"]: output["data"] for output in answer["outputs"]}


def refused(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.json().keys() == {"error"}
    return str(response.json()["error"])


def test_the_server_says_what_it_is(http: httpx.Client) -> None:
    for path in ("/v2", "/v2/"):
        answer = http.get(path).json()
        assert answer == {
            "name": "gpumemnet",
            "version": version("gpumemnet"),
            "extensions": ["binary_tensor_data"],
        }


def test_health(http: httpx.Client) -> None:
    assert http.get("/v2/health/live").json() == {"live": True}
    assert http.get("/v2/health/ready").json() == {"ready": True}


def test_every_bundle_and_the_whole_are_models(http: httpx.Client, predictor: Predictor) -> None:
    names = [entry["name"] for entry in http.post("/v2/repository/index").json()]
    assert names == [*(bundle.card.name for bundle in predictor.bundles), "gpumemnet"]
    for name in names:
        metadata = http.get(f"/v2/models/{name}").json()
        assert metadata["name"] == name
        assert [output["name"] for output in metadata["outputs"]] == OUTPUTS
        assert metadata["inputs"] == [{"name": "job", "datatype": "BYTES", "shape": [-1]}]
        assert http.get(f"/v2/models/{name}/ready").json() == {"name": name, "ready": True}
        one = f"/v2/models/{name}/versions/{metadata['versions'][0]}"
        assert http.get(one).json() == metadata
        assert http.get(f"{one}/ready").json() == {"name": name, "ready": True}


def test_metadata_hold_the_hash_of_a_bundle(http: httpx.Client, predictor: Predictor) -> None:
    bundle = predictor.bundles[0]
    facts = http.get(f"/v2/models/{bundle.card.name}").json()["parameters"]
    assert (facts["sha256"], facts["family"], facts["gpu"]) == (
        bundle.sha256,
        bundle.card.family,
        bundle.card.gpu,
    )


def test_jobs_of_all_families_are_answered_as_the_predictor_does(
    http: httpx.Client, predictor: Predictor
) -> None:
    jobs = list(EXAMPLE_JOBS.values())
    answer = ask(http, *jobs, id="42")
    expected = predictor.predict_many([job_from_dict(job) for job in jobs], bins=bins_of_width(GIB))
    assert answer["model_name"] == "gpumemnet"
    assert answer["id"] == "42"
    assert answer["parameters"] == {"coverage": 0.99, "bin_width_mib": 1024}
    assert [output["name"] for output in answer["outputs"]] == OUTPUTS
    got = columns(answer)
    assert got["expected_bytes"] == [estimate.expected_bytes for estimate in expected]
    assert got["startup_peak_bytes"] == [estimate.startup_peak_bytes for estimate in expected]
    assert got["safe_bytes"] == [
        -1 if estimate.safe_bytes is None else estimate.safe_bytes for estimate in expected
    ]
    assert got["in_support"] == [estimate.in_support for estimate in expected]
    assert got["bin_index"] == [estimate.bin_index for estimate in expected]
    assert got["model"] == [estimate.estimator for estimate in expected]
    shapes = {output["name"]: output["shape"] for output in answer["outputs"]}
    assert shapes["probabilities"] == [3, bins_of_width(GIB).count]
    probabilities = np.array(got["probabilities"]).reshape(shapes["probabilities"])
    np.testing.assert_allclose(probabilities, [estimate.probabilities for estimate in expected])


def test_answers_have_the_documented_shapes(http: httpx.Client, job: Document) -> None:
    for path, shape in (
        ("/v2", OipServer),
        ("/v2/health/live", OipLive),
        ("/v2/health/ready", OipReady),
        ("/v2/models/gpumemnet", OipModelMetadata),
        ("/v2/models/gpumemnet/ready", OipModelReady),
    ):
        shape.model_validate_json(http.get(path).content)
    for entry in http.post("/v2/repository/index").json():
        OipIndexEntry.model_validate(entry)
    OipAnswer.model_validate(ask(http, job))
    OipAnswer.model_validate(ask(http, job, id="1", parameters={"coverage": 0.9}))


def test_the_description_is_valid_openapi_and_its_examples_are_answered(
    http: httpx.Client, predictor: Predictor
) -> None:
    operations_of_protocol = OipApplication(Served(PredictionApi(predictor, 1))).operations
    document = openapi_document(
        {"title": "x", "version": "1"}, operations_of_protocol, max_jobs=1, max_layers=1
    )
    validate(document)
    paths = document["paths"]
    operations = [operation for methods in paths.values() for operation in methods.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations) == 10
    for example in paths["/v2/models/{model}/infer"]["post"]["requestBody"]["content"][
        "application/json"
    ]["examples"].values():
        OipRequest.model_validate(example["value"])
        assert http.post(INFER, json=example["value"]).status_code == 200


def test_predictions_are_noted_under_their_ids(predictor: Predictor, job: Document) -> None:
    notes = Notes()
    serving = Served(PredictionApi(predictor, 10, recorder=notes, max_layers=5))
    client = Local(serving)
    job["layers"] = job["layers"][:5]
    answer = columns(ask(client, job, job))
    assert [note.prediction_id for note in notes.records] == answer["prediction_id"]
    assert [note.estimate.expected_bytes for note in notes.records] == answer["expected_bytes"]
    job["layers"] *= 2
    assert "at most 5 layers" in refused(client.post(INFER, json={"inputs": [tensor(job)]}), 400)
    name = predictor.bundles[0].card.name
    serving.api = PredictionApi(predictor, 10, release="next")
    assert client.get("/v2/models/gpumemnet").json()["versions"] == ["next"]
    assert client.get("/v2/models/gpumemnet/versions/shipped").status_code == 404
    assert client.get(f"/v2/models/{name}/ready").status_code == 200


def test_what_fails_in_the_service_is_told_without_its_cause(predictor: Predictor) -> None:
    class Broken(PredictionApi):
        def record(self, jobs: JobTable, predictions: PredictionTable) -> list[str]:
            raise RuntimeError("secret")

    client = Local(Served(Broken(predictor, 10)))
    error = refused(client.post(INFER, json={"inputs": [tensor(EXAMPLE_JOBS["mlp"])]}), 500)
    assert "secret" not in error


def test_outside_the_support_there_is_no_limit_but_reasons(
    http: httpx.Client, job: Document
) -> None:
    job["batch_size"] = 2**31 - 1
    got = columns(ask(http, job))
    assert got["safe_bytes"] == [-1]
    assert got["in_support"] == [False]
    assert got["reasons"][0]


def test_amounts_beyond_64_bits_are_the_largest_there_are(http: httpx.Client) -> None:
    job = {
        "family": "mlp",
        "batch_size": 2**31 - 1,
        "input_elements": 1,
        "optimizer": "adam",
        "precision": "fp32",
    }
    assert columns(ask(http, {**job, "total_activations": 2**50, "total_parameters": 1}))[
        "expected_bytes"
    ] == [2**62]


def test_parameters_choose_coverage_bins_gpu_and_encoder(
    http: httpx.Client, predictor: Predictor, job: Document
) -> None:
    parameters = {
        "coverage": 0.9,
        "bin_width_mib": 2048,
        "gpu": "a100-40gb",
        "encoder": "transformer",
    }
    answer = ask(http, job, parameters=parameters)
    expected = predictor.predict(
        job_from_dict(job),
        bins=bins_of_width(2048 * MIB),
        coverage=0.9,
        gpu="a100-40gb",
        encoder="transformer",
    )
    got = columns(answer)
    assert answer["parameters"] == {"coverage": 0.9, "bin_width_mib": 2048}
    assert got["expected_bytes"] == [expected.expected_bytes]
    assert got["gpu"] == [expected.gpu]
    assert got["model"] == [expected.estimator]
    assert len(got["probabilities"]) == expected.bins.count


def test_a_bundle_answers_by_itself(http: httpx.Client, predictor: Predictor) -> None:
    for bundle in predictor.bundles:
        job = EXAMPLE_JOBS[bundle.card.families[-1]]
        for path in ("", f"/versions/{bundle.card.version}"):
            answer = ask(
                http,
                job,
                path=f"/v2/models/{bundle.card.name}{path}/infer",
                outputs=[{"name": "model_sha256"}],
            )
            assert answer["model_name"] == bundle.card.name
            assert answer["model_version"] == bundle.card.version
            assert columns(answer) == {"model_sha256": [bundle.sha256]}


def test_outputs_come_as_asked_for_and_in_that_order(http: httpx.Client, job: Document) -> None:
    answer = ask(http, job, outputs=[{"name": "model"}, {"name": "safe_bytes"}])
    assert [output["name"] for output in answer["outputs"]] == ["model", "safe_bytes"]


@pytest.mark.parametrize(
    ("shape", "nested"),
    [
        ([2], lambda text: [text, text]),
        ([2, 1], lambda text: [text, text]),
        ([2, 1], lambda text: [[text], [text]]),
    ],
)
def test_data_may_be_flat_or_nested(
    http: httpx.Client, job: Document, shape: list[int], nested: Callable[[str], list[Any]]
) -> None:
    text = json.dumps(job)
    response = http.post(INFER, json={"inputs": [tensor(shape=shape, data=nested(text))]})
    assert len(columns(response.json())["safe_bytes"]) == 2


def test_raw_tensors_in_and_out(http: httpx.Client, job: Document) -> None:
    plain = ask(http, job, job)
    raw = join_bytes([json.dumps(job).encode()] * 2)
    head = {
        "inputs": [
            {
                "name": "job",
                "datatype": "BYTES",
                "shape": [2],
                "parameters": {"binary_data_size": len(raw)},
            }
        ],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(head).encode()
    response = http.post(
        INFER,
        content=text + raw,
        headers={HEADER: str(len(text)), "Content-Type": "application/octet-stream"},
    )
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/octet-stream"
    length = int(response.headers[HEADER])
    answer, rest = json.loads(response.content[:length]), response.content[length:]
    for output, expected in zip(answer["outputs"], plain["outputs"], strict=True):
        size = output["parameters"]["binary_data_size"]
        part, rest = rest[:size], rest[size:]
        if output["name"] == "prediction_id":
            assert len(set(split_bytes(part, ""))) == 2
            continue
        if output["datatype"] == "BYTES":
            values = [element.decode() for element in split_bytes(part, "")]
        else:
            values = np.frombuffer(part, NUMPY_TYPES[output["datatype"]]).tolist()
        assert values == expected["data"]
        assert (output["name"], output["shape"]) == (expected["name"], expected["shape"])
    assert rest == b""


def test_an_output_may_differ_in_form_from_the_others(http: httpx.Client, job: Document) -> None:
    request = {
        "inputs": [tensor(job)],
        "parameters": {"binary_data_output": True},
        "outputs": [
            {"name": "expected_bytes"},
            {"name": "model", "parameters": {"binary_data": False}},
        ],
    }
    response = http.post(INFER, json=request)
    length = int(response.headers[HEADER])
    first, second = json.loads(response.content[:length])["outputs"]
    assert first["parameters"] == {"binary_data_size": 8}
    assert struct.unpack("<q", response.content[length:]) == tuple(
        columns(ask(http, job))["expected_bytes"]
    )
    assert second["data"] == columns(ask(http, job))["model"]


def test_what_other_clients_add_is_passed_over(http: httpx.Client, job: Document) -> None:
    tensor_of_mlserver = {**tensor(job), "parameters": {"content_type": "str"}}
    request = {
        "model_name": "anything",
        "model_version": "1",
        "inputs": [tensor_of_mlserver],
        "outputs": [],
        "parameters": None,
    }
    assert http.post(INFER, json=request).status_code == 200


def test_the_content_type_may_be_left_out(http: httpx.Client, job: Document) -> None:
    request = http.build_request(
        "POST", INFER, content=json.dumps({"inputs": [tensor(job)]}).encode()
    )
    request.headers.pop("content-type", None)
    assert http.send(request).status_code == 200


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"inputs": None},
            "inputs: must be a list of objects with name, datatype, shape, data, parameters, not null",
        ),
        ({"inputs": []}, "inputs: must hold at least 1, not 0"),
        ({"inputs": [tensor("{}"), tensor("{}")]}, "inputs: must hold at most 1, not 2"),
        ({"inputs": [5]}, "inputs[0]: must be a JSON object with name"),
        ({"inputs": [{**tensor("{}"), "name": "features"}]}, "inputs[0].name: must be job"),
        ({"inputs": [{**tensor("{}"), "datatype": "FP32"}]}, "inputs[0].datatype: must be BYTES"),
        (
            {"inputs": [{**tensor("{}"), "shape": [2]}]},
            "inputs[0].shape: must be [1] or [1, 1] for the 1 elements",
        ),
        ({"inputs": [{**tensor("{}"), "shape": [True]}]}, "inputs[0].shape"),
        ({"inputs": [{**tensor("{}"), "shape": "1"}]}, "inputs[0].shape"),
        ({"inputs": [{**tensor("{}"), "data": {}}]}, "inputs[0].data: must be a list"),
        ({"inputs": [{**tensor("{}"), "data": [5]}]}, "inputs[0].data[0]: must be a text"),
        (
            {"inputs": [{**tensor("{}"), "data": [[["{}"]]]}]},
            "inputs[0].data[0][0]: must be a text",
        ),
        (
            {"inputs": [{"name": "job", "datatype": "BYTES", "shape": [0], "data": []}]},
            "there is no job",
        ),
        ({"inputs": [tensor("no JSON")]}, "job[0]: no valid JSON"),
        ({"inputs": [tensor("[]")]}, "job[0]: a job must be a JSON object"),
        (
            {"inputs": [{**tensor("{}"), "parameters": {"content_type": "base64"}}]},
            "content_type: must be str",
        ),
        (
            {"inputs": [{**tensor("{}"), "parameters": {"binary_data_size": 4}}]},
            "inputs[0].data: must not stand beside",
        ),
        ({"outputs": [{"name": "memory"}]}, "outputs[0].name: must be one of prediction_id"),
        ({"outputs": [{"name": []}]}, "outputs[0].name: must be one of"),
        (
            {"outputs": [{"name": "model"}, {"name": "model"}]},
            "outputs[1].name: is asked for twice",
        ),
        (
            {"outputs": [{"name": "model", "parameters": {"classification": 3}}]},
            "parameters.classification: is not",
        ),
        (
            {"outputs": [{"name": "model", "parameters": {"binary_data": 1}}]},
            "must be true or false",
        ),
        ({"outputs": {}}, "outputs: must be a list"),
        ({"parameters": []}, "parameters: must be a JSON object with coverage"),
        ({"parameters": {"coverge": 0.5}}, "did you mean 'coverage'?"),
        ({"parameters": {"coverage": 0.9999}}, "parameters.coverage: must be between"),
        ({"parameters": {"coverage": "0.9"}}, "parameters.coverage: must be a number"),
        ({"parameters": {"bin_width_mib": 1}}, "parameters.bin_width_mib: must be a whole number"),
        ({"parameters": {"gpu": "no-such"}}, "parameters.gpu: no profile of 'no-such'"),
        ({"parameters": {"gpu": 5}}, "parameters.gpu: must be a text"),
        ({"parameters": {"encoder": "lstm"}}, "parameters.encoder: must be one of"),
        ({"id": 42}, "id: must be a text"),
        ({"id": "\ud800"}, "body: no valid JSON"),
    ],
)
def test_a_fault_is_told_at_its_place(
    http: httpx.Client, job: Document, change: dict[str, object], words: str
) -> None:
    body = json.dumps({"inputs": [tensor(job)], **change})
    error = refused(
        http.post(INFER, content=body, headers={"Content-Type": "application/json"}), 400
    )
    assert words in error


@pytest.mark.parametrize(
    ("body", "headers", "words"),
    [
        (b"", {}, "body: no valid JSON"),
        (b"[1]", {}, "body: must be a JSON object"),
        (b'{"inputs": [], "inputs": []}', {}, "inputs: appears twice"),
        (b"{}", {HEADER: "3"}, f"header {HEADER}: must be the length"),
        (b"{}", {HEADER: "-1"}, f"header {HEADER}"),
        (b"{}", {HEADER: "9" * 5000}, f"header {HEADER}"),
        (b"\xff\xfe", {}, "body"),
    ],
)
def test_a_broken_body_is_refused(
    http: httpx.Client, body: bytes, headers: dict[str, str], words: str
) -> None:
    headers = {"Content-Type": "application/octet-stream", **headers}
    assert words in refused(http.post(INFER, content=body, headers=headers), 400)


@pytest.mark.parametrize(
    ("raw", "size", "words"),
    [
        (b"", 4, "must be 0, the bytes behind the JSON object"),
        (b"\x02\x00\x00\x00{}", 5, "must be 6"),
        (b"\x02\x00\x00\x00{}", None, "goes on for 6 bytes that no input claims"),
        (b"\x02\x00\x00\x00{", 5, "inputs[0]: the raw data: ends within element 0"),
        (b"\x02\x00", 2, "ends within element 0"),
        (b"\xff\xff\xff\xff{}", 6, "ends within element 0"),
        (b"\x02\x00\x00\x00\xff\xfe", 6, "job[0]"),
    ],
)
def test_broken_raw_tensors_are_refused(
    http: httpx.Client, raw: bytes, size: int | None, words: str
) -> None:
    parameters = {} if size is None else {"binary_data_size": size}
    data = {"data": ["{}"]} if size is None else {}
    inputs = [{"name": "job", "datatype": "BYTES", "shape": [1], "parameters": parameters, **data}]
    head = json.dumps({"inputs": inputs}).encode()
    headers = {HEADER: str(len(head)), "Content-Type": "application/octet-stream"}
    assert words in refused(http.post(INFER, content=head + raw, headers=headers), 400)


def test_a_bad_job_is_told_by_its_number_in_the_parsers_words(
    http: httpx.Client, job: Document
) -> None:
    bad = copy.deepcopy(job)
    bad["layers"][1]["parameters"] = -1
    error = refused(http.post(INFER, json={"inputs": [tensor(job, bad)]}), 400)
    assert error.startswith("job[1].layers[1].parameters: must be between 0")


def test_the_common_model_answers_for_all_families_by_its_name(
    http: httpx.Client, predictor: Predictor
) -> None:
    bundle = next(bundle for bundle in predictor.bundles if bundle.card.encoder == "common")
    jobs = [EXAMPLE_JOBS[family] for family in ("cnn", "mlp", "cnn", "transformer")]
    answer = http.post(
        f"/v2/models/{bundle.card.name}/infer", json={"inputs": [tensor(*jobs)]}
    ).json()
    estimates = predictor.predict_many([job_from_dict(job) for job in jobs], encoder="common")
    assert columns(answer)["expected_bytes"] == [estimate.expected_bytes for estimate in estimates]


def test_a_job_that_the_model_does_not_answer_for(http: httpx.Client, predictor: Predictor) -> None:
    bundle = next(
        bundle
        for bundle in predictor.bundles
        if (bundle.card.family, bundle.card.encoder) == ("mlp", "transformer")
    )
    path = f"/v2/models/{bundle.card.name}/infer"
    totals = {name: value for name, value in EXAMPLE_JOBS["mlp"].items() if name != "layers"}
    totals |= {"total_activations": 100, "total_parameters": 100}
    for job, parameters, words in (
        (
            EXAMPLE_JOBS["cnn"],
            {},
            f"job[0].family: is cnn, and {bundle.card.name} answers for mlp jobs",
        ),
        (totals, {}, "job[0].layers: is missing"),
        (EXAMPLE_JOBS["mlp"], {"encoder": "mlp"}, "parameters.encoder: must be transformer"),
    ):
        assert words in refused(
            http.post(path, json={"inputs": [tensor(job)], "parameters": parameters}), 400
        )
    whole = http.post(
        INFER, json={"inputs": [tensor(totals)], "parameters": {"encoder": "transformer"}}
    )
    assert "(job[0])" in refused(whole, 400)


def test_more_jobs_or_probabilities_than_an_answer_holds_are_refused(
    http: httpx.Client, job: Document
) -> None:
    totals = {name: value for name, value in job.items() if name != "layers"} | {
        "total_activations": 9,
        "total_parameters": 9,
    }
    request = {"inputs": [tensor(*[totals] * 100)], "parameters": {"bin_width_mib": 49}}
    assert "parameters.bin_width_mib: gives" in refused(http.post(INFER, json=request), 400)
    assert (
        len(
            columns(http.post(INFER, json={**request, "outputs": [{"name": "model"}]}).json())[
                "model"
            ]
        )
        == 100
    )
    assert "at most 1000 jobs, not 1001" in refused(
        http.post(INFER, json={"inputs": [tensor(*["{}"] * 1001)]}), 400
    )


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/v2/models/nothing", 404, "there is no model 'nothing': models are"),
        ("GET", "/v2/models/nothing/ready", 404, "there is no model"),
        ("POST", "/v2/models/nothing/infer", 404, "there is no model"),
        (
            "GET",
            "/v2/models/gpumemnet/versions/no-such",
            404,
            "there is no version 'no-such' of gpumemnet",
        ),
        ("POST", "/v2/models/gpumemnet/versions/no-such/infer", 404, "there is no version"),
        ("GET", "/v2/nowhere", 404, "there is nothing at /v2/nowhere"),
        ("GET", "/v2/models/gpumemnet/stats", 404, "there is nothing at"),
        ("GET", INFER, 405, f"{INFER} answers to POST, not to GET"),
        ("POST", "/v2", 405, "/v2 answers to GET"),
        ("DELETE", "/v2/models/gpumemnet", 405, "answers to"),
    ],
)
def test_what_is_not_there(
    http: httpx.Client, method: str, path: str, status: int, words: str
) -> None:
    response = http.request(method, path)
    assert words in refused(response, status)
    assert (status == 405) == ("allow" in response.headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
def test_other_bodies_are_not_read(http: httpx.Client, headers: dict[str, str]) -> None:
    refused(http.post(INFER, content=b"{}", headers=headers), 415)


def test_a_body_that_is_too_large_is_refused_as_the_protocol_does(
    start_service: StartService,
) -> None:
    with (
        start_service(GPUMEMNET_MAX_BODY_BYTES="2000") as running,
        httpx.Client(base_url=running.url, headers={"Content-Type": "application/json"}) as http,
    ):
        assert "larger than the 2000 bytes" in refused(http.post(INFER, content=b" " * 2001), 413)
        assert "larger than the 2000 bytes" in refused(
            http.post(INFER, content=iter([b" " * 1500] * 2)), 413
        )


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(elements=st.lists(st.binary(max_size=20), max_size=5))
def test_raw_bytes_tensors_come_back(elements: list[bytes]) -> None:
    assert split_bytes(join_bytes(elements), "data") == elements


@pytest.mark.parametrize("name", ["model_version", "model_name"])
def test_the_models_name_and_version_in_a_body_are_texts(
    http: httpx.Client, job: Document, name: str
) -> None:
    not_texts: list[object] = [7, ["1"], {"a": 1}, True]
    for value in not_texts:
        error = refused(http.post(INFER, json={"inputs": [tensor(job)], name: value}), 400)
        assert name in error
    for text in ("1", None):
        response = http.post(INFER, json={"inputs": [tensor(job)], name: text})
        assert response.status_code == 200, response.text
