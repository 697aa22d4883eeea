"""The layers of a job as records: their kinds, their roles in the structure of the network, and the
element types and sizes of their tensors (output, weight, and bias or the shift of a norm).

A layer list states kinds and sizes, not which layer reads which output.  Some orders are
unambiguous, and memory depends on them. What was found is noted in fields
of :class:`Layer`:

* ``is_constant_product``: a product with constants, which needs no gradient of them and keeps
  nothing: cosines and sines of positions, the scale of scores.  Rotary positions (RoFormer, arXiv
  2104.09864) are a product, a concatenation that exchanges the halves, a product, a sum.
* ``is_inner_sum``: a sum within attention, of a rotation or of scores and a mask.  It ends no
  residual block, and has the element type of its input.
* ``is_passed_on``: the next layer of the list does not keep this output: only a rotation or the
  scale of scores reads it, or only later layers, such as the sum behind another branch.
* ``is_read_later``: the projection of queries, keys and values in one, whose queries are scaled:
  the list goes on with them, and the products read keys and values where they are.
* ``is_written_out``: scores and weights of attention in single steps of the model's own, which are
  scaled or masked in the list.  The math kernel does that inside, and computes them in fp32.
* ``begins_block``, ``is_in_block``: blocks that activation checkpointing recomputes.  They are
  those that the layers state, if all do.  Else layers after the last residual sum lie outside of
  all blocks; without residual sums, the last layer that begins a block lies outside.
* ``is_decomposed_norm``: an RMS norm in elementary operations, without a parameter, whose weight is
  a separate product: it keeps its input in fp32.
* ``is_sibling``: a projection of the same input as the projection before it: keys and values, or
  the gated half.  Autocast casts the input again.  Projections with a norm between them (queries
  and keys of Qwen 3) are not recognised.
* ``is_depthwise``: a convolution with one group per channel, recognised by the norm behind it,
  which has two parameters per channel.

The roles must be known before the element types and sizes are noted.

Cython compiles this module with the types of ``network_structure.pxd``; there a record is a C
structure.  Without a compiler it runs as it is.
"""

from __future__ import annotations

from typing import Final

from gpumemnet.job.layers import GROUP_NAMES, GROUP_OF_KIND, KINDS
from gpumemnet.physics.element_types import FULL_BYTES
from gpumemnet.physics.saved_tensors import KIND_RULES
from gpumemnet.physics.step_memory import JobNumbers, block_bytes, class_of_block, segment_cost

IS_COMPILED: Final = not __file__.endswith(".py")
"""Whether this module is compiled."""

_ROTATION_REACH: Final = 2
"""Largest distance from a rotation's first product to its concatenation; between them is at most
the negation of one half."""
_SCORES_REACH: Final = 3
"""Largest distance from scores to their softmax; between them are a scale and a mask."""
_PROJECTIONS: Final = 2
"""Projections beside the first of queries, keys and values, or before the last of them."""
_WIDEST_FILTER: Final = 7
"""Widest filter of usual depthwise convolutions (ConvNeXt, arXiv 2201.03545); a larger limit would
match dense convolutions."""


class LayerKind:
    """What is known of one kind of layer: the fields of
    :class:`gpumemnet.physics.saved_tensors.KindRule`, and these.

    Attributes:
        group: position of its group in :data:`gpumemnet.job.layers.GROUP_NAMES`.
        is_attention: one kernel for the whole attention (scores, softmax and weighted sum).
        computes_attention: such a kernel, or the softmax of attention in single steps.
        reads_scores: computes with attention scores.
        reads_projections: reads queries, keys and values.
        is_gate: an activation between 0 and 1, or -1 and 1, that weighs what it is computed from.
        starts_block: begins a block where the job has no residual sums.
    """

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
        self.is_gate = name in ("sigmoid", "tanh", "hardsigmoid")
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
        self.is_other = name == "other"
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
        is_constant_product, is_inner_sum, is_passed_on, is_read_later, is_written_out,
        begins_block, is_in_block, is_decomposed_norm, is_sibling, is_depthwise:
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
        self.is_read_later = self.is_written_out = False
        self.is_recomputed = self.has_backward = self.is_output_kept = False
        self.is_trained = self.saves_input = False
        self.element_bytes = self.input_element_bytes = 0.0
        self.elements = self.output_bytes = self.output_cost = 0.0
        self.weight_cost = self.second_cost = self.second_elements = 0.0
        self.output_class = self.weight_class = self.second_class = 0


