"""Which tensors a layer keeps for its backward pass, by layer kind.

Source: the formulas of PyTorch's ``tools/autograd/derivatives.yaml``: a formula that names ``self``
keeps the layer's input, one that names ``result`` keeps its output, and dropout and max-pooling
keep a mask or indices of their own.

cuDNN keeps one opaque buffer for a stack of LSTM or GRU layers, the reserve space.
``cudnnGetRNNTempSpaceSizes`` returns its size, but no formula is published.  The formula here is
derived from two sizes reported in PyTorch's issue 2895 for cuDNN 7 on a Tesla P100 with four layers
of 320: 736,000,000 bytes for an LSTM and 864,000,000 bytes for a GRU.  Per layer, step and hidden
unit it counts five values for an LSTM and six for a GRU.  It adds the outputs of all layers but the
last, and omits the masks of dropout between layers.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final, NamedTuple

from gpumemnet.job.layers import KIND_TABLE, LAYER_GROUPS

LOSS_TENSORS: Final = 3
"""Tensors of the logits' size at the loss, a cross-entropy: log-probabilities, their gradient, and
the gradient of the logits.

Source: ``aten/src/ATen/native/LossNLL.cpp``.  An element has
:attr:`gpumemnet.physics.element_types.ElementBytes.uncast` bytes.
"""


class KindRule(NamedTuple):
    """What a layer of one kind keeps and how autocast treats it.

    Attributes:
        is_alias: its output shares the storage of its input.
        saves_input, saves_output: it keeps its input or its output for the backward pass.
        mask_bytes: bytes per output element of a mask, of indices or of noise that it keeps.
        statistics: how many tensors of the size of half its parameters it keeps.
        second_share: share of its parameters that is a second tensor (the shift of a norm).
        has_bias: it has a bias as wide as its output (linear layers).
        is_cast: autocast casts its weights.
        autocast_output_bytes: bytes per element of its output under autocast; 0: the same as its
            input.
        autocast_input_bytes: bytes per element of its input as its kernel reads it under autocast;
            0: as it comes.
    """

    is_alias: bool = False
    saves_input: bool = False
    saves_output: bool = False
    mask_bytes: int = 0
    statistics: int = 0
    second_share: float = 0.0
    has_bias: bool = False
    is_cast: bool = False
    autocast_output_bytes: int = 0
    autocast_input_bytes: int = 0


KIND_RULES: Final = {
    kind: KindRule(**rule) for kinds in KIND_TABLE.values() for kind, rule in kinds.items()
}
"""Layer kind → its rule, in the order of :data:`gpumemnet.job.layers.KINDS`."""
ALIASES: Final = frozenset(kind for kind, rule in KIND_RULES.items() if rule.is_alias)
"""Kinds whose output shares the storage of their input."""

_SPECIAL_ACTIVATIONS: Final = frozenset(
    {"softmax", "log_softmax", "glu", "swiglu", "prelu", "identity", "activation"}
)
"""Activations that normalise, halve their input, have parameters, or are of no known function."""
PLAIN_ACTIVATIONS: Final = frozenset(LAYER_GROUPS["activation"]) - _SPECIAL_ACTIVATIONS


def alike(kinds: Set[str]) -> frozenset[str]:
    """Activations that keep the same tensors, in the same types, as one of ``kinds``; no estimator
    here distinguishes them."""
    known = {KIND_RULES[kind] for kind in PLAIN_ACTIVATIONS & kinds}
    return frozenset(kind for kind in PLAIN_ACTIVATIONS if KIND_RULES[kind] in known)


_KEEP_RESULT_IN_PLACE: Final = frozenset({"leaky_relu", "elu", "selu", "celu"})


def kept_in_place(kind: str) -> str:
    """Return the kind that keeps the same tensors as ``kind`` where it overwrites its input.

    Out of place, these activations keep their input.  In place they keep their result, as a ReLU
    does (``tools/autograd/derivatives.yaml``); others clone their input first.
    """
    return "relu" if kind in _KEEP_RESULT_IN_PLACE else kind


RESERVED_PER_UNIT: Final = {"lstm": 5, "gru": 6}
"""Values per layer, direction, step, sample and hidden unit in the reserve space."""


def reserve_elements(kind: str, *, steps: int, hidden: int, layers: int, directions: int) -> int:
    """Return the number of elements of the reserve space, by the formula in the module's docstring.

    Args:
        kind: ``lstm`` or ``gru``.
        steps: steps of all samples together.
        hidden: hidden units of one layer and direction.
        layers, directions: of the stack.
    """
    return steps * hidden * directions * (RESERVED_PER_UNIT[kind] * layers + layers - 1)
