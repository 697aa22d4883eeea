"""The memory of a training step in the closed form: what a block costs in segments, the numbers of
a job, and what its step holds in each class of blocks.

Blocks of one class take over each other's segments.  The cost of a block is its share of the
segments that the allocator would fill with blocks like it, because ``nvidia-smi`` shows segments
(``c10/cuda/CUDACachingAllocator.cpp``).  :mod:`gpumemnet.physics.closed_form` fills the records
while it walks over the layers.

Cython compiles this module with the types of ``step_memory.pxd``; there a record is a C structure.
Without a compiler it runs as it is.
"""

from __future__ import annotations

from typing import Final

from gpumemnet.allocator import settings
from gpumemnet.job.layers import GROUP_NAMES
from gpumemnet.units import MIB

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

# The same numbers once more where the compiled form reads them all the time: allocator_blocks.pxd
# makes C variables of them.
_BLOCK: Final = float(settings.MINIMUM_BLOCK_BYTES)
_ROUNDING: Final = float(settings.SEGMENT_ROUNDING_BYTES)
_MEDIUM_SEGMENT: Final = float(settings.LARGE_SEGMENT_BYTES)
_SMALL_TOP: Final = float(BLOCK_TOPS[0])
_MEDIUM_TOP: Final = float(BLOCK_TOPS[1])
_LARGE_TOP: Final = float(BLOCK_TOPS[2])
_CLASSES: Final = BLOCK_CLASSES


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

    __slots__ = (
        "batch_size",
        "batches_on_gpu",
        "copy_bytes",
        "filter_copies",
        "frees_outputs_first",
        "frozen_parameters",
        "input_bytes",
        "input_elements",
        "is_autocast",
        "is_channels_last",
        "is_checkpointed",
        "is_math_attention",
        "keeps_outputs",
        "loop_copies",
        "new_gradients",
        "positions",
        "state_copies",
        "temporary_copies",
        "uncast_bytes",
        "weight_bytes",
    )

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

    __slots__ = (
        "attention_matrix_bytes",
        "backward_peak",
        "backward_total",
        "block_count",
        "filter_state",
        "forward_peak",
        "forward_total",
        "group_counts",
        "kept",
        "kept_by_group",
        "largest_convolution_bytes",
        "largest_output_bytes",
        "largest_parameters",
        "last_parameter_cost",
        "layer_count",
        "logits_bytes",
        "loop_class",
        "loop_cost",
        "loss_total",
        "moment",
        "named_output",
        "peak",
        "recomputed",
        "resident",
        "standing",
        "step",
        "trained",
        "weight_copies",
        "weights",
    )

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
