"""Roles of the layers in a list, derived from their order.

A layer list states kinds and sizes, not which layer reads which output.  Some orders are unambiguous, and memory depends on them:
products that rotate queries and keys and keep nothing, sums that belong to attention or end a residual block, and the first
layers of the blocks that activation checkpointing recomputes.

This module runs as it stands.  Where a compiler was at hand when the package was built, Cython has compiled it with the types of
``layer_roles.pxd``, as it has :mod:`gpumemnet.physics.closed_form`, which reads the roles.
"""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, Final

from gpumemnet.job.layers import CODE_OF_KIND, KINDS, LAYER_GROUPS
from gpumemnet.physics.saved_tensors import ALIASES

IS_COMPILED: Final = not __file__.endswith(".py")
"""Whether this module is compiled; the compiled form takes arrays, the other form takes lists too and is faster with them."""

CONSTANT: Final = 1
"""A product with constants, which needs no gradient of them and keeps nothing: cosines and sines of positions, the scale of
scores.

Rotary positions (RoFormer, arXiv 2104.09864): a product, a concatenation that exchanges the halves, a product, a sum.
"""
INNER_SUM: Final = 2
"""A sum within attention, of a rotation or of scores and a mask: it ends no residual block, and keeps the type of its input."""
PASSED_ON: Final = 4
"""An output that the next layer of the list does not keep: only a rotation reads it, or only later layers."""
BLOCK_BEGIN: Final = 8
"""The first layer of a block that activation checkpointing recomputes."""
IN_BLOCK: Final = 16
"""A layer of such a block.  Layers after the last residual sum lie outside of all blocks.  Without residual sums, the last layer
that begins a block lies outside."""

WRITTEN_OUT: Final = 32
"""An RMS norm in elementary operations, without a parameter, whose weight is a separate product: it keeps its input in fp32."""
SIBLING: Final = 64
"""A projection of the same input as the projection before it: keys and values, or the gated half.  Autocast casts the input
again.

Projections with a norm between them (queries and keys of Qwen 3) are not recognised.
"""

DEPTHWISE: Final = 128
"""A convolution with one group per channel, recognised by the norm behind it, which has two parameters per channel."""

_ROTATION_REACH: Final = 2
"""Largest distance from a rotation's first product to its concatenation; between them is at most the negation of one half."""
_PROJECTIONS: Final = 2
"""Projections beside the first of queries, keys and values, or before the last of them."""
_WIDEST_FILTER: Final = 7
"""Widest filter of usual depthwise convolutions (ConvNeXt, arXiv 2201.03545); a larger limit would match dense convolutions."""

# Copies for the compiled form's inner loops: layer_roles.pxd declares them as C variables.
_CONSTANT, _INNER_SUM, _PASSED_ON, _BLOCK_BEGIN, _IN_BLOCK = CONSTANT, INNER_SUM, PASSED_ON, BLOCK_BEGIN, IN_BLOCK
_WRITTEN_OUT, _SIBLING, _DEPTHWISE = WRITTEN_OUT, SIBLING, DEPTHWISE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = Sequence[float] | NDArray[np.float64]
    Codes = Sequence[int] | NDArray[np.int64]
    Places = MutableSequence[int] | NDArray[np.int64]

