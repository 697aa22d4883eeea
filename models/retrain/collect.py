"""Collects what can be learnt from: rows of datasets and of exported observations, each once, and none that cannot be true.

A row is refused where its numbers contradict physics or each other (:mod:`gpumemnet.data.validation`, :mod:`.columns_check`).
Where a
file has many such rows of a family, or all of them are off by the ratio of two units, something is wrong with the file, and the
family is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from gpumemnet.data.dataset import read_dataset
from gpumemnet.data.measurement import OBSERVED, Measurement, identity
from gpumemnet.data.validation import validate
from gpumemnet.errors import DatasetError
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.physics.replicas import WITH_OTHERS

from ..training.data import ZOO
from .columns_check import SWAPPED, is_swapped
from .units_check import unit_error

REFUSING: Final = frozenset(
    {
        *("below-weights", "below-training-state", "reserved-above-label", "reserved-above-process", "allocated-above-reserved"),
        *("above-capacity", "device-far-from-process", "oom-without-capacity"),
    }
)
"""Rules of :func:`gpumemnet.data.validation.validate` whose breach rules a row out; not ``below-floor``, which compares a row
with others and would take the smallest jobs away."""
MOST_REFUSED: Final = 0.1
"""Where more of a file's rows of one family are refused, the others are not trusted either."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement and where it comes from.

    Attributes:
        measurement: the row.
        origin: SHA-256 of its file.
        number: its number in the file, from 1.
        observed_at: when the job ended, in seconds since 1970; ``None`` unless it is an observation that says so.
        key: hash of what it says.
    """

    measurement: Measurement
    origin: str
    number: int
    observed_at: float | None
    key: str


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file that was read: its name, its hash, how many rows it holds and how many of them are used."""

    name: str
    sha256: str
    rows: int
    used: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Rows that are not used: of which file, how many, and why."""

    file: str
    rows: int
    reason: str


@dataclass(frozen=True, slots=True)
class Collected:
    """Everything that may be learnt from, and what was left out."""

    rows: tuple[Row, ...]
    files: tuple[InputFile, ...]
    refusals: tuple[Refusal, ...]


def collect(datasets: Sequence[Path], observations: Sequence[Path] = ()) -> Collected:
    """Read the files in their order; of rows of the same job, options, GPU and software the first counts.

    Raises:
        DatasetError: when a file is missing, damaged or of another schema, or all of them together hold nothing to learn from.
    """
    rows: list[Row] = []
    files: list[InputFile] = []
    refusals: list[Refusal] = []
    seen: dict[str, str] = {}
    for path, is_export in [*((path, False) for path in datasets), *((path, True) for path in observations)]:
        measurements = read_dataset(path)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        if sha256 in seen:
            refusals.append(Refusal(path.name, len(measurements), f"the same file as {seen[sha256]}"))
            continue
        seen[sha256] = path.name
        if is_export and any(one.provenance != OBSERVED for one in measurements):
            raise DatasetError(f"{path} holds rows that no site has observed: give it as a dataset")
        if not measurements:
            refusals.append(Refusal(path.name, 0, "holds no row"))
        kept, reasons = _trusted(measurements, sha256, rows)
        refusals += [Refusal(path.name, count, reason) for reason, count in reasons.items()]
        files.append(InputFile(path.name, sha256, len(measurements), len(kept)))
        rows += kept
    once = _once(rows)
    if len(once) < len(rows):
        refusals.append(Refusal("all files", len(rows) - len(once), "the same job again, on the same GPU and software"))
    if not once:
        raise DatasetError(f"{', '.join(path.name for path in (*datasets, *observations)) or 'no file'}: no row to learn from")
    return Collected(tuple(once), tuple(files), tuple(refusals))


def _trusted(measurements: Sequence[Measurement], sha256: str, earlier: Sequence[Row]) -> tuple[list[Row], Counter[str]]:
    """The rows that can be true; and reason → number of the others."""
    reasons: Counter[str] = Counter()
    rules: dict[int, str] = {}
    for finding in validate(measurements):
        if finding.rule in REFUSING:
            rules.setdefault(finding.row, finding.rule)
    for number, one in enumerate(measurements, start=1):
        if is_swapped(one.job):
            rules.setdefault(number, SWAPPED)
    kept: list[Row] = []
    for family in FAMILIES:
        usable = [(number, one) for number, one in enumerate(measurements, start=1) if one.job.family == family]
        real_models = sum(one.recipe == ZOO for _, one in usable)
        unfinished = sum(one.status not in ("ok", "oom") for _, one in usable)
        usable = [(number, one) for number, one in usable if one.recipe != ZOO and one.status in ("ok", "oom")]
        several = sum(one.job.is_replica for _, one in usable)
        usable = [(number, one) for number, one in usable if not one.job.is_replica]
        good = [Row(one, sha256, number, _time(one), _key(one)) for number, one in usable if number not in rules]
        bad = Counter(rules[number] for number, _ in usable if number in rules)
        reasons += Counter({f"{family}: real models, which are for testing only": real_models})
        reasons += Counter({f"{family}: neither finished nor out of memory": unfinished})
        reasons += Counter({f"{family}: {WITH_OTHERS}": several})
        reasons += Counter({f"{family}: {rule}": count for rule, count in bad.items()})
        if bad.total() > MOST_REFUSED * len(usable):
            share = f"{bad.total()} of {len(usable)} rows cannot be true ({', '.join(sorted(bad))})"
            reasons += Counter({f"{family}: {share}, so the others are not trusted either": len(good)})
            continue
        for group in _alike(good):
            sentence = unit_error(group, _same(earlier, group[0]))
            if sentence:
                reasons += Counter({f"{family}: {sentence}": len(group)})
            else:
                kept += group
    return sorted(kept, key=lambda row: row.number), reasons


def _kind(one: Measurement) -> tuple[str, str, str]:
    return one.job.family, one.gpu, one.label_source


def _alike(rows: Iterable[Row]) -> list[list[Row]]:
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(_kind(row.measurement), []).append(row)
    return list(groups.values())


def _same(rows: Iterable[Row], like: Row) -> list[Measurement]:
    return [row.measurement for row in rows if _kind(row.measurement) == _kind(like.measurement)]


def _once(rows: Iterable[Row]) -> list[Row]:
    chosen: dict[tuple[object, ...], Row] = {}
    for row in rows:
        chosen.setdefault((*identity(row.measurement), row.measurement.label_source), row)
    return list(chosen.values())


def newest_runs(rows: Iterable[Row]) -> list[Row]:
    """Of several observed runs of one job the newest alone, so that a job that runs every hour does not drown the others."""
    chosen: dict[object, Row] = {}
    for row in rows:
        earlier = chosen.get(row.measurement.job)
        if earlier is None or (row.observed_at or 0.0) >= (earlier.observed_at or 0.0):
            chosen[row.measurement.job] = row
    return list(chosen.values())


def _key(one: Measurement) -> str:
    said = (one.job, one.options, one.status, one.label_bytes, one.capacity_bytes, one.context_bytes)
    return hashlib.sha256(repr((*said, one.gpu, one.label_source, one.provenance)).encode()).hexdigest()[:32]


def _time(one: Measurement) -> float | None:
    """When an observed job ended, or else when that was reported."""
    if one.provenance != OBSERVED:
        return None
    try:
        options = json.loads(one.options)
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
