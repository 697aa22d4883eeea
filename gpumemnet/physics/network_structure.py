"""The structure of a network, found from the order of its layers: blocks, residual sums, rotations,
projections of one input.

A layer list states kinds and sizes, not which layer reads which output.  Some orders are
unambiguous, and memory depends on them. What was found is noted in fields
of :class:`gpumemnet.physics.layer_records.Layer`:

* ``is_constant_product``: a product with constants, which needs no gradient of them and keeps
  nothing: cosines and sines of positions, the scale of scores.  Rotary positions (RoFormer, arXiv
  2104.09864) are a product, a concatenation that exchanges the halves, a product, a sum.
* ``is_inner_sum``: a sum within attention, of a rotation or of scores and a mask.  It ends no
  residual block, and has the element type of its input.
* ``is_passed_on``: the next layer of the list does not keep this output: only a rotation reads it,
  or only later layers, such as the sum behind another branch.
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

Cython compiles this module with the types of ``network_structure.pxd``.  Without a compiler it runs as it
is.
"""

from __future__ import annotations

from typing import Final

from gpumemnet.physics.layer_records import Layer

IS_COMPILED: Final = not __file__.endswith(".py")
"""Whether this module is compiled."""

_ROTATION_REACH: Final = 2
"""Largest distance from a rotation's first product to its concatenation; between them is at most
the negation of one half."""
_PROJECTIONS: Final = 2
"""Projections beside the first of queries, keys and values, or before the last of them."""
_WIDEST_FILTER: Final = 7
"""Widest filter of usual depthwise convolutions (ConvNeXt, arXiv 2201.03545); a larger limit would
match dense convolutions."""


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
        elif kind.is_linear:
            _note_projection(layers, at)
        elif kind.is_conv2d:
            _note_depthwise(layers, at)
            _note_branch(layers, at)
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
            layer.is_constant_product = True


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
    its projection (ResNet, arXiv 1512.03385, and its D variant), or the branches of a network that
    is trained to be merged (RepVGG, arXiv 2101.03697; MobileOne, arXiv 2206.04040).
    """
    first = at
    if at > 0:
        pooling = layers[at - 1]
        if pooling.kind.is_average_pool:
            first = at - 1
    if first == 0 or at + 2 >= len(layers):
        return
    before, norm, total = layers[first - 1], layers[at + 1], layers[at + 2]
    is_added = norm.is_passed_on or (total.kind.is_add and total.activations == norm.activations)
    if norm.kind.is_norm and is_added and (before.kind.is_norm or before.kind.is_add):
        before.is_passed_on = before.activations == norm.activations


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
