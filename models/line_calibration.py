"""Calibrates the line over the closed form on real networks, without training a network.

A bundle's network is trained on synthetic networks.  The closed form is calibrated on networks that
nobody designed it for, from four sources.  Published readings, traces of ordinary networks, and
traced jobs of real architectures over all training options are of real networks.  Bundles of
published readings, and those of MLPs, are asked for other jobs.  For them the line is calibrated on
such jobs (:func:`rows_like_labels`).

The bounds are cross-conformal in each group (Vovk, Cross-conformal predictors, Annals of
Mathematics and Artificial Intelligence 74, 2015).  A bound is the error that a share of the rows,
plus one row, stays below.  The line of each row was fitted without its architecture family.  Five
more folds say how well the bounds hold for a family that was in none of the fits.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog

from gpumemnet.errors import DatasetError
from gpumemnet.gpu import blas_workspace_bytes, device_profile
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.json_codec import read_jobs
from gpumemnet.job.layers import GROUP_OF_KIND
from gpumemnet.job.measurement import PUBLISHED
from gpumemnet.job.training_job import OPTION_FIELDS, TrainingJob
from gpumemnet.predict.bundle import Bundle, load_bundle, save_bundle
from gpumemnet.predict.bundle_card import BundleCard
from gpumemnet.predict.calibrated_line import (
    GROUPS,
    TERMS,
    group_codes,
    growing_features,
    has_benchmark,
    line_bytes,
    line_terms,
    log_errors,
    with_log_errors,
)
from gpumemnet.predict.features import FEATURE_NAMES, feature_matrix

from .training.bounds import FEWEST_SCORES, conformal_bounds
from .training.card import LIMITS
from .training.data import (
    READING_BYTES,
    above_context_bytes,
    features_of_runs,
    folds,
    load_labelled_jobs,
    real_rows,
)

Array = NDArray[np.float64]

GPU: Final = "A100-40GB"
"""The GPU of the traced ordinary networks: its cuBLAS workspace is part of the closed form."""


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


FOLDS: Final = 5
"""Of every fit, and of the test of its bounds."""
_FIT_SEED: Final = 1
"""Seed of the folds of a fit; those that test its bounds have another."""
_TEST_SEED: Final = 0
SLOPE_BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "constant": (-math.inf, math.inf),
    "kept_by_norm_bytes, cnn": (-1.0, 0.0),
}
"""Term → its least and largest slope, where these are not :data:`USUAL_SLOPES`."""
USUAL_SLOPES: Final = (0.0, 8.0)
"""Least and largest slope of all other terms.

At least 0, so that the line grows with the batch as its terms do.  At most 8, as no tensor has more
copies at one time: with a larger slope the few bytes of a classifier's output would stand in for
the batch size.
"""
LEAST_LOG_SCALE: Final = 1e-3
"""Smallest scale of a group's errors, in log-bytes, for groups whose errors are all equal."""


@dataclass(frozen=True, slots=True, eq=False)
class Centre:
    """The line, moved to the median of each group.

    Attributes:
        slopes: of the line's terms.
        shifts: median error of each group, without and with ``cudnn.benchmark``, shape ``[G, 2]``.
    """

    slopes: Array
    shifts: Array

    def log_errors(self, networks: RealNetworks) -> Array:
        """Returns the errors of ``B`` networks less the shift, shape ``[B]``."""
        features = networks.features
        errors = log_errors(networks.above_context_bytes, line_bytes(features, self.slopes))
        moved: Array = errors - self.shifts[group_codes(features), has_benchmark(features)]
        return moved


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """The line and its error in each group.

    Attributes:
        centre: the line.
        scales: scale of a logistic with the quartiles of the errors, shape ``[G]``.
        bounds: conformal bounds of the errors, shape ``[G, C]`` for ``C`` coverages.
    """

    centre: Centre
    scales: Array
    bounds: Array

    def amounts(self, features: Array) -> tuple[Array, Array]:
        """Returns expected memory above the context of ``B`` jobs, shape ``[B]``, and its bounds,
        shape ``[B, C]``."""
        line, groups = line_bytes(features, self.centre.slopes), group_codes(features)
        shifts = self.centre.shifts[groups, has_benchmark(features)]
        return with_log_errors(line, shifts), with_log_errors(
            line[:, None], shifts[:, None] + self.bounds[groups]
        )


