"""The job table: its rows are the jobs that it was made of, whichever way they come in."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumemnet.errors import InvalidJobError
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.json_codec import job_from_dict, job_to_dict, read_jobs
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.features import feature_matrix
from tests.job_documents import documents, oddities
from tests.jobs import jobs, small_job

WORKSPACE = 8_519_680


def reason(document: Any) -> str:
    with pytest.raises(InvalidJobError) as error:
        job_from_dict(document)
    return str(error.value)


@settings(max_examples=60)
@given(st.lists(documents() | oddities, max_size=8))
def test_every_document_is_read_or_refused_as_it_is_alone(many: list[Any]) -> None:
    table, rows, errors = read_jobs(many)
    assert sorted([*rows.tolist(), *errors]) == list(range(len(many)))
    assert list(table) == [job_from_dict(many[row]) for row in rows]
    assert [type(value) for job in table for value in (job.batch_size, job.total_parameters)] == [
        int
    ] * 2 * len(table)
    assert {row: str(error) for row, error in errors.items()} == {
        row: reason(many[row]) for row in errors
    }


@settings(max_examples=25)
@given(st.lists(jobs(), max_size=8))
def test_the_rows_of_a_table_are_its_jobs(many: list[TrainingJob]) -> None:
    table = JobTable.from_jobs(many)
    assert list(table) == many
    np.testing.assert_array_equal(
        feature_matrix(read_jobs([job_to_dict(job) for job in many]).table, WORKSPACE),
        feature_matrix(table, WORKSPACE),
    )


@settings(max_examples=25)
@given(st.lists(jobs(), max_size=8), st.data())
def test_parts_of_a_table_are_tables(many: list[TrainingJob], data: st.DataObject) -> None:
    table = JobTable.from_jobs(many)
    rows = data.draw(st.lists(st.integers(0, len(many) - 1))) if many else []
    assert list(table.take(np.array(rows, dtype=np.int64))) == [many[row] for row in rows]
    start, stop = (data.draw(st.none() | st.integers(-9, 9)) for _ in range(2))
    part = slice(start, stop, data.draw(st.sampled_from([None, 1, 2, -1])))
    assert list(table[part]) == many[part]
    with pytest.raises(IndexError):
        table[len(many)]


@pytest.mark.parametrize("form", [dict, list, "mixed", "without zeros"])
def test_layers_may_be_objects_or_lists(form: Any) -> None:
    document = job_to_dict(small_job())
    document["layers"] = [
        {name: value for name, value in layer.items() if value or form != "without zeros"}
        if form in (dict, "without zeros") or (form == "mixed" and place % 2)
        else [*layer.values()]
        for place, layer in enumerate(document["layers"])
    ]
    assert list(read_jobs([document, document]).table) == [small_job()] * 2


def test_longer_jobs_than_wanted_are_refused() -> None:
    read = read_jobs([job_to_dict(small_job()) | {"layers": [["relu", 1, 0]] * 20_001}])
    assert len(read.table) == 0
    assert str(read.errors[0]) == "layers: must hold at most 20000 layers, not 20001"
