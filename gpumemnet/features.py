"""The feature vector: the fixed-length summary of a job that the MLP-based estimator reads, vectorised over many jobs.

GPUMemNet's features (arXiv 2602.17817, section 4: counts of layers, batch size, parameters, activations) are among the columns;
the others carry the physics: bytes under the job's precision and optimizer, and the closed-form peak by size class of the
allocator.  Every column is in natural units; networks take logarithms and standardise inside their own graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.closed_form import (
    CUBLASLT_WORKSPACE,
    HANDLES,
    MEDIUM_SEGMENT,
    SIZE_CLASSES,
    SMALL_SEGMENT,
    TYPICAL_LARGE_TENSOR,
    closed_form,
    job_columns,
)
from gpumemnet.feature_row import feature_row, known_amounts
from gpumemnet.job import TrainingJob
from gpumemnet.layer_table import LayerTable, layer_table
from gpumemnet.layers import GROUP_NAMES, LAYER_GROUPS
from gpumemnet.physics import ELEMENT_BYTES, FOREACH_COPIES
from gpumemnet.saved_tensors import KIND_RULES

_FEW: Final = 12
"""Up to so many jobs the loop over plain floats is quicker than the arrays."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the feature vector: its name, and what it holds."""

    name: str
    meaning: str


TOTAL_COLUMNS: Final = (
    Column("batch_size", "samples per forward pass"),
    Column("input_elements", "input elements per sample"),
    Column("total_parameters", "parameter elements"),
    Column("trainable_share", "share of the parameters that receives gradients"),
    Column("total_activations", "output elements per sample, summed over the layers"),
    Column("sequence_length", "tokens per sample; 0 where there is no sequence"),
    Column("gradient_accumulation", "forward-backward passes per optimizer step"),
    Column("is_checkpointed", "1 where every block's activations are recomputed"),
    Column("is_channels_last", "1 for the NHWC memory format"),
    Column("is_cudnn_benchmark", "1 where cuDNN tries all algorithms"),
    Column("weight_bytes", "bytes of the weights and of their cast copies"),
    Column("gradient_bytes", "bytes of the gradients"),
    Column("optimizer_state_bytes", "bytes that the optimizer keeps between steps"),
    Column("optimizer_temporary_bytes", "bytes that the optimizer's step needs on top"),
    Column("input_bytes", "bytes of the input batch"),
    Column("activation_bytes", "bytes of all layer outputs of the batch"),
)
"""Columns that totals alone give."""

LAYER_COLUMNS: Final = (
    Column("has_layers", "1 where the layer list is known; where it is 0 all columns below are 0"),
    Column("layer_count", "layers in all"),
    *(Column(f"{group}_count", f"layers of the group {group}") for group in GROUP_NAMES),
    *(
        Column(f"{part}_{size}_bytes", f"{meaning}, tensors of the size class {size}")
        for part, meaning in (
            ("weights", "packed bytes of the parameters"),
            ("kept", "packed bytes kept for the backward pass"),
            ("peak", "packed bytes at the peak of the step"),
        )
        for size in SIZE_CLASSES
    ),
    Column("largest_activation_bytes", "bytes of the largest layer output"),
    Column("largest_weight_bytes", "bytes of the largest parameter"),
    Column("segment_bytes", "closed-form reserved bytes: the peaks and workspaces in whole segments"),
    Column("small_slack_bytes", "what is left free in the last small segment"),
    Column("medium_slack_bytes", "what is left free in the last medium segment"),
    Column("spare_medium_segments", "medium segments of the backward pass that the optimizer's step leaves free"),
    Column(
        "reused_segments", "spare medium segments that gradients and optimizer state of large tensors (10 to 20 MiB) can take"
    ),
)
"""Columns that need the layer list."""

FEATURE_COLUMNS: Final[tuple[Column, ...]] = TOTAL_COLUMNS + LAYER_COLUMNS
FEATURE_NAMES: Final[tuple[str, ...]] = tuple(column.name for column in FEATURE_COLUMNS)
FEATURE_SCHEMA: Final = hashlib.sha256(
    repr((3, FEATURE_NAMES, LAYER_GROUPS, KIND_RULES.tolist(), ELEMENT_BYTES, FOREACH_COPIES)).encode()
).hexdigest()[:12]
"""Identifies the columns and the tables behind them; bundles carry it.  Raise the number when code changes a meaning."""