_KINDS: Final = len(KINDS)
_ADD: Final = CODE_OF_KIND["add"]
_CONCATENATE: Final = CODE_OF_KIND["concatenate"]
_CONV2D: Final = CODE_OF_KIND["conv2d"]
_LINEAR: Final = CODE_OF_KIND["linear"]
_MATMUL: Final = CODE_OF_KIND["matmul"]
_SOFTMAX: Final = CODE_OF_KIND["softmax"]
_MULTIPLY: Final = CODE_OF_KIND["multiply"]
_RMS_NORM: Final = CODE_OF_KIND["rms_norm"]
_ALIAS, _STARTS_BLOCK, _ATTENDS, _READS_SCORES, _READS_PROJECTIONS, _NORMALISES = 1, 2, 4, 8, 16, 32
_ATTENTION: Final = {*LAYER_GROUPS["attention"], "softmax"}
_TRAITS: Final = array(
    "q",
    [
        _ALIAS * (kind in ALIASES)
        + _STARTS_BLOCK * (kind in LAYER_GROUPS["linear"] or kind in LAYER_GROUPS["conv"])
        + _ATTENDS * (kind in _ATTENTION)
        + _READS_SCORES * (kind in _ATTENTION or kind == "matmul")
        + _READS_PROJECTIONS * (kind in LAYER_GROUPS["attention"] or kind == "matmul")
        + _NORMALISES * (kind in LAYER_GROUPS["norm"])
        for kind in KINDS
    ],
)


def fill_roles(roles: Places, counts: Codes, kinds: Codes, activations: Numbers, parameters: Numbers) -> int:
    """Write the roles of the ``N`` layers of several jobs: sums of the flags of this module, zero where this writes.

    Returns the layers of the longest job.

    Args:
        roles: ``N`` numbers, zero.
        counts: layers of each job.
        kinds: codes of the layers' kinds, ``N`` numbers, the jobs one after the other.
        activations: their output elements per sample.
        parameters: their parameter elements.

    Raises:
        ValueError: when a buffer is too short, or a code none of a kind.
    """
    job_count = len(counts)
    layer_count = len(kinds)
    if len(roles) < layer_count or len(activations) < layer_count or len(parameters) < layer_count:
        raise ValueError("too few numbers for the layers")
    for layer in range(layer_count):
        if not 0 <= kinds[layer] < _KINDS:
            raise ValueError("a code that is no kind's")
    longest = 0
    left = layer_count
    for job in range(job_count):
        count = counts[job]
        if count < 0 or count > left:
            raise ValueError("fewer layers than the jobs are said to have")
        longest = max(longest, count)
        left -= count
    chain = array("q", bytes(8 * longest))
    first = 0
    for job in range(job_count):
        count = counts[job]
        stored = 0  # layers with storage of their own: an alias is as if it were not there
        for layer in range(first, first + count):
            if not _TRAITS[kinds[layer]] & _ALIAS:
                chain[stored] = layer
                stored += 1
        _note_neighbours(roles, kinds, activations, parameters, chain, stored)
        _note_blocks(roles, kinds, chain, stored)
        first += count
    return longest


def _note_neighbours(roles: Places, kinds: Codes, activations: Numbers, parameters: Numbers, chain: Places, stored: int) -> None:
    """Note constants, sums within attention, projections of one input, norms in elementary operations and depthwise convolutions.
    The loop goes backwards, because a sum is within attention where the sum after it is.
    """
    for at in range(stored - 2, -1, -1):
        layer, next_layer = chain[at], chain[at + 1]
        kind, following = kinds[layer], kinds[next_layer]
        if kind == _ADD:
            if _TRAITS[following] & _READS_SCORES or (following == _ADD and roles[next_layer] & _INNER_SUM):
                roles[layer] |= _INNER_SUM
        elif kind == _MULTIPLY:
            is_scored = following == _SOFTMAX or (following == _ADD and roles[next_layer] & _INNER_SUM)
            if is_scored and at > 0 and kinds[chain[at - 1]] == _MATMUL:
                roles[layer] |= _CONSTANT
        elif kind == _RMS_NORM:
            if following == _MULTIPLY and not parameters[layer] and activations[layer] == activations[next_layer]:
                roles[layer] |= _WRITTEN_OUT
        elif kind == _CONCATENATE:
            _note_rotation(roles, kinds, chain, stored, at)
        elif kind == _LINEAR:
            if _TRAITS[following] & _READS_PROJECTIONS:
                _note_siblings(roles, kinds, chain, at)
            is_weighed = following == _MULTIPLY and not parameters[next_layer]
            if is_weighed and at > 1 and kinds[chain[at - 2]] == _LINEAR and activations[chain[at - 2]] == activations[layer]:
                roles[layer] |= _SIBLING  # a gate; the second layer of a block, before its scale, is as wide as the stream
        elif kind == _CONV2D and at > 0 and _TRAITS[following] & _NORMALISES:
            can_be = activations[chain[at - 1]] >= activations[layer]  # as many channels, and no more pixels
            if can_be and _is_depthwise(parameters[layer], parameters[next_layer] / 2.0):
                roles[layer] |= _DEPTHWISE


