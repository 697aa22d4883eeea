"""The training data: jobs with labels from all sources as one table.

Every label means the same: memory of the steady state above the CUDA context.  A label is an
interval for two reasons.  Readings are granular: NVML and ``nvidia-smi`` count in MiB.  And a job
that ran out of memory has a censored label: it needed more than the card has.  Such jobs do not
form a separate class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import LeaveOneGroupOut

from gpumemnet.errors import DatasetError
from gpumemnet.gpu import blas_workspace_bytes
from gpumemnet.job.dataset import Dataset, read_dataset
from gpumemnet.job.job_files import file_sha256
from gpumemnet.job.job_table import Array, Columns, Flags, Indices, JobTable
from gpumemnet.job.measurement import TRACED, Measurement
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.predict.features import FEATURE_NAMES, model_features
from gpumemnet.units import MIB

ZOO: Final = "zoo"
"""Recipe of real models, which are only used for testing."""
STEADY_PART: Final = "steady_reserved_bytes"
"""Part of a traced run: reserved bytes of the steady state."""
STEADY: Final = "steady"
SAMPLED: Final = "sampled"
"""Family of all sampled networks."""
READING_BYTES: Final = MIB
"""Granularity of the driver's readings: a label's interval extends this far to both sides, in
bytes."""
_SEGMENT: Final = FEATURE_NAMES.index("segment_bytes")
SHIPPED_DATASETS: Final = Path(__file__).resolve().parents[2] / "dataset_builder" / "datasets"

Words = NDArray[np.str_]


@dataclass(frozen=True, eq=False)
class LabelledJobs(Columns):
    """``B`` jobs of any families, GPUs and label sources.

    Attributes:
        jobs: the jobs.
        features: what a bundle's graph reads of them, each on its own GPU, shape ``[B, 2 F]``.
        label_bytes: memory of the steady state above the CUDA context; NaN where the job ran out of
            memory, shape ``[B]``.
        lower_bytes: memory was at least this, shape ``[B]``.
        upper_bytes: memory was at most this, infinite where the job ran out of memory, shape
            ``[B]``.
        context_bytes: the CUDA context that was taken out of the reading, shape ``[B]``.
        groups: architecture family; for sampled networks the architecture.  Splits keep a group
            together.  Shape ``[B]``.
        families: as ``groups``, but all sampled networks of a file are one family, shape ``[B]``.
        sources: name of the dataset that each row is from, shape ``[B]``.
        gpus: GPU model, shape ``[B]``.
        provenances, label_sources: how the labels came about, and how memory was read, ``[B]``.
        calibrates: whether bounds are calibrated on the row, shape ``[B]``.  Sampled networks that
            nobody has run do not count: their convolutions need workspaces that those of real
            networks do not, so bounds for both would be too wide for one.
        files: name of each dataset → its SHA-256.
    """

    jobs: JobTable
    features: Array
    label_bytes: Array
    lower_bytes: Array
    upper_bytes: Array
    context_bytes: Array
    groups: Words
    families: Words
    sources: Words
    gpus: Words
    provenances: Words
    label_sources: Words
    calibrates: Flags
    files: dict[str, str]

    @property
    def is_measured(self) -> Flags:
        """Whether each job has a label that is not censored, shape ``[B]``."""
        return ~np.isnan(self.label_bytes)

    @property
    def weights(self) -> Array:
        """Weight of each row in training, with mean 1, shape ``[B]``: one over the square root of
        the rows of its family in its source, so that no family and no large table of sampled
        networks decides alone."""
        keys = np.char.add(np.char.add(self.sources, ", "), self.families)
        _, codes, counts = np.unique(keys, return_inverse=True, return_counts=True)
        weights = 1.0 / np.sqrt(counts[codes])
        return weights / weights.mean()

    def without_layers(self) -> LabelledJobs:
        """Return the same jobs with totals only."""
        jobs = self.jobs.without_layers()
        return replace(self, jobs=jobs, features=features_on(self.gpus, jobs))


def features_on(gpus: Words, jobs: JobTable) -> Array:
    """Return what a bundle's graph reads of ``B`` jobs, each on its own GPU model, ``[B, 2 F]``."""
    parts = [(gpu, np.flatnonzero(gpus == gpu)) for gpu in dict.fromkeys(gpus.tolist())]
    features = [model_features(jobs.take(rows), blas_workspace_bytes(gpu)) for gpu, rows in parts]
    order = np.argsort(np.concatenate([rows for _, rows in parts]))
    return np.concatenate(features)[order]


def load_labelled_jobs(paths: Sequence[str | Path]) -> LabelledJobs:
    """Return the rows of datasets that training uses.

    These are ``ok`` rows with a label of the steady state, and ``oom`` rows.  Left out are real
    models that are only used for testing, and jobs that are one of several replicas, for the reason
    given at :data:`gpumemnet.physics.replicas.WITH_OTHERS`.

    Raises:
        DatasetError: when a dataset cannot be read, has no such rows, or does not say which CUDA
            context its readings contain.
    """
    parts = []
    for path in map(Path, paths):
        rows = labelled_jobs(read_dataset(path), path.stem)
        if rows is not None:
            parts.append(replace(rows, files={path.stem: file_sha256(path)}))
    if not parts:
        raise DatasetError(f"{', '.join(map(str, paths))}: holds no row to train on")
    return LabelledJobs.concatenate(parts)


