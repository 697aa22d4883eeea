"""The peak of a training step in closed form, by size class of the caching allocator, from the layer list alone.

No event is replayed: at the backward pass of layer *i* the weights and their optimizer state live, the gradients of the layers
from *i* on, the tensors kept for the layers up to *i*, the gradient that flows in and the one that flows out.  Prefix sums over
the layers give every such moment at once (liveness as in DNNMem, ESEC/FSE '20, section 3.3).  Each tensor counts with its share
of the segments that the allocator would fill with its like (``c10/cuda/CUDACachingAllocator.cpp``), because that is what
``nvidia-smi`` sees.  Segments are never merged: what activations of 50 MiB leave free cannot hold the gradient of an embedding of
2 GiB, while the other way round they can.  So the peak is taken for every octave of tensor sizes apart, what the optimizer's step
needs comes out of segments that are as large or larger, and the sum of what each octave holds is what the process comes to hold.

What the layer list does not say is taken as usual: frozen layers are the first ones, a checkpointed block ends with a residual
sum (without any, it starts with a linear layer or a convolution), the loss is a cross-entropy of the last layer's output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job import TrainingJob
from gpumemnet.job_table import JobTable, job_table
from gpumemnet.layer_table import LayerTable
from gpumemnet.layers import CODE_OF_KIND, GROUP_NAMES, KINDS, LAYER_GROUPS
from gpumemnet.saved_tensors import FULL_BYTES, KIND_RULES
from gpumemnet.units import MIB

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Indices = NDArray[np.int64]

SIZE_CLASSES: Final = ("small", "medium", "large", "huge")
"""Tensors up to 1 MiB (packed into 2 MiB segments), below 10 MiB (20 MiB segments), below 20 MiB, and above (own segments).

Features are by these; the peaks behind them by :data:`BLOCK_CLASSES`.
"""

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
LOSS_TENSORS: Final = 3
"""At the loss: log-probabilities, their gradient, and the gradient of the logits (``aten/src/ATen/native/LossNLL.cpp``)."""

HUGE_OCTAVES: Final = 7
"""Tensors of 20 to 40 MiB, and so on, up to those above 1,280 MiB."""
BLOCK_TOPS: Final = (SMALL_LIMIT, *(top - BLOCK for top in (MEDIUM_LIMIT, *(LARGE_LIMIT << k for k in range(HUGE_OCTAVES)))))
"""Largest block of each class of tensors that take over each other's segments, but the last, which has no largest."""
BLOCK_CLASSES: Final = len(BLOCK_TOPS) + 1
_LARGEST: Final = len(SIZE_CLASSES) - 1
_SIZE_CLASS_OF: Final[Array] = np.eye(len(SIZE_CLASSES))[np.minimum(np.arange(BLOCK_CLASSES), _LARGEST)]
"""Adds amounts by block class up to amounts by size class, shape ``[BLOCK_CLASSES, 4]``."""


def _is_one_of(kinds: Sequence[str]) -> Flags:
    return np.array([kind in kinds for kind in KINDS])


_STARTS_BLOCK: Final = _is_one_of((*LAYER_GROUPS["linear"], *LAYER_GROUPS["conv"]))
_IS_ATTENTION: Final = _is_one_of((*LAYER_GROUPS["attention"], "softmax"))
_IS_EMBEDDING: Final = _is_one_of(LAYER_GROUPS["embedding"])
_ADD, _MULTIPLY, _SOFTMAX, _MATMUL, _DROPOUT = (
    CODE_OF_KIND[kind] for kind in ("add", "multiply", "softmax", "matmul", "dropout")
)


@dataclass(frozen=True, slots=True, eq=False)
class ClosedForm:
    """Closed-form bytes of ``B`` jobs; jobs without layers have zeros.

    Attributes:
        weights: packed bytes of the parameters by size class, shape ``[B, 4]``.
        kept: packed bytes of the tensors kept for the backward pass by size class, shape ``[B, 4]``.
        peak: packed bytes at the peaks of the block classes, by size class, shape ``[B, 4]``.
        optimizer_step: packed bytes during the optimizer's step by size class, shape ``[B, 4]``.
        resident: packed bytes that stay from step to step, shape ``[B]``.
        loss_moment, backward_moment: packed bytes on top of those at the loss, and at the fullest moment, shape ``[B]``.
        kept_by_group: packed bytes kept for the backward pass by the layer group that made them, shape ``[B, G]``.
        attention_matrices: bytes of the outputs of all softmax layers, shape ``[B]``.
        logits: bytes of the last layer's output as the loss takes it, shape ``[B]``.
        largest_activation: bytes of the largest layer output, shape ``[B]``.
        largest_weight: bytes of the largest layer's parameters, shape ``[B]``.
        largest_convolution: bytes of the largest input and output of a convolution together, shape ``[B]``.
        blocks: number of checkpointed blocks, 0 where nothing is checkpointed, shape ``[B]``.
    """

    weights: Array
    kept: Array
    peak: Array
    optimizer_step: Array
    resident: Array
    loss_moment: Array
    backward_moment: Array
    kept_by_group: Array
    attention_matrices: Array
    logits: Array
    largest_activation: Array
    largest_weight: Array
    largest_convolution: Array
    blocks: Array


