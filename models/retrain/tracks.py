"""Tracks: groups of rows for which one bundle is trained, by family, provenance, GPU and way of reading memory.

Observations are a track of their own.  It borrows the family's other rows, moved by the difference of the contexts: reserved
bytes travel between drivers and ways of reading, the CUDA context does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from gpumemnet.data.measurement import OBSERVED, TRACED, Measurement
from gpumemnet.errors import InvalidRequestError
from gpumemnet.gpu.catalogue import device_profile
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.predict.predictor import TRUST
from gpumemnet.units import MIB

from ..networks.physics_line import LAYER_TERMS, TOTALS_TERMS, fit_line
from ..training.data import LabelledJobs, features_on, labelled_jobs
from .holdout import is_held_out, newest_after
from .rows import Row, newest_runs

FEWEST_ROWS: Final = 120
"""Labelled rows that a candidate is trained on; a bound at 99 % needs 99."""
FEWEST_MOVING: Final = 20
"""Observed rows that the difference of the contexts is told from."""
MOST_COPIES: Final = 4
"""An observed row counts for so many borrowed ones at most."""


@dataclass(frozen=True, slots=True)
class Track:
    """The rows of one track by their purpose.

    Attributes:
        family, provenance, gpu, label_source: what it is.
        training: rows to learn from.
        held_out: rows of held-out architectures.
        newest: the newest observations.
        borrowed: other tracks' rows to learn from, too.
        learnt_until: time of the newest observation among ``training``.
    """

    family: str
    provenance: str
    gpu: str
    label_source: str
    training: tuple[Row, ...]
    held_out: tuple[Row, ...]
    newest: tuple[Row, ...] = ()
    borrowed: tuple[Row, ...] = ()
    learnt_until: float | None = None

    @property
    def name(self) -> str:
        """The name of its bundles, such as ``mlp-a100-published``."""
        return f"{self.family}-{_short(self.gpu)}-{self.provenance}"

    @property
    def origins(self) -> tuple[str, ...]:
        """SHA-256 of the datasets that its candidate learns from, in order; exports of observations are none."""
        rows = (*self.training, *self.borrowed)
        return tuple(sorted({row.origin for row in rows if row.measurement.provenance != OBSERVED}))


def find_tracks(rows: Sequence[Row], champion_until: dict[str, float]) -> tuple[list[Track], list[str]]:
    """The tracks, the most trusted last, and sentences about the rows that are in none.

    Args:
        rows: all rows.
        champion_until: family → the newest observation that the champion has learnt from.
    """
    groups: dict[tuple[str, str], dict[tuple[str, str], list[Row]]] = {}
    for row in rows:
        one = row.measurement
        groups.setdefault((one.job.family, one.provenance), {}).setdefault((one.gpu, one.label_source), []).append(row)
    tracks, left_out = [], []
    for (family, provenance), places in groups.items():
        (gpu, label_source), chosen = max(places.items(), key=lambda item: (len(item[1]), item[0]))
        for place, others in places.items():
            if others is not chosen:
                left_out.append(
                    f"{len(others)} {provenance} {family} rows of {place[0]}, read by {place[1]}: a release holds one model "
                    f"for a family's {provenance} jobs, and {gpu}, read by {label_source}, has more rows"
                )
        tracks.append(_split(family, provenance, gpu, label_source, chosen, champion_until.get(family)))
    tracks.sort(key=lambda track: (FAMILIES.index(track.family), -TRUST.index(track.provenance)))
    return [_with_borrowed(track, tracks) for track in tracks], left_out


def _split(family: str, provenance: str, gpu: str, label_source: str, rows: Sequence[Row], until: float | None) -> Track:
    after = newest_after(rows, until) if provenance == OBSERVED else None
    parts: dict[str, list[Row]] = {"training": [], "held_out": [], "newest": []}
    for row in rows:
        if after is not None and row.observed_at is not None and row.observed_at > after:
            parts["newest"].append(row)
        else:
            parts["held_out" if is_held_out(row.measurement.architecture_key) else "training"].append(row)
    times = [row.observed_at for row in parts["training"] if row.observed_at is not None]
    if provenance == OBSERVED:
        parts = {name: newest_runs(part) for name, part in parts.items()}
    training, held_out, newest = map(tuple, parts.values())
    learnt_until = max(times, default=None)
    return Track(family, provenance, gpu, label_source, training, held_out, newest, learnt_until=learnt_until)


def _with_borrowed(track: Track, tracks: Sequence[Track]) -> Track:
    """Observations borrow from the tracks of their family: those on the same GPU, else the most trusted."""
    others = [other for other in tracks if other.family == track.family and other.provenance != OBSERVED]
    if track.provenance != OBSERVED or not others:
        return track
    near = [other for other in others if other.gpu == track.gpu] or [others[-1]]
    return replace(track, borrowed=tuple(row for other in near for row in other.training))


@dataclass(frozen=True, slots=True, eq=False)
class TrainingData:
    """What a track's candidate learns from.

    Attributes:
        data: every row once.
        weighted: observed rows as often as they count.
        copies: how often that is.
        shifts: ``gpu, label source`` of borrowed rows → bytes that their labels were moved by.
    """

    data: LabelledJobs
    weighted: LabelledJobs
    copies: int
    shifts: dict[str, int]


def too_few(track: Track) -> str | None:
    """Why a track has too few rows to train on; ``None`` if it has enough."""
    labelled = [row.measurement for row in track.training if row.measurement.label_bytes is not None]
    if track.borrowed and len(labelled) < FEWEST_MOVING:
        return f"{len(labelled)} observed rows to learn from are too few: {FEWEST_MOVING} are needed"
    borrowed = sum(row.measurement.label_bytes is not None for row in track.borrowed)
    count = sum(one.job.has_layers for one in labelled) + borrowed
    return f"{count} rows with layers to learn from are too few: {FEWEST_ROWS} are needed" if count < FEWEST_ROWS else None


def training_data(track: Track) -> TrainingData:
    """The rows of a track as its candidate learns from them; there must not be :func:`too_few`."""
    own = [row.measurement for row in track.training]
    shifts: dict[str, int] = {}
    borrowed: list[Measurement] = []
    for place, group in _places(track.borrowed).items():
        shifts[place] = context_shift([row.measurement for row in group], own, track.gpu)
        borrowed += [moved(row.measurement, shifts[place], track) for row in group]
    usable = [one for one in own if one.job.has_layers]
    copies = max(1, min(MOST_COPIES, len(borrowed) // max(1, len(usable))))
    data = labelled_jobs([*usable, *borrowed], track.name, "")
    data = replace(data, capacity_bytes=_capacity_bytes(track.gpu, data.capacity_bytes), sha256=digest(track, shifts))
    if data.context_bytes is None:
        intercept = fit_line(data.features, data.label_bytes, LAYER_TERMS).intercept_mib
        data = replace(data, context_bytes=max(0, round(intercept * MIB)))
    order = np.concatenate((np.tile(np.arange(len(usable)), copies), np.arange(len(usable), len(data))))
    return TrainingData(data, data.take(order), copies, shifts)


def context_shift(borrowed: Sequence[Measurement], observed: Sequence[Measurement], gpu: str) -> int:
    """Median of what observed labels are above the line of the borrowed ones, in bytes."""
    known = [one for one in borrowed if one.label_bytes is not None and one.job.has_layers]
    reference = labelled_jobs(known, "borrowed rows", "")
    totals = reference.without_layers()
    lines = {
        True: fit_line(reference.features, reference.label_bytes, LAYER_TERMS),
        False: fit_line(totals.features, totals.label_bytes, TOTALS_TERMS),
    }
    residuals = []
    for has_layers, line in lines.items():
        rows = [one for one in observed if one.label_bytes is not None and one.job.has_layers == has_layers]
        if rows:
            labels = np.array([one.label_bytes for one in rows], dtype=np.float64)
            residuals.append(labels - line.predict_bytes(features_on(gpu, [one.job for one in rows])))
    return round(float(np.median(np.concatenate(residuals))))


def moved(one: Measurement, shift_bytes: int, track: Track) -> Measurement:
    """A row as it would have read where the track's rows were read."""
    label = one.label_bytes
    peak = None if label is None else max(MIB, label + shift_bytes)
    return replace(
        one,
        provenance=track.provenance,
        label_source=track.label_source,
        gpu=track.gpu,
        capacity_bytes=one.capacity_bytes if label is not None else max(MIB, one.capacity_bytes + shift_bytes),
        peak_process_bytes=peak,
        peak_device_bytes=peak,
        peak_reserved_bytes=None,
        peak_allocated_bytes=None,
        context_bytes=None,
        phases=(),
    )


