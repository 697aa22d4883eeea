"""What cuDNN keeps of a stack of LSTM or GRU layers for its backward pass: one opaque buffer, the
reserve space.

``cudnnGetRNNTempSpaceSizes`` returns its size, but no formula is published.  The formula here is
derived from two sizes reported in PyTorch's issue 2895 for cuDNN 7 on a Tesla P100 with four layers
of 320: 736,000,000 bytes for an LSTM and 864,000,000 bytes for a GRU.  Per layer, step and hidden
    unit it counts five values for an LSTM and six for a GRU.  It adds the outputs of all
layers but the last, and omits the masks of dropout between layers.
"""

from __future__ import annotations

from typing import Final

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
