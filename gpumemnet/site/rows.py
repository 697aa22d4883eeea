"""Reads the jobs of a site: datasets, exported observations, or JSON Lines of observations or jobs.

All become rows of one form.  A row that cannot be read is counted with the reason; nothing is
guessed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from gpumemnet.errors import DatasetError, GpumemnetError, InvalidJobError, InvalidRequestError
from gpumemnet.gpu.catalogue import device_profile
from gpumemnet.job.json_codec import job_from_dict, parse_json
from gpumemnet.job.measurement import OBSERVED, Measurement
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.site.observation import Observation, observation_from_dict

_LINES: Final = (".jsonl", ".ndjson")
_HASH_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRow:
    """One job of a site, with what is known of its run.

    Attributes:
        job: the job.
        gpu: the GPU that it ran on, by NVML's name where the catalogue has it; ``None`` where only
            the job is known.
        label_bytes: its peak; ``None`` where it ran out of memory, or where only the job is known.
        is_oom: whether it ran out of memory.
        limit_bytes: the memory that it could have had, where known.
        context_bytes: its CUDA context, where it was read.
        label_source, provenance: as :class:`~gpumemnet.job.measurement.Measurement` has them;
            ``None`` where only the job is known.
        observed_at: seconds since the epoch when it ended, where known.
    """

    job: TrainingJob
    gpu: str | None = None
    label_bytes: int | None = None
    is_oom: bool = False
    limit_bytes: int | None = None
    context_bytes: int | None = None
    label_source: str | None = None
    provenance: str | None = None
    observed_at: float | None = None


@dataclass(frozen=True, slots=True)
class SiteRows:
    """The rows of one or several files.

    Attributes:
        rows: in the order of the files.
        left_out: reason → number of rows that are not used.
        files: name of each file → its SHA-256.
    """

    rows: tuple[SiteRow, ...]
    left_out: Mapping[str, int]
    files: Mapping[str, str]


def read_site_rows(paths: Sequence[Path]) -> SiteRows:
    """The rows of all ``paths``: datasets or jobs in Parquet, observations or jobs in JSON Lines.

    Raises:
        InvalidRequestError: when a file does not exist or has another ending; names the line of a
            bad one.
        DatasetError: when a Parquet file is damaged, foreign or of another version.
        MissingExtraError: when Parquet is asked for and pyarrow is not installed.
    """
    rows: list[SiteRow] = []
    left_out: Counter[str] = Counter()
    files: dict[str, str] = {}
    for path in paths:
        if path.suffix != ".parquet" and path.suffix not in _LINES:
            raise InvalidRequestError(f"{path} must end in .parquet, {' or '.join(_LINES)}", "rows")
        if not path.is_file():
            raise InvalidRequestError(f"{path} does not exist", "rows")
        files[str(path)] = _sha256(path)
        rows += (
            _parquet_rows(path, left_out)
            if path.suffix == ".parquet"
            else _line_rows(path, left_out)
        )
    return SiteRows(tuple(rows), dict(left_out), files)


def _parquet_rows(path: Path, left_out: Counter[str]) -> list[SiteRow]:
    from gpumemnet.job.dataset import is_dataset, read_dataset, read_jobs

    if not is_dataset(path):
        return [SiteRow(job=job) for jobs in read_jobs(path) for job in jobs]
    rows = []
    for measurement in read_dataset(path):
        if measurement.status in ("ok", "oom"):
            rows.append(_measured(measurement))
        else:
            left_out[f"ended with '{measurement.status}'"] += 1
    return rows


def _measured(one: Measurement) -> SiteRow:
    return SiteRow(
        job=one.job,
        gpu=_gpu_name(one.gpu),
        label_bytes=one.label_bytes,
        is_oom=one.status == "oom",
        limit_bytes=one.capacity_bytes,
        context_bytes=one.context_bytes,
        label_source=one.label_source,
        provenance=one.provenance,
        observed_at=_observed_at(one.options),
    )


def _line_rows(path: Path, left_out: Counter[str]) -> list[SiteRow]:
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                document = parse_json(line)
                if (
                    not isinstance(document, Mapping)
                    or not {"source", "prediction_id", "job"} & document.keys()
                ):
                    rows.append(SiteRow(job=job_from_dict(document)))
                    continue
                observation = observation_from_dict(document)
            except (InvalidJobError, InvalidRequestError) as error:
                location = f"{path}, line {number}" + (f", {error.field}" if error.field else "")
                raise InvalidRequestError(error.reason, location) from None
            if observation.job is None:
                left_out[
                    "names a prediction and not the job: export the observations from the service instead"
                ] += 1
            else:
                rows.append(_observed(observation, observation.job))
    return rows


def _observed(one: Observation, job: TrainingJob) -> SiteRow:
    limit_bytes = one.limit_bytes
    if one.oom:
        known = [amount for amount in (one.limit_bytes, one.peak_bytes) if amount is not None]
        limit_bytes = max(known, default=None)
    return SiteRow(
        job=job,
        gpu=one.gpu,
        label_bytes=None if one.oom else one.peak_bytes,
        is_oom=one.oom,
        limit_bytes=limit_bytes,
        label_source=one.source,
        provenance=OBSERVED,
        observed_at=None if one.observed_at is None else one.observed_at.timestamp(),
    )


def _observed_at(options: str) -> float | None:
    """When an exported observation ended, from the options of its row."""
    with contextlib.suppress(ValueError, TypeError, AttributeError, OverflowError):
        value: Any = json.loads(options).get("observed_at")
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        time = datetime.fromisoformat(value)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return None


def _gpu_name(name: str) -> str:
    with contextlib.suppress(GpumemnetError):
        return device_profile(name).name
    return name


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_HASH_BYTES):
                digest.update(block)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()
