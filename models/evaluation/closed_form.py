"""The closed form's error on real networks: fits its calibration, tests it on held-out families, writes it to cards.

A bundle's network is trained on synthetic networks.  The closed form needs no training, so it is tested on networks that nobody
designed it for: traces of ordinary networks, and published readings of timm models.  Its bound is split-conformal: the error that
a share of the rows, plus one row, stays below (Vovk et al., Algorithmic Learning in a Random World, 2005).  Five folds over
architecture families say how well the bound holds for a family that it has not seen.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import DatasetError
from gpumemnet.features.vector import FEATURE_NAMES, feature_matrix
from gpumemnet.gpu.catalogue import device_profile
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.json_codec import job_from_dict
from gpumemnet.job.layers import GROUP_OF_KIND
from gpumemnet.job.training_job import FAMILIES, OPTION_FIELDS, TrainingJob
from gpumemnet.predict.bundle import Bundle, load_bundle, save_bundle

from ..training.data import above_context_bytes, real_rows

PUBLISHED: Final = "published"
GPU: Final = "A100-40GB"
"""The GPU of all rows: its cuBLAS workspace is part of the closed form."""
FOLDS: Final = 5
TESTED_OPTIONS: Final[Mapping[str, tuple[object, ...]]] = {
    "checkpointing": ("none",),
    "cudnn_benchmark": (False, True),
    "attention_kernel": (None, "cudnn", "flash", "math", "memory_efficient"),
}
"""Options whose values are not those of the bundle's own support.

Kernels other than math keep the same tensors.  Recomputed blocks are not in the rows.
"""
_RANGED: Final = ("batch_size", "input_elements", "total_parameters", "total_activations", "trainable_share")

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Row:
    """One real network at one batch size.

    Attributes:
        kind: its architecture family.
        job: the training job, from an extraction.
        above_context_bytes: its memory without the CUDA context, as traced or measured.
    """

    kind: str
    job: TrainingJob
    above_context_bytes: int


def read_rows(path: Path) -> list[Row]:
    """Reads rows, one network a line: ``kind``, ``job``, and ``readings``, pairs of batch size and bytes above the context.

    Raises:
        DatasetError: when the file cannot be read or holds no rows.
    """
    try:
        with gzip.open(path, "rt") as stream:
            documents = [json.loads(line) for line in stream]
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: cannot be read as gzipped JSON lines ({error})") from None
    rows = []
    for document in documents:
        job = job_from_dict(document["job"])
        rows += [Row(document["kind"], replace(job, batch_size=size), above) for size, above in document["readings"]]
    if not rows:
        raise DatasetError(f"{path}: holds no rows")
    return rows


def rows_of_runs(paths: Sequence[Path]) -> list[Row]:
    """Returns the published readings of real networks in datasets of runs, without their CUDA context.

    Raises:
        DatasetError: when a dataset cannot be read.
    """
    runs = [row for family in FAMILIES for row in real_rows(paths, family) if row.provenance == PUBLISHED]
    above = above_context_bytes(runs).astype(np.int64).tolist() if runs else []
    return [Row(run.split_group, run.job, amount) for run, amount in zip(runs, above, strict=True)]


def log_errors(rows: Sequence[Row]) -> Array:
    """Logarithm of each row's memory over the closed form, shape ``[N]``."""
    features = feature_matrix(JobTable.from_jobs([row.job for row in rows]), device_profile(GPU).blas_workspace_bytes)
    truth = np.array([row.above_context_bytes for row in rows], dtype=np.float64)
    errors: Array = np.log(truth / features[:, FEATURE_NAMES.index("segment_bytes")])
    return errors


def conformal_bound(errors: Array, coverage: float) -> float | None:
    """The smallest error that covers the share ``coverage`` of future rows; ``None`` where there are too few rows."""
    rank = math.ceil((len(errors) + 1) * coverage)
    return None if rank > len(errors) else float(np.sort(errors)[rank - 1])


def held_out_coverage(rows: Sequence[Row], errors: Array, coverage: float) -> float:
    """Share of the rows below the bound that was fitted without their architecture family's fold."""
    kinds = sorted({row.kind for row in rows})
    folds = np.array([kinds.index(row.kind) % FOLDS for row in rows])
    below = 0
    for fold in range(FOLDS):
        bound = conformal_bound(errors[folds != fold], coverage)
        below += int((errors[folds == fold] <= (np.inf if bound is None else bound)).sum())
    return below / len(rows)


def calibration(rows: Sequence[Row], coverages: Sequence[float]) -> dict[str, Any]:
    """The part of the card that the rows give: everything but the options and ranges, which are the bundle's."""
    errors = log_errors(rows)
    shift = float(np.median(errors))
    spread = np.quantile(errors, (0.25, 0.75))
    return {
        "method": "split-conformal over the logarithm of memory above the context over the closed form",
        "rows": len(rows),
        "kinds": len({row.kind for row in rows}),
        "log_shift": shift,
        "log_scale": float(spread[1] - spread[0]) / (2.0 * math.log(3.0)),
        "log_bounds": [conformal_bound(errors, coverage) for coverage in coverages],
        "held_out_coverage": [round(held_out_coverage(rows, errors, coverage), 4) for coverage in coverages],
        "held_out_method": f"{FOLDS} folds over architecture families",
        "other_share": max(_other_share(row.job) for row in rows),
    }


def extend_bundle(folder: Path, rows: Sequence[Row], union: Mapping[str, Any]) -> Bundle:
    """Writes the closed form's calibration into the card of the bundle in ``folder``.

    Args:
        folder: the bundle.
        rows: from :func:`read_rows`.
        union: ``support`` of a bundle of all families: its options and ranges are those for which the closed form was tested.

    Raises:
        BundleError: when the folder holds no bundle.
    """
    bundle = load_bundle(folder)
    document: dict[str, Any] = json.loads(json.dumps(bundle.card.document))
    options = {
        name: list(TESTED_OPTIONS.get(name, values))
        for name, values in union["options"].items()
        if name in OPTION_FIELDS or name == "gradient_accumulation"
    }
    ranges = {name: union["ranges"][name] for name in _RANGED}
    entry = {**calibration(rows, bundle.card.coverages), "options": options, "ranges": ranges}
    for part in (document, *document.get("families", {}).values()):
        part["fallback"]["closed_form"] = entry
    return save_bundle(folder, bundle.model, document)


def _other_share(job: TrainingJob) -> float:
    other = sum(layer.activations for layer in job.layers if GROUP_OF_KIND.get(layer.kind, "other") == "other")
    return other / max(1, job.total_activations or 0)
