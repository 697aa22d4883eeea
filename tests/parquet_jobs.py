"""Writes jobs to a Parquet file, as a user's own program would."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from gpumemnet.job.dataset import dataset_schema
from gpumemnet.job.json_codec import job_to_dict
from gpumemnet.job.training_job import JOB_FIELDS, TrainingJob

JOB_SCHEMA = pa.schema([dataset_schema().field(name) for name in JOB_FIELDS])


def write_jobs(path: Path, jobs: Iterable[TrainingJob]) -> None:
    """Write ``jobs`` to ``path``."""
    pq.write_table(
        pa.Table.from_pylist([job_to_dict(job) for job in jobs], schema=JOB_SCHEMA), path
    )
