"""The memory of a training step in the closed form: what a block costs in segments, the numbers of
a job, what its step holds in each class of blocks, and the columns of the feature vector that are
made of them.

Blocks of one class take over each other's segments.  The cost of a block is its share of the
segments that the allocator would fill with blocks like it, because ``nvidia-smi`` shows segments
(``c10/cuda/CUDACachingAllocator.cpp``).  :mod:`gpumemnet.physics.closed_form` fills the records
while it walks over the layers.

Cython compiles this module with the types of ``step_memory.pxd``; there a record is a C structure.
Without a compiler it runs as it is.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, Final

from gpumemnet.allocator import settings
from gpumemnet.job.layers import GROUP_NAMES
from gpumemnet.job.training_job import FAMILIES, NUMBER_FIELDS
from gpumemnet.units import MIB

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    MutableNumbers = MutableSequence[float] | NDArray[np.float64]
    Numbers = Sequence[float] | NDArray[np.float64]
    Codes = Sequence[int] | NDArray[np.int64]

IS_COMPILED: Final = not __file__.endswith(".py")
"""Whether this module is compiled."""

LARGE_LIMIT: Final = 20 * MIB
HUGE_OCTAVES: Final = 7
"""Tensors of 20 to 40 MiB, and so on, up to those above 1,280 MiB."""
_LARGER_FROM: Final = (
    settings.MINIMUM_LARGE_BYTES,
    *(LARGE_LIMIT << octave for octave in range(HUGE_OCTAVES)),
)
BLOCK_TOPS: Final = (
    settings.SMALL_BYTES,
    *(limit - settings.MINIMUM_BLOCK_BYTES for limit in _LARGER_FROM),
)
"""Largest block of each class of tensors that take over each other's segments, but the last, which
has no largest."""
BLOCK_CLASSES: Final = len(BLOCK_TOPS) + 1

SIZE_CLASSES: Final = ("small", "medium", "large", "huge")
"""Tensors up to 1 MiB (packed into 2 MiB segments), below 10 MiB (20 MiB segments), below 20 MiB,
and above (own segments).

