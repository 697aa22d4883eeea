"""A job gets the same document, and so the same hash, whether it is stored alone or with many others."""

import json

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gpumemnet.job.job_table import JobTable
from gpumemnet.job.json_codec import job_from_dict, read_jobs
from service.api.examples import EXAMPLE_JOBS
from service.observations.job_documents import job_document, job_documents
from tests.jobs import jobs

JOBS = [job_from_dict(job) for job in EXAMPLE_JOBS.values()]


def _batch(documents: list[bytes]) -> JobTable:
    read = read_jobs([orjson.loads(document) for document in documents], 4096)
    assert list(read.rows) == list(range(len(documents)))
    return read.table


@given(st.lists(jobs(), min_size=1, max_size=8))
def test_together_as_alone(some) -> None:
    documents = [job_document(job) for job in some]
    assert job_documents(some) == documents
    read = read_jobs([orjson.loads(document) for document in documents], 4096)
    assert job_documents(read.table) == [documents[row] for row in read.rows]


def test_a_document_can_be_read_again() -> None:
    documents = job_documents(_batch([job_document(job) for job in JOBS]))
    assert [job_from_dict(json.loads(document)) for document in documents] == JOBS


def test_kinds_that_no_model_knows() -> None:
    mlp = next(iter(EXAMPLE_JOBS.values()))
    odd = [{**mlp, "layers": [{"kind": kind, "activations": 1, "parameters": 2}, *mlp["layers"]]} for kind in ("magic", "s_2")]
    documents = [job_document(job_from_dict(job)) for job in odd]
    assert job_documents(_batch(documents)) == documents
