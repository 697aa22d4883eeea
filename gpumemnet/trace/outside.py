"""What a training process holds on its GPU outside of the caching allocator: the CUDA context, and NCCL's buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpumemnet.devices import ContextEstimate, DeviceProfile, context
from gpumemnet.units import MIB

NCCL_PAIR_BYTES: Final = 544 * MIB
NCCL_GROUP_BYTES: Final = 688 * MIB
"""What a process group of two GPUs, and of three or four, was read to hold after its first all-reduce, on A100s with NVLink
(github.com/NVIDIA/nccl/issues/964)."""
NCCL_BOUND_BYTES: Final = 1024 * MIB
"""Of each group.  Assumed: faster links take more channels, and memory is proportional to these
(github.com/NVIDIA/nccl/issues/986)."""
NCCL_SOURCE: Final = "NCCL: read on A100s with NVLink (github.com/NVIDIA/nccl/issues/964)"


def communicator_bytes(groups: Sequence[int]) -> int:
    """What NCCL is expected to hold for process groups of so many ranks; nothing for one that is alone."""
    return sum(NCCL_PAIR_BYTES if ranks == 2 else NCCL_GROUP_BYTES for ranks in groups if ranks > 1)


def around(device: DeviceProfile, groups: Sequence[int]) -> ContextEstimate:
    """Context and communicators of a process that exchanges in ``groups``, on a ``device`` of its own."""
    alone, communicators = context(device), sum(ranks > 1 for ranks in groups)
    if not communicators:
        return alone
    return ContextEstimate(
        alone.expected_bytes + communicator_bytes(groups),
        alone.bound_bytes + communicators * NCCL_BOUND_BYTES,
        f"{alone.source}; {NCCL_SOURCE}",
    )
