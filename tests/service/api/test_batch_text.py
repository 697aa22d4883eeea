"""The reader of plain batches: what it reads is what the careful one reads, and it leaves all that is odd."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumemnet.errors import FieldError
from gpumemnet.job.json_codec import job_to_dict
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.predictor import Predictor
from service.api.answers import Answerer
from service.api.batch_text import read_plain_batch
from service.api.requests import read_question
from tests.fuzzing import CASES
from tests.job_documents import documents, oddities, read_alone
from tests.jobs import jobs, small_job


def read_carefully(body: bytes) -> tuple[list[TrainingJob | None], Any] | None:
    """The jobs and the options as the careful readers have them; ``None`` where they refuse the request."""
    try:
        content, options = read_question(body, "jobs")
    except FieldError:
        return None
    return [read_alone(document) for document in content], options


def assert_read_alike(body: bytes) -> None:
    try:
        plain = read_plain_batch(body, 1000, 1000)
    except FieldError:
        assert read_carefully(body) is None
        return
    if plain is None:
        return
    assert (list(plain.jobs), plain.options) == read_carefully(body)
    assert {type(value) for job in plain.jobs for value in (job.batch_size, job.total_parameters)} == {int}
    assert len(set(plain.jobs.option_sets)) == len(plain.jobs.option_sets)


OPEN = ["checkpointing", "channels_last", "schema_version", "gradient_accumulation"]
options = st.fixed_dictionaries(
    {},
    optional={
        "coverage": st.sampled_from([0.99, 1, "0.9", None]),
        "bin_width_mib": st.sampled_from([1024, 0.5, None, 10**30]),
        "gpu": st.sampled_from(["A100", "", None, 7]),
        "encoder": st.sampled_from(["mlp", "common", "MLP", None]),
        "fits": st.sampled_from([True, False, None]),
        "devices": st.just([{"id": 1}]),
        "bins": st.sampled_from(["published-mlp", "1", None]),
    },
)


@settings(max_examples=CASES)
@given(st.lists(documents() | oddities, max_size=4), options)
def test_both_readers_agree(many: list[Any], beside: dict[str, Any]) -> None:
    assert_read_alike(json.dumps({"jobs": many, **beside}).encode())


@settings(max_examples=CASES)
@given(st.lists(jobs(), min_size=1, max_size=2), st.data())
def test_both_readers_agree_on_spoilt_text(many: list[TrainingJob], data: st.DataObject) -> None:
    body = json.dumps({"jobs": [job_to_dict(job) for job in many]}).encode()
    for _ in range(data.draw(st.integers(1, 3))):
        at, length = data.draw(st.integers(0, len(body))), data.draw(st.integers(0, 30))
        put = data.draw(st.binary(max_size=3) | st.sampled_from([b'"batch_size": 7, ', b"\\u0062", b"-", b"0", b".0", b"9" * 20]))
        body = body[:at] + put + body[at + length :]
    assert_read_alike(body)


@given(st.lists(jobs(), min_size=1, max_size=8))
def test_ordinary_jobs_are_plain(many: list[TrainingJob]) -> None:
    plain = read_plain_batch(json.dumps({"jobs": [job_to_dict(job) for job in many], "coverage": 0.9}).encode(), 8, 1000)
    assert plain is not None
    assert list(plain.jobs) == many
    assert plain.options.coverage == 0.9


@given(st.lists(jobs(), min_size=1, max_size=8), st.data())
def test_what_is_not_stated_has_its_default(many: list[TrainingJob], data: st.DataObject) -> None:
    sent = [{name: value for name, value in job_to_dict(job).items() if value is not None} for job in many]
    for document in sent:
        for name in data.draw(st.lists(st.sampled_from(OPEN))):
            document.pop(name, None)
    plain = read_plain_batch(json.dumps({"jobs": sent}).encode(), 8, 1000)
    assert plain is not None
    assert list(plain.jobs) == [read_alone(document) for document in sent]
    assert len(set(plain.jobs.option_sets)) == len(plain.jobs.option_sets)


LAYER = '{"kind": "linear", "activations": 3, "parameters": 4}'
JOB = f'{{"batch_size": 1, "family": "mlp", "input_elements": 1, "optimizer": "adam", "precision": "fp32", "layers": [{LAYER}]}}'
PLAIN = f'{{"coverage": 0.9, "jobs": [{JOB}]}}'


@pytest.mark.parametrize(
    ("part", "odd"),
    [
        (JOB, ""),
        (JOB, ", ".join([JOB] * 3)),
        (JOB, JOB + "]]"),
        ('"jobs"', f'"jobs": [{JOB}], "jobs"'),
        ('"coverage": 0.9', '"coverage": 0.9, "coverage": 0.9'),
        ('"coverage": 0.9', '"fits": ["A100"]'),
        ('"batch_size": 1', '"batch_size": 2, "batch_size": 1'),
        ('"batch_size": 1', '"batch_size": 1.0'),
        ('"batch_size": 1', '"total_parameters": 5, "batch_size": 1'),
        ('"parameters": 4', '"parameters": 4, "parameters": 4'),
        ("linear", "Linear!"),
        (LAYER, '["linear", 3, 4]'),
        (LAYER, ", ".join([LAYER] * 9)),
    ],
)
def test_odd_requests_are_left(part: str, odd: str) -> None:
    assert read_plain_batch(PLAIN.encode(), 2, 8) is not None
    assert read_plain_batch(PLAIN.replace(part, odd).encode(), 2, 8) is None


def test_answers_are_the_same_however_a_batch_is_read(predictor: Predictor) -> None:
    sent = [{**job_to_dict(small_job()), "batch_size": size} for size in range(1, 40)]
    answerer = Answerer(predictor, 100)
    plain, careful = (
        json.loads(answerer.predict_batch(json.dumps({"jobs": sent, **beside}).encode())) for beside in ({}, {"fits": False})
    )
    for result in (*plain["results"], *careful["results"]):
        del result["prediction"]["prediction_id"]
    assert plain == careful
    assert len(plain["results"]) == len(sent)