def labelled_jobs(rows: Sequence[Measurement], source: str) -> LabelledJobs | None:
    """Convert the usable rows of one source to labelled jobs; ``None`` where there are none.

    Raises:
        DatasetError: when the rows do not say which CUDA context their readings contain.
    """
    rows = Dataset.from_measurements(rows)
    rows = rows.take(is_usable(rows))
    if not len(rows):
        return None
    gpus = rows.words("gpu").astype(str)
    features = features_on(gpus, rows.jobs)
    contexts, labels = _contexts(rows, features, source), rows.label_bytes
    is_ok = ~np.isnan(labels)
    above = np.where(is_ok, np.maximum(labels - contexts, READING_BYTES), np.nan)
    least = np.maximum(rows.numbers("capacity_bytes") - contexts, READING_BYTES)
    named = rows.words("architecture_family")
    has_name = np.array([bool(name) for name in named])
    return LabelledJobs(
        jobs=rows.jobs,
        features=features,
        label_bytes=above,
        lower_bytes=np.where(is_ok, above - READING_BYTES, least),
        upper_bytes=np.where(is_ok, above + READING_BYTES, np.inf),
        context_bytes=contexts,
        groups=rows.split_groups.astype(str),
        families=np.where(has_name, named, SAMPLED).astype(str),
        sources=np.full(len(rows), source),
        gpus=gpus,
        provenances=rows.words("provenance").astype(str),
        label_sources=rows.words("label_source").astype(str),
        calibrates=has_name | (rows.words("provenance") != TRACED),
        files={source: ""},
    )


def is_usable(rows: Dataset) -> Flags:
    """Whether training uses each row, as said at :func:`load_labelled_jobs`, shape ``[B]``."""
    status, state = rows.words("status"), rows.words("label_state")
    # the largest reading of a whole run holds cuDNN's search, too
    may_be_search = rows.jobs.option_column("cudnn_benchmark").astype(bool)
    is_steady = (state == STEADY) | ((state == None) & ~may_be_search)  # noqa: E711
    is_used = ((status == "ok") & is_steady) | (status == "oom")
    return is_used & (rows.jobs.column("ranks") <= 1) & (rows.words("recipe") != ZOO)


def _contexts(rows: Dataset, features: Array, source: str) -> Array:
    """The CUDA context in each reading: as measured, else one constant for each GPU, the median of
    what readings hold beside the traced bytes, or beside the closed form where nobody traced."""
    contexts, labels, gpus = rows.numbers("context_bytes"), rows.label_bytes, rows.words("gpu")
    traced = rows.traced(STEADY_PART)
    peaks = rows.jobs.column("traced_peak_bytes")
    traced = np.where(np.isnan(traced) & (peaks > 0), peaks, traced)
    closed_form = features[:, _SEGMENT]
    traced = np.where(np.isnan(traced) & (closed_form > 0), closed_form, traced)
    for gpu in set(gpus):
        own = (gpus == gpu) & np.isnan(contexts)
        beside = (labels - traced)[own]
        if own.any() and np.isnan(beside).all():
            raise DatasetError(
                f"{source}: rows of {gpu} state neither the CUDA context in their readings nor layers, so "
                "they cannot be compared with others: measure with gpumemnet build"
            )
        if own.any():
            contexts[own] = max(0.0, float(np.nanmedian(beside)))
    return contexts


def shipped_datasets() -> list[Path]:
    """The datasets of the repository, in the order of their paths."""
    return sorted(SHIPPED_DATASETS.rglob("*.parquet"))


def families_of(data: LabelledJobs) -> tuple[str, ...]:
    """The job families that occur, in the order of :data:`gpumemnet.job.training_job.FAMILIES`."""
    found = set(data.jobs.option_column("family").tolist())
    return tuple(family for family in FAMILIES if family in found)


def source_splits(data: LabelledJobs) -> Iterator[tuple[Indices, Indices]]:
    """Training and test rows with each source as the test once; none if there is one source."""
    if len({*data.sources.tolist()}) > 1:
        yield from LeaveOneGroupOut().split(data.sources, groups=data.sources)


def fold_numbers(groups: NDArray[np.generic], count: int, seed: int) -> Indices:
    """Assign each row to one of ``count`` folds of nearly equal numbers of groups, shuffled; shape
    ``[B]``.

    Raises:
        DatasetError: when there are fewer groups than folds.
    """
    _, codes = np.unique(groups, return_inverse=True)
    found = int(codes.max(initial=-1)) + 1
    if found < count:
        raise DatasetError(
            f"{found} different architectures cannot be split into {count} parts: add more of them"
        )
    return (np.random.default_rng(seed).permutation(found) % count)[codes]


def folds(groups: NDArray[np.generic], count: int, seed: int) -> list[tuple[Indices, Indices]]:
    """``count`` pairs of training and test rows; every row is tested once.

    Raises:
        DatasetError: when there are fewer groups than folds.
    """
    assigned = fold_numbers(groups, count, seed)
    return [
        (np.flatnonzero(assigned != fold), np.flatnonzero(assigned == fold))
        for fold in range(count)
    ]
