"""The feature vector: the fixed-length summary of a job that the MLP-based estimator reads, vectorised over many jobs.

GPUMemNet's features (arXiv 2602.17817, section 4: counts of layers, batch size, parameters, activations) are among the columns;
the others carry the physics: bytes under the job's precision and optimizer, and the closed-form peak by size class of the
allocator.  Every column is in natural units; networks take logarithms and standardise inside their own graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.features.layer_table import LayerTable, layer_table
from gpumemnet.features.option_columns import JobTable, OptionNumbers, job_table, option_numbers
from gpumemnet.job.job_batch import JobBatch
from gpumemnet.job.layers import GROUP_NAMES, LAYER_GROUPS
from gpumemnet.job.training_job import FAMILIES, TrainingJob
from gpumemnet.physics.closed_form import IS_COMPILED, SIZE_CLASSES, fill_columns
from gpumemnet.physics.element_types import ELEMENT_BYTES
from gpumemnet.physics.optimizers import FOREACH_COPIES, LOOP_COPIES
from gpumemnet.physics.saved_tensors import KIND_RULES

_FEW: Final = 12
"""Up to so many jobs the totals are quicker one by one than as arrays."""
_JOBS_AT_ONCE: Final = 2048
"""The arrays of so many jobs still fit the processor's cache."""


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
    repr((11, FEATURE_NAMES, LAYER_GROUPS, KIND_RULES.tolist(), ELEMENT_BYTES, FOREACH_COPIES, LOOP_COPIES)).encode()
).hexdigest()[:12]
"""Identifies the columns and the tables behind them; bundles carry it.  Raise the number when code changes a meaning."""


_WIDTH: Final = len(FEATURE_COLUMNS)
_TOTALS: Final = len(TOTAL_COLUMNS)


def feature_matrix(jobs: Sequence[TrainingJob], blas_workspace_bytes: int) -> NDArray[np.float64]:
    """Feature vectors of ``B`` jobs, shape ``[B, F]`` with the columns :data:`FEATURE_COLUMNS`.

    Args:
        jobs: the jobs; those with totals only have zeros in :data:`LAYER_COLUMNS`.
        blas_workspace_bytes: cuBLAS workspace per handle on the GPU in question
            (:attr:`gpumemnet.gpu.catalogue.DeviceProfile.blas_workspace_bytes`).
    """
    matrix = np.zeros((len(jobs), _WIDTH))
    if isinstance(jobs, JobBatch) or len(jobs) > _FEW:
        for start in range(0, len(jobs), _JOBS_AT_ONCE):
            rows, some = matrix[start : start + _JOBS_AT_ONCE], jobs[start : start + _JOBS_AT_ONCE]
            table = job_table(some)
            for place, column in enumerate(_totals(table)):
                rows[:, place] = column
            _fill_layers(rows, _columns_of(table), layer_table(some), blas_workspace_bytes)
    elif len(jobs):
        known = [(job, option_numbers(job)) for job in jobs]
        matrix[:, :_TOTALS] = [_total_row(job, numbers) for job, numbers in known]
        columns = np.array([_column_row(job, numbers) for job, numbers in known], dtype=np.float64)
        _fill_layers(matrix, columns, layer_table(jobs), blas_workspace_bytes)
    return matrix


def total_matrix(jobs: Sequence[TrainingJob]) -> NDArray[np.float64]:
    """The columns :data:`TOTAL_COLUMNS` alone, which hold for every GPU, shape ``[B, T]``."""
    matrix = np.empty((len(jobs), _TOTALS))
    for start in range(0, len(jobs), _JOBS_AT_ONCE):
        rows = slice(start, start + _JOBS_AT_ONCE)
        for place, column in enumerate(_totals(job_table(jobs[rows]))):
            matrix[rows, place] = column
    return matrix


