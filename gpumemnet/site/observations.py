"""An observation: the memory that a finished job really used, as a scheduler reports it.

It names the job by the id of the prediction that it was scheduled with, or holds the job itself.  A
job that ran out of GPU
memory is a censored observation: it needed more than it had.  The service stores observations,
``gpumemnet observations import-sacct`` makes
them from Slurm's accounting, and they join the dataset.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpumemnet.atomic_files import Document
from gpumemnet.errors import (
    InvalidJobError,
    InvalidRequestError,
)
from gpumemnet.gpu import known_profile
from gpumemnet.job.job_files import file_sha256
from gpumemnet.job.job_table import Array, Columns, Flags, JobTable
from gpumemnet.job.json_codec import job_from_dict, observed_document, refuse_unknown
from gpumemnet.job.layers import describe
from gpumemnet.job.measurement import (
    OBSERVED,
    PROCESS_SOURCES,
    SITE_PROCESS_SOURCES,
    TRACED,
)
from gpumemnet.job.table_reader import error_at, read_documents, read_job_tables
from gpumemnet.job.training_job import FIELD_DEFAULTS, TrainingJob
from gpumemnet.units import GIB, MIB

Words: TypeAlias = NDArray[np.object_]

SOURCES: Final[Mapping[str, str]] = {
    "nvml_accounting": "NVML's accounting mode: the highest memory of the process, kept by the driver",
    "nvml_process": "NVML's or nvidia-smi's memory of the process, read again and again: the highest reading",
    "nvml_device_difference": "NVML's memory of the whole GPU less what it was before the job, which ran alone: the highest",
    "nvidia_smi_device_1s": "nvidia-smi's memory of the whole GPU every second, the job alone on it: the highest",
    "slurm_gpumem": "Slurm's accounting of gres/gpumem: NVML's memory of the processes, by default every 30 seconds",
    "dcgm": "DCGM's framebuffer in use (DCGM_FI_DEV_FB_USED), the job alone on the GPU: the highest reading",
    "prometheus": "another exporter's series of a GPU's memory, the job alone on it: the highest sample",
}
"""Where a peak may come from.  Not accepted: the allocator's own maximum
(``torch.cuda.max_memory_reserved``), which lacks the CUDA context, and a trace, which is a
prediction itself."""

PROCESS_OBSERVATIONS: Final = (
    *(source for source in PROCESS_SOURCES if source != TRACED),
    *SITE_PROCESS_SOURCES,
)
"""Sources that read the process; the others read the whole GPU."""

MIN_BYTES: Final = MIB
MAX_BYTES: Final = 1024 * GIB
"""Smallest and largest memory of a process on a GPU; a value outside has the wrong unit."""
MAX_KEY_LENGTH: Final = 200
MAX_TEXT_LENGTH: Final = 100
EARLIEST: Final = datetime(2010, 1, 1, tzinfo=UTC)
CLOCK_SKEW: Final = timedelta(days=1)
"""How far in the future an observation may lie, as clocks and time zones differ."""

_SOFTWARE: Final = ("driver", "cuda", "torch")
_PREDICTION_ID: Final = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\Z")


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The memory that one run of a job used.

    Attributes:
        source: where the peak comes from, one of :data:`SOURCES`; of an ``oom``, who noticed.
        prediction_id: id of the prediction that the job was scheduled with.
        job: the job itself; beside a prediction's id it counts where the prediction is not known
            any more.
        gpu: the GPU that it ran on, by NVML's name where the catalogue has it; ``None`` for that of
            the prediction.
        peak_bytes: the most GPU memory that it took, CUDA context included; ``None`` only with
            ``oom``.
        oom: whether it ran out of GPU memory: it needed more than ``peak_bytes`` and
            ``limit_bytes``.
        limit_bytes: the memory that it could have had, its limit or the whole GPU.
        observed_at: when it ended.
        idempotency_key: the reporter's name for this observation; an observation sent again under
            its key is stored once.
        driver, cuda, torch: versions of the software.
    """

    source: str
    prediction_id: str | None = None
    job: TrainingJob | None = None
    gpu: str | None = None
    peak_bytes: int | None = None
    oom: bool = False
    limit_bytes: int | None = None
    observed_at: datetime | None = None
    idempotency_key: str | None = None
    driver: str | None = None
    cuda: str | None = None
    torch: str | None = None


