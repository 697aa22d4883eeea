"""One row to learn from: a measurement, the file that it comes from, and when it was observed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from gpumemnet.job.measurement import OBSERVED, Measurement


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement and where it comes from.

    Attributes:
        measurement: the row.
        origin: SHA-256 of its file.
        number: its number in the file, from 1.
        observed_at: when the job ended, in seconds since 1970; ``None`` unless it is an observation
            that says so.
        key: hash of what it says.
    """

    measurement: Measurement
    origin: str
    number: int
    observed_at: float | None
    key: str


def newest_runs(rows: Iterable[Row]) -> list[Row]:
    """The newest of several observed runs of a job, so that a job that runs every hour does not
    outweigh the others."""
    chosen: dict[object, Row] = {}
    for row in rows:
        earlier = chosen.get(row.measurement.job)
        if earlier is None or (row.observed_at or 0.0) >= (earlier.observed_at or 0.0):
            chosen[row.measurement.job] = row
    return list(chosen.values())


def content_key(measurement: Measurement) -> str:
    """Hash of what a measurement says about memory; equal for rows that teach the same."""
    content = (
        measurement.job,
        measurement.options,
        measurement.status,
        measurement.label_bytes,
        measurement.capacity_bytes,
        measurement.context_bytes,
    )
    return hashlib.sha256(
        repr((*content, measurement.gpu, measurement.label_source, measurement.provenance)).encode()
    ).hexdigest()[:32]


def observation_time(measurement: Measurement) -> float | None:
    """When an observed job ended, or else when it was reported, in seconds since 1970; ``None`` for
    other rows."""
    if measurement.provenance != OBSERVED:
        return None
    try:
        options = json.loads(measurement.options)
    except ValueError:
        return None
    for name in ("observed_at", "received_at"):
        value = options.get(name) if isinstance(options, dict) else None
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError:
                continue
    return None