JOB_COLUMNS: Final = (
    "batch_size",
    "positions",
    "weight_bytes",
    "activation_bytes",
    "copy_bytes",
    "state_copies",
    "temporary_copies",
    "frozen_parameters",
    "is_created",
    "input_bytes",
    "is_autocast",
    "is_math_attention",
    "is_checkpointed",
    "loop_copies",
    "input_elements",
)
"""What the closed form needs of a job beside its layers.

``positions`` is the sequence length, or 1 where there is none: a linear layer's output elements over its output width.  The bytes
are per element (:class:`gpumemnet.physics.ElementBytes`), the copies those of :class:`gpumemnet.physics.OptimizerCopies`.
``is_created`` says that the backward pass creates the gradients as it goes: it does not where they are accumulated.
"""


def job_columns(jobs: Sequence[TrainingJob]) -> Array:
    """The columns :data:`JOB_COLUMNS` of ``B`` jobs, shape ``[15, B]``."""
    return columns_of(job_table(jobs))


def columns_of(table: JobTable) -> Array:
    """The same of a table of jobs."""
    inputs = table.batch_size * table.input_elements
    return np.stack(
        (
            table.batch_size,
            np.maximum(table.sequence_length, 1.0),
            table.weight_bytes,
            table.base_bytes,
            table.copy_bytes,
            table.state_copies,
            table.temporary_copies,
            table.total_parameters - table.trainable_parameters,
            table.gradient_accumulation == 1,
            inputs * table.input_bytes,
            table.is_autocast,
            table.is_math,
            table.is_checkpointed,
            table.loop_copies,
            inputs,
        )
    )


def packed(sizes: Array) -> Array:
    """Bytes of segment that each tensor costs among its likes, in the column of its block class.

    A tensor of 7 MiB costs 10: two of them fill a segment of 20 MiB.  Costs are whole bytes, so that sums are exact in any
    order: a job has the same features alone and among others.

    Args:
        sizes: bytes of the tensors, any shape ``[...]``.

    Returns:
        Shape ``[..., C]`` with ``C`` block classes, zero outside the tensor's own.
    """
    flat = np.ascontiguousarray(sizes).ravel()
    places = np.flatnonzero(flat != 0.0)  # half of them are empty: a layer without weights, or without a mask
    blocks = np.ceil(flat[places] / BLOCK)
    blocks *= BLOCK
    shares = MEDIUM_SEGMENT // (MEDIUM_SEGMENT // np.minimum(blocks, MEDIUM_LIMIT))
    own_segments = np.ceil(blocks / ROUNDING) * ROUNDING
    classes = np.searchsorted(BLOCK_TOPS, blocks)
    amounts = np.where(classes > 1, own_segments, np.where(classes, shares, blocks))
    by_class = np.zeros(len(flat) * BLOCK_CLASSES)
    by_class[places * BLOCK_CLASSES + classes] = amounts
    return by_class.reshape(*sizes.shape, BLOCK_CLASSES)


@dataclass(frozen=True, slots=True, eq=False)
class _Chain:
    """The layers with storage of ``J`` jobs that have any, ``N`` in all, with what is known of each.

    Attributes:
        starts, ends: first layer of each job, and one past its last, shape ``[J]``.
        is_first, is_last: of a job, shape ``[N]``.
        job: the job's columns for each layer, shape ``[15, N]``.
        kind, group: codes, shape ``[N]``.
        rules: shape ``[N, 10]``.
        elements: output elements of the batch, shape ``[N]``.
        parameters: shape ``[N]``.
    """

    starts: Indices
    ends: Indices
    is_first: Flags
    is_last: Flags
    job: Array
    kind: Indices
    group: Indices
    rules: Array
    elements: Array
    activations: Array
    parameters: Array

    def cumulated(self, amounts: Array) -> Array:
        """Sums from each job's first layer up to each layer, shape as ``amounts``, ``[N]`` or ``[N, C]``."""
        sums = amounts.cumsum(axis=0)
        before = sums[self.starts] - amounts[self.starts]
        return sums - np.repeat(before, self.ends - self.starts, axis=0)

    def before(self, values: Array, first: Array | float) -> Array:
        """Each layer's predecessor's value; ``first`` for a job's first layer."""
        shifted = np.empty_like(values)
        shifted[1:] = values[:-1]
        shifted[:1] = 0.0  # what lies there by chance may be no number, and times 0 it stays none
        filled: Array = np.where(self.is_first, first, shifted) if shifted.ndim == 1 else shifted * ~self.is_first[:, None]
        return filled


