"""Whatever arrives, the answer is a prediction of the documented shape or a problem document; never
a 5xx."""

import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpumemnet.atomic_files import Document
from gpumemnet.job.layers import MAX_ELEMENTS
from gpumemnet.job.training_job import FIELD_CHOICES, FIELD_RANGES, JOB_FIELDS
from service.api.schemas import BatchPrediction, Prediction, Problem, Schema

bounded = settings(max_examples=100, suppress_health_check=list(HealthCheck))

SHAPE_OF_PATH: dict[str, type[Schema]] = {
    "/v1/predict": Prediction,
    "/v1/predict/batch": BatchPrediction,
}

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=10) | st.sampled_from(JOB_FIELDS), inner, max_size=4)
    ),
    max_leaves=8,
)
elements = st.integers(0, MAX_ELEMENTS) | st.integers(0, 100)
layers = st.lists(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["linear", "relu", "conv2d", "unheard_of"]),
            "activations": elements,
        },
        optional={"parameters": elements},
    )
    | junk,
    max_size=5,
)


@st.composite
def nearly_valid_jobs(draw: st.DrawFn) -> Document:
    """Jobs of valid words and counts, most of them absurd, with some fields spoilt."""
    fields: dict[str, st.SearchStrategy[object]] = {
        name: st.sampled_from(words) for name, words in FIELD_CHOICES.items()
    }
    fields |= {name: st.integers(low, high) for name, low, high in FIELD_RANGES}
    job = draw(st.fixed_dictionaries(fields))
    if draw(st.booleans()):
        job["layers"] = draw(layers)
        del job["total_activations"], job["total_parameters"], job["trainable_parameters"]
    for name in draw(st.lists(st.sampled_from(JOB_FIELDS), max_size=2)):
        job[name] = draw(junk)
    return job


devices = st.fixed_dictionaries(
    {"id": st.text(max_size=5) | junk, "gpu": st.sampled_from(["A100", "T4"]) | junk},
    optional={"free_mib": st.integers(-1, 2**21) | junk},
)
options = st.fixed_dictionaries(
    {},
    optional={
        "coverage": st.sampled_from([0.5, 0.9, 0.99]) | st.floats() | junk,
        "bin_width_mib": st.integers(49, 196608) | junk,
        "gpu": st.sampled_from(["A100", "H200"]) | junk,
        "encoder": st.sampled_from(["mlp", "transformer"]) | junk,
        "fits": st.booleans()
        | st.lists(st.sampled_from(["A100/1g.5gb", "T4"]) | junk, max_size=3)
        | junk,
        "devices": st.lists(devices | junk, max_size=3) | junk,
    },
)


def assert_answered(http: httpx.Client, path: str, body: bytes) -> None:
    response = http.post(path, content=body, headers={"Content-Type": "application/json"})
    if response.status_code == 200:
        SHAPE_OF_PATH[path].model_validate_json(response.content)
    else:
        assert response.status_code == 422
        assert response.headers["content-type"] == "application/problem+json"
        problem = Problem.model_validate_json(response.content)
        assert problem.errors


@pytest.mark.parametrize("path", SHAPE_OF_PATH)
@bounded
@given(body=st.binary(max_size=300) | junk.map(lambda value: json.dumps(value).encode()))
def test_any_body(http: httpx.Client, path: str, body: bytes) -> None:
    assert_answered(http, path, body)


@bounded
@given(job=nearly_valid_jobs(), options=options)
def test_nearly_valid_questions(http: httpx.Client, job: Document, options: Document) -> None:
    assert_answered(http, "/v1/predict", json.dumps({"job": job, **options}).encode())


@bounded
@given(jobs=st.lists(nearly_valid_jobs() | junk, max_size=4), options=options)
def test_nearly_valid_batches(http: httpx.Client, jobs: list[object], options: Document) -> None:
    assert_answered(http, "/v1/predict/batch", json.dumps({"jobs": jobs, **options}).encode())


names = st.text(
    st.characters(min_codepoint=33, max_codepoint=126, exclude_characters='"(),/:;<=>?@[\\]{}'),
    min_size=1,
    max_size=20,
)
