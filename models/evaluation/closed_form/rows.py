"""The jobs that the line over the closed form is calibrated on, from four sources.

Published readings, traces of ordinary networks, and traced jobs of real architectures over all
training options are of real networks.  Bundles of published readings, and those of MLPs, are asked
for other jobs.  For them the line is calibrated on such jobs (:func:`rows_like_labels`).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import DatasetError
from gpumemnet.gpu.catalogue import blas_workspace_bytes, device_profile
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.json_codec import read_jobs
from gpumemnet.job.measurement import PUBLISHED
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.bundle_card import BundleCard
from gpumemnet.predict.closed_form import growing_features
from gpumemnet.predict.features import FEATURE_NAMES, feature_matrix

from ...training.data import (
    READING_BYTES,
    above_context_bytes,
    features_of_runs,
    load_labelled_jobs,
    real_rows,
)

GPU: Final = "A100-40GB"
"""The GPU of the traced ordinary networks: its cuBLAS workspace is part of the closed form."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class RealNetworks:
    """``B`` jobs of real networks.

    Attributes:
        families: architecture family of each, shape ``[B]``.
        jobs: the jobs.
        features: their features for the line (:func:`line_features`), each on its own GPU, shape
            ``[B, F]``.
        above_context_bytes: memory without the CUDA context, as traced or measured, shape ``[B]``.
    """

    families: NDArray[np.str_]
    jobs: JobTable
    features: Array
    above_context_bytes: Array

    def __len__(self) -> int:
        return len(self.jobs)

    def take(self, rows: NDArray[np.int64]) -> RealNetworks:
        """Returns the jobs in ``rows``, shape ``[R]``."""
        jobs = self.jobs.take(rows)
        return RealNetworks(
            self.families[rows], jobs, self.features[rows], self.above_context_bytes[rows]
        )


def line_features(gpu: str, jobs: Sequence[TrainingJob]) -> Array:
    """Returns the features that the line reads of jobs with layers, on the GPU model ``gpu``, shape
    ``[B, F]``."""
    table, workspace = JobTable.from_jobs(jobs), blas_workspace_bytes(gpu)
    return growing_features(table, feature_matrix(table, workspace), workspace)


def ordinary_networks(path: Path) -> RealNetworks:
    """Reads networks, one a line: ``kind``, ``job``, and ``readings``, pairs of batch size and
    bytes above the context.

    Raises:
        DatasetError: when the file cannot be read or holds no rows.
    """
    try:
        with gzip.open(path, "rt") as stream:
            documents = [json.loads(line) for line in stream]
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: cannot be read as gzipped JSON lines ({error})") from None
    if not documents:
        raise DatasetError(f"{path}: holds no rows")
    readings = [
        (document, size, above) for document in documents for size, above in document["readings"]
    ]
    jobs = read_jobs([document["job"] for document, _, _ in readings]).table.with_numbers(
        "batch_size", np.array([size for _, size, _ in readings], dtype=np.float64)
    )
    return RealNetworks(
        np.array([document["kind"] for document, _, _ in readings]),
        jobs,
        line_features(device_profile(GPU).name, jobs),
        np.array([above for _, _, above in readings], dtype=np.float64),
    )


def networks_of_runs(paths: Sequence[Path]) -> RealNetworks:
    """Returns the runs of real networks in datasets, without the constant of their GPU and source.

    Raises:
        DatasetError: when a dataset cannot be read, or there is no such run.
    """
    runs = real_rows(paths)
    if not len(runs):
        raise DatasetError(f"{', '.join(map(str, paths))}: no run of a real network ended well")
    return RealNetworks(
        runs.split_groups.astype(str),
        runs.jobs,
        features_of_runs(runs, line_features),
        above_context_bytes(runs),
    )


def sampled_networks(path: Path, family: str) -> RealNetworks:
    """Returns the jobs with layers of a dataset of sampled networks, without its context; every
    architecture is a family.

    Raises:
        DatasetError: when the dataset cannot be read, or its labels state no context.
    """
    data = load_labelled_jobs(path, family)
    if data.context_bytes is None:
        raise DatasetError(
            f"{path}: its labels state no CUDA context, so they cannot be compared with others"
        )
    rows = np.flatnonzero(
        ~np.isnan(data.label_bytes) & (data.features[:, FEATURE_NAMES.index("has_layers")] > 0)
    )
    own = data.take(rows)
    above = np.maximum(own.label_bytes - data.context_bytes, READING_BYTES)
    families = np.array([f"{path.stem} {group}" for group in own.groups])
    return RealNetworks(families, own.jobs, line_features(own.gpu, own.jobs), above)


def joined_networks(parts: Sequence[RealNetworks]) -> RealNetworks:
    """Joins the networks of several sources."""
    return RealNetworks(
        np.concatenate([part.families for part in parts]),
        JobTable.concatenate([part.jobs for part in parts]),
        np.concatenate([part.features for part in parts]),
        np.concatenate([part.above_context_bytes for part in parts]),
    )


def rows_like_labels(card: BundleCard, real: RealNetworks, datasets: Path) -> RealNetworks:
    """Returns the rows on which the closed form is calibrated for a bundle.

    Published readings of sampled networks have workspaces of their own, and MLPs are not among the
    real networks.  Sampled CNNs
    and transformers are left out: real networks are closer to what is asked for.

    Args:
        card: of the bundle.
        real: real networks of all families.
        datasets: folder of the datasets of sampled networks.

    Raises:
        DatasetError: when a dataset cannot be read.
    """
    if card.provenance == PUBLISHED:
        return sampled_networks(datasets / f"published_{card.family}_a100.parquet", card.family)
    if card.family == "mlp":
        of_mlps = np.flatnonzero(real.features[:, FEATURE_NAMES.index("is_mlp")] > 0)
        return joined_networks(
            [sampled_networks(datasets / "traced_mlp_h200.parquet", "mlp"), real.take(of_mlps)]
        )
    return real
