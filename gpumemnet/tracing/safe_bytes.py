"""The safe bytes of a trace: an upper bound from the parts that a trace knows only within bounds.

Scratch memory enters at its most, the CUDA context at the most that is known of it, and a margin on the reserved bytes stands for
what a trace does not see: other orders of the same allocations, which fragment memory in other ways, and the algorithms that
cuDNN picks.  The margins are the one thing here that measurements set.
"""

from __future__ import annotations

from typing import Final

from gpumemnet.gpu.catalogue import ContextEstimate

MARGIN: Final = 0.05
"""Share of the reserved bytes added for what a trace does not see."""
CONVOLUTION_MARGIN: Final = 0.15
"""The same for runs that convolve, whose workspaces are an expectation: chosen so that all of the 30 published runs of real
vision models in ``benchmarks/real_models.py`` stay below."""


def margin(convolves: bool) -> float:
    """The margin for a run with or without convolutions."""
    return CONVOLUTION_MARGIN if convolves else MARGIN


def safe_bytes(bound_reserved_bytes: int, context: ContextEstimate, convolves: bool) -> int:
    """The bound on the process's memory.

    Args:
        bound_reserved_bytes: peak reserved bytes with all scratch memory at its bound.
        context: of the GPU.
        convolves: whether the run has convolutions.
    """
    return round(bound_reserved_bytes * (1 + margin(convolves))) + context.bound_bytes


def safe_basis(convolves: bool, exchanges: bool = False) -> str:
    """What the bound rests on, in words."""
    outside = ", CUDA context and NCCL" if exchanges else " and CUDA context"
    return (
        f"scratch memory{outside} at their bounds, and {margin(convolves):.0%} of the reserved bytes for what a trace "
        "does not see; no coverage has been measured on this GPU"
    )
