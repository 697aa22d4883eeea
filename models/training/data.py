"""Loads datasets for training and evaluation: jobs, labels as intervals of bytes, and groups for
splits.

A label is an interval for two reasons.  Readings are granular: NVML and ``nvidia-smi`` count in
MiB.  And a job that ran out of
memory has a censored label: it needed more than the card has.  Such jobs do not form a separate
class.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import DatasetError
from gpumemnet.gpu import blas_workspace_bytes
from gpumemnet.job.dataset import Dataset, read_dataset
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.measurement import Measurement
from gpumemnet.job.training_job import FAMILIES, TrainingJob
from gpumemnet.predict.bundle_card import ALL_FAMILIES
from gpumemnet.predict.features import feature_matrix
from gpumemnet.units import MIB

ZOO: Final = "zoo"
"""Recipe of real models, which are only used for testing."""
STEADY_PART: Final = "steady_reserved_bytes"
"""Part of a traced run: reserved bytes of the steady state."""
Rows = NDArray[np.int64]

READING_BYTES: Final = MIB
"""Granularity of the driver's readings: a label's interval extends this far to both sides, in
bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class LabelledJobs:
    """``B`` jobs of one or several families, with their memory on one GPU model.

    Attributes:
        jobs: the jobs.
        features: their feature vectors, shape ``[B, F]``.
        label_bytes: measured memory; NaN where the job ran out of memory, shape ``[B]``.
        lower_bytes: memory was at least this, shape ``[B]``.
        upper_bytes: memory was at most this, infinite where the job ran out of memory, shape
            ``[B]``.
        groups: architecture of each job as a code; splits keep a group together, shape ``[B]``.
        gpu: the GPU model.
        capacity_bytes: memory available to a job on that GPU.
        provenance: ``measured`` or ``published``.
        label_source: how memory was read.
        context_bytes: CUDA context included in the labels: measured, or the median difference
            between label and trace; ``None`` if neither is known.
        sha256: hash of the dataset file; for several files, the hash over their hashes, one per
            line, in the order of the families.
        real_families: architecture families of the real networks among the jobs; empty without any.
        is_real: whether each job is of a real network, shape ``[B]``; ``None`` where all are
            sampled.
    """

    jobs: JobTable
    features: NDArray[np.float64]
    label_bytes: NDArray[np.float64]
    lower_bytes: NDArray[np.float64]
    upper_bytes: NDArray[np.float64]
    groups: NDArray[np.int64]
    gpu: str
    capacity_bytes: int
    provenance: str
    label_source: str
    sha256: str
    context_bytes: int | None = None
    real_families: tuple[str, ...] = ()
    is_real: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.jobs)

    def take(self, rows: NDArray[np.int64]) -> LabelledJobs:
        """Return the jobs in ``rows``, shape ``[R]``."""
        return replace(
            self,
            jobs=self.jobs.take(rows),
            features=self.features[rows],
            label_bytes=self.label_bytes[rows],
            lower_bytes=self.lower_bytes[rows],
            upper_bytes=self.upper_bytes[rows],
            groups=self.groups[rows],
            is_real=None if self.is_real is None else self.is_real[rows],
        )

    @property
    def families(self) -> tuple[str, ...]:
        """The families that occur, in the order of :data:`gpumemnet.job.training_job.FAMILIES`."""
        found = set(self.jobs.option_column("family").tolist())
        return tuple(family for family in FAMILIES if family in found)

    @property
    def family(self) -> str:
        """The family, or ``all`` if there are several."""
        return self.families[0] if len(self.families) == 1 else ALL_FAMILIES

    @property
    def calibration_rows(self) -> NDArray[np.int64]:
        """The rows that bounds are calibrated on: those of real networks, or all where there are
        none.

        Sampled convolutions need workspaces that those of real networks do not, so bounds for both
        would be too wide for one.
        """
        return np.arange(len(self)) if self.is_real is None else np.flatnonzero(self.is_real)

    def rows_of(self, family: str) -> NDArray[np.int64]:
        """Return the rows of one family."""
        return np.flatnonzero(self.jobs.option_column("family") == family)

    def rows_by_family(self) -> dict[str, NDArray[np.int64]]:
        """Return the rows of each family; where there is a single one, all rows under the empty
        name."""
        if len(self.families) == 1:
            return {"": np.arange(len(self))}
        return {family: self.rows_of(family) for family in self.families}

    def without_layers(self) -> LabelledJobs:
        """Return the same jobs with totals only."""
        jobs = self.jobs.without_layers()
        return replace(self, jobs=jobs, features=features_on(self.gpu, jobs))


def features_on(gpu: str, jobs: Sequence[TrainingJob]) -> NDArray[np.float64]:
    """Return the feature vectors of ``jobs`` on the GPU model ``gpu``, shape ``[B, F]``."""
    return feature_matrix(JobTable.from_jobs(jobs), blas_workspace_bytes(gpu))


