"""Memory that NCCL holds on a GPU for each process group that communicates, outside of PyTorch's
allocator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpumemnet.units import MIB

PAIR_BYTES: Final = 544 * MIB
GROUP_BYTES: Final = 688 * MIB
"""Measured for a process group of two GPUs, and of three or four, after its first all-reduce, on
A100s with NVLink (github.com/NVIDIA/nccl/issues/964)."""
BOUND_BYTES: Final = 1024 * MIB
"""Of each group.  Assumed: faster links take more channels, and memory is proportional to these
(github.com/NVIDIA/nccl/issues/986)."""
SOURCE: Final = "NCCL: read on A100s with NVLink (github.com/NVIDIA/nccl/issues/964)"


def communicator_bytes(groups: Sequence[int]) -> int:
    """Bytes that NCCL is expected to hold for process groups of so many ranks; 0 for groups of one
    rank."""
    return sum(PAIR_BYTES if ranks == 2 else GROUP_BYTES for ranks in groups if ranks > 1)


def communicator_bound_bytes(groups: Sequence[int]) -> int:
    """Upper bound of the bytes that NCCL holds for them."""
    return BOUND_BYTES * sum(ranks > 1 for ranks in groups)
