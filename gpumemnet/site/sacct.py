"""Turns finished jobs of Slurm's accounting, as ``sacct --json`` writes them, into observations.

Slurm accounts ``gres/gpumem`` where ``AccountingStorageTRES`` names it and ``gres.conf`` detects
GPUs by NVML: the memory of the job's processes, read every ``JobAcctGatherFrequency`` (30 seconds by
default).  The highest reading of any task stands under a step's ``tres.requested.max``.  What cannot
be an observation is reported with the reason; nothing is guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from gpumemnet.errors import FieldError, InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.site.observations import MAX_KEY_LENGTH, Observation, observation_from_dict

MIN_SECONDS: Final = 60
"""Shorter jobs are left out: Slurm reads every 30 seconds, and may have missed the peak."""

_TAKEN_STATES: Final = ("COMPLETED", "TIMEOUT", "CANCELLED", "PREEMPTED", "DEADLINE")
_UNFINISHED_STATES: Final = ("PENDING", "RUNNING", "REQUEUED", "RESIZING", "SUSPENDED")
_NO_READING_BYTES: Final = 2**50
"""Slurm writes 2**64 - 2 where it has no value."""
_PREDICTION: Final = re.compile(
    r"gpumemnet:([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})(?![0-9a-fA-F])"
)


@dataclass(frozen=True)
class Skipped:
    """A job that gave no observation, with the reason.

    Attributes:
        location: place of the job in the file.
        job_id: Slurm's, where it could be read.
        reason: one sentence.
    """

    location: str
    job_id: str | None
    reason: str


class _NoObservationError(ValueError):
    """A job that says nothing of its memory; the message says why."""


def read_sacct(path: Path) -> Iterator[Observation | Skipped]:
    """The observations in ``path``, and the jobs that gave none.

    Args:
        path: output of ``sacct --json``.

    Raises:
        InvalidRequestError: when the file cannot be read, or holds anything else.
    """
    try:
        jobs = json.loads(path.read_bytes())["jobs"]
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}", "file") from None
    except (ValueError, RecursionError, TypeError, KeyError):
        jobs = None
    if not isinstance(jobs, list):
        raise InvalidRequestError(
            f"{path} is not JSON with 'jobs': write it with  sacct --json", "file"
        )
    for index, entry in enumerate(jobs):
        job_id = None
        try:
            job_id = _job_id(entry)
            yield _observation(entry, job_id)
        except (FieldError, _NoObservationError) as error:
            yield Skipped(f"jobs[{index}]", job_id, str(error))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, OSError) as error:
            reason = f"{type(error).__name__}: {str(error)[:80]}"  # OSError: a date
            reason = f"is not as sacct --json writes jobs ({reason})"
            yield Skipped(f"jobs[{index}]", job_id, reason)


def _observation(entry: Any, job_id: str) -> Observation:
    """The observation of one job of the accounting.

    Raises:
        _NoObservationError, FieldError: when it gives none.
    """
    _check_ended(entry)
    peak_bytes = _peak_bytes(entry, _gpu_count(entry))
    comments = entry.get("comment") or ""
    comments = comments.values() if isinstance(comments, dict) else [comments]
    predictions = [found[1] for text in comments if (found := _PREDICTION.search(str(text)))]
    if not predictions:
        raise _NoObservationError(
            "no prediction is known for it: its comments hold no gpumemnet:<prediction id>"
        )
    ended, cluster = _number((entry.get("time") or {}).get("end")), entry.get("cluster")
    name = f"{cluster}/{job_id}" if isinstance(cluster, str) and cluster else job_id
    return observation_from_dict(
        {
            "peak_bytes": peak_bytes,
            "source": "slurm_gpumem",
            "observed_at": datetime.fromtimestamp(ended, UTC).isoformat() if ended else None,
            "idempotency_key": f"slurm/{name}"[:MAX_KEY_LENGTH],
            "prediction_id": predictions[0],
        }
    )


def _check_ended(entry: Any) -> None:
    """Refuses a job that has not ended, or that may have ended before its peak."""
    current = (entry.get("state") or {}).get("current")
    text = str(current[0] if isinstance(current, list) else current)
    state = text.partition(" ")[0].rstrip("+").upper()  # CANCELLED by 1000
    if state in _UNFINISHED_STATES:
        raise _NoObservationError(f"its state is {state}: it has not ended")
    if state == "OUT_OF_MEMORY":
        raise _NoObservationError(
            "it ran out of host memory, which says nothing of the GPU's: Slurm does not know when that runs out"
        )
    if state not in _TAKEN_STATES:
        raise _NoObservationError(f"its state is {state}: it may have ended before its peak")
    seconds = _number((entry.get("time") or {}).get("elapsed"))
    if seconds is not None and seconds < MIN_SECONDS:
        raise _NoObservationError(
            f"it ran for {seconds} s, and Slurm reads too seldom to see the peak of less than {MIN_SECONDS} s"
        )


def _gpu_count(entry: Any) -> int:
    """Number of the allocated GPUs, from ``gres/gpu:a100`` with ``gres/gpu`` beside it, or that
    alone."""
    resources = dict(_resources((entry.get("tres") or {}).get("allocated")))
    typed = [count for name, count in resources.items() if name.startswith("gres/gpu:") and count]
    if len(typed) > 1:
        raise _NoObservationError("it ran on GPUs of several types")
    return sum(typed) or resources.get("gres/gpu", 0)


def _peak_bytes(entry: Any, gpus: int) -> int:
    """The highest reading of any task in any step."""
    readings, tasks = [0], [0]
    for step in entry.get("steps") or []:
        usage = (step.get("tres") or {}).get("requested") or {}
        amounts = dict(_resources(usage.get("max")))
        typed = (count for name, count in amounts.items() if name.startswith("gres/gpumem:"))
        reading = amounts.get("gres/gpumem") or max(typed, default=0)
        if 0 < reading < _NO_READING_BYTES:
            readings.append(reading)
            tasks.append(_number((step.get("tasks") or {}).get("count")) or 0)
    if not any(readings):
        raise _NoObservationError(
            "Slurm has no reading of its GPU memory (no gres/gpumem, or 0): the GPU has no NVML accounting, or none was used"
        )
    if gpus > 1 and max(tasks) != gpus:
        raise _NoObservationError(
            f"it had {gpus} GPUs and not as many tasks: Slurm's reading is the sum over the GPUs of a task"
        )
    return max(readings)


def _job_id(entry: Any) -> str:
    """As Slurm shows it: ``123``, ``123_4``."""
    identity = entry["job_id"]
    if type(identity) is not int:
        raise ValueError(f"job_id is {describe(identity)}")
    array = entry.get("array") or {}
    task, parent = _number(array.get("task_id")), array.get("job_id")
    return f"{parent}_{task}" if parent and task is not None else str(identity)


def _resources(found: Any) -> Iterator[tuple[str, int]]:
    for one in found or []:
        count = _number(one.get("count"))
        if count is not None:
            yield "/".join(filter(None, (one.get("type"), one.get("name")))).lower(), count


def _number(value: Any) -> int | None:
    """A number as older Slurms write it, or as newer ones do: ``{"set": true, "infinite": false,
    "number": 7}``."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") and not value.get("infinite") else None
    return value if type(value) is int else None
