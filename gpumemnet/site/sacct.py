"""Turns finished jobs of Slurm's accounting, as ``sacct --json`` writes them, into observations.

Slurm accounts ``gres/gpumem`` where ``AccountingStorageTRES`` names it and ``gres.conf`` detects
GPUs by NVML: the memory of the job's processes, read every ``JobAcctGatherFrequency`` (30 seconds by
default).  The highest reading of any task stands under a step's ``tres.requested.max``.  What cannot
be an observation is reported with the reason; nothing is guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
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
    """The observations in ``path``, and the jobs that gave none.

    Args:
        path: output of ``sacct --json``.
        known: Slurm's job id → what is known of the job; comments with ``gpumemnet:<prediction
            id>`` need no entry.
        gpus: Slurm's type of a GPU → its name in NVML; an empty type stands for all.
        min_seconds: shortest job that is taken.

    Raises:
        InvalidRequestError: when the file cannot be read, or holds anything else.
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


_NO_READING_BYTES: Final = 2**50
"""Slurm writes 2**64 - 2 where it has no value."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A job that gave no observation, with the reason.

    Attributes:
        location: number of the job in the file.
        job_id: Slurm's, where it could be read.
        reason: one sentence.
        text: the job itself, where it could not be read.
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
    """The jobs in ``path``, and those that cannot be read.

    Args:
        path: output of ``sacct --json``.

    Raises:
        InvalidRequestError: when the file cannot be read, or holds anything else.
    """
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}", "file") from None
    except (ValueError, RecursionError):
        raise InvalidRequestError(
            f"{path} is not valid JSON: write it with  sacct --json", "file"
        ) from None
    jobs = document.get("jobs") if isinstance(document, dict) else None
    if not isinstance(jobs, list):
        raise InvalidRequestError(f"{path} holds no 'jobs': write it with  sacct --json", "file")
    for index, entry in enumerate(jobs):
        location = f"jobs[{index}]"
        try:
            yield _job(entry, location)
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            OverflowError,
            OSError,
        ) as error:  # the last of a date
            identity = entry.get("job_id") if isinstance(entry, dict) else None
            yield Skipped(
                location,
                None if identity is None else str(identity)[:40],
                f"is not as sacct --json writes jobs ({type(error).__name__}: {str(error)[:80]})",
                json.dumps(entry)[:1000],
            )


def _reading(amount_bytes: int) -> int | None:
    return amount_bytes if 0 < amount_bytes < _NO_READING_BYTES else None


def _gpus(resources: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Type → number, from ``gres/gpu:a100`` with ``gres/gpu`` beside it."""
    typed: dict[str, int] = {}
    total = 0
    for name, count in resources:
        if name == "gres/gpu":
            total = count
        elif name.startswith("gres/gpu:") and count > 0:
            typed[name.removeprefix("gres/gpu:")] = count
    return typed or ({"": total} if total > 0 else {})


def _state(text: str) -> str:
    """``CANCELLED by 1000`` and ``COMPLETED+`` without what follows."""
    return (text.split() or ["UNKNOWN"])[0].rstrip("+").upper()


def _job(entry: Any, location: str) -> SlurmJob:
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
        _job_id(entry),
        _state(current[0] if isinstance(current, list) else str(current)),
        cluster if isinstance(cluster := entry.get("cluster"), str) and cluster else None,
        datetime.fromtimestamp(ended, UTC) if ended else None,
        _number(time.get("elapsed")),
        _gpus(_resources((entry.get("tres") or {}).get("allocated"))),
        comments=comments,
    )
    for step in entry.get("steps") or []:
        usage = (step.get("tres") or {}).get("requested") or {}
        amounts = dict(_resources(usage.get("max")))
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


def _job_id(entry: Mapping[str, Any]) -> str:
    identity = entry["job_id"]
    if type(identity) is not int:
        raise ValueError(f"job_id is {describe(identity)}")
    array = entry.get("array") or {}
    task = _number(array.get("task_id"))
    parent = array.get("job_id")
    return f"{parent}_{task}" if parent and task is not None else str(identity)


def _resources(listed: Any) -> Iterator[tuple[str, int]]:
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