_FULL: Final = float(FULL_BYTES)


def note_structure(layers: list[Layer]) -> None:
    """Notes the roles of the layers of one job.

    Args:
        layers: without aliases (:data:`gpumemnet.physics.saved_tensors.ALIASES`), and with no role
            noted.
    """
    # Backwards, because a sum is within attention if the sum after it is.
    for at in range(len(layers) - 2, -1, -1):
        layer = layers[at]
        kind = layer.kind
        if kind.is_add:
            _note_inner_sum(layers, at)
        elif kind.is_multiply:
            _note_scale_of_scores(layers, at)
        elif kind.is_rms_norm:
            _note_decomposed_norm(layers, at)
        elif kind.is_concatenate:
            _note_rotation(layers, at)
            _note_split_convolution(layers, at)
        elif kind.is_linear:
            _note_projection(layers, at)
        elif kind.is_conv2d:
            _note_depthwise(layers, at)
            _note_branch(layers, at)
            _note_shortcut(layers, at)
        elif kind.is_norm:
            _note_parallel_norm(layers, at)
        elif kind.is_matmul:
            _note_projection_of_scores(layers, at)
    if _note_stated_blocks(layers):
        return
    last = _note_residual_blocks(layers)
    if last < 0:
        last = _note_plain_blocks(layers)
    for at in range(last + 1):
        layer = layers[at]
        layer.is_in_block = True


def _note_inner_sum(layers: list[Layer], at: int) -> None:
    """A sum within attention is followed by what reads scores, or by another such sum."""
    layer, following = layers[at], layers[at + 1]
    layer.is_inner_sum = following.kind.reads_scores or (
        following.kind.is_add and following.is_inner_sum
    )


def _note_scale_of_scores(layers: list[Layer], at: int) -> None:
    """The product between the scores and their softmax, or their mask, is with a constant."""
    layer, following = layers[at], layers[at + 1]
    is_scored = following.kind.is_softmax or (following.kind.is_add and following.is_inner_sum)
    if is_scored and at > 0:
        previous = layers[at - 1]
        if previous.kind.is_matmul:
            layer.is_constant_product = previous.is_passed_on = True


def _note_decomposed_norm(layers: list[Layer], at: int) -> None:
    """An RMS norm without parameters and a product of the same size are one norm in elementary
    operations."""
    layer, following = layers[at], layers[at + 1]
    if (
        following.kind.is_multiply
        and not layer.parameters
        and layer.activations == following.activations
    ):
        layer.is_decomposed_norm = True


def _note_projection(layers: list[Layer], at: int) -> None:
    """Queries, keys and values read the same input, and so do the two halves of a gate."""
    layer, following = layers[at], layers[at + 1]
    if following.kind.reads_projections:
        _note_siblings(layers, at)
    if following.kind.is_multiply and not following.parameters and at > 1:
        other = layers[at - 2]
        # The second layer of a block, before a layer scale, is as wide as the residual stream, not
        # as its hidden layer.
        if other.kind.is_linear and other.activations == layer.activations:
            layer.is_sibling = True


def _note_siblings(layers: list[Layer], last: int) -> None:
    """The projections up to ``last`` read the input of the first of them."""
    at = last
    while at > max(0, last - _PROJECTIONS):
        layer, previous = layers[at], layers[at - 1]
        if not layer.kind.is_linear or not previous.kind.is_linear:
            return
        layer.is_sibling = True
        at -= 1