Features are by these; the peaks behind them by
:data:`~gpumemnet.physics.step_memory.BLOCK_CLASSES`.
"""
CUBLASLT_WORKSPACE: Final = MIB
"""cuBLASLt's default workspace (``CUBLASLT_WORKSPACE_SIZE``, 1,024 KiB below compute capability
9.0)."""
HANDLES: Final = 2
"""cuBLAS handles of a training process: forward and backward run on different host threads."""
TYPICAL_LARGE_TENSOR: Final = 16 * MIB
"""Middle of the large size class, in logarithms."""
FLAGS: Final = 13 + len(FAMILIES)
"""Number of columns ``is_…``."""
TOTALS: Final = 7 + FLAGS + 7
"""How many columns :func:`fill_totals` writes: :data:`gpumemnet.predict.features.TOTAL_COLUMNS`."""
COLUMNS: Final = 2 + 2 * len(GROUP_NAMES) + 3 * len(SIZE_CLASSES) + 16
"""How many columns :func:`fill_columns` writes: those of
:data:`gpumemnet.predict.features.LAYER_COLUMNS`, in their order."""

# The same numbers once more where the compiled form reads them all the time: step_memory.pxd makes
# C variables of them.
_BLOCK: Final = float(settings.MINIMUM_BLOCK_BYTES)
_ROUNDING: Final = float(settings.SEGMENT_ROUNDING_BYTES)
_MEDIUM_SEGMENT: Final = float(settings.LARGE_SEGMENT_BYTES)
_SMALL_TOP: Final = float(BLOCK_TOPS[0])
_MEDIUM_TOP: Final = float(BLOCK_TOPS[1])
_LARGE_TOP: Final = float(BLOCK_TOPS[2])
_CLASSES: Final = BLOCK_CLASSES
_SMALL_SEGMENT: Final = float(settings.SMALL_SEGMENT_BYTES)
_MEDIUM_LIMIT: Final = float(settings.MINIMUM_LARGE_BYTES)
_CUBLASLT: Final = float(CUBLASLT_WORKSPACE)
_TYPICAL: Final = float(TYPICAL_LARGE_TENSOR)
_HANDLES: Final = float(HANDLES)
_SIZES: Final = len(SIZE_CLASSES)
_GROUPS: Final = len(GROUP_NAMES)
_FIELDS: Final = len(NUMBER_FIELDS)
_TOTALS: Final = TOTALS


def block_bytes(size: float) -> float:
    """Bytes of the allocator's block for a tensor of ``size`` bytes (``round_size``)."""
    return -(-size // _BLOCK) * _BLOCK


def class_of_block(block: float) -> int:
    """Class of a block: blocks of one class take over each other's segments."""
    if block <= _SMALL_TOP:
        return 0
    if block <= _MEDIUM_TOP:
        return 1
    block_class = 2
    top = _LARGE_TOP
    while block > top and block_class < _CLASSES - 1:
        block_class += 1
        top = 2.0 * (top + _BLOCK) - _BLOCK
    return block_class


def segment_cost(block: float, block_class: int) -> float:
    """Bytes of segment that a block of this class costs among blocks like it
    (``get_allocation_size``).

    One of 7 MiB costs 10: two of them fill a segment of 20 MiB.  Costs are whole bytes.
    """
    if block_class > 1:
        return -(-block // _ROUNDING) * _ROUNDING
    if block_class == 1:
        return _MEDIUM_SEGMENT // (_MEDIUM_SEGMENT // block)
    return block


_NO_CLASS: Final = list((0.0,) * BLOCK_CLASSES)
_NO_GROUP: Final = list((0.0,) * len(GROUP_NAMES))
_NO_SIZE: Final = list((0.0,) * len(SIZE_CLASSES))


class OptionNumbers:
    """The numbers that depend on a job's options alone.

    Attributes:
        flags: the columns ``is_…`` of :data:`gpumemnet.predict.features.TOTAL_COLUMNS`, in their
            order.
        input_bytes, weight_bytes, activation_bytes, copy_bytes, uncast_bytes: bytes per element,
        see
            :class:`gpumemnet.physics.element_types.ElementBytes`.
        state_copies, temporary_copies, loop_copies: see
        :class:`gpumemnet.physics.optimizers.OptimizerCopies`.
        filter_copies: optimizer state in copies of the convolutions' parameters, in addition to
            ``state_copies``.
        is_autocast, is_math_attention, is_checkpointed, is_channels_last, frees_outputs_first,
        keeps_outputs: options that the closed form reads, see
            :class:`gpumemnet.physics.step_memory.JobNumbers`.
    """

    def __init__(self) -> None:
        self.flags = list((0.0,) * FLAGS)
        self.input_bytes = self.weight_bytes = self.activation_bytes = self.copy_bytes = (
            self.uncast_bytes
        ) = 0.0
        self.state_copies = self.temporary_copies = self.loop_copies = self.filter_copies = 0.0
        self.is_autocast = self.is_math_attention = self.is_checkpointed = self.is_channels_last = (
            False
        )
        self.frees_outputs_first = self.keeps_outputs = False


class JobNumbers:
    """What the closed form needs of a job beside its layers.

    Attributes:
        batch_size: samples per forward pass.
        positions: the sequence length, or 1: a linear layer's output elements over its output
            width.
        input_elements, input_bytes: of the input batch.
        frozen_parameters: parameter elements that receive no gradient.
        weight_bytes, copy_bytes: per element of weights, and of the copies that autocast makes of
            them (0 without autocast).
        uncast_bytes: per element of the outputs of layers that autocast has no rule for
            (:attr:`gpumemnet.physics.element_types.ElementBytes.uncast`).
        state_copies, temporary_copies, loop_copies: see
        :class:`gpumemnet.physics.optimizers.OptimizerCopies`.
        filter_copies: optimizer state of convolutions, beside ``state_copies``.
        new_gradients: 1 if the backward pass creates the gradients; 0 if it accumulates them in
            those that exist.
        is_autocast, is_math_attention, is_checkpointed, is_channels_last: options of the job.
        batches_on_gpu: input batches that are on the GPU, 1 where the job does not say it.
        frees_outputs_first: the network's outputs are freed before the backward pass.
        keeps_outputs: they live until the next step replaces them.  Where neither holds, or the job
            does not say it, they live until the step ends.
    """

    def __init__(self) -> None:
        self.batch_size = self.positions = self.input_elements = self.input_bytes = (
            self.frozen_parameters
        ) = 0.0
        self.weight_bytes = self.copy_bytes = self.uncast_bytes = self.new_gradients = 0.0
        self.state_copies = self.temporary_copies = self.loop_copies = self.filter_copies = 0.0
        self.is_autocast = self.is_math_attention = self.is_checkpointed = self.is_channels_last = (
            False
        )
        self.batches_on_gpu = 1.0
        self.frees_outputs_first = self.keeps_outputs = False


class StepMemory:
    """What the walk over the layers of one job has found so far, in bytes of segment (costs) unless
    stated otherwise.

    Attributes with one number for each of the
    :data:`~gpumemnet.physics.step_memory.BLOCK_CLASSES`:
        weights: the parameters.
        trained: the parameters met so far that receive gradients.
        filter_state: optimizer state of convolutions, beside that which all parameters have.
        kept: all that the forward pass keeps for the backward pass.
        standing: the part of it that is there from the forward pass on, with named outputs.
        recomputed: the part of it that lies in the block met last, which the backward pass
            recomputes.
        weight_copies: autocast's copies of weights.
        named_output: the output of the network, which the training loop has a name for.
        moment: tensors of one operator, which are freed at once.
        frozen_peak: what the forward pass of layers that have no backward pass takes.
        backward_peak: the most at the backward pass of any layer, less the gradients of all layers.
        forward_peak: the most in the forward pass of layers for which it can be more than in the
            backward pass.
        resident: what stays from step to step.
        step: what there is during the optimizer's step.
        peak: the peak of each class.

    Other attributes:
        group_counts, kept_by_group: layers, and what they keep, by layer group.
        backward_total, forward_total: as ``backward_peak`` and ``forward_peak``, all classes
            together.
        loss_total: what there is at the loss.
        loop_cost, loop_class: the most temporaries of an optimizer step in a loop over the
            parameters.
        last_parameter_cost: of the parameter met last.
        layer_count, block_count: layers, and blocks that are recomputed.
        logits_bytes, attention_matrix_bytes, largest_output_bytes, largest_convolution_bytes: plain
        bytes.
        largest_parameters: elements of the largest layer's parameters.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets the job."""
        self.weights = _NO_CLASS[:]
        self.trained = _NO_CLASS[:]
        self.filter_state = _NO_CLASS[:]
        self.kept = _NO_CLASS[:]
        self.standing = _NO_CLASS[:]
        self.recomputed = _NO_CLASS[:]
        self.weight_copies = _NO_CLASS[:]
        self.named_output = _NO_CLASS[:]
        self.moment = _NO_CLASS[:]
        self.backward_peak = _NO_CLASS[:]
        self.forward_peak = _NO_CLASS[:]
        self.frozen_peak = _NO_CLASS[:]
        self.resident = _NO_CLASS[:]
        self.step = _NO_CLASS[:]
        self.peak = _NO_CLASS[:]
        self.group_counts = _NO_GROUP[:]
        self.kept_by_group = _NO_GROUP[:]
        self.backward_total = self.forward_total = self.loss_total = 0.0
        self.loop_cost = self.last_parameter_cost = 0.0
        self.loop_class = 0
        self.layer_count = self.block_count = 0.0
        self.logits_bytes = self.attention_matrix_bytes = 0.0
        self.largest_output_bytes = self.largest_convolution_bytes = self.largest_parameters = 0.0


def fill_totals(
    features: MutableNumbers,
    width: int,
    numbers: Numbers,
    codes: Codes,
    options: list[OptionNumbers],
) -> list[JobNumbers]:
    """Writes the total columns of ``B`` jobs; returns what the closed form needs of each job beside
    its layers.

    Args:
        features: rows of ``width`` columns, one after the other; the first :data:`TOTALS` are
            written.
        width: columns of a row.
        numbers: the fields :data:`~gpumemnet.job.training_job.NUMBER_FIELDS`, each of all jobs:
            ``10 * B`` numbers.
        codes: position of each job's option set.
        options: the numbers of each option set.

    Raises:
        ValueError: if a buffer is too short, or a code is not that of an option set.
    """
    count = len(codes)
    if width < _TOTALS or len(features) // width < count or len(numbers) // _FIELDS < count:
        raise ValueError("too few numbers for the jobs")
    for row in range(count):
        if codes[row] < 0 or codes[row] >= len(options):
            raise ValueError("a code is not that of an option set")
    jobs = []
    for row in range(count):
        job = JobNumbers()
        _fill_row(features, row * width, numbers, count, row, options[codes[row]], job)
        jobs.append(job)
    return jobs


def _fill_row(
    features: MutableNumbers,
    begin: int,
    numbers: Numbers,
    count: int,
    row: int,
    option: OptionNumbers,
    job: JobNumbers,
) -> None:
    """Writes the columns of one job from ``begin`` on, and its ``job`` numbers."""
    # One field after the other, each with all jobs; the optional number of ranks (field 7) moves no
    # memory here.
    batch_size = numbers[row]
    input_elements = numbers[count + row]
    total_activations = numbers[2 * count + row]
    total_parameters = numbers[3 * count + row]
    trainable_parameters = numbers[4 * count + row]
    sequence_length = numbers[5 * count + row]
    gradient_accumulation = numbers[6 * count + row]
    traced_peak_bytes = numbers[8 * count + row]
    trainable_share = trainable_parameters / total_parameters if total_parameters > 0.0 else 1.0
    gradient_bytes = total_parameters * trainable_share * option.weight_bytes
    inputs = batch_size * input_elements

    before_flags = [
        batch_size,
        input_elements,
        total_parameters,
        trainable_share,
        total_activations,
        sequence_length,
        gradient_accumulation,
    ]
    after_flags = [
        traced_peak_bytes,
        total_parameters * (option.weight_bytes + option.copy_bytes),
        gradient_bytes,
        gradient_bytes * option.state_copies,
        gradient_bytes * option.temporary_copies,
        inputs * option.input_bytes,
        total_activations * batch_size * option.activation_bytes,
    ]
    for number in before_flags:
        features[begin] = number
        begin += 1
    for number in option.flags:
        features[begin] = number
        begin += 1
    for number in after_flags:
        features[begin] = number
        begin += 1

    job.batch_size = batch_size
    job.positions = max(sequence_length, 1.0)
    job.input_elements = inputs
    job.input_bytes = inputs * option.input_bytes
    job.frozen_parameters = total_parameters - trainable_parameters
    job.new_gradients = 1.0 if gradient_accumulation == 1.0 else 0.0
    job.weight_bytes = option.weight_bytes
    job.copy_bytes = option.copy_bytes
    job.uncast_bytes = option.uncast_bytes
    job.state_copies = option.state_copies
    job.temporary_copies = option.temporary_copies
    job.loop_copies = option.loop_copies
    job.filter_copies = option.filter_copies
    job.is_autocast = option.is_autocast
    job.is_math_attention = option.is_math_attention
    job.is_checkpointed = option.is_checkpointed
    job.is_channels_last = option.is_channels_last
    job.batches_on_gpu = max(numbers[9 * count + row], 1.0)
    job.frees_outputs_first = option.frees_outputs_first
    job.keeps_outputs = option.keeps_outputs


def find_peaks(job: JobNumbers, memory: StepMemory) -> None:
    """The peak of each block class: what stays from step to step, and what the forward pass of
    frozen layers, the backward pass and the optimizer's step, one after the other, need on top of
    it."""
    from_start = job.state_copies + 1.0 - job.new_gradients
    for c in range(_CLASSES):
        resident = (
            memory.weights[c]
            + from_start * memory.trained[c]
            + memory.filter_state[c]
            + memory.resident[c]
        )
        memory.resident[c] = resident
        memory.step[c] = (
            resident
            + memory.named_output[c]
            + (job.new_gradients + job.temporary_copies) * memory.trained[c]
        )
        if c == memory.loop_class:
            memory.step[c] += memory.loop_cost
        memory.peak[c] = resident + memory.frozen_peak[c]
        memory.backward_peak[c] += resident
    _grow(memory.peak, memory.backward_peak)
    _grow(memory.peak, memory.step)


def add_frozen_moment(memory: StepMemory) -> None:
    """Adds to the peak of frozen layers what the present moment needs beyond it."""
    _grow(memory.frozen_peak, memory.moment)


def _grow(segments: list[float], need: list[float]) -> None:
    """Adds to the ``segments`` of each class what a later moment needs beyond them.

    It takes what larger classes have free first, except in the smallest class, which has a pool of
    its own.
    """
    beyond = new = 0.0
    for c in range(_CLASSES - 1, 0, -1):
        beyond += need[c] - segments[c]
        segments[c] += max(beyond, new) - new
        new = max(beyond, new)
    segments[0] = max(segments[0], need[0])


def write_columns(
    features: MutableNumbers,
    begin: int,
    job: JobNumbers,
    memory: StepMemory,
    blas_workspace_bytes: float,
) -> None:
    """Writes the columns :data:`gpumemnet.predict.features.LAYER_COLUMNS` of one job, in their
    order, from ``begin`` on."""
    weights, kept, peak = _NO_SIZE[:], _NO_SIZE[:], _NO_SIZE[:]
    resident = step = 0.0
    for c in range(_CLASSES):
        size = min(c, _SIZES - 1)
        weights[size] += memory.weights[c]
        kept[size] += memory.kept[c]
        peak[size] += memory.peak[c]
        resident += memory.resident[c]
        step += memory.step[c]
    # Workspaces below 10 MiB lie among the medium tensors, larger ones in segments of their own.
    own = _HANDLES * blas_workspace_bytes
    pooled = 0.0
    if blas_workspace_bytes < _MEDIUM_LIMIT:
        pooled, own = own, 0.0
    small = peak[0] + _CUBLASLT
    medium = peak[1] + pooled
    small_segments = -(-small // _SMALL_SEGMENT) * _SMALL_SEGMENT
    medium_count = -(-medium // _MEDIUM_SEGMENT)
    medium_segments = medium_count * _MEDIUM_SEGMENT
    spare_count = max(medium_count + (-(memory.step[1] + pooled) // _MEDIUM_SEGMENT), 0.0)
    large_state = (1.0 + job.state_copies) * weights[2] / _TYPICAL
    head = [1.0, memory.layer_count]
    sums = [
        resident,
        memory.loss_total,
        memory.backward_total,
        step,
        max(resident + memory.backward_total, step),
        memory.attention_matrix_bytes,
        memory.logits_bytes,
        memory.largest_convolution_bytes,
        memory.block_count,
        memory.largest_output_bytes,
        memory.largest_parameters * job.weight_bytes,
        small_segments + medium_segments + peak[2] + peak[3] + own,
        small_segments - small,
        medium_segments - medium,
        spare_count,
        min(spare_count, large_state),
    ]
    begin = _write(features, begin, head, 2)
    begin = _write(features, begin, memory.group_counts, _GROUPS)
    begin = _write(features, begin, weights, _SIZES)
    begin = _write(features, begin, kept, _SIZES)
    begin = _write(features, begin, peak, _SIZES)
    begin = _write(features, begin, memory.kept_by_group, _GROUPS)
    _write(features, begin, sums, 16)


def _write(features: MutableNumbers, begin: int, numbers: list[float], count: int) -> int:
    """Writes ``count`` numbers from ``begin`` on; returns where they end."""
    for at in range(count):
        features[begin + at] = numbers[at]
    return begin + count
