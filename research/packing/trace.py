"""The jobs of a simulated cluster: a trace as it is read, and the times that are drawn where it has
none."""

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

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gpumemnet.errors import GpumemnetError, InvalidJobError, InvalidRequestError, first_line
from gpumemnet.gpu import device_profile
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


DURATION_SPREAD: Final = 1.0
"""Standard deviation of the logarithm of drawn durations: one job in six runs for more than 2.7
times the median."""
MAX_JOBS: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """``J`` jobs in the order of their arrival.

    Attributes:
        rows: the different jobs of the trace.
        row_of: the row of each job, shape ``[J]``.
        arrival_seconds, duration_seconds: of each job, shape ``[J]``; the duration is that without
            neighbours.
        synthetic: what was drawn and is not in the trace, a sentence each.
    """

    rows: tuple[TraceRow, ...]
    row_of: NDArray[np.int64]
    arrival_seconds: NDArray[np.float64]
    duration_seconds: NDArray[np.float64]
    synthetic: tuple[str, ...]

    @property
    def peak_mib(self) -> NDArray[np.int64]:
        """True peak of each job, shape ``[J]``."""
        return np.array([row.peak_mib for row in self.rows], dtype=np.int64)[self.row_of]


def workload(
    trace: Trace,
    cards: int,
    *,
    jobs: int | None = None,
    load: float = 2.0,
    median_seconds: float = 3600.0,
    seed: int = 0,
) -> Workload:
    """The jobs of ``trace`` with their times.

    Args:
        trace: the rows; arrivals and durations are drawn where no row states them.
        cards: how many GPUs there will be.
        jobs: draw so many jobs from the rows, each row as often as the others; all rows once unless
            given.
        load: jobs per GPU that would run on average if none ever waited; sets the distance of drawn
            arrivals.
        median_seconds: median of drawn durations, which are log-normal.
        seed: of everything that is drawn.

    Raises:
        InvalidRequestError: on impossible numbers, rows of which only some state a time, or
            ``jobs`` beside stated arrivals.
    """
    _check(jobs, load, median_seconds, seed)
    rows = trace.rows
    has_arrivals, has_durations = (
        _stated(trace, name) for name in ("arrival_seconds", "duration_seconds")
    )
    draw = np.random.default_rng(seed)
    row_of = np.arange(len(rows))
    synthetic = []
    if jobs is not None:
        if has_arrivals:
            raise InvalidRequestError(
                "cannot be given: the trace states when its jobs arrived", "jobs"
            )
        rounds = -(-jobs // len(rows))
        row_of = np.concatenate([draw.permutation(len(rows)) for _ in range(rounds)])[:jobs]
        synthetic.append(f"{jobs:,} jobs drawn from {len(rows):,} rows")
    if has_durations:
        durations = np.array([row.duration_seconds for row in rows], dtype=np.float64)[row_of]
    else:
        durations = median_seconds * np.exp(DURATION_SPREAD * draw.standard_normal(len(row_of)))
        synthetic.append(
            f"durations drawn: log-normal, median {median_seconds:g} s, sigma {DURATION_SPREAD:g}"
        )
    if has_arrivals:
        arrivals = np.array([row.arrival_seconds for row in rows], dtype=np.float64)[row_of]
    else:
        arrivals = np.cumsum(draw.exponential(durations.mean() / (load * cards), len(row_of)))
        synthetic.append(f"arrivals drawn: Poisson, {load:g} jobs a GPU if none waited")
    order = np.argsort(arrivals, kind="stable")
    return Workload(
        rows=rows,
        row_of=row_of[order],
        arrival_seconds=arrivals[order] - arrivals.min(),
        duration_seconds=durations[order],
        synthetic=tuple(synthetic),
    )


def _check(jobs: int | None, load: float, median_seconds: float, seed: int) -> None:
    if jobs is not None and not 1 <= jobs <= MAX_JOBS:
        raise InvalidRequestError(f"must be from 1 to {MAX_JOBS:,}, not {jobs}", "jobs")
    if not 0.001 <= load <= 1000:
        raise InvalidRequestError(f"must be from 0.001 to 1000 jobs a GPU, not {load:g}", "load")
    if not 1 <= median_seconds <= 1e8:
        raise InvalidRequestError(
            f"must be from 1 to 100,000,000, not {median_seconds:g}", "median_seconds"
        )
    if not 0 <= seed < 2**63:
        raise InvalidRequestError(f"must be a whole number from 0, not {seed}", "seed")


def _stated(trace: Trace, name: str) -> bool:
    """Whether the rows state ``name``: all of them or none."""
    missing = next((row for row in trace.rows if getattr(row, name) is None), None)
    if missing is None:
        return True
    if any(getattr(row, name) is not None for row in trace.rows):
        raise InvalidRequestError(
            "is missing here and stated in other rows: state it in all of them or in none",
            f"{missing.location}, {name}",
        )
    return False
