"""The peak of a training step in closed form, by size class of the caching allocator, from the layer list alone.

No event is replayed: at the backward pass of layer *i* the weights and their optimizer state live, the gradients of the layers
from *i* on, the tensors kept for the layers up to *i*, the gradient that flows in and the one that flows out.  Prefix sums over
the layers give every such moment at once (liveness as in DNNMem, ESEC/FSE '20, section 3.3).  Each tensor counts with its share
of the segments that the allocator would fill with its like (``c10/cuda/CUDACachingAllocator.cpp``), because that is what
``nvidia-smi`` sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job import TrainingJob
from gpumemnet.layer_table import LayerTable
from gpumemnet.physics import ELEMENT_BYTES, optimizer_copies
from gpumemnet.saved_tensors import KIND_RULES
from gpumemnet.units import MIB

Array = NDArray[np.float64]

SIZE_CLASSES: Final = ("small", "medium", "large", "huge")
"""Tensors up to 1 MiB (packed into 2 MiB segments), below 10 MiB (20 MiB segments), below 20 MiB, and above (own segments)."""

SMALL_LIMIT: Final = MIB
MEDIUM_LIMIT: Final = 10 * MIB
LARGE_LIMIT: Final = 20 * MIB
SMALL_SEGMENT: Final = 2 * MIB
MEDIUM_SEGMENT: Final = 20 * MIB
ROUNDING: Final = 2 * MIB
BLOCK: Final = 512
CUBLASLT_WORKSPACE: Final = MIB
"""cuBLASLt's default workspace (``CUBLASLT_WORKSPACE_SIZE``, 1,024 KiB below compute capability 9.0)."""
HANDLES: Final = 2
"""cuBLAS handles of a training process: forward and backward run on different host threads."""
TYPICAL_LARGE_TENSOR: Final = 16 * MIB
"""Middle of the large size class, in logarithms."""


