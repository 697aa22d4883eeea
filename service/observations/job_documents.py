"""The JSON documents of jobs as the database holds them, one by one and by the hundred.

A job is known by the hash of its document, so both ways must give the same bytes: a test holds them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import orjson

from gpumemnet.job.job_table import JobTable
from gpumemnet.job.training_job import FIELD_DEFAULTS, JOB_FIELDS, NUMBER_FIELDS, OPTION_FIELDS, UNSTATED_AS_ZERO, TrainingJob

_GAP: Final = orjson.Fragment(b"\0b")  # no JSON holds this byte; it stands for the % of what fills the gap
_FILLED: Final = tuple(name for name in JOB_FIELDS if name in NUMBER_FIELDS or name == "layers")


def job_document(job: TrainingJob) -> bytes:
    """The document of one job."""
    return orjson.dumps(job, default=list)  # a layer is a tuple of its own type


def job_documents(jobs: Sequence[TrainingJob]) -> list[bytes]:
    """The documents of many; of a batch without an object for each."""
    if not isinstance(jobs, JobTable) or not len(jobs):
        return [job_document(job) for job in jobs]
    columns = [_layers(jobs) if name == "layers" else _numbers(jobs, name) for name in _FILLED]
    templates = [_template(options) for options in jobs.option_sets]
    codes = jobs.option_codes.tolist()
    return [templates[code] % values for code, values in zip(codes, zip(*columns, strict=True), strict=True)]


@lru_cache(maxsize=1024)
def _template(options: tuple[Any, ...]) -> bytes:
    """The document of jobs with these options, with gaps for everything else."""
    values = dict(zip(OPTION_FIELDS, options, strict=True))
    document = {name: _GAP if name in _FILLED else values.get(name, default) for name, default in FIELD_DEFAULTS.items()}
    return orjson.dumps(document).replace(b"%", b"%%").replace(b"\0", b"%")


def _numbers(jobs: JobTable, name: str) -> list[bytes]:
    numbers = _whole(jobs.column(name))
    if name in UNSTATED_AS_ZERO:
        return [b"null" if number == b"0" else number for number in numbers]
    return numbers


def _layers(jobs: JobTable) -> list[bytes]:
    """The list of layers of each job."""
    names = jobs.kind_names
    kinds = map(names.__getitem__, jobs.layer_kinds.tolist())
    amounts = (amounts.astype(np.int64).tolist() for amounts in (jobs.layer_activations, jobs.layer_parameters))
    pieces = orjson.dumps(list(zip(kinds, *amounts, strict=True)))[2:-2].split(b"],[")  # no kind's name holds a bracket
    documents, start = [], 0
    for count in jobs.layer_counts.tolist():
        documents.append(b"[[%b]]" % b"],[".join(pieces[start : start + count]) if count else b"[]")
        start += count
    return documents


def _whole(numbers: np.ndarray[Any, np.dtype[np.float64]]) -> list[bytes]:
    return orjson.dumps(numbers.astype(np.int64), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")