@dataclass(frozen=True, slots=True, eq=False)
class _Tensors:
    """Packed bytes by block class, shape ``[N, C]`` each.

    Attributes:
        outputs: of each layer.
        kept: of what each layer leaves for the backward pass.
        weights: of its parameters, main and second tensor.
        copies: of autocast's copies of them.
        largest: of its larger parameter tensor.
        is_saved: whether the layer's own output is among what is kept, shape ``[N]``.
        is_needed: whether a gradient reaches the layer, shape ``[N]``.
        element_bytes: of the outputs, shape ``[N]``.
    """

    outputs: Array
    kept: Array
    weights: Array
    copies: Array
    largest: Array
    is_saved: Flags
    is_needed: Flags
    element_bytes: Array


def closed_form(columns: Array, table: LayerTable) -> ClosedForm:
    """The closed form of ``B`` jobs from their :func:`job_columns`, shape ``[15, B]``, and their layers."""
    rules = KIND_RULES[table.kind]
    if rules[:, 0].any():
        table = table.without(rules[:, 0] > 0)
        rules = KIND_RULES[table.kind]
    job_count = len(table.counts)
    if not len(table.owner):
        return _spread(job_count, np.zeros(0, dtype=np.int64), {})
    rows = np.flatnonzero(table.counts)  # the jobs that have layers
    chain = _chain(columns, table, rules, table.counts[rows])
    tensors = _tensors(chain)
    starts, ends, lasts = chain.starts, chain.ends, chain.ends - 1
    job = columns[:, rows]
    state, temporary, created, loop = job[5, :, None], job[6, :, None], job[8, :, None], job[13, :, None]

    trained = tensors.weights * tensors.is_needed[:, None]
    sums = np.add.reduceat(np.concatenate((tensors.weights, trained, tensors.kept, tensors.copies), axis=1), starts)
    weights_total, trained_total, kept_total, copies_total = np.split(sums, 4, axis=1)
    largest_trained = np.maximum.reduceat(tensors.largest * tensors.is_needed[:, None], starts)

    standing, recomputed, blocks = _checkpointed(chain, tensors) if job[12].any() else (tensors.kept, None, np.zeros(len(rows)))
    logits = chain.elements[lasts] * np.where(job[10] > 0, FULL_BYTES, tensors.element_bytes[lasts])
    at_loss = np.add.reduceat(standing, starts) + copies_total + LOSS_TENSORS * packed(logits)
    # Under autocast the loss takes a copy in fp32, and nothing needs the layer's own output any more.
    at_loss += tensors.outputs[lasts] * ~(tensors.is_saved[lasts] | (job[10] > 0))[:, None]

    # What is kept comes layer by layer; the gradients of later layers are there, unless they are from the start.
    counts = ends - starts
    moments = chain.cumulated(standing + tensors.copies - np.repeat(created, counts, axis=0) * trained)
    moments += np.repeat(created * trained_total, counts, axis=0)
    if recomputed is not None:
        moments += recomputed
    moments += trained
    moments *= tensors.is_needed[:, None]  # without a gradient only what flows forward is there
    moments += tensors.outputs
    moments += chain.before(tensors.outputs, 0.0)
    fullest = np.maximum(np.maximum.reduceat(moments, starts), at_loss)

    resident = weights_total + (state + (1.0 - created)) * trained_total + packed(job[9])
    step = resident + (created + temporary) * trained_total + loop * largest_trained
    is_convolution = chain.group == GROUP_NAMES.index("conv")
    output_bytes = chain.elements * tensors.element_bytes
    around = (output_bytes + chain.before(output_bytes, chain.job[9])) * is_convolution

    groups = len(GROUP_NAMES)
    place = np.repeat(np.arange(len(rows)), counts) * groups + chain.group
    by_group = np.bincount(place, weights=_over_classes(tensors.kept), minlength=len(rows) * groups)
    return _spread(
        job_count,
        rows,
        {
            "weights": weights_total @ _SIZE_CLASS_OF,
            "kept": kept_total @ _SIZE_CLASS_OF,
            "peak": held(resident + fullest, step) @ _SIZE_CLASS_OF,
            "optimizer_step": step @ _SIZE_CLASS_OF,
            "resident": resident.sum(axis=1),
            "loss_moment": at_loss.sum(axis=1),
            "backward_moment": np.maximum(np.maximum.reduceat(_over_classes(moments), starts), at_loss.sum(axis=1)),
            "kept_by_group": by_group.reshape(len(rows), groups),
            "attention_matrices": np.add.reduceat(output_bytes * (chain.kind == _SOFTMAX), starts),
            "logits": logits,
            "largest_activation": np.maximum.reduceat(output_bytes, starts),
            "largest_weight": np.maximum.reduceat(chain.parameters, starts) * job[2],
            "largest_convolution": np.maximum.reduceat(around, starts),
            "blocks": blocks,
        },
    )


