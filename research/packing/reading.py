"""Reads a trace: jobs with the memory they really took, and where it is known when they arrived and
how long they ran.

A dataset of measured or observed jobs is a trace without times.  Any other table (Parquet, CSV,
JSON Lines) has the job's fields as columns, or the job as an object in ``job``, beside ``peak_mib``
or ``peak_bytes``, ``arrival_seconds``, ``duration_seconds`` and ``gpu``; a column
``estimate_NAME_mib`` is what somebody else expected, such as the users.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpumemnet.errors import (
    DatasetError,
    InvalidJobError,
    InvalidRequestError,
    MissingExtraError,
    first_line,
)
from gpumemnet.gpu.catalogue import device_profile
from gpumemnet.job.dataset import read_dataset
from gpumemnet.job.job_files import VERSION_KEY
from gpumemnet.job.json_codec import job_from_dict, parse_json
from gpumemnet.job.layers import describe
from gpumemnet.job.measurement import TRACED, Measurement
from gpumemnet.job.training_job import FIELD_RANGES, JOB_FIELDS, TrainingJob
from gpumemnet.predict.fits import MAX_FREE_MIB
from gpumemnet.units import MIB, ceil_mib

FORMATS: Final = (".parquet", ".csv", ".jsonl", ".ndjson")
TIMES: Final = ("arrival_seconds", "duration_seconds")
COLUMNS: Final = ("job", "peak_mib", "peak_bytes", "gpu", "oom", *TIMES)
MAX_SECONDS: Final = 1e11
"""More than any clock shows in seconds since 1970."""
_ESTIMATE: Final = re.compile(r"estimate_(.{1,40})_mib\Z")
_PUBLISHED: Final = {
    "fake_tensor_mib": "FakeTensor",
    "horus_mib": "Horus",
    "gpumemnet_mib": "GPUMemNet",
}
"""Options of a dataset's row that hold what others have published as their estimate, and whose it
is."""
_NUMBERS: Final = frozenset(name for name, _, _ in FIELD_RANGES) | {"schema_version"}
_FLAGS: Final = frozenset({"channels_last", "cudnn_benchmark"})
_SEVERAL: Final = "that train on several GPUs at once"
_WORDS: Final = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One job of a trace.

    Attributes:
        location: file and line or row.
        job: what the scheduler could have known.
        peak_mib: the memory that the job really took, CUDA context included, rounded up.
        is_traced: whether that comes from a trace and not from a measurement.
        gpu: the GPU that it was measured on, where that is known.
        arrival_seconds, duration_seconds: where they are known.
        estimates_mib: what others expected, by their name.
    """

    location: str
    job: TrainingJob
    peak_mib: int
    is_traced: bool = False
    gpu: str | None = None
    arrival_seconds: float | None = None
    duration_seconds: float | None = None
    estimates_mib: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The rows of one or several files.

    Attributes:
        rows: those whose memory is known; at least one.
        left_out: how many others there are, by the reason.
        ignored_columns: columns that mean nothing here.
        sha256_of: hash of each file, by its path as given.
    """

    rows: tuple[TraceRow, ...]
    left_out: Mapping[str, int]
    ignored_columns: tuple[str, ...]
    sha256_of: Mapping[str, str]


def read_trace(paths: Sequence[Path]) -> Trace:
    """The trace in ``paths``.

    Raises:
        InvalidRequestError: on a missing file, another format, or a value that cannot be; names
            file, row and column.
        InvalidJobError, DatasetError: on a job or a dataset that is none, likewise.
        MissingExtraError: when Parquet is asked for and pyarrow is not installed.
    """
    rows: list[TraceRow] = []
    left_out: Counter[str] = Counter()
    ignored: dict[str, None] = {}
    hashes: dict[str, str] = {}
    for path in paths:
        if path.suffix not in FORMATS:
            raise InvalidRequestError(f"{path} must end in {', '.join(FORMATS)}", "trace")
        try:
            with path.open("rb") as file:
                hashes[str(path)] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise InvalidRequestError(f"{path} cannot be read: {error.strerror}", "trace") from None
        for row in _rows_of(path, ignored):
            if isinstance(row, str):
                left_out[row] += 1
            else:
                rows.append(row)
    if not rows:
        reasons = (
            "; ".join(f"{count:,} {reason}" for reason, count in left_out.items()) or "no rows"
        )
        raise InvalidRequestError(
            f"{', '.join(map(str, paths))} hold no job whose memory is known: {reasons}", "trace"
        )
    return Trace(
        rows=tuple(rows), left_out=dict(left_out), ignored_columns=tuple(ignored), sha256_of=hashes
    )


def _rows_of(path: Path, ignored: dict[str, None]) -> Iterator[TraceRow | str]:
    """The rows of one file, or for a row without known memory the reason."""
    if path.suffix == ".parquet":
        yield from _parquet_rows(path, ignored)
        return
    documents = _csv_documents(path) if path.suffix == ".csv" else _json_documents(path)
    for location, document in documents:
        yield _row(document, location, ignored)


def _parquet_rows(path: Path, ignored: dict[str, None]) -> Iterator[TraceRow | str]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingExtraError("pyarrow", "parquet", "reading Parquet") from None
    try:
        table = pq.ParquetFile(path)
        is_dataset = VERSION_KEY in (table.schema_arrow.metadata or {})
        names = table.schema_arrow.names
        own = (
            [name for name in names if name in TIMES or _ESTIMATE.match(name)]
            if is_dataset
            else names
        )
        documents = table.read(columns=own).to_pylist() if own else [{}] * table.metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"{path} is no whole Parquet file: {first_line(error)}") from None
    if not is_dataset:
        for number, document in enumerate(documents, start=1):
            yield _row(document, f"{path}, row {number}", ignored)
        return
    for number, (measurement, extra) in enumerate(
        zip(read_dataset(path), documents, strict=True), start=1
    ):
        yield _measured_row(measurement, extra, f"{path}, row {number}")


def _measured_row(
    measurement: Measurement, extra: Mapping[str, Any], location: str
) -> TraceRow | str:
    if measurement.label_bytes is None:
        return f"without a known peak (status {measurement.status})"
    if measurement.job.is_replica:
        return _SEVERAL
    return TraceRow(
        location=location,
        job=measurement.job,
        peak_mib=ceil_mib(measurement.label_bytes),
        is_traced=measurement.provenance == TRACED,
        gpu=measurement.gpu,
        estimates_mib=_published_estimates(measurement.options) | _estimates(extra, location),
        **_times(extra, location),
    )


def _published_estimates(options: str) -> dict[str, int]:
    try:
        stated = json.loads(options)
    except ValueError:
        return {}
    amounts = (
        {name: stated.get(key) for key, name in _PUBLISHED.items()}
        if isinstance(stated, dict)
        else {}
    )
    return {
        f"published {name}": math.ceil(amount)
        for name, amount in amounts.items()
        if isinstance(amount, int | float)
    }


def _csv_documents(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, cells in enumerate(csv.DictReader(file, strict=True), start=1):
                location = f"{path}, row {number}"
                if None in cells or None in cells.values():
                    raise InvalidRequestError(
                        "has more or fewer cells than the first line has names", location
                    )
                yield (
                    location,
                    {
                        name: _cell(name, text.strip())
                        for name, text in cells.items()
                        if text.strip()
                    },
                )
    except (csv.Error, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path} is no CSV file in UTF-8: {error}", "trace") from None


def _cell(name: str, text: str) -> Any:
    """The value of a cell; text in a column of numbers stays text, and is refused with the job."""
    if name == "job" or name == "layers":
        return text if name == "job" else _loaded(text)
    if name in _FLAGS or name == "oom":
        return _WORDS.get(text.lower(), text)
    if name in _NUMBERS or name in COLUMNS or _ESTIMATE.match(name):
        value = _loaded(text)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else text
    return text


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _json_documents(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            location = f"{path}, line {number}"
            try:
                document = parse_json(line)
            except InvalidJobError as error:
                raise InvalidRequestError(error.reason, location) from None
            if not isinstance(document, dict):
                raise InvalidRequestError(
                    f"must be a JSON object, not {describe(document)}", location
                )
            yield location, document


def _row(document: Mapping[str, Any], location: str, ignored: dict[str, None]) -> TraceRow | str:
    given = {name: value for name, value in document.items() if not _is_nothing(value)}
    for name in document:
        if name not in COLUMNS and name not in JOB_FIELDS and not _ESTIMATE.match(name):
            ignored[name] = None
    if given.get("oom") is True:
        return "that ran out of memory, so that their peak is not known"
    gpu = given.get("gpu")
    try:
        gpu = device_profile(gpu).name if isinstance(gpu, str) else None
    except InvalidRequestError:
        gpu = str(gpu)  # a GPU outside the catalogue: its memory is known all the same
    job = _job(given, location)
    if job.is_replica:
        return _SEVERAL
    return TraceRow(
        location=location,
        job=job,
        peak_mib=_peak_mib(given, location),
        gpu=gpu,
        estimates_mib=_estimates(given, location),
        **_times(given, location),
    )


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _job(given: Mapping[str, Any], location: str) -> TrainingJob:
    document: Any = {name: given[name] for name in JOB_FIELDS if name in given}
    prefix = ""
    if "job" in given:
        if document:
            field = f"{location}, {next(iter(document))}"
            raise InvalidRequestError("stands beside a job: the job's fields belong into it", field)
        document, prefix = given["job"], "job."
    try:
        if isinstance(document, str):
            document = parse_json(document)
        if isinstance(document, Mapping):
            document = {
                name: _whole(value) for name, value in document.items() if not _is_nothing(value)
            }
        return job_from_dict(document)
    except InvalidJobError as error:
        field = prefix + error.field if error.field else prefix.rstrip(".")
        raise InvalidJobError(error.reason, f"{location}, {field}" if field else location) from None


def _whole(value: Any) -> Any:
    """Many tools write a column of integers with missing values as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _peak_mib(given: Mapping[str, Any], location: str) -> int:
    stated = [name for name in ("peak_mib", "peak_bytes") if name in given]
    if len(stated) != 1:
        reason = (
            "is missing: what the job really took, here or in peak_bytes"
            if not stated
            else "cannot stand beside peak_bytes"
        )
        raise InvalidRequestError(reason, f"{location}, peak_mib")
    name = stated[0]
    largest = MAX_FREE_MIB * (MIB if name == "peak_bytes" else 1)
    amount = _number(given[name], 1, largest, f"{location}, {name}")
    return ceil_mib(amount) if name == "peak_bytes" else math.ceil(amount)


def _times(given: Mapping[str, Any], location: str) -> dict[str, Any]:
    return {
        name: _number(
            given[name],
            0 if name == "arrival_seconds" else 1e-3,
            MAX_SECONDS,
            f"{location}, {name}",
        )
        for name in TIMES
        if not _is_nothing(given.get(name))
    }


def _estimates(given: Mapping[str, Any], location: str) -> dict[str, int]:
    return {
        found[1]: math.ceil(_number(value, 0, MAX_FREE_MIB, f"{location}, {name}"))
        for name, value in given.items()
        if (found := _ESTIMATE.match(name)) and not _is_nothing(value)
    }


def _number(value: object, least: float, most: float, location: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InvalidRequestError(
            f"must be a number from {least:g} to {most:g}, not {describe(value)}", location
        )
    return value
