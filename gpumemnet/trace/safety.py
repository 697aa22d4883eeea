"""The safe bytes of a trace: an upper bound from the parts that a trace knows only within bounds.

Scratch memory enters at its most, the CUDA context at the most that is known of it, and a margin on the reserved bytes stands for
what a trace does not see.  The margin is the one thing here that measurements set; see ``SAFE_BASIS``.
"""

from __future__ import annotations

from typing import Final

from gpumemnet.devices import ContextEstimate

RESERVED_MARGIN: Final = 0.05
"""Share of the reserved bytes added for what a trace does not see."""
SAFE_BASIS: Final = (
    "scratch memory and CUDA context at their bounds, and 5 % of the reserved bytes for what a trace does not see; "
    "its coverage has not been measured on this GPU"
)


def safe_bytes(bound_reserved_bytes: int, context: ContextEstimate) -> int:
    """The bound on the process's memory.

    Args:
        bound_reserved_bytes: peak reserved bytes with all scratch memory at its bound.
        context: of the GPU.
    """
    return round(bound_reserved_bytes * (1 + RESERVED_MARGIN)) + context.bound_bytes
