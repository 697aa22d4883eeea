"""The safe bytes of a trace: an upper bound on the memory of the process.

Scratch memory and the CUDA context enter at their upper bounds.  A margin on the reserved bytes covers what a trace does not see:
other orders of the same allocations, which fragment memory differently, and the algorithms that cuDNN chooses.  The margins come
from measurements.
"""

from __future__ import annotations

from typing import Final

from gpumemnet.gpu.catalogue import ContextEstimate

MARGIN: Final = 0.05
"""Share of the reserved bytes added for what a trace does not see."""
CONVOLUTION_MARGIN: Final = 0.15
"""The same for runs with convolutions, whose workspaces are estimates: all 30 published runs of real vision models in
``benchmarks/real_models.py`` stay below this bound."""


def margin(convolves: bool) -> float:
    """Return the margin for a run with or without convolutions."""
    return CONVOLUTION_MARGIN if convolves else MARGIN


def safe_bytes(bound_reserved_bytes: int, context: ContextEstimate, convolves: bool) -> int:
    """Return the bound on the memory of the process.

    Args:
        bound_reserved_bytes: peak reserved bytes with all scratch memory at its bound.
        context: memory outside the allocator.
        convolves: whether the run has convolutions.
    """
    return round(bound_reserved_bytes * (1 + margin(convolves))) + context.bound_bytes


def allocator_bytes(usable_bytes: int, context: ContextEstimate, convolves: bool) -> int:
    """Return the memory that is left for the allocator within ``usable_bytes``: the inverse of :func:`safe_bytes`."""
    return int((usable_bytes - context.bound_bytes) / (1 + margin(convolves)))


def safe_basis(convolves: bool, exchanges: bool = False) -> str:
    """Return how the bound is computed, in words."""
    outside = ", CUDA context and NCCL" if exchanges else " and CUDA context"
    return (
        f"scratch memory{outside} at their bounds, and {margin(convolves):.0%} of the reserved bytes for what a trace "
        "does not see; no coverage has been measured on this GPU"
    )
