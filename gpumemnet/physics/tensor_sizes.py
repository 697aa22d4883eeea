"""Element types and sizes of the tensors of each layer: its output, its weight, and its bias or the
shift of its norm.

They are fields of :class:`gpumemnet.physics.layer_records.Layer`.  The roles of the layers
(:mod:`gpumemnet.physics.layer_roles`) must be known.

Cython compiles this module with the types of ``tensor_sizes.pxd``.  Without a compiler it runs as
it is.
"""

from __future__ import annotations

from typing import Final

from gpumemnet.physics.allocator_blocks import block_bytes, class_of_block, segment_cost
from gpumemnet.physics.element_types import FULL_BYTES
from gpumemnet.physics.layer_records import Layer
from gpumemnet.physics.step_memory import JobNumbers

IS_COMPILED: Final = not __file__.endswith(".py")
"""Whether this module is compiled."""

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

    Autocast lowers some kinds and raises others (:mod:`gpumemnet.physics.autocast`); the rest hand
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
