"""Every error is a problem document (RFC 9457) that names the place, on every endpoint."""

import asyncio
import json
import re

import httpx
import pytest
from fastapi import FastAPI

from gpumemnet.atomic_files import Document
from gpumemnet.errors import InvalidJobError
from gpumemnet.job.json_codec import job_from_dict
from gpumemnet.predict.predictor import BundleModel
from service.api.problems import PROBLEM_KINDS
from service.app import create_app
from service.settings import Settings

JSON = {"Content-Type": "application/json"}
KINDS = {kind.uri: kind for kind in PROBLEM_KINDS}
POST_PATHS = ("/v1/predict", "/v1/predict/batch")
GET_PATHS = ("/v1/models", "/healthz", "/readyz", "/openapi.json", "/docs")


def problem(response: httpx.Response, status: int) -> Document:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    kind = KINDS[document["type"]]
    assert (
        (document["title"], document["status"]) == (kind.title, status) == (kind.title, kind.status)
    )
    assert set(document) - {"errors"} == {"type", "title", "status", "detail"}
    assert document["detail"]
    for error in document.get("errors", ()):
        assert set(error) == {"field", "message"}
        assert document["detail"] == f"{error['field']}: {error['message']}"
    assert not re.search(r"Traceback|File \"|/site-packages/", response.text)
    return dict(document)


def field_at_fault(http: httpx.Client, body: object, path: str = "/v1/predict") -> str:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return str(problem(http.post(path, content=content, headers=JSON), 422)["errors"][0]["field"])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 10**400}, "batch_size"),
        ({"schema_version": 99}, "schema_version"),
        ({"batch_sise": 1}, "batch_sise"),
        ({"layers": 5}, "layers"),
        ({"layers": [["relu", 1, 0]] * 20_001}, "layers"),
        ({"layers": [["relu", 1, 0], ["relu", 1]]}, "layers[1]"),
        (
            {"layers": [["relu", 1, 0], {"kind": "relu", "activations": 1, "parameters": "x"}]},
            "layers[1].parameters",
        ),
    ],
)
def test_a_bad_job_is_refused_at_its_field_in_the_parsers_words(
    http: httpx.Client, job: Document, change: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidJobError) as raised:
        job_from_dict({**job, **change})
    response = http.post(
        "/v1/predict", content=json.dumps({"job": {**job, **change}}), headers=JSON
    )
    document = problem(response, 422)
    assert document["errors"] == [{"field": f"job.{field}", "message": raised.value.reason}]
    assert document["detail"] == f"job.{raised.value}"


@pytest.mark.parametrize("path", POST_PATHS)
@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b"{",
            b"nonsense",
            b"\xff\xfe\x00",
            b"\x00",
            b'{"job": NaN}',
            b'{"jobs": [Infinity]}',
            b'{"job": 1e',
            b"'{}'",
        ),
        *(
            b"[" * 100_000,
            b'{"job":' * 50_000,
            b'{"job": ' + b"9" * 5000 + b"}",
            b"[]",
            b"null",
            b"3",
            b'"job"',
        ),
    ],
    ids=lambda body: body[:12].decode("latin-1"),
)
def test_a_body_that_is_no_json_object_is_refused(
    http: httpx.Client, path: str, body: bytes
) -> None:
    assert field_at_fault(http, body, path) == "body"


def test_too_many_jobs_are_refused(http: httpx.Client, job: Document) -> None:
    assert field_at_fault(http, {"jobs": [1] * 1001}, "/v1/predict/batch") == "jobs"


def test_too_many_probabilities_are_refused(http: httpx.Client, job: Document) -> None:
    body = {"jobs": [job] * 1000, "bin_width_mib": 49}
    assert field_at_fault(http, body, "/v1/predict/batch") == "bin_width_mib"


def test_a_body_without_media_type_is_refused(http: httpx.Client, job: Document) -> None:
    problem(http.post("/v1/predict", content=json.dumps({"job": job})), 415)


@pytest.mark.parametrize(
    "path",
    [
        "/v1",
        "/v1/predict/",
        "/v3",
        "/page",
        "/v1/predict/batch/1",
        "/V1/PREDICT",
        "/%00",
        "/%ff",
        "/" + "x" * 5000,
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_an_unknown_path(http: httpx.Client, method: str, path: str) -> None:
    problem(http.request(method, path), 404)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(
            (method, path)
            for path in POST_PATHS
            for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS")
        ),
        *(
            (method, path)
            for path in GET_PATHS
            for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS")
        ),
    ],
)
def test_a_wrong_method(http: httpx.Client, method: str, path: str) -> None:
    response = http.request(method, path)
    allowed = response.headers["allow"]
    assert method not in allowed
    assert allowed in problem(response, 405)["detail"]


def ask_in_process(app: FastAPI, path: str) -> httpx.Response:
    """For failures that a sound service does not show."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(path)

    return asyncio.run(ask())


@pytest.mark.parametrize("path", ["/readyz"])
def test_a_probe_runs_no_model(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """A release passes its self-test before it is served; repeated in each probe, it would delay
    predictions."""
    app = create_app(Settings(database_url="off"))

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("a probe ran a model")

    monkeypatch.setattr(BundleModel, "run", fail)
    assert ask_in_process(app, path).status_code == 200
