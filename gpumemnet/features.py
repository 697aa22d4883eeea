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
    MEDIUM_LIMIT,
    MEDIUM_SEGMENT,
    SIZE_CLASSES,
    SMALL_SEGMENT,
    TYPICAL_LARGE_TENSOR,
    ClosedForm,
    closed_form,
    columns_of,
)
from gpumemnet.feature_row import QUICK_LAYERS, feature_row, is_quick
from gpumemnet.job import FAMILIES, TrainingJob
from gpumemnet.job_batch import JobBatch, layer_counts
from gpumemnet.job_table import JobTable, job_table
from gpumemnet.layer_table import layer_table
from gpumemnet.layers import GROUP_NAMES, LAYER_GROUPS
from gpumemnet.physics import ELEMENT_BYTES, FOREACH_COPIES
from gpumemnet.saved_tensors import KIND_RULES

_FEW: Final = 12
"""Up to so many jobs the loop over plain floats is quicker than the arrays."""
_LAYERS_AT_ONCE: Final = 4096
_JOBS_AT_ONCE: Final = 2048
"""The arrays of so many layers, or jobs, still fit the processor's cache."""


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
    *(Column(f"is_{family}", f"1 for the family {family}") for family in FAMILIES),
    Column("is_autocast", "1 under autocast"),
    Column("is_scaled", "1 where a gradient scaler is at work"),
    Column("is_half", "1 where weights are kept in half precision"),
    Column("is_tf32", "1 for TF32 matrix products"),
    Column("is_foreach", "1 where the optimizer's step works on lists of tensors"),
    Column("is_fused", "1 where it is one kernel"),
    Column("is_factored", "1 for Adafactor, whose state is a row and a column per matrix"),
    Column("is_flash", "1 for the flash attention kernel"),
    Column("is_memory_efficient", "1 for the memory-efficient attention kernel"),
    Column("is_math", "1 where attention is computed step by step"),
    Column("traced_peak_bytes", "reserved bytes at the peak as a trace found them; 0 where nobody traced"),
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
    *(Column(f"kept_by_{group}_bytes", f"packed bytes that layers of the group {group} keep") for group in GROUP_NAMES),
    Column("resident_bytes", "packed bytes that stay from step to step"),
    Column("loss_bytes", "packed bytes on top of them at the loss"),
    Column("backward_bytes", "packed bytes on top of them at the fullest moment of the backward pass"),
    Column("step_bytes", "packed bytes during the optimizer's step"),
    Column("unfragmented_bytes", "packed bytes at the fullest moment, as if every free byte could be used again"),
    Column("attention_matrix_bytes", "bytes of all attention matrices that are computed one by one"),
    Column("logits_bytes", "bytes of the last layer's output as the loss takes it"),
    Column("largest_convolution_bytes", "bytes of the largest input and output of a convolution together"),
    Column("block_count", "checkpointed blocks"),
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
    repr((7, FEATURE_NAMES, LAYER_GROUPS, KIND_RULES.tolist(), ELEMENT_BYTES, FOREACH_COPIES)).encode()
).hexdigest()[:12]
"""Identifies the columns and the tables behind them; bundles carry it.  Raise the number when code changes a meaning."""


def feature_matrix(jobs: Sequence[TrainingJob], blas_workspace_bytes: int) -> NDArray[np.float64]:
    """Feature vectors of ``B`` jobs, shape ``[B, F]`` with the columns :data:`FEATURE_COLUMNS`.

    Args:
        jobs: the jobs; those with totals only have zeros in :data:`LAYER_COLUMNS`.
        blas_workspace_bytes: cuBLAS workspace per handle on the GPU in question
            (:attr:`gpumemnet.devices.DeviceProfile.blas_workspace_bytes`).
    """
    if isinstance(jobs, JobBatch) or len(jobs) > _FEW:
        return feature_columns(jobs, blas_workspace_bytes)
    if sum([len(job.layers) for job in jobs]) <= QUICK_LAYERS and all(map(is_quick, jobs)):
        rows = [feature_row(job, blas_workspace_bytes) for job in jobs]
        return np.array(rows, dtype=np.float64).reshape(len(jobs), len(FEATURE_COLUMNS))
    return feature_columns(jobs, blas_workspace_bytes)


def feature_columns(jobs: Sequence[TrainingJob], blas_workspace_bytes: int) -> NDArray[np.float64]:
    """The arrays behind :func:`feature_matrix`, for many jobs: same arguments, same answer."""
    matrix = np.empty((len(jobs), len(FEATURE_COLUMNS)))
    ends = np.cumsum(layer_counts(jobs))
    start = 0
    while start < len(jobs):
        before = ends[start - 1] if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + _LAYERS_AT_ONCE, side="right")))
        end = min(end, start + _JOBS_AT_ONCE)
        fill = _fill if ends[end - 1] > before else _fill_totals
        fill(matrix[start:end], jobs[start:end], blas_workspace_bytes)
        start = end
    return matrix


