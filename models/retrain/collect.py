"""Collects the rows to learn from, out of datasets and exported observations; refuses rows that
cannot be true.

A row is refused if its numbers contradict physics or each other (:mod:`gpumemnet.site.validation`,
:mod:`.columns_check`).  If a file has many such rows of a family, the whole family of that file is
refused.  So it is if all its labels are in another unit.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpumemnet.errors import DatasetError
from gpumemnet.job.dataset import read_dataset
from gpumemnet.job.measurement import OBSERVED, Measurement, identity
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.physics.replicas import WITH_OTHERS
from gpumemnet.site.validation import validate

from ..training.data import ZOO
from .columns_check import SWAPPED, is_swapped
from .rows import Row, content_key, observation_time
from .units_check import unit_error

REFUSING_RULES: Final = frozenset(
    {
        *(
            "below-weights",
            "below-training-state",
            "reserved-above-label",
            "reserved-above-process",
            "allocated-above-reserved",
        ),
        *("above-capacity", "device-far-from-process", "oom-without-capacity"),
    }
)
"""Rules of :func:`gpumemnet.site.validation.validate` that refuse a row.  ``below-floor`` is not
among them, as it compares a row with others and would refuse the smallest jobs."""
MOST_REFUSED: Final = 0.1
"""Share of refused rows above which the other rows of that file and family are refused too."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file that was read, with the number of its rows and of those that are used."""

    name: str
    sha256: str
    rows: int
    used: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Rows of one file that are not used, with the reason."""

    file: str
    rows: int
    reason: str


@dataclass(frozen=True, slots=True)
class Collected:
    """The rows to learn from, the files that were read, and the rows that were refused."""

    rows: tuple[Row, ...]
    files: tuple[InputFile, ...]
    refusals: tuple[Refusal, ...]


def collect(datasets: Sequence[Path], observations: Sequence[Path] = ()) -> Collected:
    """Read the files in their order; of several rows of the same job, options, GPU and software the
    first is used.

    Raises:
        DatasetError: when a file is missing, damaged or of another schema, or all of them together
            hold nothing to learn from.
    """
    rows: list[Row] = []
    files: list[InputFile] = []
    refusals: list[Refusal] = []
    seen: dict[str, str] = {}
    for path, is_export in [
        *((path, False) for path in datasets),
        *((path, True) for path in observations),
    ]:
        measurements = read_dataset(path)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        if sha256 in seen:
            refusals.append(
                Refusal(path.name, len(measurements), f"the same file as {seen[sha256]}")
            )
            continue
        seen[sha256] = path.name
        if is_export and any(measurement.provenance != OBSERVED for measurement in measurements):
            raise DatasetError(f"{path} holds rows that no site has observed: give it as a dataset")
        if not measurements:
            refusals.append(Refusal(path.name, 0, "holds no row"))
        kept, reasons = _plausible_rows(measurements, sha256, rows)
        refusals += [Refusal(path.name, count, reason) for reason, count in reasons.items()]
        files.append(InputFile(path.name, sha256, len(measurements), len(kept)))
        rows += kept
    unique = _without_duplicates(rows)
    if len(unique) < len(rows):
        refusals.append(
            Refusal(
                "all files",
                len(rows) - len(unique),
                "the same job again, on the same GPU and software",
            )
        )
    if not unique:
        raise DatasetError(
            f"{', '.join(path.name for path in (*datasets, *observations)) or 'no file'}: no row to learn from"
        )
    return Collected(tuple(unique), tuple(files), tuple(refusals))


def _plausible_rows(
    measurements: Sequence[Measurement], sha256: str, earlier: Sequence[Row]
) -> tuple[list[Row], Counter[str]]:
    """The rows that can be true, and the number of the others for each reason."""
    reasons: Counter[str] = Counter()
    rules: dict[int, str] = {}
    for finding in validate(measurements):
        if finding.rule in REFUSING_RULES:
            rules.setdefault(finding.row, finding.rule)
    for number, measurement in enumerate(measurements, start=1):
        if is_swapped(measurement.job):
            rules.setdefault(number, SWAPPED)
    kept: list[Row] = []
    for family in FAMILIES:
        usable = [
            (number, measurement)
            for number, measurement in enumerate(measurements, start=1)
            if measurement.job.family == family
        ]
        real_models = sum(measurement.recipe == ZOO for _, measurement in usable)
        unfinished = sum(measurement.status not in ("ok", "oom") for _, measurement in usable)
        usable = [
            (number, measurement)
            for number, measurement in usable
            if measurement.recipe != ZOO and measurement.status in ("ok", "oom")
        ]
        replicas = sum(measurement.job.is_replica for _, measurement in usable)
        usable = [
            (number, measurement)
            for number, measurement in usable
            if not measurement.job.is_replica
        ]
        accepted = [
            Row(
                measurement, sha256, number, observation_time(measurement), content_key(measurement)
            )
            for number, measurement in usable
            if number not in rules
        ]
        refused = Counter(rules[number] for number, _ in usable if number in rules)
        reasons += Counter({f"{family}: real models, which are for testing only": real_models})
        reasons += Counter({f"{family}: neither finished nor out of memory": unfinished})
        reasons += Counter({f"{family}: {WITH_OTHERS}": replicas})
        reasons += Counter({f"{family}: {rule}": count for rule, count in refused.items()})
        if refused.total() > MOST_REFUSED * len(usable):
            share = f"{refused.total()} of {len(usable)} rows cannot be true ({', '.join(sorted(refused))})"
            reasons += Counter(
                {f"{family}: {share}, so the others are not trusted either": len(accepted)}
            )
            continue
        for group in _groups(accepted):
            sentence = unit_error(group, _same_group(earlier, group[0]))
            if sentence:
                reasons += Counter({f"{family}: {sentence}": len(group)})
            else:
                kept += group
    return sorted(kept, key=lambda row: row.number), reasons


def _group_key(measurement: Measurement) -> tuple[str, str, str]:
    return measurement.job.family, measurement.gpu, measurement.label_source


def _groups(rows: Iterable[Row]) -> list[list[Row]]:
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(_group_key(row.measurement), []).append(row)
    return list(groups.values())


def _same_group(rows: Iterable[Row], example: Row) -> list[Measurement]:
    return [
        row.measurement
        for row in rows
        if _group_key(row.measurement) == _group_key(example.measurement)
    ]


def _without_duplicates(rows: Iterable[Row]) -> list[Row]:
    chosen: dict[tuple[object, ...], Row] = {}
    for row in rows:
        chosen.setdefault((*identity(row.measurement), row.measurement.label_source), row)
    return list(chosen.values())
