"""Records of the layers of a job: what is known of their kinds, and element types and sizes of their
tensors (output, weight, and bias or the shift of a norm).

The roles of the layers (:mod:`gpumemnet.physics.network_structure`) must be known before their element
types and sizes are noted.

Cython compiles this module with the types of ``layer_records.pxd``; there a record is a C
structure.  Without a compiler it runs as it is.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, Final

from gpumemnet.job.layers import GROUP_NAMES, GROUP_OF_KIND, KINDS
from gpumemnet.physics.element_types import FULL_BYTES
from gpumemnet.physics.saved_tensors import KIND_RULES
from gpumemnet.physics.step_memory import JobNumbers, block_bytes, class_of_block, segment_cost

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    MutableNumbers = MutableSequence[float] | NDArray[np.float64]
    Numbers = Sequence[float] | NDArray[np.float64]
    Codes = Sequence[int] | NDArray[np.int64]

IS_COMPILED: Final = not __file__.endswith(".py")
"""Whether this module is compiled."""


class LayerKind:
    """What is known of one kind of layer: the fields of
    :class:`gpumemnet.physics.saved_tensors.KindRule`, and these.

    Attributes:
        group: position of its group in :data:`gpumemnet.job.layers.GROUP_NAMES`.
        is_attention: one kernel for the whole attention (scores, softmax and weighted sum).
        computes_attention: such a kernel, or the softmax of attention in single steps.
        reads_scores: computes with attention scores.
        reads_projections: reads queries, keys and values.
        starts_block: begins a block where the job has no residual sums.
    """

    __slots__ = (
        "autocast_input_bytes",
        "autocast_output_bytes",
        "computes_attention",
        "group",
        "has_bias",
        "is_add",
        "is_alias",
        "is_attention",
        "is_average_pool",
        "is_cast",
        "is_concatenate",
        "is_conv2d",
        "is_convolution",
        "is_dropout",
        "is_embedding",
        "is_linear",
        "is_matmul",
        "is_multiply",
        "is_norm",
        "is_rms_norm",
        "is_softmax",
        "mask_bytes",
        "reads_projections",
        "reads_scores",
        "saves_input",
        "saves_output",
        "second_share",
        "starts_block",
        "statistics",
    )

    def __init__(self, name: str) -> None:
        """Looks up the kind ``name`` in the tables of :mod:`gpumemnet.physics.saved_tensors`."""
        rule, group = KIND_RULES[name], GROUP_OF_KIND[name]
        self.group = GROUP_NAMES.index(group)
        self.is_alias, self.saves_input, self.saves_output = (
            rule.is_alias,
            rule.saves_input,
            rule.saves_output,
        )
        self.mask_bytes, self.statistics, self.second_share = (
            rule.mask_bytes,
            rule.statistics,
            rule.second_share,
        )
        self.has_bias, self.is_cast = rule.has_bias, rule.is_cast
        self.autocast_output_bytes, self.autocast_input_bytes = (
            rule.autocast_output_bytes,
            rule.autocast_input_bytes,
        )
        self.is_attention = group == "attention"
        self.is_embedding = group == "embedding"
        self.is_convolution = group == "conv"
        self.is_norm = group == "norm"
        self.is_add = name == "add"
        self.is_average_pool = name == "avg_pool"
        self.is_concatenate = name == "concatenate"
        self.is_conv2d = name == "conv2d"
        self.is_dropout = name == "dropout"
        self.is_linear = name == "linear"
        self.is_matmul = name == "matmul"
        self.is_multiply = name == "multiply"
        self.is_rms_norm = name == "rms_norm"
        self.is_softmax = name == "softmax"
        self.computes_attention = group == "attention" or name == "softmax"
        self.reads_scores = group == "attention" or name in ("softmax", "matmul")
        self.reads_projections = group == "attention" or name == "matmul"
        self.starts_block = group in ("linear", "conv")


LAYER_KINDS: Final = [LayerKind(kind) for kind in KINDS]
"""The kinds in the order of their codes (:data:`gpumemnet.job.layers.CODE_OF_KIND`)."""


class Layer:
    """One layer of a job.

    Attributes:
        kind: what is known of its kind.
        activations: output elements per sample.
        parameters: parameter elements.
        trains: 1 where its parameters receive gradients, 0 where they do not, -1 where the job does
            not say.
        block: number of the block that it says it lies in, 0 outside of all, -1 where it does not
            say.
        is_constant_product, is_inner_sum, is_passed_on, begins_block, is_in_block,
        is_decomposed_norm, is_sibling, is_depthwise:
            its roles, see :mod:`gpumemnet.physics.network_structure`.
        is_recomputed: lies in a block whose activations are recomputed in the backward pass.
        has_backward: it or a layer before it is trained, so the backward pass runs through it.
        is_trained: its parameters receive gradients.
        saves_input: it keeps its input for the backward pass.
        is_output_kept: the backward pass keeps its output, for this layer or for the next.
        element_bytes: bytes per element of its output.
        input_element_bytes: bytes per element of its input as the kernel reads it, so after a cast.
        elements: output elements of the whole batch.
        output_bytes, output_class, output_cost: its output; the class is one of
            :data:`gpumemnet.physics.closed_form.BLOCK_CLASSES`, the cost the bytes of segment.
        weight_class, weight_cost: its weight.
        second_class, second_cost: its second parameter (a bias, or the shift of a norm).
        second_elements: of that parameter; 0 if there is none.
    """

    __slots__ = (
        "activations",
        "begins_block",
        "block",
        "element_bytes",
        "elements",
        "has_backward",
        "input_element_bytes",
        "is_constant_product",
        "is_decomposed_norm",
        "is_depthwise",
        "is_in_block",
        "is_inner_sum",
        "is_output_kept",
        "is_passed_on",
        "is_recomputed",
        "is_sibling",
        "is_trained",
        "kind",
        "output_bytes",
        "output_class",
        "output_cost",
        "parameters",
        "saves_input",
        "second_class",
        "second_cost",
        "second_elements",
        "trains",
        "weight_class",
        "weight_cost",
    )

    def describe(
        self, kind: LayerKind, activations: float, parameters: float, trains: int, block: int
    ) -> None:
        """Makes this the record of a layer of which nothing else is known yet."""
        self.kind = kind
        self.activations = activations
        self.parameters = parameters
        self.trains = trains
        self.block = block
        self.is_constant_product = self.is_inner_sum = self.is_passed_on = self.begins_block = (
            self.is_in_block
        ) = False
        self.is_decomposed_norm = self.is_sibling = self.is_depthwise = False
        self.is_recomputed = self.has_backward = self.is_output_kept = False
        self.is_trained = self.saves_input = False
        self.element_bytes = self.input_element_bytes = 0.0
        self.elements = self.output_bytes = self.output_cost = 0.0
        self.weight_cost = self.second_cost = self.second_elements = 0.0
        self.output_class = self.weight_class = self.second_class = 0


_FULL: Final = float(FULL_BYTES)


def note_element_types(job: JobNumbers, layers: list[Layer]) -> None:
    """Notes the bytes per element of each layer's output, and of its input as its kernel reads
    it."""
    if job.is_autocast or job.is_math_attention:
        _note_mixed_types(job, layers)
        return
    for layer in layers:
        layer.element_bytes = job.uncast_bytes
        layer.input_element_bytes = _FULL if layer.is_decomposed_norm else job.uncast_bytes


def _note_mixed_types(job: JobNumbers, layers: list[Layer]) -> None:
    """Element types under autocast, or with attention in single steps.

    Autocast lowers some kinds and raises others (:mod:`gpumemnet.physics.element_types`); the rest hand
    on what they are given.  A sum with a residual stream that began with an embedding is fp32.  The
    math kernel computes attention scores and weights in fp32 whatever it is given
    (``aten/src/ATen/native/transformers/attention.cpp``).
    """
    has_embedding = False
    for layer in layers:
        if layer.kind.is_embedding:
            has_embedding = True
    element_bytes = job.input_bytes / job.input_elements
    is_weights = False  # whether the layer before made attention weights
    for at in range(len(layers)):
        layer = layers[at]
        kind = layer.kind
        layer.input_element_bytes = element_bytes
        if job.is_autocast and kind.autocast_input_bytes and not is_weights:
            layer.input_element_bytes = kind.autocast_input_bytes
        elif layer.is_decomposed_norm:
            layer.input_element_bytes = _FULL
        is_weights = job.is_math_attention and _makes_attention_weights(layers, at)
        if is_weights or (job.is_math_attention and _makes_attention_scores(layers, at)):
            element_bytes = _FULL
        elif not job.is_autocast:
            element_bytes = job.uncast_bytes
        elif kind.is_add and has_embedding and not layer.is_inner_sum:
            element_bytes = _FULL
        elif kind.autocast_output_bytes:
            element_bytes = kind.autocast_output_bytes
        layer.element_bytes = element_bytes


def _makes_attention_scores(layers: list[Layer], at: int) -> bool:
    """A matrix product whose result goes into a softmax."""
    layer = layers[at]
    if not layer.kind.is_matmul or at + 1 == len(layers):
        return False
    following = layers[at + 1]
    return following.kind.is_softmax


def _makes_attention_weights(layers: list[Layer], at: int) -> bool:
    """A softmax, or the dropout behind it."""
    layer = layers[at]
    if not layer.kind.is_dropout or at == 0:
        return layer.kind.is_softmax
    previous = layers[at - 1]
    return previous.kind.is_softmax


def note_tensor_sizes(job: JobNumbers, layer: Layer) -> None:
    """Sizes of a layer's output, of its weight, and of its bias or the shift of its norm."""
    layer.elements = layer.activations * job.batch_size
    layer.output_bytes = layer.elements * layer.element_bytes
    block = block_bytes(layer.output_bytes)
    layer.output_class = class_of_block(block)
    layer.output_cost = segment_cost(block, layer.output_class)
    if not layer.parameters:
        return
    second = layer.kind.second_share * layer.parameters
    if layer.kind.has_bias:
        second = layer.activations / job.positions
        if layer.parameters <= second:
            second = 0.0
    block = block_bytes((layer.parameters - second) * job.weight_bytes)
    layer.weight_class = class_of_block(block)
    layer.weight_cost = segment_cost(block, layer.weight_class)
    if second:
        block = block_bytes(second * job.weight_bytes)
        layer.second_elements = second
        layer.second_class = class_of_block(block)
        layer.second_cost = segment_cost(block, layer.second_class)
