"""Turns finished jobs of Slurm's accounting into observations.

What cannot be an observation is reported with
the reason; nothing is guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO
from uuid import UUID

from gpumemnet.errors import FieldError, InvalidRequestError
from gpumemnet.job.json_codec import job_from_dict, job_to_dict
from gpumemnet.job.layers import describe
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.site.observations import Observation, observation_from_dict, observation_to_dict

MIN_SECONDS: Final = 60
"""Shorter jobs are left out: Slurm reads every 30 seconds, and may have missed the peak."""

_TAKEN_STATES: Final = ("COMPLETED", "TIMEOUT", "CANCELLED", "PREEMPTED", "DEADLINE")
_UNFINISHED_STATES: Final = ("PENDING", "RUNNING", "REQUEUED", "RESIZING", "SUSPENDED")
_PREDICTION: Final = re.compile(
    r"gpumemnet:([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})(?![0-9a-fA-F])"
)


@dataclass(frozen=True, slots=True)
class Known:
    """An entry of a mapping file: the prediction of a Slurm job, or the job itself with its GPU."""

    prediction_id: str | None = None
    job: TrainingJob | None = None
    gpu: str | None = None


def read_sacct(
    path: Path,
    known: Mapping[str, Known] | None = None,
    gpus: Mapping[str, str] | None = None,
    min_seconds: int = MIN_SECONDS,
) -> Iterator[Observation | Skipped]:
    """The observations in ``path``, and the jobs that gave none; text is read one job at a time.

    Args:
        path: output of ``sacct -P`` with its header, or of ``sacct --json``.
        known: Slurm's job id → what is known of the job; comments with ``gpumemnet:<prediction
            id>`` need no entry.
        gpus: Slurm's type of a GPU → its name in NVML; an empty type stands for all.
        min_seconds: shortest job that is taken.

    Raises:
        InvalidRequestError: when the file cannot be read, or holds neither form.
    """
    for job in read_jobs(path):
        yield (
            job
            if isinstance(job, Skipped)
            else _observation(job, known or {}, gpus or {}, min_seconds)
        )


def read_known_jobs(path: Path) -> dict[str, Known]:
    """A mapping file: JSON Lines with ``job_id`` and ``prediction_id``, or ``job_id``, ``job`` and
    ``gpu``.

    Raises:
        InvalidRequestError: names the line and what is wrong with it.
    """
    known: dict[str, Known] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}", "jobs") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict) or not isinstance(entry.get("job_id"), int | str):
                raise InvalidRequestError("must be an object with the job_id of Slurm")
            unknown = set(entry) - {"job_id", "prediction_id", "job", "gpu"}
            if unknown:
                raise InvalidRequestError(
                    "is not a field: they are job_id, prediction_id, job and gpu", min(unknown)[:64]
                )
            job = None if entry.get("job") is None else job_from_dict(entry["job"])
            known[str(entry["job_id"])] = Known(entry.get("prediction_id"), job, entry.get("gpu"))
        except FieldError as error:
            raise InvalidRequestError(f"{path}, line {number}: {error}", "jobs") from None
        except (ValueError, RecursionError):
            raise InvalidRequestError(f"{path}, line {number}: is no JSON", "jobs") from None
    return known


def _observation(
    job: SlurmJob, known: Mapping[str, Known], gpus: Mapping[str, str], min_seconds: int
) -> Observation | Skipped:
    entry = known.get(job.job_id) or known.get(re.split(r"[_+]", job.job_id)[0])
    token = next(
        (found[1].lower() for comment in job.comments if (found := _PREDICTION.search(comment))),
        None,
    )
    reason = _why_not(job, entry.job if entry else None, min_seconds)
    if reason is None and entry is None and token is None:
        reason = "no prediction is known for it: its comments hold no gpumemnet:<prediction id>, and no mapping file names the job"
    if reason is not None:
        return Skipped(job.location, job.job_id, reason)
    entry = entry or Known(prediction_id=token)
    predicted_at = None if entry.prediction_id is None else _predicted_at(entry.prediction_id)
    if predicted_at is not None and job.ended_at is not None and job.ended_at < predicted_at:
        made = predicted_at.isoformat(timespec="seconds")
        return Skipped(
            *(job.location, job.job_id),
            f"it ended before its prediction was made ({made}): the id is of another job, or sacct ran in another time zone",
        )
    name = "/".join(filter(None, (job.cluster, job.job_id)))
    document = {
        "prediction_id": entry.prediction_id or (None if entry.job is not None else token),
        "job": entry.job,
        "gpu": entry.gpu or gpus.get(next(iter(job.gpus), ""), gpus.get("")),
        "peak_bytes": job.peak_bytes,
        "source": "slurm_gpumem",
        "observed_at": None if job.ended_at is None else job.ended_at.isoformat(),
        "idempotency_key": f"slurm/{name}"[:200],
    }
    try:
        return _checked(document)
    except FieldError as error:
        return Skipped(job.location, job.job_id, str(error))


def _predicted_at(prediction_id: str) -> datetime | None:
    """When a prediction was made: its id is a UUID of version 7, which begins with the time in
    milliseconds (RFC 9562)."""
    try:
        identity = UUID(prediction_id)
        return (
            datetime.fromtimestamp((identity.int >> 80) / 1000, UTC)
            if identity.version == 7
            else None
        )
    except (ValueError, AttributeError, OverflowError, OSError):
        return None


def _checked(document: dict[str, Any]) -> Observation:
    """The observation, checked as the service does; the job in it has been read already."""
    job = document.pop("job")
    if job is None:
        return observation_from_dict(document)
    return observation_from_dict({**document, "job": job_to_dict(job)})


def _why_not(job: SlurmJob, described: TrainingJob | None, min_seconds: int) -> str | None:
    if job.state in _UNFINISHED_STATES:
        return f"its state is {job.state}: it has not ended"
    if job.state == "OUT_OF_MEMORY":
        return "it ran out of host memory, which says nothing of the GPU's: Slurm does not know when that runs out"
    if job.state not in _TAKEN_STATES:
        return f"its state is {job.state}: it may have ended before its peak"
    if job.elapsed_seconds is not None and job.elapsed_seconds < min_seconds:
        return f"it ran for {job.elapsed_seconds} s, and Slurm reads too seldom to see the peak of less than {min_seconds} s"
    if job.peak_bytes is None:
        return "Slurm has no reading of its GPU memory (no gres/gpumem, or 0): the GPU has no NVML accounting, or none was used"
    count = sum(job.gpus.values())
    if len(job.gpus) > 1:
        return f"it ran on GPUs of several types ({', '.join(sorted(job.gpus))})"
    if count > 1 and job.tasks != count:
        return f"it had {count} GPUs and not as many tasks: Slurm's reading is the sum over the GPUs of a task"
    if described is not None and count not in (0, described.ranks):
        of_file = f"the job that the mapping file names for it has ranks {described.ranks}"
        return f"it had {count} GPU(s), and {of_file}: they must be as many"
    return None


def observation_lines(observations: Iterable[Observation]) -> Iterator[str]:
    """One JSON object a line, as ``POST /v1/observations`` takes them."""
    for observation in observations:
        yield json.dumps(observation_to_dict(observation)) + "\n"


SACCT_FIELDS: Final = (
    "JobID,State,Cluster,End,ElapsedRaw,NTasks,AllocTRES,TRESUsageInMax,Comment,AdminComment"
)
"""What to ask ``sacct -P -o`` for; all but JobID, State and TRESUsageInMax may be missing."""

_NEEDED: Final = ("JobID", "State", "TRESUsageInMax")
_USED: Final = frozenset(SACCT_FIELDS.split(",")) | {"JobIDRaw", "TRESUsageInTot"}
_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
_AMOUNT: Final = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)\Z", re.IGNORECASE)
_NO_READING_BYTES: Final = 2**50
"""Slurm writes 2**64 - 2 where it has no value."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A job that gave no observation, with the reason.

    Attributes:
        location: line, or number of the job, in the file.
        job_id: Slurm's, where it could be read.
        reason: one sentence.
        text: the line itself, where it could not be read.
    """

    location: str
    job_id: str | None
    reason: str
    text: str | None = None


@dataclass(slots=True)
class SlurmJob:
    """One job of the accounting, its steps together.

    Attributes:
        location: where it begins in the file.
        job_id: as Slurm shows it (``123``, ``123_4``, ``123+0``).
        state: in Slurm's words, in capitals.
        cluster: its name, where it is known.
        ended_at: when it ended.
        elapsed_seconds: how long it ran.
        gpus: GPUs allocated, by their type; the type is empty where Slurm names none.
        tasks: most tasks of any step that read GPU memory.
        peak_bytes: the highest reading of any task in any step.
        comments: comments of users, administrators and plug-ins.
    """

    location: str
    job_id: str
    state: str
    cluster: str | None = None
    ended_at: datetime | None = None
    elapsed_seconds: int | None = None
    gpus: dict[str, int] = field(default_factory=dict)
    tasks: int | None = None
    peak_bytes: int | None = None
    comments: list[str] = field(default_factory=list)


def read_jobs(path: Path) -> Iterator[SlurmJob | Skipped]:
    """The jobs in ``path``, and those that cannot be read; text is read one job at a time.

    Args:
        path: output of ``sacct -P`` with its header, or of ``sacct --json``.

    Raises:
        InvalidRequestError: when the file cannot be read, or holds neither form.
    """
    try:
        with path.open(encoding="utf-8", errors="replace", newline=None) as stream:
            start = stream.read(1)
            while start.isspace():
                start = stream.read(1)
            stream.seek(0)
            yield from _json_jobs(stream, path) if start == "{" else _text_jobs(stream, path)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}", "file") from None


def usage_bytes(text: str) -> int | None:
    """The ``gres/gpumem`` of a list of trackable resources such as
    ``cpu=00:01:02,gres/gpumem=38888M,mem=9G``.

    Where Slurm names types (``gres/gpumem:a100=…``) without a total, it is the largest.  ``None``
    where there is no reading.

    Raises:
        ValueError: when the amount cannot be read.
    """
    typed: list[int] = []
    for name, amount in _resources(text):
        if name == "gres/gpumem":
            return _reading(parse_amount(amount))
        if name.startswith("gres/gpumem:"):
            typed.append(parse_amount(amount))
    return _reading(max(typed)) if typed else None


def parse_amount(text: str) -> int:
    """Bytes of an amount such as ``38888M``, ``1.5G`` or ``40777023488``; units are powers of 1024.

    Raises:
        ValueError: when it is not an amount.
    """
    found = _AMOUNT.match(text.strip())
    if found is None:
        raise ValueError(f"'{text[:40]}' is no amount of memory such as 38888M")
    number, unit = found[1], found[2].upper()
    return int(number) * _UNITS[unit] if number.isdigit() else round(float(number) * _UNITS[unit])


def _reading(amount_bytes: int) -> int | None:
    return amount_bytes if 0 < amount_bytes < _NO_READING_BYTES else None


def _resources(text: str) -> Iterator[tuple[str, str]]:
    for part in text.split(","):
        name, equals, amount = part.partition("=")
        if equals:
            yield name.strip().lower(), amount


# sacct -P


def _text_jobs(stream: TextIO, path: Path) -> Iterator[SlurmJob | Skipped]:
    header = next((line.rstrip("\n") for line in stream if line.strip()), "")
    names = [name.split("%")[0].strip() for name in header.rstrip("|").split("|")]
    lacking = [name for name in _NEEDED if name.lower() not in (one.lower() for one in names)]
    if lacking:
        raise InvalidRequestError(
            f"{path} lacks the column {lacking[0]}: write it with  sacct -P -o {SACCT_FIELDS}  or  sacct --json",
            "file",
        )
    spelling = {name.lower(): name for name in _USED}
    names = [spelling.get(name.lower(), name) for name in names]
    current: SlurmJob | None = None
    for number, line in enumerate(stream, start=2):
        text = line.rstrip("\n")
        if not text.strip():
            continue
        row = _row(names, text)
        location = f"line {number}"
        if row is None:
            yield Skipped(
                location,
                None,
                f"has not the {len(names)} columns of the header (a comment with a '|' in it?)",
                text,
            )
            continue
        job_id, _, step = row["JobID"].strip().partition(".")
        if not job_id:
            yield Skipped(location, None, "has no JobID", text)
            continue
        if not step:
            if current is not None:
                yield current
            current = SlurmJob(location, job_id, _state(row["State"]), row.get("Cluster") or None)
        elif current is None or current.job_id != job_id:
            yield Skipped(
                location, job_id, "is a step of a job whose own line does not come before it", text
            )
            continue
        try:
            _add_row(current, row, is_step=bool(step))
        except ValueError as error:
            yield Skipped(location, job_id, f"{error}; the job is left out", text)
            current = None
    if current is not None:
        yield current


def _row(names: list[str], text: str) -> dict[str, str] | None:
    values = text.split("|")
    if (
        len(values) == len(names) + 1 and not values[-1]
    ):  # sacct -p ends every line with the delimiter
        values.pop()
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else None


def _add_row(job: SlurmJob, row: Mapping[str, str], *, is_step: bool) -> None:
    if not is_step:
        job.elapsed_seconds = (
            int(row["ElapsedRaw"]) if row.get("ElapsedRaw", "").isdigit() else None
        )
        job.ended_at = _local_time(row.get("End", ""))
        job.gpus = _gpus((name, amount) for name, amount in _resources(row.get("AllocTRES", "")))
    job.comments += [row[name] for name in ("Comment", "AdminComment") if row.get(name)]
    peak_bytes = usage_bytes(row["TRESUsageInMax"])
    if peak_bytes is not None:
        job.peak_bytes = max(job.peak_bytes or 0, peak_bytes)
        if row.get("NTasks", "").isdigit():
            job.tasks = max(job.tasks or 0, int(row["NTasks"]))


def _gpus(resources: Iterable[tuple[str, Any]]) -> dict[str, int]:
    """Type → number, from ``gres/gpu:a100=2`` with ``gres/gpu=2`` beside it."""
    typed: dict[str, int] = {}
    total = 0
    for name, amount in resources:
        count = int(amount) if str(amount).isdigit() else 0
        if name == "gres/gpu":
            total = count
        elif name.startswith("gres/gpu:") and count:
            typed[name.removeprefix("gres/gpu:")] = count
    return typed or ({"": total} if total else {})


def _state(text: str) -> str:
    """``CANCELLED by 1000`` and ``COMPLETED+`` without what follows."""
    return (text.split() or ["UNKNOWN"])[0].rstrip("+").upper()


def _local_time(text: str) -> datetime | None:
    """sacct's times are those of the machine that it ran on, which is taken to be this one."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