def feature_matrix(jobs: Sequence[TrainingJob], blas_workspace_bytes: int) -> NDArray[np.float64]:
    """Feature vectors of ``B`` jobs, shape ``[B, F]`` with the columns :data:`FEATURE_COLUMNS`.

    Args:
        jobs: the jobs; those with totals only have zeros in :data:`LAYER_COLUMNS`.
        blas_workspace_bytes: cuBLAS workspace per handle on the GPU in question
            (:attr:`gpumemnet.devices.DeviceProfile.blas_workspace_bytes`).
    """
    if len(jobs) <= _FEW:
        rows = [feature_row(job, blas_workspace_bytes) for job in jobs]
        return np.array(rows, dtype=np.float64).reshape(len(jobs), len(FEATURE_COLUMNS))
    return feature_columns(jobs, blas_workspace_bytes)


def feature_columns(jobs: Sequence[TrainingJob], blas_workspace_bytes: int) -> NDArray[np.float64]:
    """The arrays behind :func:`feature_matrix`, for many jobs: same arguments, same answer."""
    matrix = np.zeros((len(jobs), len(FEATURE_COLUMNS)))
    columns = job_columns(jobs)
    _fill_totals(matrix[:, : len(TOTAL_COLUMNS)], jobs, columns)
    _fill_layers(matrix[:, len(TOTAL_COLUMNS) :], layer_table(jobs), columns, blas_workspace_bytes)
    return matrix


def _fill_totals(matrix: NDArray[np.float64], jobs: Sequence[TrainingJob], columns: NDArray[np.float64]) -> None:
    matrix[:, :10] = [known_amounts(job) for job in jobs]
    batch_size, _, weight_bytes, activation_bytes, copy_bytes, state_copies, temporary_copies, _, _, input_bytes = columns
    matrix[:, 10] = matrix[:, 2] * (weight_bytes + copy_bytes)
    matrix[:, 11] = matrix[:, 2] * matrix[:, 3] * weight_bytes
    matrix[:, 12] = matrix[:, 11] * state_copies
    matrix[:, 13] = matrix[:, 11] * temporary_copies
    matrix[:, 14] = input_bytes
    matrix[:, 15] = matrix[:, 4] * batch_size * activation_bytes


def _fill_layers(matrix: NDArray[np.float64], table: LayerTable, columns: NDArray[np.float64], blas_workspace_bytes: int) -> None:
    jobs, groups = len(matrix), len(GROUP_NAMES)
    form = closed_form(columns, table)
    matrix[:, 0] = table.counts > 0
    matrix[:, 1] = table.counts
    matrix[:, 2 : 2 + groups] = np.bincount(table.owner * groups + table.group, minlength=jobs * groups).reshape(jobs, groups)
    column = 2 + groups
    for part in (form.weights, form.kept, form.peak):
        matrix[:, column : column + len(SIZE_CLASSES)] = part
        column += len(SIZE_CLASSES)
    matrix[:, column] = form.largest_activation
    matrix[:, column + 1] = form.largest_weight

    workspaces = HANDLES * blas_workspace_bytes
    small = form.peak[:, 0] + CUBLASLT_WORKSPACE
    medium = form.peak[:, 1] + workspaces
    small_segments = np.ceil(small / SMALL_SEGMENT) * SMALL_SEGMENT
    medium_segments = np.ceil(medium / MEDIUM_SEGMENT)
    spare = np.maximum(medium_segments - np.ceil((form.optimizer_step[:, 1] + workspaces) / MEDIUM_SEGMENT), 0.0)
    matrix[:, column + 2] = small_segments + medium_segments * MEDIUM_SEGMENT + form.peak[:, 2] + form.peak[:, 3]
    matrix[:, column + 3] = small_segments - small
    matrix[:, column + 4] = medium_segments * MEDIUM_SEGMENT - medium
    matrix[:, column + 5] = spare
    matrix[:, column + 6] = np.minimum(spare, (1.0 + columns[5]) * form.weights[:, 2] / TYPICAL_LARGE_TENSOR)
    matrix[:, 2:] *= matrix[:, :1]
