"""Which tensors a layer keeps for its backward pass, by layer kind.

Source: the formulas of PyTorch's ``tools/autograd/derivatives.yaml``: a formula that names ``self`` keeps the layer's input, one
that names ``result`` keeps its output, and dropout and max-pooling keep a mask or indices of their own.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job.layers import KINDS, LAYER_GROUPS
from gpumemnet.physics.autocast import CAST_KINDS, LOWERED_KINDS, RAISED_INPUT_KINDS, RAISED_KINDS
from gpumemnet.physics.element_types import FULL_BYTES, HALF_BYTES

SAVES_INPUT: Final = frozenset(
    {
        *LAYER_GROUPS["linear"],
        *LAYER_GROUPS["conv"],
        *LAYER_GROUPS["norm"],
        *(set(LAYER_GROUPS["pool"]) - {"adaptive_avg_pool"}),  # to one pixel, nearly always: a mean, which keeps nothing
        *LAYER_GROUPS["attention"],
        *LAYER_GROUPS["recurrent"],
        *("relu6", "leaky_relu", "prelu", "rrelu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "log_sigmoid"),
        *("hardswish", "hardsigmoid", "hardtanh", "softsign", "threshold", "glu", "swiglu", "activation"),
        "multiply",
    }
)
SAVES_OUTPUT: Final = frozenset(
    {"relu", "tanh", "tanhshrink", "sigmoid", "softmax", "log_softmax", *LAYER_GROUPS["attention"], *LAYER_GROUPS["recurrent"]}
)
MASK_BYTES: Final[dict[str, int]] = {
    "dropout": 1,
    "max_pool": 8,
    "adaptive_max_pool": 8,
    "alpha_dropout": 4,
    "rrelu": 4,
    "softsign": 4,
}
"""Bytes per output element of a mask (bool), of indices (int64), or of noise and intermediate results (fp32)."""

SAVES_STATISTICS: Final = frozenset(kind for kind in LAYER_GROUPS["norm"] if kind.startswith(("batch_norm", "instance_norm")))
"""Kinds that keep a mean and an inverse deviation per channel."""

ALIASES: Final = frozenset({"identity"})
"""Kinds whose output shares the storage of their input."""

LOSS_TENSORS: Final = 3
"""Tensors of the logits' size at the loss, a cross-entropy: log-probabilities, their gradient, and the gradient of the logits.

Source: ``aten/src/ATen/native/LossNLL.cpp``.  An element has :attr:`gpumemnet.physics.element_types.ElementBytes.uncast` bytes.
"""

KIND_RULES: Final[NDArray[np.float64]] = np.array(
    [
        (
            kind in ALIASES,
            kind in SAVES_INPUT,
            kind in SAVES_OUTPUT,
            MASK_BYTES.get(kind, 0),
            2 * (kind in SAVES_STATISTICS),
            0.5 * (kind in LAYER_GROUPS["norm"] and kind != "rms_norm"),
            kind in LAYER_GROUPS["linear"],
            kind in CAST_KINDS,
            HALF_BYTES if kind in LOWERED_KINDS else FULL_BYTES if kind in RAISED_KINDS else 0,
            HALF_BYTES if kind in LOWERED_KINDS else FULL_BYTES if kind in RAISED_INPUT_KINDS else 0,
        )
        for kind in KINDS
    ],
    dtype=np.float64,
)
"""The rules as a table, one row per kind code; shape ``[len(KINDS), 10]``.

Columns: is an alias; saves its input; saves its output; mask bytes per output element; statistics of half the parameters' size;
share of the parameters that is a second tensor (the shift of a norm); has a bias as wide as its output (linear layers);
weights are cast by autocast; bytes per element of the output under autocast, and of the input as the kernel takes it (0: as what
comes in).
"""

_OF_A_KIND_OF_THEIR_OWN: Final = frozenset({"softmax", "log_softmax", "glu", "swiglu", "prelu", "identity", "activation"})
"""Activations that normalise, halve their input, have parameters, or are of no known function."""
PLAIN_ACTIVATIONS: Final = frozenset(LAYER_GROUPS["activation"]) - _OF_A_KIND_OF_THEIR_OWN
_RULES_OF_KIND: Final = {kind: tuple(rules) for kind, rules in zip(KINDS, KIND_RULES.tolist(), strict=True)}


def alike(kinds: Set[str]) -> frozenset[str]:
    """Activations that keep the same tensors, in the same types, as one of ``kinds``; no estimator here distinguishes them."""
    known = {_RULES_OF_KIND[kind] for kind in PLAIN_ACTIVATIONS & kinds}
    return frozenset(kind for kind in PLAIN_ACTIVATIONS if _RULES_OF_KIND[kind] in known)