def load_training_rows(path: str | Path) -> Dataset:
    """Return the ``ok`` and ``oom`` rows of the dataset at ``path``, real models included.

    Jobs that are one of several replicas are excluded, for the reason given at
    :data:`gpumemnet.physics.replicas.WITH_OTHERS`.

    Raises:
        DatasetError: when the dataset cannot be read.
    """
    rows = read_dataset(path)
    is_used = np.isin(rows.words("status"), ("ok", "oom")) & (rows.jobs.column("ranks") <= 1)
    return rows.take(np.flatnonzero(is_used))


def labelled_families(path: str | Path) -> list[str]:
    """Return the families for which the dataset at ``path`` has training rows.

    Raises:
        DatasetError: when the dataset cannot be read.
    """
    rows = load_training_rows(path)
    found = set(rows.jobs.option_column("family")[rows.words("recipe") != ZOO].tolist())
    return [family for family in FAMILIES if family in found]


def load_labelled_jobs(path: str | Path, family: str) -> LabelledJobs:
    """Return the ``ok`` and ``oom`` rows of one family in the dataset at ``path``.

    Real models, and jobs that are one of several replicas, are excluded.

    Raises:
        DatasetError: when the dataset cannot be read, has no such rows, or mixes GPU models or ways
            of reading memory.
    """
    rows = load_training_rows(path)
    is_own = (rows.jobs.option_column("family") == family) & (rows.words("recipe") != ZOO)
    if not is_own.any():
        raise DatasetError(f"{path} has no measured {family} job: choose another family or dataset")
    sha256 = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return labelled_jobs(rows.take(np.flatnonzero(is_own)), str(path), sha256)


def labelled_jobs(rows: Sequence[Measurement], source: str, sha256: str) -> LabelledJobs:
    """Convert ``ok`` and ``oom`` measurements of one family to labelled jobs.

    Args:
        rows: the measurements.
        source: name of the dataset in error messages.
        sha256: hash of the dataset file.

    Raises:
        DatasetError: when they mix GPU models or ways of reading memory.
    """
    rows, origin = Dataset.from_measurements(rows), {}
    for name in ("gpu", "label_source", "provenance"):
        values = sorted(set(rows.words(name)))
        if len(values) > 1:
            raise DatasetError(
                f"{source} mixes rows of different {name} ({', '.join(values)}): train on one at a time"
            )
        origin[name] = values[0]
    labels, capacities = rows.label_bytes, rows.numbers("capacity_bytes")
    _, groups = np.unique(rows.split_groups.astype(str), return_inverse=True)
    return LabelledJobs(
        jobs=rows.jobs,
        features=features_on(origin["gpu"], rows.jobs),
        label_bytes=labels,
        lower_bytes=np.where(np.isnan(labels), capacities, labels - READING_BYTES),
        upper_bytes=np.where(np.isnan(labels), np.inf, labels + READING_BYTES),
        groups=groups.astype(np.int64),
        capacity_bytes=int(capacities.max()),
        sha256=sha256,
        context_bytes=_context_bytes(rows),
        **origin,
    )


def with_real_networks(data: LabelledJobs, paths: Sequence[str | Path]) -> LabelledJobs:
    """Append runs of real networks of the same family, labelled as ``data`` is.

    Beside the traced steady state a reading holds one constant for each GPU and source, its CUDA
    context: the median difference. The context of ``data`` takes its place, because models learn
    what lies above the context.  Features are those of each row's
    own GPU.  An architecture family stays one group.

    Args:
        data: jobs of one family.
        paths: datasets of real runs; rows that ended well and whose label is of the steady state
            are used.

    Raises:
        DatasetError: when a dataset cannot be read, or ``data`` states no context.
    """
    if data.context_bytes is None:
        raise DatasetError(
            "the training labels state no CUDA context, so labels of other GPUs cannot be compared with them"
        )
    runs = real_rows(paths, data.family)
    if not len(runs):
        return data
    above = above_context_bytes(runs)
    labels = np.concatenate((data.label_bytes, above + data.context_bytes))
    names, groups = np.unique(runs.split_groups.astype(str), return_inverse=True)
    hashes = [data.sha256, *(hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths)]
    return replace(
        data,
        jobs=JobTable.concatenate((data.jobs, runs.jobs)),
        features=np.concatenate((data.features, features_of_runs(runs))),
        label_bytes=labels,
        lower_bytes=np.concatenate((data.lower_bytes, labels[len(data) :] - READING_BYTES)),
        upper_bytes=np.concatenate((data.upper_bytes, labels[len(data) :] + READING_BYTES)),
        groups=np.concatenate((data.groups, groups + data.groups.max() + 1)),
        sha256=hashlib.sha256("\n".join(hashes).encode()).hexdigest(),
        real_families=tuple(names.tolist()),
        is_real=np.arange(len(labels)) >= len(data),
    )