OBSERVATION_FIELDS: Final = tuple(each.name for each in fields(Observation))


def observation_from_dict(document: object) -> Observation:
    """An observation from its JSON object.

    Raises:
        InvalidRequestError: names the field and says what it may hold.
        InvalidJobError: when the job is at fault; the field begins with ``job``.
    """
    if not isinstance(document, Mapping):
        raise InvalidRequestError(f"an observation must be a JSON object, not {describe(document)}")
    refuse_unknown(document, OBSERVATION_FIELDS, InvalidRequestError)
    given = {name: value for name, value in document.items() if value is not None}
    oom = given.get("oom", False)
    if not isinstance(oom, bool):
        raise InvalidRequestError(f"must be true or false, not {describe(oom)}", "oom")
    gpu = _text(given, "gpu", MAX_TEXT_LENGTH)
    observation = Observation(
        source=_source(given.get("source")),
        prediction_id=_prediction_id(given.get("prediction_id")),
        job=_job(given["job"]) if "job" in given else None,
        gpu=None if gpu is None else _gpu(gpu),
        peak_bytes=_amount(given, "peak_bytes"),
        oom=oom,
        limit_bytes=_amount(given, "limit_bytes"),
        observed_at=_time(given.get("observed_at")),
        idempotency_key=_text(given, "idempotency_key", MAX_KEY_LENGTH),
        **{name: _text(given, name, MAX_TEXT_LENGTH) for name in _SOFTWARE},
    )
    if observation.peak_bytes is None and not oom:
        raise InvalidRequestError(
            "is missing: give the peak, or oom if the job ran out", "peak_bytes"
        )
    if observation.prediction_id is None and observation.job is None:
        raise InvalidRequestError(
            "is missing: give the prediction's id, or the job and its gpu", "prediction_id"
        )
    if observation.job is not None and observation.gpu is None:
        raise InvalidRequestError(
            "is missing: the memory of a job depends on the GPU that it ran on", "gpu"
        )
    if observation.gpu is not None:
        check_capacity(observation, observation.gpu)
    return observation


def observation_to_dict(observation: Observation) -> Document:
    """The JSON object of ``observation``, without what is not known; :func:`observation_from_dict`
    gives the same back."""
    return observed_document({name: getattr(observation, name) for name in OBSERVATION_FIELDS})