_CLASS_CODES: Final = np.arange(len(SIZE_CLASSES))
_CLASS_TOPS: Final = np.array([SMALL_LIMIT, MEDIUM_LIMIT - BLOCK, LARGE_LIMIT - BLOCK], dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class ClosedForm:
    """Closed-form bytes of ``B`` jobs; jobs without layers have zeros.

    Attributes:
        weights: packed bytes of the parameters by size class, shape ``[B, 4]``.
        kept: packed bytes of the tensors kept for the backward pass by size class, shape ``[B, 4]``.
        peak: packed bytes at the peak of each size class, shape ``[B, 4]``.
        optimizer_step: packed bytes during the optimizer's step by size class, shape ``[B, 4]``.
        largest_activation: bytes of the largest layer output, shape ``[B]``.
        largest_weight: bytes of the largest layer's parameters, shape ``[B]``.
    """

    weights: Array
    kept: Array
    peak: Array
    optimizer_step: Array
    largest_activation: Array
    largest_weight: Array


JOB_COLUMNS: Final = (
    "batch_size",
    "positions",
    "weight_bytes",
    "activation_bytes",
    "copy_bytes",
    "state_copies",
    "temporary_copies",
    "trainable_share",
    "created_share",
    "input_bytes",
)
"""What the closed form needs of a job beside its layers.

``positions`` is the sequence length, or 1 where there is none: a linear layer's output elements over its output width.  The bytes
are per element (:class:`gpumemnet.physics.ElementBytes`), the copies those of :class:`gpumemnet.physics.OptimizerCopies`.
``created_share`` is the share of the gradients that the backward pass creates as it goes: none where gradients are accumulated.
"""


def job_columns(jobs: Sequence[TrainingJob]) -> Array:
    """The columns :data:`JOB_COLUMNS` of ``B`` jobs, shape ``[10, B]``."""
    rows = []
    for job in jobs:
        element = ELEMENT_BYTES[job.precision]
        copies = optimizer_copies(job.optimizer, job.optimizer_implementation)
        share = job.trainable_share
        rows.append(
            (
                job.batch_size,
                job.sequence_length or 1,
                element.weight,
                element.activation,
                element.weight_copy,
                copies.state,
                copies.temporary,
                share,
                share if job.gradient_accumulation == 1 else 0.0,
                job.batch_size * job.input_elements * element.inputs,
            )
        )
    return np.array(rows, dtype=np.float64).T


def packed(sizes: Array) -> Array:
    """Bytes of segment that each tensor costs among its likes, in the column of its size class.

    A tensor of 7 MiB costs 10: two of them fill a segment of 20 MiB.

    Args:
        sizes: bytes of the tensors, any shape ``[...]``.

    Returns:
        Shape ``[..., 4]``, zero outside the tensor's own class.
    """
    blocks = np.ceil(sizes / BLOCK)
    blocks *= BLOCK
    classes = np.searchsorted(_CLASS_TOPS, blocks)
    shares = MEDIUM_SEGMENT / np.floor(MEDIUM_SEGMENT / np.minimum(np.maximum(blocks, BLOCK), MEDIUM_LIMIT))
    own_segments = np.ceil(blocks / ROUNDING) * ROUNDING
    amounts = np.where(classes == 0, blocks, np.where(classes == 1, shares, own_segments))
    by_class: Array = amounts[..., None] * (classes[..., None] == _CLASS_CODES)
    return by_class


def closed_form(columns: Array, table: LayerTable) -> ClosedForm:
    """The closed form of ``B`` jobs from their :func:`job_columns`, shape ``[10, B]``, and their layers."""
    rules = KIND_RULES[table.kind]
    if rules[:, 0].any():
        table = table.without(rules[:, 0] > 0)
        rules = KIND_RULES[table.kind]
    job_count = len(table.counts)
    totals = np.zeros((4, job_count, len(SIZE_CLASSES)))
    largest = np.zeros((2, job_count))
    if not len(table.owner):
        return ClosedForm(*totals, *largest)
    rows = np.flatnonzero(table.counts)  # the jobs that have layers
    counts = table.counts[rows]
    ends = counts.cumsum()
    starts = ends - counts
    job = columns[:, rows]
    state, temporary, share, created = job[5:9, :, None]

    outputs, kept, weights, copies = _tensors(columns.take(table.owner, axis=1), table, rules, ends)
    sums = np.add.reduceat(np.concatenate((weights, kept, copies), axis=1), starts).reshape(len(rows), 3, -1)
    weights_total = sums[:, 0]
    appearing = weights * np.repeat(created, counts, axis=0)
    change = (kept - appearing).cumsum(axis=0)
    if len(rows) > 1:
        change -= np.repeat(change[starts] - kept[starts] + appearing[starts], counts, axis=0)
    change += appearing
    change += outputs
    incoming = outputs.copy()
    incoming[ends - 1] = 0.0  # the gradient that flows in has the size of the layer before, and the first layer has none
    change[1:] += incoming[:-1]
    resident = (1.0 + share * (1.0 + state)) * weights_total + packed(job[9])
    temporaries = share * temporary * weights_total

    totals[0, rows] = weights_total
    totals[1, rows] = sums[:, 1]
    in_backward = np.maximum.reduceat(change, starts) + sums[:, 2]  # autocast's copies are gone when the optimizer steps
    totals[2, rows] = resident + np.maximum(in_backward, temporaries + outputs[ends - 1])
    totals[3, rows] = resident + temporaries
    largest[0, rows] = np.maximum.reduceat(table.activations, starts) * job[0] * job[3]
    largest[1, rows] = np.maximum.reduceat(table.parameters, starts) * job[2]
    return ClosedForm(*totals, *largest)


def _tensors(job: Array, table: LayerTable, rules: Array, ends: NDArray[np.int64]) -> tuple[Array, Array, Array, Array]:
    """Packed bytes by size class of each layer's output, of what it keeps for backward, of its weights and of their copies.

    Args:
        job: :data:`JOB_COLUMNS` of the job of each of the ``N`` layers, shape ``[10, N]``.
        table: the layers.
        rules: :data:`gpumemnet.saved_tensors.KIND_RULES` of each layer, shape ``[N, 8]``.
        ends: where each job's layers end.
    """
    _, saves_input, saves_output, mask_bytes, statistics, second_share, has_bias, is_cast = rules.T
    elements = table.activations * job[0]
    widths = table.activations / job[1]
    second = second_share * table.parameters + (has_bias * widths) * (table.parameters > widths)
    sizes = np.empty((5, len(table.owner)))
    sizes[0] = elements * job[3]
    sizes[1] = elements * mask_bytes
    sizes[2] = table.parameters - second
    sizes[3] = second
    sizes[4] = sizes[2] * job[4] * is_cast
    sizes[2:4] *= job[2]
    outputs, masks, mains, seconds, copies = packed(sizes)
    is_kept = saves_output.copy()
    is_kept[:-1] += saves_input[1:]
    is_kept[ends - 1] = 1.0  # the loss keeps the logits
    kept = outputs * (is_kept > 0)[:, None] + masks + seconds * statistics[:, None]
    return outputs, kept, mains + seconds, copies
