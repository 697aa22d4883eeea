"""Reads a trace: jobs with the memory they really took, and where it is known when they arrived and
how long they ran.

A dataset of measured or observed jobs is a trace without times.  Any other table (Parquet, CSV,
JSON Lines) has the job's fields as columns, or the job as an object in ``job``, beside ``peak_mib``
or ``peak_bytes``, ``arrival_seconds``, ``duration_seconds``, ``gpu`` and ``oom``; a column
``estimate_NAME_mib`` is what somebody else expected, such as the users.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pandas as pd

from gpumemnet.errors import GpumemnetError, InvalidJobError, InvalidRequestError, first_line
from gpumemnet.gpu.catalogue import device_profile
from gpumemnet.job.dataset import read_dataset
from gpumemnet.job.job_files import dataset_version
from gpumemnet.job.json_codec import job_from_dict, parse_json
from gpumemnet.job.measurement import TRACED, Measurement
from gpumemnet.job.training_job import JOB_FIELDS, TrainingJob
from gpumemnet.units import ceil_mib

TIMES: Final = ("arrival_seconds", "duration_seconds")
_ESTIMATE: Final = re.compile(r"estimate_(.{1,40})_mib\Z")
_PUBLISHED: Final = {
    "fake_tensor_mib": "FakeTensor",
    "horus_mib": "Horus",
    "gpumemnet_mib": "GPUMemNet",
}
"""Options of a dataset's row that hold what others have published as their estimate, and whose it
is."""
_SEVERAL: Final = "that train on several GPUs at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One job of a trace.

    Attributes:
        location: file and row.
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
        sha256_of: hash of each file, by its path as given.
    """

    rows: tuple[TraceRow, ...]
    left_out: Mapping[str, int]
    sha256_of: Mapping[str, str]


def read_trace(paths: Sequence[Path]) -> Trace:
    """The trace in ``paths``.

    Raises:
        InvalidRequestError: a file that is missing or of another format, a value that cannot be, or
            no job whose memory is known; names file and row.
    """
    rows: list[TraceRow] = []
    left_out: Counter[str] = Counter()
    hashes: dict[str, str] = {}
    for path in paths:
        try:
            hashes[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
            found = list(_rows_of(path))
        except GpumemnetError:
            raise
        except (OSError, ValueError) as error:
            raise InvalidRequestError(f"{path}: {first_line(error)}", "trace") from None
        left_out.update(row for row in found if isinstance(row, str))
        rows += [row for row in found if not isinstance(row, str)]
    if not rows:
        reasons = "; ".join(f"{count:,} {why}" for why, count in left_out.items()) or "no rows"
        raise InvalidRequestError(
            f"{', '.join(map(str, paths))} hold no job whose memory is known: {reasons}", "trace"
        )
    return Trace(rows=tuple(rows), left_out=dict(left_out), sha256_of=hashes)


def _rows_of(path: Path) -> Iterator[TraceRow | str]:
    """The rows of one file, or for a row without known memory the reason."""
    documents, measured = _documents(path)
    for number, cells in enumerate(documents, start=1):
        given = {str(name): value for name, value in cells.items() if not _is_missing(value)}
        location = f"{path}, row {number}"
        try:
            if measured is None:
                yield _row(given, location)
            else:
                yield _measured_row(measured[number - 1], given, location)
        except (GpumemnetError, TypeError, ValueError) as error:
            raise InvalidRequestError(str(error), location) from None


def _documents(path: Path) -> tuple[list[dict[Any, Any]], Sequence[Measurement] | None]:
    """The rows of a file, and its measurements if it is a dataset."""
    if path.suffix == ".csv":
        frame = pd.read_csv(path, dtype_backend="numpy_nullable").astype(object)
        return frame.to_dict("records"), None
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines() if line], None
    if path.suffix != ".parquet":
        raise ValueError("must end in .parquet, .csv or .jsonl")
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    is_dataset = dataset_version(table.schema, str(path)) is not None
    own = [name for name in table.column_names if name in TIMES or _ESTIMATE.match(name)]
    documents = (table.select(own) if is_dataset else table).to_pylist()
    return (documents or [{}] * table.num_rows), read_dataset(path) if is_dataset else None


def _is_missing(value: object) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def _measured_row(
    measurement: Measurement, given: Mapping[str, Any], location: str
) -> TraceRow | str:
    if measurement.label_bytes is None:
        return f"without a known peak (status {measurement.status})"
    if measurement.job.is_replica:
        return _SEVERAL
    stated = json.loads(measurement.options or "{}")
    published = {
        f"published {name}": math.ceil(stated[key])
        for key, name in _PUBLISHED.items()
        if isinstance(stated.get(key), int | float)
    }
    return TraceRow(
        location=location,
        job=measurement.job,
        peak_mib=ceil_mib(measurement.label_bytes),
        is_traced=measurement.provenance == TRACED,
        gpu=measurement.gpu,
        estimates_mib=published | _estimates(given),
        **_times(given),
    )


def _row(given: Mapping[str, Any], location: str) -> TraceRow | str:
    if given.get("oom"):
        return "that ran out of memory, so that their peak is not known"
    job = _job(given)
    if job.is_replica:
        return _SEVERAL
    if ("peak_mib" in given) == ("peak_bytes" in given):
        raise InvalidRequestError("states what the job really took once", "peak_mib")
    peak_mib = (
        math.ceil(given["peak_mib"]) if "peak_mib" in given else ceil_mib(given["peak_bytes"])
    )
    if peak_mib < 1:
        raise InvalidRequestError(f"must be above 0, not {peak_mib}", "peak_mib")
    return TraceRow(
        location=location,
        job=job,
        peak_mib=peak_mib,
        gpu=device_profile(given["gpu"]).name if "gpu" in given else None,
        estimates_mib=_estimates(given),
        **_times(given),
    )


def _job(given: Mapping[str, Any]) -> TrainingJob:
    document: Any = given.get("job", {name: given[name] for name in JOB_FIELDS if name in given})
    if isinstance(document, str):
        document = parse_json(document)
    if not isinstance(document, Mapping):
        raise InvalidJobError("must be a JSON object", "job")
    # pandas writes a column of integers with missing values as floats
    whole = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in document.items()
        if not _is_missing(value)
    }
    layers = whole.get("layers")
    return job_from_dict(
        whole | {"layers": parse_json(layers)} if isinstance(layers, str) else whole
    )


def _times(given: Mapping[str, Any]) -> dict[str, Any]:
    times = {name: float(given[name]) for name in TIMES if name in given}
    if times.get("arrival_seconds", 0) < 0 or times.get("duration_seconds", 1) <= 0:
        raise InvalidRequestError(f"an arrival or a duration cannot be: {times}", "trace")
    return times


def _estimates(given: Mapping[str, Any]) -> dict[str, int]:
    return {
        found[1]: math.ceil(value)
        for name, value in given.items()
        if (found := _ESTIMATE.match(name))
    }