def held(before: Array, after: Array) -> Array:
    """What the process holds after two moments, by block class, all ``[B, C]``.

    What the second moment needs beyond the first in a class comes out of what larger classes have free by then, but for the
    smallest, which has a pool of its own; the rest is new.
    """
    beyond = (after - before)[:, :0:-1]
    new = np.maximum(np.maximum.accumulate(beyond.cumsum(axis=1), axis=1), 0.0)  # in a class and all larger ones together
    amounts = before.copy()
    amounts[:, 0] = np.maximum(before[:, 0], after[:, 0])
    amounts[:, :0:-1] += np.diff(new, axis=1, prepend=0.0)
    return amounts


def _over_classes(amounts: Array) -> Array:
    """Sums of ``[N, C]`` over the block classes; a matrix product is ten times as quick as a sum along so short an axis."""
    return amounts @ np.ones(BLOCK_CLASSES)


_WIDTHS: Final = {"weights": 4, "kept": 4, "peak": 4, "optimizer_step": 4, "kept_by_group": len(GROUP_NAMES)}


def _spread(job_count: int, rows: Indices, amounts: Mapping[str, NDArray[Any]]) -> ClosedForm:
    """The amounts of the jobs in ``rows``, and zeros for the others."""
    values = {}
    for field in fields(ClosedForm):
        width = _WIDTHS.get(field.name)
        values[field.name] = np.zeros((job_count, width) if width else job_count)
        if len(rows):
            values[field.name][rows] = amounts[field.name]
    return ClosedForm(**values)


def _chain(columns: Array, table: LayerTable, rules: Array, counts: Indices) -> _Chain:
    ends = counts.cumsum()
    starts = ends - counts
    is_first, is_last = np.zeros((2, len(table.owner)), dtype=bool)
    is_first[starts] = True
    is_last[ends - 1] = True
    job = columns.take(table.owner, axis=1)
    return _Chain(
        starts=starts,
        ends=ends,
        is_first=is_first,
        is_last=is_last,
        job=job,
        kind=table.kind,
        group=table.group,
        rules=rules,
        elements=table.activations * job[0],
        activations=table.activations,
        parameters=table.parameters,
    )


def _tensors(chain: _Chain) -> _Tensors:
    """Every tensor of each layer, and which of them stay for the backward pass."""
    _, saves_input, saves_output, mask_bytes, statistics, second_share, has_bias, is_cast, _, _ = chain.rules.T
    element_bytes, input_bytes = _element_bytes(chain)
    is_needed = chain.cumulated(chain.parameters) > chain.job[7]
    previous_bytes = chain.before(element_bytes, chain.job[9] / chain.job[14])
    previous_elements = chain.before(chain.elements, chain.job[14])
    saves = (saves_input > 0) & is_needed
    casts = saves & (input_bytes != previous_bytes)
    is_saved = (saves_output > 0) & is_needed
    is_saved[:-1] |= (saves & ~casts & ~chain.is_first)[1:]
    is_scaling = (chain.kind == _MULTIPLY) & (chain.elements > previous_elements) & (chain.parameters == 0) & is_needed

    widths = chain.activations / chain.job[1]
    second = second_share * chain.parameters + (has_bias * widths) * (chain.parameters > widths)
    main = chain.parameters - second
    sizes = np.stack(
        (
            chain.elements * element_bytes,
            chain.elements * mask_bytes * is_needed,
            main * chain.job[2],
            second * chain.job[2],
            main * chain.job[4] * is_cast,
            previous_elements * input_bytes * casts,
        )
    )
    outputs, masks, mains, seconds, copies, casted = packed(sizes)
    kept = outputs * (is_saved * 1.0 + is_scaling)[:, None] + masks + casted + seconds * (statistics * is_needed)[:, None]
    return _Tensors(outputs, kept, mains + seconds, copies, np.maximum(mains, seconds), is_saved, is_needed, element_bytes)


