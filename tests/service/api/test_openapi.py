"""The API's description: valid, complete and typed, so that a program can write a client from it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openapi_spec_validator import validate
from referencing import Registry
from referencing.jsonschema import DRAFT202012
from starlette.routing import Route

from gpumemnet.atomic_files import Document
from gpumemnet.errors import InvalidJobError
from gpumemnet.job.json_codec import job_from_dict
from gpumemnet.job.training_job import FIELD_CHOICES, FIELD_RANGES, JOB_FIELDS
from service.api.schemas import TrainingJob
from service.app import create_app
from service.settings import Settings

Check = Callable[[Document, object], None]

SNAPSHOT = Path(__file__).parent / "openapi_snapshot.json"
METHODS = {"get", "put", "post", "delete"}
UNDESCRIBED = {"/", "/docs", "/openapi.json"}
"""What is for people, and the description itself."""
MAX_OPERATIONS = 15


@pytest.fixture(scope="module")
def description(http: httpx.Client) -> Document:
    return dict(http.get("/openapi.json").json())


@pytest.fixture(scope="module")
def check(description: Document) -> Check:
    """Validates a document against a component of the description."""
    registry = Registry().with_resource("urn:description", DRAFT202012.create_resource(description))

    def check_against(schema: Document, document: object) -> None:
        rooted = json.loads(json.dumps(schema).replace('"#/', '"urn:description#/'))
        jsonschema.Draft202012Validator(rooted, registry=registry).validate(document)

    return check_against


def json_content(part: Document) -> Document:
    return dict(part["content"]["application/json"])


def test_it_is_valid_openapi(description: Document) -> None:
    validate(description)


def operations(description: Document) -> dict[tuple[str, str], Document]:
    """(path, method) → operation."""
    return {
        (path, method): operation
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
        if method in METHODS
    }


def test_it_describes_every_route(description: Document) -> None:
    app = create_app(Settings(database_url="off"))
    served = {
        (route.path, method.lower())
        for route in app.routes
        if isinstance(route, Route)
        and not route.path.startswith(("/page/", "/docs/"))
        and route.path not in UNDESCRIBED
        for method in (route.methods or set()) - {"HEAD"}
    }
    described = operations(description).keys()
    assert described == served
    assert len(described) + len(UNDESCRIBED) <= MAX_OPERATIONS


def test_every_reference_leads_somewhere(description: Document) -> None:
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(description)))
    assert names <= description["components"]["schemas"].keys()


def test_nothing_in_it_changes_unseen(description: Document) -> None:
    """The interface is a promise: a change of it changes this file too (GPUMEMNET_UPDATE_SNAPSHOT=1
    writes it anew)."""
    frozen = outline(description)
    if os.environ.get("GPUMEMNET_UPDATE_SNAPSHOT"):
        SNAPSHOT.write_text(json.dumps(frozen, indent=1, sort_keys=True) + "\n")
    assert frozen == json.loads(SNAPSHOT.read_text())


def outline(part: Any) -> Any:
    """The description without its examples, which change with the models, and without its
    version."""
    if isinstance(part, dict):
        kept = {
            name: outline(value)
            for name, value in part.items()
            if name not in ("example", "examples")
        }
        if "openapi" in part:
            kept["info"] = {
                name: value for name, value in kept["info"].items() if name != "version"
            }
        return kept
    return [outline(one) for one in part] if isinstance(part, list) else part


@pytest.mark.parametrize("path", ["/v1/predict", "/v1/predict/batch", "/v1/batch-sizes", "/v1/fit"])
def test_the_examples_are_answered_as_described(
    http: httpx.Client, description: Document, check: Check, path: str
) -> None:
    operation = description["paths"][path]["post"]
    requests = json_content(operation["requestBody"])
    for example in requests["examples"].values():
        if path != "/v1/predict/batch":  # one of its jobs is invalid on purpose
            check(requests["schema"], example["value"])
        response = http.post(path, json=example["value"])
        assert response.status_code == 200
        check(json_content(operation["responses"]["200"])["schema"], response.json())


@pytest.mark.parametrize("status", [404, 405, 413, 415, 422])
def test_every_problem_has_the_documented_shape(
    http: httpx.Client, check: Check, status: int
) -> None:
    requests: dict[int, dict[str, Any]] = {
        404: {"method": "GET", "url": "/nowhere"},
        405: {"method": "GET", "url": "/v1/predict"},
        413: {"method": "POST", "url": "/v1/predict", "json": " " * Settings().max_body_bytes},
        415: {"method": "POST", "url": "/v1/predict"},
        422: {"method": "POST", "url": "/v1/predict", "json": {}},
    }
    response = http.request(**requests[status])
    assert response.status_code == status
    check({"$ref": "#/components/schemas/Problem"}, response.json())


def accepted(job: Document, **changes: object) -> bool:
    try:
        job_from_dict({**job, **changes})
    except InvalidJobError:
        return False
    return True


def allowed(schema: Document, value: object) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def job_of_totals() -> Document:
    job = {
        "family": "mlp",
        "batch_size": 1,
        "input_elements": 1,
        "optimizer": "adam",
        "precision": "fp32",
    }
    return job | {"total_activations": 2**50, "total_parameters": 2**50}


VALUES: tuple[object, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        -1,
        1.5,
        2**31 - 1,
        2**31,
        2**50,
        2**50 + 1,
        "",
        "adam",
        "none",
        "math",
        [],
        {},
    ),
)


@pytest.mark.parametrize("field", [name for name in JOB_FIELDS if name != "layers"])
def test_the_schema_of_a_field_allows_what_the_parser_accepts(field: str) -> None:
    schema = TrainingJob.model_json_schema()["properties"][field]
    words = [word for words in FIELD_CHOICES.values() for word in words]
    edges = [
        edge + step for _, low, high in FIELD_RANGES for edge in (low, high) for step in (-1, 0, 1)
    ]
    for value in (*VALUES, *words, *edges):
        if value is None and field in ("total_activations", "total_parameters"):
            continue  # may be null where layers are given
        job = job_of_totals()
        assert allowed(schema, value) == accepted(job, **{field: value}), (field, value)


def test_a_job_is_typed_wherever_it_stands(description: Document) -> None:
    schemas = description["components"]["schemas"]
    job = {"$ref": "#/components/schemas/TrainingJob"}
    for name in ("PredictRequest", "BatchSizesRequest"):
        assert schemas[name]["properties"]["job"]["$ref"] == job["$ref"]
    assert schemas["BatchRequest"]["properties"]["jobs"]["items"] == job
    assert job in schemas["Observation"]["properties"]["job"]["anyOf"]
    assert len(json.dumps(description)) < 100_000


CLIENT = """
import json, sys
from predictor_client import Client
from predictor_client.api.predict import predict, predict_batch
from predictor_client.models import BatchRequest, PredictRequest, Prediction, TrainingJob