def digest(track: Track, shifts: dict[str, int]) -> str:
    """Hash of what a track's candidate learns from: which rows of which files, and how borrowed ones are moved."""
    parts = [[row.key for row in rows] for rows in (track.training, track.borrowed)]
    text = json.dumps([track.name, track.label_source, parts, shifts, MOST_COPIES], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def calibration_track(track: Track, tracks: Sequence[Track]) -> Track | None:
    """The readings that say how memory lies around a traced peak, for a track whose labels are traced."""
    if track.provenance != TRACED:
        return None
    read = [other for other in tracks if other.family == track.family and other.provenance not in (TRACED, OBSERVED)]
    return read[-1] if read and read[-1].training else None


def place_of(one: Measurement) -> str:
    """Where and how a row was read, in words."""
    return f"{one.gpu}, {one.label_source}"


def _places(rows: Sequence[Row]) -> dict[str, list[Row]]:
    places: dict[str, list[Row]] = {}
    for row in rows:
        places.setdefault(place_of(row.measurement), []).append(row)
    return places


def _capacity_bytes(gpu: str, largest_bytes: int) -> int:
    try:
        return device_profile(gpu).capacity_bytes
    except InvalidRequestError:
        return largest_bytes


def _short(gpu: str) -> str:
    try:
        name = device_profile(gpu).aliases[0]
    except (InvalidRequestError, IndexError):
        name = gpu
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name.lower()).split())