def _note_rotation(layers: list[Layer], at: int) -> None:
    """Recognises the rotation that exchanges its halves at ``at``, and the projections that it
    reads."""
    if at + 2 >= len(layers):
        return
    halves, second, total = layers[at], layers[at + 1], layers[at + 2]
    if not second.kind.is_multiply or not total.kind.is_add:
        return
    product = _first_product(layers, at)
    if product < 0:
        return
    first = layers[product]
    first.is_constant_product = second.is_constant_product = True
    halves.is_passed_on = True
    total.is_inner_sum = True
    _note_siblings(layers, product - 1)
    before = product - 2  # keys and queries; the values behind them are kept by attention
    while before >= max(0, product - 1 - _PROJECTIONS):
        projection, following = layers[before], layers[before + 1]
        if not projection.kind.is_linear or not following.kind.is_linear:
            return
        projection.is_passed_on = True
        before -= 1


def _first_product(layers: list[Layer], at: int) -> int:
    """Position of the product before the concatenation at ``at`` that begins a rotation; -1 if
    there is none."""
    product = at - 1
    while product >= 0 and product >= at - _ROTATION_REACH:
        layer = layers[product]
        if layer.kind.is_multiply:
            return product
        product -= 1
    return -1


def _note_depthwise(layers: list[Layer], at: int) -> None:
    """A depthwise convolution has as many channels as its input, and no more pixels."""
    layer, following = layers[at], layers[at + 1]
    if at > 0 and following.kind.is_norm:
        previous = layers[at - 1]
        can_be = previous.activations >= layer.activations
        layer.is_depthwise = can_be and _is_depthwise(layer.parameters, following.parameters / 2.0)


def _note_branch(layers: list[Layer], at: int) -> None:
    """A convolution that begins a branch of its own, to be added to what the branch before it ends
    with.

    The branch is a convolution and its norm, after a pooling or none.  It reads what the branch
    before it has read, and what lies between is not its input: the end of a residual block before
    its projection (ResNet, arXiv 1512.03385, its D variant, and with squeeze-and-excitation, arXiv
    1709.01507), or the branches of a network that is trained to be merged (RepVGG, arXiv
    2101.03697; MobileOne, arXiv 2206.04040).  A sum with the number that begins a sum of branches is
    an ``other`` layer.
    """
    first = at
    if at > 0:
        pooling = layers[at - 1]
        if pooling.kind.is_average_pool:
            first = at - 1
    if first == 0 or at + 2 >= len(layers):
        return
    layer, before, norm, total = layers[at], layers[first - 1], layers[at + 1], layers[at + 2]
    if not norm.kind.is_norm or before.activations != norm.activations:
        return
    is_added = norm.is_passed_on or (
        (total.kind.is_add or total.kind.is_other) and total.activations == norm.activations
    )
    if not is_added:
        return
    if (
        before.kind.is_norm
        or before.kind.is_add
        or (before.kind.is_other and not before.parameters)
    ):
        before.is_passed_on = True
    elif before.kind.is_multiply and not before.parameters and not layer.is_depthwise:
        # A convolution that reads the product has as many channels as it makes.
        channels = norm.parameters / 2.0
        before.is_passed_on = layer.parameters < channels * channels


def _note_shortcut(layers: list[Layer], at: int) -> None:
    """The projection of a block with early activations (arXiv 1603.05027) stands between the
    activation that both branches read and the first convolution of the other branch."""
    if at < 2 or at + 1 >= len(layers):
        return
    layer, before, read, norm = layers[at], layers[at - 1], layers[at - 2], layers[at + 1]
    if not before.kind.is_convolution or not norm.kind.is_norm:
        return
    channels = norm.parameters / 2.0
    if channels < 1.0 or before.activations == read.activations:
        return
    # Filters of one pixel and stride 1 tell the channels of the input, and so its size.
    if layer.parameters / channels * layer.activations / channels == read.activations:
        before.is_passed_on = True


def _note_parallel_norm(layers: list[Layer], at: int) -> None:
    """A norm of another branch's input, whose result is added to that of the norm before it."""
    if at == 0 or at + 1 >= len(layers):
        return
    before, layer, total = layers[at - 1], layers[at], layers[at + 1]
    is_added = (total.kind.is_add or total.kind.is_other) and total.activations == layer.activations
    if is_added and before.kind.is_norm and before.activations == layer.activations:
        before.is_passed_on = True


