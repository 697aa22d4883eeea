"""Collects the rows to learn from, out of datasets and exported observations; refuses rows that
cannot be true.

A row is refused if its numbers contradict physics or each other
(:mod:`gpumemnet.site.implausible_rows`, :func:`is_swapped`).  If a file has many such rows of a family, the whole family of that file is
refused.  So it is if all its labels are in another unit.

Finds rows with batch size and input size swapped: the first layer's weights fit the batch size
instead of the input size.

The closed form gives nearly the same memory for such a row, so that no other check notices it.

Finds labels in the wrong unit: MB written for MiB, or 1000 for 1024.

Memory is a line over the closed form, and the context is its intercept.  If slope and intercept of
a file both differ from the known ones by the same ratio of two units, the labels are in the other
unit.  Another context changes the intercept only.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from gpumemnet.errors import DatasetError
from gpumemnet.job.dataset import read_dataset
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.measurement import OBSERVED, Measurement, identity
from gpumemnet.job.training_job import FAMILIES, TrainingJob
from gpumemnet.physics.replicas import WITH_OTHERS
from gpumemnet.site.implausible_rows import implausible_rows

from ..training.data import ZOO

if TYPE_CHECKING:
    from .physics_line import PhysicsLine

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
"""Rules of :mod:`gpumemnet.site.implausible_rows` that refuse a row.  ``below-floor`` is not
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
    for finding in implausible_rows(measurements):
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


SWAPPED: Final = "batch-and-input-swapped"


def is_swapped(job: TrainingJob) -> bool:
    """Whether the weights of a first linear layer are those for an input of ``batch_size``
    elements, not ``input_elements``."""
    if not job.layers or job.layers[0].kind != "linear":
        return False
    outputs, weights = job.layers[0].activations, job.layers[0].parameters
    fits = [
        weights in (size * outputs, (size + 1) * outputs)
        for size in (job.input_elements, job.batch_size)
    ]
    return fits == [False, True]


FEWEST: Final = 20
"""Rows that a line needs, in the file and in those before it."""
RATIOS: Final = {
    "1000 for 1024": 1000 / 1024,
    "1024 for 1000": 1024 / 1000,
    "MB for MiB": 1000**2 / 1024**2,
    "MiB for MB": 1024**2 / 1000**2,
    "GB for GiB": 1000**3 / 1024**3,
    "GiB for GB": 1024**3 / 1000**3,
}
_LINE: Final = (("segment_bytes",),)
"""One term only: the slopes of two terms that grow together cannot be estimated well."""
TOLERANCE: Final = 0.006
"""Largest distance from a ratio, in logarithms; the ratios lie 0.024 apart."""


def unit_error(rows: Sequence[Row], reference: Sequence[Measurement]) -> str | None:
    """A sentence that names the wrong unit of ``rows``; ``None`` if it is that of ``reference``
    (same family, GPU and source)."""
    own_rows = [row.measurement for row in rows if _is_usable(row.measurement)]
    reference_rows = [row for row in reference if _is_usable(row)]
    if min(len(own_rows), len(reference_rows)) < FEWEST:
        return None
    reference_line, own_line = _line(reference_rows), _line(own_rows)
    pairs = (
        (reference_line.intercept_mib, own_line.intercept_mib),
        (reference_line.slopes[0], own_line.slopes[0]),
    )
    if any(min(pair) <= 0 for pair in pairs):
        return None
    changes = [math.log(found / expected) for expected, found in pairs]
    for name, ratio in RATIOS.items():
        if all(abs(change - math.log(ratio)) < TOLERANCE for change in changes):
            return f"all labels are {ratio:.3f} times those of the files before, context included: {name}"
    return None


def _is_usable(measurement: Measurement) -> bool:
    return measurement.label_bytes is not None and measurement.job.has_layers


def _line(rows: Sequence[Measurement]) -> PhysicsLine:
    from ..training.data import features_on
    from .physics_line import fit_line  # loads scikit-learn

    labels = np.array([row.label_bytes for row in rows], dtype=np.float64)
    return fit_line(
        features_on(np.full(len(rows), rows[0].gpu), JobTable.from_jobs([row.job for row in rows])),
        labels,
        _LINE,
    )
