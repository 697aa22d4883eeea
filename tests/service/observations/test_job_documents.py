"""The stored document of a job can be read again, and its hash does not change with how the job was
written."""

import json

from hypothesis import given
from hypothesis import strategies as st

from gpumemnet.job.job_table import JobTable
from gpumemnet.job.json_codec import job_from_dict, read_jobs
from gpumemnet.job.training_job import TrainingJob
from service.api.examples import EXAMPLE_JOBS
from service.observations.inserts import job_document
from tests.jobs import jobs


@given(st.lists(jobs(), min_size=1, max_size=8))
def test_a_document_can_be_read_again(some: list[TrainingJob]) -> None:
    table = JobTable.from_jobs(some)
    documents = [job_document(table, row) for row in range(len(table))]
    assert [job_from_dict(json.loads(document)) for document in documents] == list(table)
    assert documents == [job_document(JobTable.from_jobs([job]), 0) for job in some]


def test_layers_as_objects_or_as_lists_are_the_same_job() -> None:
    mlp = EXAMPLE_JOBS["mlp"]
    lists = [[layer["kind"], layer["activations"], layer["parameters"]] for layer in mlp["layers"]]
    table = read_jobs([mlp, {**mlp, "layers": lists}]).table
    assert job_document(table, 0) == job_document(table, 1)