def content_hash(observation: Observation) -> str:
    """SHA-256 over all that ``observation`` says, its idempotency key left out: equal for equal
    observations.

    Fields of the job that say nothing beyond their default are left out, too: one that joins later
    changes no older hash.
    """
    document = observation_to_dict(observation)
    document.pop("idempotency_key", None)
    if "job" in document:
        document["job"] = {
            name: value for name, value in document["job"].items() if value != FIELD_DEFAULTS[name]
        }
    return hashlib.sha256(
        json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def check_capacity(observation: Observation, gpu: str) -> None:
    """Refuse a peak above the memory of the GPU ``gpu``, if the catalogue has it.

    Raises:
        InvalidRequestError: says both amounts.
    """
    profile, peak_bytes = known_profile(gpu), observation.peak_bytes
    if profile is not None and peak_bytes is not None and peak_bytes > profile.capacity_bytes:
        raise InvalidRequestError(
            f"is {peak_bytes} bytes, more than the {profile.capacity_bytes} of one {gpu}: "
            "are the unit and the GPU right, and is it the peak on one GPU?",
            "peak_bytes",
        )


def _source(value: object) -> str:
    if value == TRACED:
        raise InvalidRequestError(
            "must say what was read of a GPU; a trace is a prediction and no observation", "source"
        )
    if not isinstance(value, str) or value not in SOURCES:
        wrong = "is missing" if value is None else f"is {describe(value)}"
        raise InvalidRequestError(f"{wrong}: must be one of {', '.join(SOURCES)}", "source")
    return value


def _prediction_id(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not _PREDICTION_ID.match(value.lower()):
        raise InvalidRequestError(
            f"must be a prediction's id as the answer gave it (a UUID), not {describe(value)}",
            "prediction_id",
        )
    return value.lower()


def _job(value: object) -> TrainingJob:
    try:
        return job_from_dict(value)
    except InvalidJobError as error:
        raise error_at(error, "job", ".") from None


def _gpu(name: str) -> str:
    """NVML's name of the GPU where the catalogue has it."""
    profile = known_profile(name)
    return name if profile is None else profile.name


def _amount(given: Mapping[str, Any], name: str) -> int | None:
    amount = given.get(name)
    if amount is not None and (type(amount) is not int or not MIN_BYTES <= amount <= MAX_BYTES):
        raise InvalidRequestError(
            f"must be a whole number of bytes between {MIN_BYTES} and {MAX_BYTES}, not {describe(amount)}",
            name,
        )
    return amount


def _time(value: object) -> datetime | None:
    if value is None:
        return None
    try:
        time = datetime.fromisoformat(value)  # type: ignore[arg-type]  # anything but a text is a TypeError
    except (TypeError, ValueError):
        time = None
    if time is None or time.tzinfo is None:
        raise InvalidRequestError(
            f"must be a time with its zone such as 2026-01-31T12:00:00Z (RFC 3339), not {describe(value)}",
            "observed_at",
        )
    if not EARLIEST <= time <= datetime.now(UTC) + CLOCK_SKEW:
        raise InvalidRequestError(
            f"must lie between {EARLIEST:%Y} and now, not at {describe(value)}", "observed_at"
        )
    return time.astimezone(UTC)


def _text(given: Mapping[str, Any], name: str, longest: int) -> str | None:
    value = given.get(name)
    if value is None:
        return None
    if (
        not isinstance(value, str)
        or not 1 <= len(value.strip()) <= len(value) <= longest
        or not value.isprintable()
    ):
        raise InvalidRequestError(
            f"must be a text of 1 to {longest} printable characters, not {describe(value)}", name
        )
    return value


_LINES: Final = (".jsonl", ".ndjson")


@dataclass(frozen=True, eq=False)
class SiteRows(Columns):
    """``B`` jobs of a site as columns, with what is known of their runs.

    Attributes:
        jobs: the jobs.
        gpu: the GPU that each ran on, by NVML's name where the catalogue has it; ``None`` where
            only the job is known.
        label_bytes: its peak; NaN where it ran out of memory, or where only the job is known.
        is_oom: whether it ran out of memory.
        limit_bytes: the memory that it could have had; NaN where that is not known.
        context_bytes: its CUDA context; NaN where it was not read.
        label_source, provenance: as :class:`~gpumemnet.job.measurement.Measurement` has them;
            ``None`` where only the job is known.
        observed_at: seconds since the epoch when it ended; NaN where that is not known.
        location: file and row or line of each, for people; ``None`` where there is none.
        left_out: reason → the locations of the rows of the files that are not used.
        files: name of each file → its SHA-256.
    """

    jobs: JobTable
    gpu: Words
    label_bytes: Array
    is_oom: Flags
    limit_bytes: Array
    context_bytes: Array
    label_source: Words
    provenance: Words
    observed_at: Array
    location: Words
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def from_columns(jobs: JobTable | Sequence[TrainingJob], **known: Any) -> SiteRows:
        """Rows of ``jobs`` with the columns that are known; one value stands for all rows."""
        table = JobTable.from_jobs(jobs)
        columns: dict[str, Any] = {
            name: np.full(len(table), value) for name, value in _UNKNOWN.items()
        }
        for name, values in known.items():
            columns[name][:] = values
        return SiteRows(table, **columns)


_UNKNOWN: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("gpu", "label_source", "provenance", "location")),
    **dict.fromkeys(("label_bytes", "limit_bytes", "context_bytes", "observed_at"), np.nan),
    "is_oom": False,
}
"""Column of :class:`SiteRows` → its value where nothing is known."""