client = Client(base_url=sys.argv[1])
job = TrainingJob.from_dict(json.loads(sys.argv[2]))
prediction = predict.sync(client=client, body=PredictRequest(job=job))
assert isinstance(prediction, Prediction), prediction
batch = {"jobs": [job.to_dict()] * 2, "fields": ["safe_bytes"]}
several = predict_batch.sync(client=client, body=BatchRequest.from_dict(batch))
print(prediction.safe_bytes, *(one.prediction.safe_bytes for one in several.results))
"""


def test_a_generated_client_makes_a_prediction(
    http: httpx.Client, description: Document, job: Document, tmp_path: Path
) -> None:
    """By openapi-python-client, which stands for all generators."""
    pytest.importorskip("openapi_python_client", reason="openapi-python-client is not installed")
    for name, text in (
        ("openapi.json", json.dumps(description)),
        (
            "settings.json",
            json.dumps({"package_name_override": "predictor_client", "post_hooks": []}),
        ),
    ):
        (tmp_path / name).write_text(text)
    arguments = [
        "generate",
        "--path",
        "openapi.json",
        "--config",
        "settings.json",
        "--meta",
        "none",
    ]
    made = subprocess.run(
        [sys.executable, "-m", "openapi_python_client", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    said = made.stdout + made.stderr
    assert (made.returncode, "WARNING" in said.upper()) == (0, False), said
    asked = subprocess.run(
        [sys.executable, "-c", CLIENT, str(http.base_url), json.dumps(job)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    safe_bytes = http.post("/v1/predict", json={"job": job}).json()["safe_bytes"]
    assert asked.stdout.split() == [str(safe_bytes)] * 3, asked.stderr
