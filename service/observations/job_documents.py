"""The JSON documents of jobs in the database; a job's key is the hash of its document."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import orjson

from gpumemnet.job.job_table import JobTable
from gpumemnet.job.training_job import (
    FIELD_DEFAULTS,
    NUMBER_FIELDS,
    OPTION_FIELDS,
    UNSTATED_AS_ZERO,
)

_NUMBER_FIELDS: Final = tuple(name for name in FIELD_DEFAULTS if name in NUMBER_FIELDS)


def job_documents(jobs: JobTable) -> list[bytes]:
    """The JSON document of each job."""
    numbers = [_whole(jobs.column(name), name in UNSTATED_AS_ZERO) for name in _NUMBER_FIELDS]
    options = [dict(zip(OPTION_FIELDS, values, strict=True)) for values in jobs.option_sets]
    return [
        orjson.dumps(
            FIELD_DEFAULTS
            | options[code]
            | dict(zip(_NUMBER_FIELDS, values, strict=True))
            | {"layers": layers}
        )
        for code, layers, *values in zip(
            jobs.option_codes.tolist(), _layers(jobs), *numbers, strict=True
        )
    ]


def _layers(jobs: JobTable) -> list[list[Any]]:
    """The layer list of each job."""
    names = jobs.kind_names
    kinds = map(names.__getitem__, jobs.layer_kinds.tolist())
    amounts = (
        amounts.astype(np.int64).tolist()
        for amounts in (jobs.layer_activations, jobs.layer_parameters)
    )
    layers = list(zip(kinds, *amounts, strict=True))
    ends = np.cumsum(jobs.layer_counts).tolist()
    return [layers[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _whole(
    numbers: np.ndarray[Any, np.dtype[np.float64]], is_zero_unstated: bool
) -> list[int | None]:
    whole: list[int | None] = numbers.astype(np.int64).tolist()
    return [number or None for number in whole] if is_zero_unstated else whole
