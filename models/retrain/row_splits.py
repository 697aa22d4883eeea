"""Row splits: groups of rows for which one bundle is trained, by family, provenance, GPU and way of
reading memory.

Observations are a split of their own.  It borrows the family's other rows, shifted by the
difference of the contexts: reserved bytes are the same under other drivers and ways of reading, the
CUDA context is not.

Rows that no retraining trains on: architectures chosen by the hash of their key, and the newest
observations.

The hash gives the same choice always and on every machine.  So a champion of an earlier retraining
was not trained on the rows on which its successor is judged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

import numpy as np

from gpumemnet.errors import InvalidRequestError
from gpumemnet.gpu import device_profile
from gpumemnet.job.measurement import OBSERVED, TRACED, Measurement
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.units import MIB

from ..training.data import LabelledJobs, labelled_jobs
from .collect import Row, newest_runs

FEWEST_ROWS: Final = 120
"""Fewest labelled training rows of a candidate; a bound at 99 % needs 99."""
FEWEST_OBSERVED_ROWS: Final = 20
"""Observed rows that are needed to estimate the difference of the contexts."""
MOST_COPIES: Final = 4
TRUST: Final = ("observed", "measured", "published", "traced")
"""Provenance of labels, most trusted first; observed ones come from jobs at the user's site."""
"""Largest number of copies of an observed row in the training data."""


@dataclass(frozen=True, slots=True)
class RowSplit:
    """The rows of one split by their purpose.

    Attributes:
        family, provenance, gpu, label_source: the properties that its rows share.
        training: rows to train on.
        held_out: rows of held-out architectures.
        newest: the newest observations.
        borrowed: rows of other splits that are also trained on.
        learned_until: time of the newest observation among ``training``.
    """

    family: str
    provenance: str
    gpu: str
    label_source: str
    training: tuple[Row, ...]
    held_out: tuple[Row, ...]
    newest: tuple[Row, ...] = ()
    borrowed: tuple[Row, ...] = ()
    learned_until: float | None = None

    @property
    def name(self) -> str:
        """The name of its bundles, such as ``mlp-a100-published``."""
        return f"{self.family}-{_gpu_slug(self.gpu)}-{self.provenance}"

    @property
    def origins(self) -> tuple[str, ...]:
        """SHA-256 of the datasets that its candidate is trained on, in order, without exports of
        observations."""
        rows = (*self.training, *self.borrowed)
        return tuple(sorted({row.origin for row in rows if row.measurement.provenance != OBSERVED}))


def split_rows(
    rows: Sequence[Row], champion_until: dict[str, float]
) -> tuple[list[RowSplit], list[str]]:
    """The splits, the most trusted last, and sentences about the rows that are in none.

    Args:
        rows: all rows.
        champion_until: family → the newest observation that the champion was trained on.
    """
    groups: dict[tuple[str, str], dict[tuple[str, str], list[Row]]] = {}
    for row in rows:
        measurement = row.measurement
        groups.setdefault((measurement.job.family, measurement.provenance), {}).setdefault(
            (measurement.gpu, measurement.label_source), []
        ).append(row)
    splits, left_out = [], []
    for (family, provenance), sources in groups.items():
        (gpu, label_source), chosen = max(sources.items(), key=lambda item: (len(item[1]), item[0]))
        for source, others in sources.items():
            if others is not chosen:
                left_out.append(
                    f"{len(others)} {provenance} {family} rows of {source[0]}, read by {source[1]}: a release holds one model "
                    f"for a family's {provenance} jobs, and {gpu}, read by {label_source}, has more rows"
                )
        splits.append(
            _split(family, provenance, gpu, label_source, chosen, champion_until.get(family))
        )
    splits.sort(key=lambda split: (FAMILIES.index(split.family), -TRUST.index(split.provenance)))
    return [_with_borrowed(split, splits) for split in splits], left_out


def _split(
    family: str,
    provenance: str,
    gpu: str,
    label_source: str,
    rows: Sequence[Row],
    until: float | None,
) -> RowSplit:
    after = newest_after(rows, until) if provenance == OBSERVED else None
    parts: dict[str, list[Row]] = {"training": [], "held_out": [], "newest": []}
    for row in rows:
        if after is not None and row.observed_at is not None and row.observed_at > after:
            parts["newest"].append(row)
        else:
            parts[
                "held_out" if is_held_out(row.measurement.architecture_key) else "training"
            ].append(row)
    times = [row.observed_at for row in parts["training"] if row.observed_at is not None]
    if provenance == OBSERVED:
        parts = {name: newest_runs(part) for name, part in parts.items()}
    training, held_out, newest = map(tuple, parts.values())
    learned_until = max(times, default=None)
    return RowSplit(
        family,
        provenance,
        gpu,
        label_source,
        training,
        held_out,
        newest,
        learned_until=learned_until,
    )


def _with_borrowed(split: RowSplit, splits: Sequence[RowSplit]) -> RowSplit:
    """Observations borrow from the splits of their family: those on the same GPU, else the most
    trusted."""
    others = [
        other for other in splits if other.family == split.family and other.provenance != OBSERVED
    ]
    if split.provenance != OBSERVED or not others:
        return split
    near = [other for other in others if other.gpu == split.gpu] or [others[-1]]
    return replace(split, borrowed=tuple(row for other in near for row in other.training))


@dataclass(frozen=True, slots=True, eq=False)
class TrainingData:
    """The training data of a split's candidate.

    Attributes:
        data: every row once.
        weighted: the same with each observed row repeated.
        copies: how often it is repeated.
        shifts: ``gpu, label source`` of borrowed rows → bytes by which their labels were shifted.
    """

    data: LabelledJobs
    weighted: LabelledJobs
    copies: int
    shifts: dict[str, int]


