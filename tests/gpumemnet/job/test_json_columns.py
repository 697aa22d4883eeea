"""The columnar reader: what it reads is what the careful one reads, and it leaves all that is odd."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumemnet.features.sequence import layer_sequence
from gpumemnet.features.vector import feature_matrix
from gpumemnet.job.json_codec import job_to_dict
from gpumemnet.job.json_columns import read_jobs
from gpumemnet.job.training_job import TrainingJob
from tests.job_documents import documents, oddities, read_alone
from tests.jobs import jobs, small_job

WORKSPACE = 8_519_680


@settings(max_examples=300)
@given(st.lists(documents() | oddities, max_size=8))
def test_both_readers_agree(many: list[Any]) -> None:
    read = read_jobs(many)
    assert sorted([*read.rows, *read.odd_rows]) == list(range(len(many)))
    alone = [read_alone(many[row]) for row in read.rows]
    assert list(read.jobs) == alone  # none is None: what is refused is never read here
    assert [type(value) for job in read.jobs for value in (job.batch_size, job.total_parameters)] == [int] * 2 * len(alone)
    there = [job for job in alone if job is not None]
    np.testing.assert_array_equal(feature_matrix(read.jobs, WORKSPACE), feature_matrix(there, WORKSPACE))
    with_layers = [row for row, job in enumerate(there) if job.layers]
    for ours, theirs in zip(
        layer_sequence(read.jobs.take(np.array(with_layers, dtype=np.int64))),
        layer_sequence([there[row] for row in with_layers]),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


@given(st.lists(jobs(), max_size=8))
def test_ordinary_jobs_are_never_odd(many: list[TrainingJob]) -> None:
    read = read_jobs([job_to_dict(job) for job in many])
    assert list(read.jobs) == many
    assert not read.odd_rows


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
