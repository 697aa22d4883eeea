"""The records of the closed form: the numbers of a job, and the memory of its training step.

:mod:`gpumemnet.physics.closed_form` fills them while it walks over the layers.

Cython compiles this module with the types of ``step_memory.pxd``.  Without a compiler it runs as it
is.
"""

from __future__ import annotations

from typing import Final

from gpumemnet.job.layers import GROUP_NAMES
from gpumemnet.physics.allocator_blocks import BLOCK_CLASSES

IS_COMPILED: Final = not __file__.endswith(".py")
"""Whether this module is compiled."""

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
    """

    __slots__ = (
        *(
            "batch_size",
            "positions",
            "input_elements",
            "input_bytes",
            "frozen_parameters",
            "weight_bytes",
            "copy_bytes",
        ),
        *(
            "uncast_bytes",
            "state_copies",
            "temporary_copies",
            "loop_copies",
            "filter_copies",
            "new_gradients",
        ),
        *("is_autocast", "is_math_attention", "is_checkpointed", "is_channels_last"),
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


class StepMemory:
    """What the walk over the layers of one job has found so far, in bytes of segment (costs) unless
    stated otherwise.

    Attributes with one number for each of the
    :data:`~gpumemnet.physics.allocator_blocks.BLOCK_CLASSES`:
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
        *(
            "weights",
            "trained",
            "filter_state",
            "kept",
            "standing",
            "recomputed",
            "weight_copies",
            "named_output",
            "moment",
        ),
        *(
            "backward_peak",
            "forward_peak",
            "resident",
            "step",
            "peak",
            "group_counts",
            "kept_by_group",
        ),
        *(
            "backward_total",
            "forward_total",
            "loss_total",
            "loop_cost",
            "loop_class",
            "last_parameter_cost",
            "layer_count",
            "block_count",
            "logits_bytes",
        ),
        *(
            "attention_matrix_bytes",
            "largest_output_bytes",
            "largest_convolution_bytes",
            "largest_parameters",
        ),
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