def _note_projection_of_scores(layers: list[Layer], at: int) -> None:
    """Queries that are scaled before the scores leave keys and values in the projection of all
    three."""
    if at + 1 >= len(layers):
        return
    layer, following = layers[at], layers[at + 1]
    if at > 1:
        scaled, projection = layers[at - 1], layers[at - 2]
        if (
            scaled.kind.is_other
            and not scaled.parameters
            and projection.activations > scaled.activations
            and (projection.kind.is_linear or projection.kind.is_norm)
        ):
            projection.is_read_later = scaled.is_passed_on = True
            layer.is_written_out = True
    if following.is_constant_product or following.is_inner_sum:
        layer.is_written_out = True
    if layer.is_written_out:
        after = at + 1
        while after < len(layers) and after <= at + _SCORES_REACH:
            following = layers[after]
            if following.kind.is_softmax:
                following.is_written_out = True
                if after + 1 < len(layers):  # its dropout
                    following = layers[after + 1]
                    following.is_written_out = True
                return
            after += 1


def _note_split_convolution(layers: list[Layer], at: int) -> None:
    """Convolutions side by side read parts of one tensor, and are concatenated (arXiv
    1907.09595)."""
    layer = layers[at]
    total = 0.0
    first = at
    while first > 0:
        part = layers[first - 1]
        if not part.kind.is_conv2d:
            break
        total += part.activations
        first -= 1
    if at - first < 2 or total != layer.activations:
        return
    for position in range(first, at):
        part = layers[position]
        part.is_passed_on = True


def _is_depthwise(parameters: float, channels: float) -> bool:
    """Whether a convolution to ``channels`` has one square filter per channel, with or without a
    bias."""
    if channels < 1.0:
        return False
    for width in range(3, _WIDEST_FILTER + 1, 2):
        if parameters == width * width * channels or parameters == (width * width + 1) * channels:
            return True
    return False


def _note_stated_blocks(layers: list[Layer]) -> bool:
    """Notes the blocks that the layers state, if all do; returns whether they do."""
    for layer in layers:
        if layer.block < 0:
            return False
    block = 0
    for layer in layers:
        layer.is_in_block = layer.block > 0
        layer.begins_block = layer.is_in_block and layer.block != block
        block = layer.block
    return True


def _note_residual_blocks(layers: list[Layer]) -> int:
    """Blocks end with a residual sum; returns the position of the last one, or -1.

    Sections without attention (feed-forward layers) join the section with attention before them,
    unless all sections have attention.  Before the first attention each section is a block, as in
    networks whose first stages are convolutions.
    """
    last = -1
    attends = False
    all_attend = True
    for at in range(len(layers)):
        layer = layers[at]
        if layer.kind.computes_attention:
            attends = True
        if layer.kind.is_add and not layer.is_inner_sum:
            last = at
            all_attend = all_attend and attends
            attends = False
    begin = 0
    has_attention = attends = attended = False
    for at in range(last + 1):
        layer = layers[at]
        if layer.kind.computes_attention:
            attends = has_attention = True
        if layer.kind.is_add and not layer.is_inner_sum:
            if begin == 0 or all_attend or not has_attention or (attends and not attended):
                first = layers[begin]
                first.begins_block = True
            attended = attends
            attends = False
            begin = at + 1
    return last


def _note_plain_blocks(layers: list[Layer]) -> int:
    """Without residual sums each linear layer or convolution begins a block; returns the last
    position in a block, or -1."""
    last = -1
    for at in range(len(layers)):
        layer = layers[at]
        if at == 0 or layer.kind.starts_block:
            layer.begins_block = True
            last = at - 1
    return last


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
    is_kernel = False  # whether the layer before made the math kernel's attention weights
    for at in range(len(layers)):
        layer = layers[at]
        kind = layer.kind
        layer.input_element_bytes = element_bytes
        if job.is_autocast and kind.autocast_input_bytes and not is_kernel:
            layer.input_element_bytes = kind.autocast_input_bytes
        elif layer.is_decomposed_norm:
            layer.input_element_bytes = _FULL
        is_weights = job.is_math_attention and _makes_attention_weights(layers, at)
        is_kernel = is_weights and not layer.is_written_out
        if is_weights or (
            job.is_math_attention
            and not (job.is_autocast and layer.is_written_out)
            and _makes_attention_scores(layers, at)
        ):
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