def real_rows(paths: Sequence[str | Path], family: str | None = None) -> Dataset:
    """Return the runs of real networks of one family, or of all family after family, that ended
    well, with layers and a label of the steady state.

    Raises:
        DatasetError: when a dataset cannot be read.
    """
    rows = Dataset.concatenate([load_training_rows(path) for path in paths])
    families = rows.jobs.option_column("family")
    is_used = (
        (rows.words("status") == "ok")
        & (rows.words("label_state") == "steady")
        & (rows.jobs.layer_counts > 0)
    )
    chosen = FAMILIES if family is None else (family,)
    return rows.take(
        np.concatenate([np.flatnonzero(is_used & (families == one)) for one in chosen])
    )


def features_of_runs(
    runs: Dataset, features: Callable[[str, JobTable], NDArray[np.float64]] = features_on
) -> NDArray[np.float64]:
    """Return the features of each run on the GPU that it ran on, shape ``[B, F]``."""
    gpus = runs.words("gpu")
    places = [np.flatnonzero(gpus == gpu) for gpu in dict.fromkeys(gpus)]
    parts = [features(gpus[rows[0]], runs.jobs.take(rows)) for rows in places]
    return np.concatenate(parts)[np.argsort(np.concatenate(places))]


def above_context_bytes(runs: Sequence[Measurement]) -> NDArray[np.float64]:
    """Return the labels of ``ok`` rows with traced parts, less the constant of their GPU and
    source, shape ``[B]``."""
    runs = Dataset.from_measurements(runs)
    labels, traced = runs.label_bytes, runs.traced(STEADY_PART)
    above = np.empty(len(runs))
    sources = runs.words("gpu") + ", " + runs.words("provenance")
    for source in dict.fromkeys(sources):
        own = sources == source
        above[own] = labels[own] - np.nanmedian(labels[own] - traced[own])
    return np.maximum(above, READING_BYTES)


def joined(parts: Sequence[LabelledJobs]) -> LabelledJobs:
    """Concatenate the jobs of several families; architectures of different families stay different
    groups.

    Raises:
        DatasetError: when GPU model, provenance or the way of reading memory differ, or a family
            occurs twice.
    """
    parts = sorted(parts, key=lambda part: FAMILIES.index(part.families[0]))
    for name in ("gpu", "label_source", "provenance"):
        values = sorted({getattr(part, name) for part in parts})
        if len(values) > 1:
            raise DatasetError(
                f"the datasets are of different {name} ({', '.join(values)}): one model learns from one of them"
            )
    if len(parts) == 1:
        return parts[0]
    families = [family for part in parts for family in part.families]
    if len(set(families)) < len(families):
        raise DatasetError("the datasets have a family in common: merge them first")
    firsts = np.cumsum([0, *(part.groups.max() + 1 for part in parts)])
    contexts = [
        part.context_bytes for part in parts if part.context_bytes is not None for _ in part.jobs
    ]
    return replace(
        parts[0],
        jobs=JobTable.concatenate([part.jobs for part in parts]),
        features=np.concatenate([part.features for part in parts]),
        label_bytes=np.concatenate([part.label_bytes for part in parts]),
        lower_bytes=np.concatenate([part.lower_bytes for part in parts]),
        upper_bytes=np.concatenate([part.upper_bytes for part in parts]),
        groups=np.concatenate(
            [part.groups + first for part, first in zip(parts, firsts, strict=False)]
        ),
        capacity_bytes=max(part.capacity_bytes for part in parts),
        sha256=hashlib.sha256("\n".join(part.sha256 for part in parts).encode()).hexdigest(),
        context_bytes=int(np.median(contexts)) if contexts else None,
    )


def _context_bytes(rows: Dataset) -> int | None:
    contexts = rows.numbers("context_bytes")
    if np.isnan(contexts).all():
        traced = rows.jobs.column("traced_peak_bytes")
        contexts = np.where(traced > 0, rows.label_bytes - traced, np.nan)
    contexts = contexts[~np.isnan(contexts)]
    return max(0, int(np.median(contexts))) if len(contexts) else None


def fold_numbers(groups: NDArray[np.int64], count: int, seed: int) -> NDArray[np.int64]:
    """Assign each row to one of ``count`` folds of nearly equal numbers of groups, shuffled; shape
    ``[B]``.

    Raises:
        ValueError: when there are fewer groups than folds.
    """
    names, members = np.unique(groups, return_inverse=True)
    if len(names) < count:
        raise ValueError(f"{len(names)} architectures cannot be split into {count}: measure more")
    fold_of_group = np.random.default_rng(seed).permutation(len(names)) % count
    assigned: NDArray[np.int64] = fold_of_group[members]
    return assigned


def folds(groups: NDArray[np.int64], count: int, seed: int) -> list[tuple[Rows, Rows]]:
    """``count`` pairs of training and test rows; every row is tested once.

    Raises:
        ValueError: when there are fewer groups than folds.
    """
    assigned = fold_numbers(groups, count, seed)
    return [
        (np.flatnonzero(assigned != fold), np.flatnonzero(assigned == fold))
        for fold in range(count)
    ]