def read_site_rows(paths: Sequence[Path]) -> SiteRows:
    """The rows of all ``paths``: datasets or jobs in Parquet, observations or jobs in JSON Lines.

    Raises:
        InvalidRequestError: when a file does not exist or has another ending; names the line of a
            bad observation.
        InvalidJobError: names the line of a bad job.
        DatasetError: when a Parquet file is damaged, foreign or of another version.
        MissingExtraError: when Parquet is asked for and pyarrow is not installed.
    """
    parts: list[SiteRows] = []
    left_out: dict[str, list[str]] = defaultdict(list)
    files: dict[str, str] = {}
    for path in paths:
        if path.suffix != ".parquet" and path.suffix not in _LINES:
            raise InvalidRequestError(f"{path} must end in .parquet, {' or '.join(_LINES)}", "rows")
        files[str(path)] = file_sha256(path)
        read = _parquet_rows if path.suffix == ".parquet" else _line_rows
        parts.append(read(path, left_out))
    return replace(SiteRows.concatenate(parts), left_out=dict(left_out), files=files)


def _parquet_rows(path: Path, left_out: dict[str, list[str]]) -> SiteRows:
    from gpumemnet.job.dataset import is_dataset, read_dataset

    if not is_dataset(path):
        return SiteRows.from_columns(JobTable.concatenate([*read_job_tables(path)]))
    dataset = read_dataset(path)
    statuses = dataset.words("status")
    is_used = np.isin(statuses, ("ok", "oom"))
    locations = np.array([f"{path.name} row {row + 1}" for row in range(len(dataset))], object)
    for status, location in zip(statuses[~is_used], locations[~is_used], strict=True):
        left_out[f"ended with '{status}'"].append(location)
    rows = dataset.take(is_used.nonzero()[0])
    return SiteRows(
        jobs=rows.jobs,
        gpu=np.array([_gpu(name) for name in rows.words("gpu")], dtype=object),
        label_bytes=rows.label_bytes,
        is_oom=rows.words("status") == "oom",
        limit_bytes=rows.numbers("capacity_bytes"),
        context_bytes=rows.numbers("context_bytes"),
        label_source=rows.words("label_source"),
        provenance=rows.words("provenance"),
        observed_at=np.array([ended_at(text) for text in rows.words("options")], np.float64),
        location=locations[is_used],
    )


def _line_rows(path: Path, left_out: dict[str, list[str]]) -> SiteRows:
    jobs: list[TrainingJob] = []
    runs: list[dict[str, Any]] = []
    for number, document in read_documents(path):
        location = f"{path.name} line {number}"
        try:
            if (
                not isinstance(document, Mapping)
                or not {"source", "prediction_id", "job"} & document.keys()
            ):
                jobs.append(job_from_dict(document))
                runs.append({"location": location})
                continue
            observation = observation_from_dict(document)
        except (InvalidJobError, InvalidRequestError) as error:
            raise error_at(error, f"{path}, line {number}") from None
        if observation.job is None:
            left_out[
                "names a prediction and not the job: export the observations from the service instead"
            ].append(location)
        else:
            jobs.append(observation.job)
            runs.append({**_run(observation), "location": location})
    rows = [{**_UNKNOWN, **run} for run in runs]
    known = {name: [row[name] for row in rows] for name in _UNKNOWN}
    return SiteRows.from_columns(jobs, **known)


def _run(one: Observation) -> dict[str, Any]:
    """What an observation says of its run, by the columns of :class:`SiteRows`."""
    amounts = [amount for amount in (one.limit_bytes, one.peak_bytes) if amount is not None]
    limit_bytes = max(amounts, default=None) if one.oom else one.limit_bytes
    return {
        "gpu": one.gpu,
        "label_bytes": np.nan if one.oom else one.peak_bytes,
        "is_oom": one.oom,
        "limit_bytes": np.nan if limit_bytes is None else limit_bytes,
        "label_source": one.source,
        "provenance": OBSERVED,
        "observed_at": np.nan if one.observed_at is None else one.observed_at.timestamp(),
    }


def ended_at(options: str) -> float:
    """When an observed job ended, or else when it was reported, in seconds since the epoch, from the
    options of its row; NaN where they do not say."""
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError, OverflowError):
        stated = json.loads(options)
        time = stated.get("observed_at") or stated["received_at"]
        is_text = isinstance(time, str)
        return datetime.fromisoformat(time).timestamp() if is_text else float(time)
    return math.nan