def fit(networks: RealNetworks, coverages: Sequence[float]) -> Fit:
    """Fits the line, and the errors of each group; a group of fewer than :data:`FEWEST_SCORES` rows
    takes those of all.

    The error of a row is that of a line fitted without the fold of its architecture family, of
    which there must be two.
    """
    errors, codes = np.empty(len(networks)), _family_codes(networks)
    for training, testing in folds(codes, min(FOLDS, int(codes.max()) + 1), _FIT_SEED):
        errors[testing] = fit_centre(networks.take(training)).log_errors(networks.take(testing))
    groups = group_codes(networks.features)
    parts = [
        own if len(own := errors[groups == group]) >= FEWEST_SCORES else errors
        for group in range(len(GROUPS))
    ]
    quartiles = np.array([np.quantile(own, (0.25, 0.5, 0.75)) for own in parts])
    return Fit(
        centre=fit_centre(networks),
        scales=np.maximum(
            (quartiles[:, 2] - quartiles[:, 0]) / (2.0 * math.log(3.0)), LEAST_LOG_SCALE
        ),
        bounds=np.array(
            [conformal_bounds(own, coverages, least=np.abs(own).max()) for own in parts]
        ),
    )


def fit_centre(networks: RealNetworks) -> Centre:
    """Fits the line, and its median error in each group.

    A row weighs less in the line the more rows its architecture family has, so that no family
    decides alone.
    """
    features, above_context_bytes = networks.features, networks.above_context_bytes
    closed_form = features[:, FEATURE_NAMES.index("segment_bytes")]
    _, codes, counts = np.unique(networks.families, return_inverse=True, return_counts=True)
    slopes = _median_slopes(
        line_terms(features) / closed_form[:, None],
        above_context_bytes / closed_form,
        1.0 / np.sqrt(counts[codes]),
    )
    errors, groups = (
        log_errors(above_context_bytes, line_bytes(features, slopes)),
        group_codes(features),
    )
    benchmark, numbers = has_benchmark(features), range(len(GROUPS))
    shifts = np.array(
        [
            [_median(errors, groups == group, benchmark == chosen) for chosen in (0, 1)]
            for group in numbers
        ]
    )
    return Centre(slopes, shifts)


def _family_codes(networks: RealNetworks) -> NDArray[np.int64]:
    """Returns the architecture family of each row as a number, shape ``[B]``."""
    codes: NDArray[np.int64] = np.unique(networks.families, return_inverse=True)[1]
    return codes


def _median_slopes(terms: Array, amounts: Array, weights: Array) -> Array:
    """Returns the slopes within :data:`SLOPE_BOUNDS` that give the least sum of weighted absolute
    errors, shape ``[T]``.

    As a linear programme (Koenker and Bassett, Econometrica 46, 1978): each error is the difference
    of two parts from 0 on.

    Args:
        terms: shape ``[B, T]``.
        amounts, weights: shape ``[B]``.
    """
    largest = np.abs(terms).max(axis=0)
    units = np.where(largest > 0, largest, 1.0)
    bounds = np.array([SLOPE_BOUNDS.get(name, USUAL_SLOPES) for name in TERMS]) * largest[:, None]
    count = len(amounts)
    found = linprog(
        np.concatenate((np.zeros(len(TERMS)), weights, weights)),
        A_eq=sparse.hstack(
            (sparse.csr_matrix(terms / units), sparse.eye(count), -sparse.eye(count))
        ),
        b_eq=amounts,
        bounds=[*bounds, *[(0.0, None)] * (2 * count)],
        method="highs",
    )
    slopes: Array = found.x[: len(TERMS)] / units
    return slopes


def _median(errors: Array, is_own: NDArray[np.bool_], is_chosen: NDArray[np.bool_]) -> float:
    """Returns the median of the chosen rows of a group, or of the group, or of all: the first with
    enough rows."""
    parts = (errors[is_own & is_chosen], errors[is_own], errors)
    return float(np.median(next((part for part in parts if len(part) >= FEWEST_SCORES), errors)))