def with_layers(totals: NDArray[np.float64], jobs: JobBatch, blas_workspace_bytes: int) -> NDArray[np.float64]:
    """The :func:`feature_matrix` of jobs with the :func:`total_matrix` ``totals``; where none has layers, that itself."""
    return feature_matrix(jobs, blas_workspace_bytes) if jobs.layer_counts.any() else totals


def _fill_layers(matrix: NDArray[np.float64], columns: NDArray[np.float64], table: LayerTable, workspace: int) -> None:
    """Write the layers' columns of jobs with the closed form's ``columns``, ``[B, len(JOB_COLUMNS)]``."""
    if not len(table.kind):
        return
    answers: Any = matrix.reshape(-1)
    given: tuple[Any, ...] = columns.reshape(-1), table.counts, table.kind, table.activations, table.parameters
    if not IS_COMPILED:  # of lists Python reads numbers sooner
        answers, given = answers.tolist(), tuple(numbers.tolist() for numbers in given)
    jobs, counts, kinds, activations, parameters = given
    fill_columns(answers, _WIDTH, _TOTALS, jobs, counts, kinds, activations, parameters, workspace)
    if not IS_COMPILED:
        matrix[:] = np.reshape(answers, matrix.shape)


def _column_row(job: TrainingJob, numbers: OptionNumbers) -> tuple[float, ...]:
    """The columns :data:`gpumemnet.physics.closed_form.JOB_COLUMNS`; :func:`_columns_of` is the same for many jobs."""
    assert job.total_parameters is not None
    assert job.trainable_parameters is not None
    inputs = job.batch_size * job.input_elements
    return (
        *(job.batch_size, job.sequence_length or 1, numbers.weight_bytes, numbers.base_bytes, numbers.copy_bytes),
        *(numbers.state_copies, numbers.temporary_copies, job.total_parameters - job.trainable_parameters),
        *(job.gradient_accumulation == 1, inputs * numbers.input_bytes, numbers.is_autocast, numbers.is_math),
        *(numbers.is_checkpointed, numbers.loop_copies, inputs, numbers.is_channels_last),
        numbers.filter_copies,
    )


def _columns_of(known: JobTable) -> NDArray[np.float64]:
    """The same of a table of jobs, shape ``[B, len(JOB_COLUMNS)]``."""
    inputs = known.batch_size * known.input_elements
    return np.stack(
        (
            *(known.batch_size, np.maximum(known.sequence_length, 1.0), known.weight_bytes, known.base_bytes, known.copy_bytes),
            *(known.state_copies, known.temporary_copies, known.total_parameters - known.trainable_parameters),
            *(known.gradient_accumulation == 1, inputs * known.input_bytes, known.is_autocast, known.is_math),
            *(known.is_checkpointed, known.loop_copies, inputs, known.is_channels_last),
            known.filter_copies,
        ),
        axis=1,
    )


def _total_row(job: TrainingJob, numbers: OptionNumbers) -> tuple[float, ...]:
    """The columns :data:`TOTAL_COLUMNS`; :func:`_totals` is the same for many jobs."""
    assert job.total_parameters is not None
    assert job.total_activations is not None
    batch_size, parameters, share = job.batch_size, job.total_parameters, job.trainable_share
    trained_bytes = parameters * share * numbers.weight_bytes
    return (
        *(batch_size, job.input_elements, parameters, share, job.total_activations, job.sequence_length or 0),
        *(job.gradient_accumulation, *numbers.flags, job.traced_peak_bytes or 0),
        parameters * (numbers.weight_bytes + numbers.copy_bytes),
        *(trained_bytes, trained_bytes * numbers.state_copies, trained_bytes * numbers.temporary_copies),
        batch_size * job.input_elements * numbers.input_bytes,
        job.total_activations * batch_size * numbers.activation_bytes,
    )


def _totals(known: JobTable) -> tuple[NDArray[np.float64], ...]:
    """The columns :data:`TOTAL_COLUMNS` of a table of jobs, shape ``[B]`` each."""
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
