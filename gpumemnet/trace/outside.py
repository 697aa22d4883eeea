"""What a training process holds on its GPU outside of the caching allocator: the CUDA context, and NCCL's buffers."""

from __future__ import annotations

from typing import Final

from gpumemnet.devices import ContextEstimate, DeviceProfile, context
from gpumemnet.units import MIB

NCCL_PAIR_BYTES: Final = 544 * MIB
NCCL_GROUP_BYTES: Final = 688 * MIB
"""What a process group of two GPUs, and of three or four, was read to hold after its first all-reduce, on A100s with NVLink
(github.com/NVIDIA/nccl/issues/964)."""
NCCL_BOUND_BYTES: Final = 1024 * MIB
"""Assumed: faster links take more channels, and memory is proportional to them (github.com/NVIDIA/nccl/issues/986)."""
NCCL_SOURCE: Final = "NCCL: read on A100s with NVLink, one process group (github.com/NVIDIA/nccl/issues/964)"


def communicator_bytes(ranks: int) -> int:
    """What NCCL is expected to hold for one process group of ``ranks`` GPUs; nothing for one that is alone."""
    return 0 if ranks == 1 else NCCL_PAIR_BYTES if ranks == 2 else NCCL_GROUP_BYTES


def around(device: DeviceProfile, ranks: int) -> ContextEstimate:
    """Context and communicator of a process that is one of ``ranks``, each on a ``device`` of its own."""
    alone = context(device)
    if ranks == 1:
        return alone
    return ContextEstimate(
        alone.expected_bytes + communicator_bytes(ranks), alone.bound_bytes + NCCL_BOUND_BYTES, f"{alone.source}; {NCCL_SOURCE}"
    )
