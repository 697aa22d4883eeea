"""Reads jobs from files: JSON (one job or a list), JSON Lines (one job per line) or Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from gpumemnet.errors import InvalidJobError, InvalidRequestError
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.json_codec import parse_json, read_jobs

JOBS_PER_BATCH: Final = 1000
MAX_JSON_BYTES: Final = 64 * 2**20
_FORMATS: Final = (".json", ".jsonl", ".ndjson", ".parquet")


def read_jobs_file(path: Path) -> Iterator[JobTable]:
    """Reads the jobs in ``path``, at most :data:`JOBS_PER_BATCH` at a time; only a JSON list is
    read into memory as a whole.

    Raises:
        InvalidRequestError: when the file does not exist, is too large for JSON, or has an unknown
            suffix.
        InvalidJobError: names the line or the index, and the field, of the first invalid job.
        DatasetError: when a Parquet file is damaged or lacks a column.
        MissingExtraError: when the file is Parquet and pyarrow is not installed.
    """
    if path.suffix not in _FORMATS:
        raise InvalidRequestError(f"{path} must end in {', '.join(_FORMATS)}", "jobs")
    if not path.is_file():
        raise InvalidRequestError(f"{path} does not exist", "jobs")
    if path.suffix == ".parquet":
        from gpumemnet.job.dataset import read_jobs as read_parquet_jobs

        return read_parquet_jobs(path, JOBS_PER_BATCH)
    if path.suffix == ".json":
        return _json_jobs(path)
    return _line_jobs(path)


def _json_jobs(path: Path) -> Iterator[JobTable]:
    with path.open("rb") as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise InvalidRequestError(
            f"{path} is larger than {MAX_JSON_BYTES} bytes: write one job a line (.jsonl) instead",
            "jobs",
        )
    document = parse_json(text)
    if not isinstance(document, list):
        yield _table([document], [""], ".")
        return
    for start in range(0, len(document), JOBS_PER_BATCH):
        entries = document[start : start + JOBS_PER_BATCH]
        yield _table(entries, [f"[{start + row}]" for row in range(len(entries))], ".")


def _line_jobs(path: Path) -> Iterator[JobTable]:
    with path.open("rb") as file:
        lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        while some := list(islice(lines, JOBS_PER_BATCH)):
            documents: list[object] = []
            numbers = []
            broken: InvalidJobError | None = None
            for number, line in some:
                numbers.append(number)
                try:
                    documents.append(parse_json(line))
                except InvalidJobError as error:
                    broken = InvalidJobError(
                        error.reason, f"line {number}" + (f", {error.field}" if error.field else "")
                    )
                    break
            yield _table(documents, [f"line {number}" for number in numbers], ", ")
            if broken is not None:
                raise broken


def _table(documents: Sequence[object], places: Sequence[str], between: str) -> JobTable:
    """Reads ``documents`` as jobs; the first invalid one raises an error with its place, then
    ``between``, then the field."""
    read = read_jobs(documents)
    for row, error in sorted(read.errors.items()):
        raise InvalidJobError(error.reason, between.join(filter(None, (places[row], error.field))))
    return read.table