def held_out_coverage(networks: RealNetworks, coverages: Sequence[float]) -> Array:
    """Returns the share of each group's rows below bounds that were fitted without their family's
    fold; ``[G, C]``.

    It is NaN for a group without rows.
    """
    is_below = np.zeros((len(networks), len(coverages)))
    for training, testing in folds(_family_codes(networks), FOLDS, _TEST_SEED):
        found = fit(networks.take(training), coverages)
        is_below[testing] = (
            networks.above_context_bytes[testing, None]
            <= found.amounts(networks.features[testing])[1]
        )
    groups = group_codes(networks.features)
    with np.errstate(invalid="ignore"):
        return np.array(
            [
                is_below[groups == group].sum(axis=0) / (groups == group).sum()
                for group in range(len(GROUPS))
            ]
        )


TESTED_OPTIONS: Final[Mapping[str, tuple[object, ...]]] = {
    "checkpointing": ("none", "every_block"),
    "cudnn_benchmark": (False, True),
    "attention_kernel": (None, "cudnn", "flash", "math", "memory_efficient"),
}
"""Options whose values are not those of the tested bundle's support.

Attention kernels other than math keep the same tensors.
"""
_RANGE_COLUMNS: Final = (
    "batch_size",
    "input_elements",
    "total_parameters",
    "total_activations",
    "trainable_share",
)
"""Feature columns whose ranges bound the jobs that the line answers."""


def calibration(networks: RealNetworks, coverages: Sequence[float]) -> dict[str, Any]:
    """Returns the part of the card that the networks give: everything but the options and ranges,
    which are the bundle's."""
    found = fit(networks, coverages)
    covered, codes = held_out_coverage(networks, coverages), group_codes(networks.features)
    groups = {
        name: {
            "rows": int((codes == group).sum()),
            "log_shifts": found.centre.shifts[group].tolist(),
            "log_scale": float(found.scales[group]),
            "log_bounds": found.bounds[group].tolist(),
            "held_out_coverage": covered[group].round(4).tolist() if (codes == group).any() else [],
        }
        for group, name in enumerate(GROUPS)
    }
    return {
        "method": "a line over the closed form by median regression; in each group cross-conformal bounds over the logarithm of "
        "memory above the context over the line, both with 256 MiB added",
        "rows": len(networks),
        "families": len(set(networks.families.tolist())),
        "slopes": dict(zip(TERMS, found.centre.slopes.tolist(), strict=True)),
        "groups": groups,
        "held_out_method": f"{FOLDS} folds over architecture families",
        "other_share": _largest_other_share(networks.jobs),
    }


def _largest_other_share(jobs: JobTable) -> float:
    """Returns the largest share of a job's activations that layers of no known group put out."""
    is_other = np.array([GROUP_OF_KIND.get(kind, "other") == "other" for kind in jobs.kind_names])
    other = np.bincount(
        jobs.layer_owners,
        jobs.layer_activations * is_other[jobs.layer_kinds],
        minlength=len(jobs),
    )
    return float((other / np.maximum(1.0, jobs.column("total_activations"))).max())


def extend_bundle(folder: Path, calibrated: Mapping[str, Any], union: Mapping[str, Any]) -> Bundle:
    """Writes the closed form's calibration into the card of the bundle in ``folder``.

    In bundles of the MLP-based encoder the closed form answers inside the support, too: it is about
    as good as the classifier (``docs/evaluation/real_networks.md``), and its answers grow with the
    batch.  A bundle of published readings is asked only for jobs like these.

    Args:
        folder: the bundle.
        calibrated: from :func:`calibration`, for the coverages of the bundle.
        union: ``support`` of a bundle of all families: its options and ranges are those for which
            the closed form was tested.

    Raises:
        BundleError: when the folder holds no bundle.
    """
    bundle = load_bundle(folder)
    document: dict[str, Any] = json.loads(json.dumps(bundle.card.document))
    is_published = bundle.card.provenance == PUBLISHED
    options = {
        name: list(TESTED_OPTIONS.get(name, values))
        for name, values in union["options"].items()
        if name in OPTION_FIELDS or name == "gradient_accumulation"
    }
    document["limits"] = LIMITS
    entry = {
        **calibrated,
        "within_support": document["encoder"] == "mlp",
        "beyond_support": not is_published,
        "options": options,
        "ranges": {name: union["ranges"][name] for name in _RANGE_COLUMNS},
    }
    for part in (document, *document.get("families", {}).values()):
        part["fallback"]["closed_form"] = entry
    return save_bundle(folder, bundle.model, document)