# sacct --json


def _json_jobs(stream: TextIO, path: Path) -> Iterator[SlurmJob | Skipped]:
    try:
        document = json.load(stream)
    except (ValueError, RecursionError):
        raise InvalidRequestError(
            f"{path} begins as JSON and is none: was it cut short?", "file"
        ) from None
    jobs = document.get("jobs") if isinstance(document, dict) else None
    if not isinstance(jobs, list):
        raise InvalidRequestError(f"{path} holds no 'jobs': write it with  sacct --json", "file")
    for index, entry in enumerate(jobs):
        location = f"jobs[{index}]"
        try:
            yield _json_job(entry, location)
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            OverflowError,
            OSError,
        ) as error:  # the last of a date
            identity = entry.get("job_id") if isinstance(entry, dict) else None
            reason = (
                f"is not as sacct --json writes jobs ({type(error).__name__}: {str(error)[:80]})"
            )
            yield Skipped(
                location,
                None if identity is None else str(identity)[:40],
                reason,
                json.dumps(entry)[:1000],
            )


def _json_job(entry: Any, location: str) -> SlurmJob:
    time = entry.get("time") or {}
    state = entry.get("state") or {}
    current = state.get("current") if isinstance(state, dict) else state
    ended = _number(time.get("end"))
    comment = entry.get("comment") or {}
    comments = (
        [comment]
        if isinstance(comment, str)
        else [text for text in comment.values() if isinstance(text, str)]
    )
    job = SlurmJob(
        location,
        _json_job_id(entry),
        _state(current[0] if isinstance(current, list) else str(current)),
        cluster if isinstance(cluster := entry.get("cluster"), str) and cluster else None,
        datetime.fromtimestamp(ended, UTC) if ended else None,
        _number(time.get("elapsed")),
        _gpus(_json_resources((entry.get("tres") or {}).get("allocated"))),
        comments=comments,
    )
    for step in entry.get("steps") or []:
        usage = (step.get("tres") or {}).get("requested") or {}
        amounts = dict(_json_resources(usage.get("max")))
        found = amounts.get("gres/gpumem") or max(
            (a for name, a in amounts.items() if name.startswith("gres/gpumem:")), default=0
        )
        peak_bytes = _reading(found)
        if peak_bytes is not None:
            job.peak_bytes = max(job.peak_bytes or 0, peak_bytes)
            tasks = (step.get("tasks") or {}).get("count")
            if type(tasks) is int:
                job.tasks = max(job.tasks or 0, tasks)
    return job


def _json_job_id(entry: Mapping[str, Any]) -> str:
    identity = entry["job_id"]
    if type(identity) is not int:
        raise ValueError(f"job_id is {describe(identity)}")
    array = entry.get("array") or {}
    task = _number(array.get("task_id"))
    parent = array.get("job_id")
    return f"{parent}_{task}" if parent and task is not None else str(identity)


def _json_resources(listed: Any) -> Iterator[tuple[str, int]]:
    for one in listed or []:
        name = "/".join(filter(None, (one.get("type"), one.get("name"))))
        count = _number(one.get("count"))
        if count is not None:
            yield name.lower(), count


def _number(value: Any) -> int | None:
    """A number as older Slurms write it, or as newer ones do: ``{"set": true, "infinite": false,
    "number": 7}``."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") and not value.get("infinite") else None
    return value if type(value) is int else None
