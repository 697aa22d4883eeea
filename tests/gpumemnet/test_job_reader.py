"""The columnar reader: what it reads is what the careful one reads, and it leaves all that is odd."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumemnet.errors import InvalidJobError
from gpumemnet.features import feature_columns
from gpumemnet.job import JOB_FIELDS, TrainingJob
from gpumemnet.job_json import job_from_dict, job_to_dict
from gpumemnet.job_reader import read_jobs
from gpumemnet.sequence import layer_sequence
from tests.jobs import jobs, small_job

WORKSPACE = 8_519_680

oddities = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**400), 10**400),
    st.integers(-2, 2**51),
    st.sampled_from([2**50, 2**50 + 1, 2**31 - 1, 2**31, 0, -1, 1.0, "mlp", "adam", "relu", "none", "", [], {}, [[]], [{}], [7]]),
    st.floats(),
    st.text(max_size=5),
    st.lists(
        st.fixed_dictionaries({}, optional={"kind": st.text(max_size=3), "activations": st.integers(-1, 3), "x": st.none()})
    ),
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """What clients send: a job with all or some of its fields, its layers as objects or lists, and now and then nonsense."""
    document = job_to_dict(draw(jobs()))
    form = draw(st.sampled_from(["objects", "short", "lists", "mixed"]))
    if form != "objects":
        document["layers"] = [
            [*layer.values()]
            if form == "lists" or (form == "mixed" and place % 2)
            else {name: value for name, value in layer.items() if value or name != "parameters"}
            for place, layer in enumerate(document["layers"])
        ]
    for name in draw(st.lists(st.sampled_from(JOB_FIELDS), max_size=4)):
        document.pop(name, None)
    if draw(st.integers(0, 3)) == 0:
        document[draw(st.sampled_from([*JOB_FIELDS, "batchsize"]))] = draw(oddities)
    if document.get("layers") and isinstance(document["layers"], list) and draw(st.integers(0, 5)) == 0:
        place = draw(st.integers(0, len(document["layers"]) - 1))
        layer = document["layers"][place]
        if isinstance(layer, dict):
            layer[draw(st.sampled_from(["kind", "activations", "parameters", "width"]))] = draw(oddities)
        else:
            document["layers"][place] = draw(oddities)
    return document


def read_alone(document: object) -> TrainingJob | None:
    try:
        return job_from_dict(document)
    except InvalidJobError:
        return None


@settings(max_examples=300, deadline=None)
@given(st.lists(documents() | oddities, max_size=8))
def test_both_readers_agree(many: list[Any]) -> None:
    read = read_jobs(many)
    assert sorted([*read.rows, *read.odd_rows]) == list(range(len(many)))
    alone = [read_alone(many[row]) for row in read.rows]
    assert list(read.jobs) == alone  # none is None: what is refused is never read here
    assert [type(value) for job in read.jobs for value in (job.batch_size, job.total_parameters)] == [int] * 2 * len(alone)
    there = [job for job in alone if job is not None]
    np.testing.assert_array_equal(feature_columns(read.jobs, WORKSPACE), feature_columns(there, WORKSPACE))
    with_layers = [row for row, job in enumerate(there) if job.layers]
    for ours, theirs in zip(
        layer_sequence(read.jobs.take(np.array(with_layers, dtype=np.int64))),
        layer_sequence([there[row] for row in with_layers]),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


@settings(deadline=None)
@given(st.lists(jobs(), max_size=8))
def test_ordinary_jobs_are_never_odd(many: list[TrainingJob]) -> None:
    read = read_jobs([job_to_dict(job) for job in many])
    assert list(read.jobs) == many
    assert not read.odd_rows


@settings(deadline=None)
@given(st.lists(jobs(), max_size=8), st.data())
def test_parts_of_a_batch_are_batches(many: list[TrainingJob], data: st.DataObject) -> None:
    batch = read_jobs([job_to_dict(job) for job in many]).jobs
    rows = data.draw(st.lists(st.integers(0, len(many) - 1))) if many else []
    assert list(batch.take(np.array(rows, dtype=np.int64))) == [many[row] for row in rows]
    part = slice(*data.draw(st.tuples(*[st.none() | st.integers(-9, 9)] * 2)), data.draw(st.sampled_from([None, 1, 2, -1])))
    assert list(batch[part]) == many[part]
    with pytest.raises(IndexError):
        batch[len(many)]


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": True},
        {"batch_size": 2**31},
        {"batch_size": 10**400},
        {"input_elements": 64.0},
        {"family": ["mlp"]},
        {"optimizer": None},
        {"channels_last": 1},
        {"schema_version": 2},
        {"schema_version": True},
        {"batchsize": 3},
        {"total_parameters": 3},
        {"trainable_parameters": 10**6},
        {"layers": {}},
        {"layers": []},
        {"layers": [{"kind": "Linear!", "activations": 1}]},
        {"layers": [{"kind": "linear", "parameters": 1}]},
        {"layers": [{"kind": "linear", "activations": 2**50}, {"kind": "relu", "activations": 1}]},
    ],
)
def test_odd_jobs_are_left_to_the_careful_reader(change: dict[str, Any]) -> None:
    plain = {name: value for name, value in job_to_dict(small_job()).items() if not name.startswith("t")}
    plain.pop("schema_version")
    read = read_jobs([plain, {**plain, **change}, plain])
    assert read.odd_rows == [1]
    assert list(read.jobs) == [small_job(), small_job()]


def test_longer_jobs_than_wanted_are_left() -> None:
    plain = json.loads(json.dumps(job_to_dict(small_job())))
    assert read_jobs([plain], max_layers=4).odd_rows == [0]