def total_matrix(jobs: Sequence[TrainingJob]) -> NDArray[np.float64]:
    """The columns :data:`TOTAL_COLUMNS` alone, which hold for every GPU, shape ``[B, T]``."""
    matrix = np.empty((len(jobs), len(TOTAL_COLUMNS)))
    for start in range(0, len(jobs), _JOBS_AT_ONCE):
        rows = slice(start, start + _JOBS_AT_ONCE)
        for place, column in enumerate(_totals(job_table(jobs[rows]))):
            matrix[rows, place] = column
    return matrix


def with_layers(totals: NDArray[np.float64], jobs: JobBatch, blas_workspace_bytes: int) -> NDArray[np.float64]:
    """The :func:`feature_matrix` of jobs with the :func:`total_matrix` ``totals``; where none has layers, that itself."""
    return feature_columns(jobs, blas_workspace_bytes) if jobs.layer_counts.any() else totals


def _fill_totals(matrix: NDArray[np.float64], jobs: Sequence[TrainingJob], blas_workspace_bytes: int) -> None:
    """The rows of jobs of which none states its layers."""
    for place, column in enumerate(_totals(job_table(jobs))):
        matrix[:, place] = column
    matrix[:, len(TOTAL_COLUMNS) :] = 0.0


def _fill(matrix: NDArray[np.float64], jobs: Sequence[TrainingJob], blas_workspace_bytes: int) -> None:
    known, table = job_table(jobs), layer_table(jobs)
    form = closed_form(columns_of(known), table)
    groups = len(GROUP_NAMES)
    counts = np.bincount(table.owner * groups + table.group, minlength=len(jobs) * groups).reshape(len(jobs), groups)
    layers = (
        *(table.counts > 0, table.counts, *counts.T, *form.weights.T, *form.kept.T, *form.peak.T, *form.kept_by_group.T),
        *(form.resident, form.loss_moment, form.backward_moment, step := form.optimizer_step.sum(axis=1)),
        np.maximum(form.resident + form.backward_moment, step),
        *(form.attention_matrices, form.logits, form.largest_convolution, form.blocks),
        *(form.largest_activation, form.largest_weight),
        *_segments(form, known.state_copies, blas_workspace_bytes),
    )
    for place, column in enumerate((*_totals(known), *layers)):
        matrix[:, place] = column
    matrix[table.counts == 0, len(TOTAL_COLUMNS) :] = 0.0


def _totals(known: JobTable) -> tuple[NDArray[np.float64], ...]:
    """The columns :data:`TOTAL_COLUMNS`; :func:`gpumemnet.feature_row.total_columns` is the same for one job."""
    parameters, batch_size = known.total_parameters, known.batch_size
    share = np.ones(len(parameters))
    np.divide(known.trainable_parameters, parameters, out=share, where=parameters > 0)
    trained_bytes = parameters * share * known.weight_bytes
    return (
        *(batch_size, known.input_elements, parameters, share, known.total_activations, known.sequence_length),
        *(known.gradient_accumulation, *known.flags, known.traced_peak_bytes),
        parameters * (known.weight_bytes + known.copy_bytes),
        *(trained_bytes, trained_bytes * known.state_copies, trained_bytes * known.temporary_copies),
        batch_size * known.input_elements * known.input_bytes,
        known.total_activations * batch_size * known.activation_bytes,
    )


def _segments(form: ClosedForm, state_copies: NDArray[np.float64], blas_workspace_bytes: int) -> tuple[NDArray[np.float64], ...]:
    """The last five columns; :func:`gpumemnet.feature_row.segments` is the same for one job.

    Workspaces below 10 MiB lie among the medium tensors, larger ones in segments of their own.
    """
    workspaces = HANDLES * blas_workspace_bytes
    pooled, own = (workspaces, 0) if blas_workspace_bytes < MEDIUM_LIMIT else (0, workspaces)
    small, medium = form.peak[:, 0] + CUBLASLT_WORKSPACE, form.peak[:, 1] + pooled
    small_segments = np.ceil(small / SMALL_SEGMENT) * SMALL_SEGMENT
    medium_count = np.ceil(medium / MEDIUM_SEGMENT)
    medium_segments = medium_count * MEDIUM_SEGMENT
    after_backward = np.ceil((form.optimizer_step[:, 1] + pooled) / MEDIUM_SEGMENT)
    spare = np.maximum(medium_count - after_backward, 0.0)
    large_copies = (1.0 + state_copies) * form.weights[:, 2]
    return (
        small_segments + medium_segments + form.peak[:, 2] + form.peak[:, 3] + own,
        small_segments - small,
        medium_segments - medium,
        spare,
        np.minimum(spare, large_copies / TYPICAL_LARGE_TENSOR),
    )
