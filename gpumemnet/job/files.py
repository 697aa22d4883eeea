"""Reads jobs from files: one job as JSON, a list of jobs as JSON, one job a line as JSON Lines, or a Parquet table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpumemnet.errors import InvalidJobError, InvalidRequestError
from gpumemnet.job.json_codec import job_from_dict, job_from_json, parse_json
from gpumemnet.job.training_job import TrainingJob

JOBS_PER_BATCH: Final = 1000
MAX_JSON_BYTES: Final = 64 * 2**20
_FORMATS: Final = (".json", ".jsonl", ".ndjson", ".parquet")


def read_jobs_file(path: Path) -> Iterator[list[TrainingJob]]:
    """The jobs in ``path``, at most :data:`JOBS_PER_BATCH` at a time; all but a JSON list are read in constant memory.

    Raises:
        InvalidRequestError: when the file does not exist, is too large for JSON, or has another ending.
        InvalidJobError: names the line or the index and the field of the first job that is none.
        DatasetError: when a Parquet file is damaged or lacks a column.
        MissingExtraError: when Parquet is asked for and pyarrow is not installed.
    """
    if path.suffix not in _FORMATS:
        raise InvalidRequestError(f"{path} must end in {', '.join(_FORMATS)}", "jobs")
    if not path.is_file():
        raise InvalidRequestError(f"{path} does not exist", "jobs")
    if path.suffix == ".parquet":
        from gpumemnet.data.dataset import read_jobs

        return read_jobs(path, JOBS_PER_BATCH)
    if path.suffix == ".json":
        return _json_jobs(path)
    return _line_jobs(path)


def _json_jobs(path: Path) -> Iterator[list[TrainingJob]]:
    with path.open("rb") as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise InvalidRequestError(f"{path} is larger than {MAX_JSON_BYTES} bytes: write one job a line (.jsonl) instead", "jobs")
    document = parse_json(text)
    if not isinstance(document, list):
        yield [job_from_dict(document)]
        return
    for start in range(0, len(document), JOBS_PER_BATCH):
        yield [_placed(entry, f"[{index}]") for index, entry in enumerate(document[start : start + JOBS_PER_BATCH], start=start)]


def _placed(entry: object, place: str) -> TrainingJob:
    try:
        return job_from_dict(entry)
    except InvalidJobError as error:
        raise InvalidJobError(error.reason, f"{place}.{error.field}" if error.field else place) from None


def _line_jobs(path: Path) -> Iterator[list[TrainingJob]]:
    batch: list[TrainingJob] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                batch.append(job_from_json(line))
            except InvalidJobError as error:
                raise InvalidJobError(error.reason, f"line {number}" + (f", {error.field}" if error.field else "")) from None
            if len(batch) == JOBS_PER_BATCH:
                yield batch
                batch = []
    if batch:
        yield batch