def _element_bytes(chain: _Chain) -> tuple[Array, Array]:
    """Bytes per element of each layer's output, and of its input as the kernel takes it, shape ``[N]``.

    Autocast lowers some kinds and raises others; the rest hand on what they are given.  A sum with a residual stream that began
    with an embedding is fp32.  The math kernel computes attention weights in fp32 whatever it is given
    (``aten/src/ATen/native/transformers/attention.cpp``).
    """
    is_autocast, is_math = chain.job[10] > 0, chain.job[11] > 0
    if not (is_autocast.any() or is_math.any()):
        return chain.job[3], chain.job[3]
    own, taken = chain.rules[:, 8], chain.rules[:, 9]
    counts = chain.ends - chain.starts
    has_embedding = np.repeat(np.logical_or.reduceat(_IS_EMBEDDING[chain.kind], chain.starts), counts)
    fixed = np.where((chain.kind == _ADD) & has_embedding, FULL_BYTES, own)
    fixed = np.where(is_autocast, fixed, chain.job[3])
    is_softmax = chain.kind == _SOFTMAX
    after, before = np.zeros((2, len(is_softmax)), dtype=bool)
    after[1:], before[:-1] = is_softmax[:-1], is_softmax[1:]
    after &= (chain.kind == _DROPOUT) & ~chain.is_first
    before &= (chain.kind == _MATMUL) & ~chain.is_last
    in_full = is_math & (is_softmax | after | before)
    fixed = np.where(in_full, FULL_BYTES, fixed)
    fixed = np.where(chain.is_first & (fixed == 0), FULL_BYTES, fixed)
    known = np.maximum.accumulate(np.where(fixed > 0, np.arange(len(fixed)), 0))
    element_bytes = fixed[known]
    previous = chain.before(element_bytes, chain.job[9] / chain.job[14])
    weighs = np.zeros(len(is_softmax), dtype=bool)
    weighs[1:] = in_full[:-1] & ~before[:-1] & ~chain.is_first[1:]
    keeps_input = (taken == 0) | ~is_autocast | (weighs & is_math)
    return element_bytes, np.where(keeps_input, previous, taken)


def _checkpointed(chain: _Chain, tensors: _Tensors) -> tuple[Array, Array, Array]:
    """What stands from the forward pass, what recomputing adds up to each layer, shape ``[N, C]``; blocks of each job ``[J]``."""
    count = len(chain.kind)
    places = np.arange(count)
    counts = chain.ends - chain.starts
    is_add = chain.kind == _ADD
    follows_add = np.zeros(count, dtype=bool)
    follows_add[1:] = is_add[:-1]
    follows_add &= ~chain.is_first
    has_add = np.repeat(np.logical_or.reduceat(is_add, chain.starts), counts)
    is_attention = _IS_ATTENTION[chain.kind]
    has_attention = np.repeat(np.logical_or.reduceat(is_attention, chain.starts), counts)
    stretch = (chain.is_first | follows_add).cumsum() - 1
    attends = np.bincount(stretch, weights=is_attention)[stretch] > 0
    begins = np.where(has_add, follows_add & (attends | ~has_attention), _STARTS_BLOCK[chain.kind]) | chain.is_first

    # what follows the last sum, or the last linear layer or convolution, lies outside of every block
    last_add = np.maximum.reduceat(np.where(is_add, places, -1), chain.starts)
    last_begin = np.maximum.reduceat(np.where(begins, places, -1), chain.starts) - 1
    last = np.repeat(np.where(last_add >= 0, last_add, last_begin), counts)
    inside = (chain.job[12] > 0) & (places <= last)
    ends_block = np.ones(count, dtype=bool)
    ends_block[:-1] = begins[1:] | ~inside[1:]
    ends_block &= inside
    standing = np.where(inside[:, None], tensors.outputs * (ends_block & tensors.is_needed)[:, None], tensors.kept)
    sums = tensors.kept.cumsum(axis=0)
    first_of_block = np.maximum.accumulate(np.where(begins, places, 0))
    recomputed = (sums - (sums - tensors.kept)[first_of_block]) * inside[:, None]
    return standing, recomputed, np.add.reduceat(ends_block * 1.0, chain.starts)