def _is_depthwise(parameters: float, channels: float) -> bool:
    """Whether a convolution to ``channels`` has one square filter per channel, with or without a bias."""
    if channels < 1.0:
        return False
    for width in range(3, _WIDEST_FILTER + 1, 2):
        if parameters == width * width * channels or parameters == (width * width + 1) * channels:
            return True
    return False


def _note_rotation(roles: Places, kinds: Codes, chain: Places, stored: int, at: int) -> None:
    """Note the rotation that exchanges its halves at ``at``, if there is one."""
    if at + 2 >= stored or kinds[chain[at + 1]] != _MULTIPLY or kinds[chain[at + 2]] != _ADD:
        return
    product = at - 1
    while product > 0 and product > at - _ROTATION_REACH and kinds[chain[product]] != _MULTIPLY:
        product -= 1
    if product < 0 or kinds[chain[product]] != _MULTIPLY:
        return
    roles[chain[product]] |= _CONSTANT
    roles[chain[at]] |= _PASSED_ON
    roles[chain[at + 1]] |= _CONSTANT
    roles[chain[at + 2]] |= _INNER_SUM
    _note_siblings(roles, kinds, chain, product - 1)
    before = product - 2  # ahead of the values, which attention keeps: keys and queries
    while before >= max(0, product - 1 - _PROJECTIONS) and kinds[chain[before]] == kinds[chain[before + 1]] == _LINEAR:
        roles[chain[before]] |= _PASSED_ON
        before -= 1


def _note_siblings(roles: Places, kinds: Codes, chain: Places, last: int) -> None:
    """Note the projections up to ``last`` that share the input of the first."""
    at = last
    while at > max(0, last - _PROJECTIONS) and kinds[chain[at]] == kinds[chain[at - 1]] == _LINEAR:
        roles[chain[at]] |= _SIBLING
        at -= 1


def _note_blocks(roles: Places, kinds: Codes, chain: Places, stored: int) -> None:
    """Note blocks: layers up to a residual sum; sections without attention join the section with attention before them.

    Without residual sums each linear layer or convolution begins a block.
    """
    last = -1  # the last layer inside of a block
    has_attention = False
    all_attend = True
    attends = False
    for at in range(stored):
        layer = chain[at]
        if _TRAITS[kinds[layer]] & _ATTENDS:
            attends = has_attention = True
        if kinds[layer] == _ADD and not roles[layer] & _INNER_SUM:
            last = at
            all_attend = all_attend and attends
            attends = False
    if last >= 0:
        begin = 0
        attends = attended = False
        for at in range(last + 1):
            layer = chain[at]
            if _TRAITS[kinds[layer]] & _ATTENDS:
                attends = True
            if kinds[layer] == _ADD and not roles[layer] & _INNER_SUM:
                if begin == 0 or all_attend or not has_attention or (attends and not attended):
                    roles[chain[begin]] |= _BLOCK_BEGIN
                attended = attends
                attends = False
                begin = at + 1
    else:
        for at in range(stored):
            if at == 0 or _TRAITS[kinds[chain[at]]] & _STARTS_BLOCK:
                roles[chain[at]] |= _BLOCK_BEGIN
                last = at - 1
    for at in range(last + 1):
        roles[chain[at]] |= _IN_BLOCK