def too_few(split: RowSplit) -> str | None:
    """Why a split has too few rows to train on; ``None`` if it has enough."""
    labelled = [
        row.measurement for row in split.training if row.measurement.label_bytes is not None
    ]
    if split.borrowed and len(labelled) < FEWEST_OBSERVED_ROWS:
        missing = ceil(
            (FEWEST_OBSERVED_ROWS - len(labelled)) / (1 - HELD_OUT_SHARE) / (1 - NEWEST_SHARE)
        )
        return (
            f"{len(labelled)} observed rows to train on are too few: {FEWEST_OBSERVED_ROWS} are needed, which takes some "
            f"{missing} observations more, as a part of them is for judging only"
        )
    borrowed = sum(row.measurement.label_bytes is not None for row in split.borrowed)
    count = sum(measurement.job.has_layers for measurement in labelled) + borrowed
    return (
        f"{count} rows with layers to train on are too few: {FEWEST_ROWS} are needed"
        if count < FEWEST_ROWS
        else None
    )


def training_data(split: RowSplit) -> TrainingData:
    """The training data of a split, which must not have :func:`too_few` rows."""
    own = [row.measurement for row in split.training]
    shifts: dict[str, int] = {}
    borrowed: list[Measurement] = []
    for source, group in _rows_by_source(split.borrowed).items():
        shifts[source] = context_shift([row.measurement for row in group], own, split.gpu)
        borrowed += [shift_label(row.measurement, shifts[source], split) for row in group]
    usable = [measurement for measurement in own if measurement.job.has_layers]
    copies = max(1, min(MOST_COPIES, len(borrowed) // max(1, len(usable))))
    data = labelled_jobs([*usable, *borrowed], split.name)
    assert data is not None  # too_few has counted them
    data = replace(data, files={split.name: digest(split, shifts)})
    order = np.concatenate(
        (np.tile(np.arange(len(usable)), copies), np.arange(len(usable), len(data)))
    )
    return TrainingData(data, data.take(order), copies, shifts)


def context_shift(
    borrowed: Sequence[Measurement], observed: Sequence[Measurement], gpu: str
) -> int:
    """Difference of the CUDA contexts in both, in bytes."""
    contexts = [
        np.median(part.context_bytes)
        for rows in (observed, borrowed)
        if (part := labelled_jobs(rows, "rows")) is not None
    ]
    return round(float(contexts[0] - contexts[-1]))


def shift_label(measurement: Measurement, shift_bytes: int, split: RowSplit) -> Measurement:
    """The row with its label shifted, as if it had been read like the split's rows."""
    label = measurement.label_bytes
    peak = None if label is None else max(MIB, label + shift_bytes)
    return replace(
        measurement,
        provenance=split.provenance,
        label_source=split.label_source,
        gpu=split.gpu,
        capacity_bytes=measurement.capacity_bytes
        if label is not None
        else max(MIB, measurement.capacity_bytes + shift_bytes),
        steady_process_bytes=None,
        startup_peak_bytes=None,
        peak_process_bytes=peak,
        peak_device_bytes=peak,
        peak_reserved_bytes=None,
        peak_allocated_bytes=None,
        context_bytes=None,
        phases=(),
    )


def digest(split: RowSplit, shifts: dict[str, int]) -> str:
    """Hash of a split's training data: the rows, their files, and the shifts of borrowed rows."""
    parts = [[row.key for row in rows] for rows in (split.training, split.borrowed)]
    text = json.dumps([split.name, split.label_source, parts, shifts, MOST_COPIES], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def calibration_split(split: RowSplit, splits: Sequence[RowSplit]) -> RowSplit | None:
    """The split whose readings calibrate traced peaks, for a split with traced labels."""
    if split.provenance != TRACED:
        return None
    readings = [
        other
        for other in splits
        if other.family == split.family and other.provenance not in (TRACED, OBSERVED)
    ]
    return readings[-1] if readings and readings[-1].training else None


def source_of(measurement: Measurement) -> str:
    """The GPU and the label source of a row, as text."""
    return f"{measurement.gpu}, {measurement.label_source}"


def _rows_by_source(rows: Sequence[Row]) -> dict[str, list[Row]]:
    rows_by_source: dict[str, list[Row]] = {}
    for row in rows:
        rows_by_source.setdefault(source_of(row.measurement), []).append(row)
    return rows_by_source


def _gpu_slug(gpu: str) -> str:
    try:
        name = device_profile(gpu).aliases[0]
    except (InvalidRequestError, IndexError):
        name = gpu
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name.lower()).split())


HELD_OUT_SHARE: Final = 0.15
HELD_OUT_RULE: Final = f"sha256('held-out/1 ' + architecture_key) < {HELD_OUT_SHARE:g}"
"""The rule as cards state it; a bundle with another rule, or none, may have been trained on these
rows."""
NEWEST_SHARE: Final = 0.2
"""Share of the observations, the newest, that the candidate is not trained on."""


def is_held_out(architecture_key: str) -> bool:
    """Whether an architecture is held out, for judging only."""
    digest = hashlib.sha256(f"held-out/1 {architecture_key}".encode()).digest()
    return int.from_bytes(digest[:8]) < HELD_OUT_SHARE * 2**64


def newest_after(rows: Sequence[Row], learned_until: float | None) -> float | None:
    """The time after which observations are for judging: the newest share, and none that the
    champion was trained on.

    ``None`` where no row has a time: then all of them may be trained on.
    """
    times = sorted(row.observed_at for row in rows if row.observed_at is not None)
    if not times:
        return None
    boundary = times[max(0, round(len(times) * (1.0 - NEWEST_SHARE)) - 1)]
    return boundary if learned_until is None else max(boundary, learned_until)
